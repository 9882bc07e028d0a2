"""Measurements: `python -m titan_gdn.bench {rule,layer,exchange}`."""
