"""How the linear attention layers of a model are run: the TOML section `[linear_attention]`."""

from dataclasses import dataclass
from typing import Literal

from titan_gdn.ops.backends import Backend


@dataclass(kw_only=True, slots=True)
class LinearAttentionConfig:
    """Settings that every linear attention layer of a run shares."""

    kernel: Backend = "auto"
    """Backend of the convolution and the rule: FLA's Triton kernels, PyTorch, or "auto": FLA where it
    runs, PyTorch elsewhere."""

    exchange: Literal["auto", "all_to_all", "all_gather"] = "auto"
    """How context parallelism brings all tokens of a head together; "auto": the fewer bytes, see the log."""

    regather: bool = False
    """With "all_gather" and no activation checkpointing: gather hidden states again in the backward."""
