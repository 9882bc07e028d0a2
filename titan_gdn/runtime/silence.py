"""Hush the libraries that comment on each other."""

import logging
import warnings


def silence_libraries() -> None:
    """Hush what libraries say about each other at import and on CPUs; errors still show."""
    warnings.filterwarnings("ignore", module=r"(torch|torchao|torchdata|torchtitan|triton|spmd_types)(\.|$)")
    # torchao registers its enums in a way that torch deprecates, on every rank.
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    # DTensor advises how to lay out meshes that are not ours.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
