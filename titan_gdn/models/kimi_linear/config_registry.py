"""Whole runs of Kimi Linear's flavors.

The functions without arguments also serve TorchTitan's own command:
`torchrun -m torchtitan.train --module titan_gdn.models.kimi_linear --config kimi_linear_48b_a3b`.
"""

from torchtitan.trainer import Trainer

from titan_gdn.models.hybrid.config_registry import run_of
from titan_gdn.models.kimi_linear import flavors, model_registry


def trainer_config(flavor: str, **model: object) -> Trainer.Config:
    """The run of a flavor; arguments as those of `titan_gdn.models.hybrid.model_spec`."""
    return run_of(model_registry(flavor, **model), flavors[flavor].run)


def kimi_linear_debug() -> Trainer.Config:
    """A dense model of 4 layers on the standard library's source."""
    return trainer_config("debug")


def kimi_linear_debug_moe() -> Trainer.Config:
    """The same with 8 experts in all layers but the first."""
    return trainer_config("debug_moe")


def kimi_linear_48b_a3b() -> Trainer.Config:
    """Kimi-Linear-48B-A3B."""
    return trainer_config("48B-A3B")
