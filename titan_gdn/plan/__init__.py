"""What a run sends, computes and holds, before there is a cluster: `python -m titan_gdn.plan`."""
