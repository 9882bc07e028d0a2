"""Whole runs of Qwen3-Next's flavors.

The functions without arguments also serve TorchTitan's own command:
`torchrun -m torchtitan.train --module titan_gdn.models.qwen3_next --config qwen3_next_80b_a3b`.
"""

from torchtitan.trainer import Trainer

from titan_gdn.models.hybrid.config_registry import run_of
from titan_gdn.models.qwen3_next import flavors, model_registry


def trainer_config(flavor: str, **model: object) -> Trainer.Config:
    """The run of a flavor; arguments as those of `titan_gdn.models.hybrid.model_spec`."""
    return run_of(model_registry(flavor, **model), flavors[flavor].run)


def qwen3_next_debug() -> Trainer.Config:
    """A dense model of 4 layers on the standard library's source."""
    return trainer_config("debug")


def qwen3_next_debug_moe() -> Trainer.Config:
    """The same with 8 experts a layer."""
    return trainer_config("debug_moe")


def qwen3_next_80b_a3b() -> Trainer.Config:
    """Qwen3-Next-80B-A3B."""
    return trainer_config("80B-A3B")


def qwen3_next_80b_a3b_1m() -> Trainer.Config:
    """Qwen3-Next-80B-A3B, its context extended to 1,048,576 tokens by YaRN."""
    return trainer_config("80B-A3B-1M")
