"""Patches of torch and TorchTitan, one file for each concern. Nothing else in this project patches a library.

Each patch says why it is needed and for which version. `tests/test_patches.py` shows for each that the
unpatched library still needs it, and fails when a new version no longer does: then delete the patch.
"""
