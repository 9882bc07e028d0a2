"""Measurements: `python -m titan_gdn.bench {layer,exchange}`."""
