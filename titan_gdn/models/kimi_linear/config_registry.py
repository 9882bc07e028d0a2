"""The training configurations of Kimi Linear's flavors.

TorchTitan's own command also takes the functions without arguments:
`torchrun -m torchtitan.train --module titan_gdn.models.kimi_linear --config kimi_linear_48b_a3b`.
"""

from functools import partial

from torchtitan.trainer import Trainer

from titan_gdn.models.hybrid import trainer_config_of
from titan_gdn.models.kimi_linear import flavors, model_registry

trainer_config = partial(trainer_config_of, flavors, model_registry)


def kimi_linear_debug() -> Trainer.Config:
    """A dense model of 4 layers, trained on the source code of the standard library."""
    return trainer_config("debug")


def kimi_linear_debug_moe() -> Trainer.Config:
    """The same model with 8 experts in all layers but the first."""
    return trainer_config("debug_moe")


def kimi_linear_48b_a3b() -> Trainer.Config:
    """Kimi-Linear-48B-A3B."""
    return trainer_config("48B-A3B")
