"""The section `[debug]`: TorchTitan's keys and those of this package."""

from dataclasses import dataclass

from torchtitan.config.configs import DebugConfig as TorchTitanDebugConfig


@dataclass(kw_only=True, slots=True)
class DebugConfig(TorchTitanDebugConfig):
    """TorchTitan's keys, and:"""

    traceback: bool = False
    """Whether an error prints its traceback, not only one line and the file that holds the traceback"""

    name_nonfinite: bool = False
    """Whether a step whose gradients are not finite names its first such tensor; slows each step down"""
