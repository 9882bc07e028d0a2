"""The training configurations of Qwen3-Next's flavors.

TorchTitan's own command also takes the functions without arguments:
`torchrun -m torchtitan.train --module titan_gdn.models.qwen3_next --config qwen3_next_80b_a3b`.
"""

from functools import partial

from torchtitan.trainer import Trainer

from titan_gdn.models.hybrid import trainer_config_of
from titan_gdn.models.qwen3_next import flavors, model_registry

trainer_config = partial(trainer_config_of, flavors, model_registry)


def qwen3_next_debug() -> Trainer.Config:
    """A dense model of 4 layers, trained on the source code of the standard library."""
    return trainer_config("debug")


def qwen3_next_debug_moe() -> Trainer.Config:
    """The same model with 8 experts per layer."""
    return trainer_config("debug_moe")


def qwen3_next_80b_a3b() -> Trainer.Config:
    """Qwen3-Next-80B-A3B."""
    return trainer_config("80B-A3B")


def qwen3_next_80b_a3b_1m() -> Trainer.Config:
    """Qwen3-Next-80B-A3B with its context extended to 1,048,576 tokens by YaRN."""
    return trainer_config("80B-A3B-1M")
