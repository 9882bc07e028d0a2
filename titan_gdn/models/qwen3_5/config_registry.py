"""The training configurations of Qwen3.5's flavors.

TorchTitan's own command also takes the functions without arguments:
`torchrun -m torchtitan.train --module titan_gdn.models.qwen3_5 --config qwen3_5_9b`.
"""

from functools import partial

from torchtitan.trainer import Trainer

from titan_gdn.models.hybrid import trainer_config_of
from titan_gdn.models.qwen3_5 import flavors, model_registry

trainer_config = partial(trainer_config_of, flavors, model_registry)


def qwen3_5_debug() -> Trainer.Config:
    """A dense model of 4 layers, trained on the source code of the standard library."""
    return trainer_config("debug")


def qwen3_5_debug_moe() -> Trainer.Config:
    """The same model with 8 experts per layer."""
    return trainer_config("debug_moe")


def qwen3_5_9b() -> Trainer.Config:
    """Qwen3.5-9B."""
    return trainer_config("9B")


def qwen3_5_35b_a3b() -> Trainer.Config:
    """Qwen3.5-35B-A3B."""
    return trainer_config("35B-A3B")
