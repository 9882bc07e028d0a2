"""Hides log lines and warnings of libraries about each other (torch 2.14, torchao, TorchTitan 0.3)."""

import logging
import warnings


def silence_libraries() -> None:
    """Hide what libraries report about each other at import and on CPUs; errors are still shown."""
    warnings.filterwarnings("ignore", module=r"(torch|torchao|torchdata|torchtitan|triton|spmd_types)(\.|$)")
    # torchao registers its enums in a way that torch has deprecated, and each rank logs a line.
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    # DTensor recommends other mesh layouts; TorchTitan chooses them, not the user.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
