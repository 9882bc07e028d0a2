"""What the benchmarks may be told."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from titan_gdn.ops.backends import Backend
from titan_gdn.parallel.exchange import ExchangeName
from titan_gdn.parallel.sequence import Order


@dataclass(kw_only=True)
class RuleOptions:
    """The rule's shapes; the defaults are those of one rank of Qwen3-Next, narrowed for two cores."""

    rule: Literal["chunk_gated_delta_rule", "chunk_kda"] = "chunk_gated_delta_rule"
    tokens: tuple[int, ...] = (2048, 4096, 8192)
    """Sequence lengths, one after the other."""
    batch: int = 1
    key_heads: int = 8
    value_heads: int = 8
    key_dim: int = 128
    value_dim: int = 128
    dtype: Literal["float32", "bfloat16"] = "float32"
    backends: tuple[Backend, ...] = ("auto",)
    """Ours, one beside the other."""
    peer: Literal["transformers"] | None = None
    """Run the PyTorch function of transformers' Qwen3-Next or Kimi Linear beside ours, in turns."""
    threads: int | None = None
    """Threads of the CPU; all of them if not given."""
    repeats: int = 5
    """Timed forwards and backwards, after one that is not; medians are printed."""
    json: str | None = None
    """Write the figures to this file."""
    plot: str | None = None
    """Draw time and memory over the length to this PNG file, both axes logarithmic."""


@dataclass(kw_only=True)
class LayerOptions:
    """The layer, the mesh and the sequence; the defaults are Qwen3-Next's layer, narrowed for two cores."""

    layer: Literal["gated_delta_net", "kimi_delta_attention"] = "gated_delta_net"
    dim: int = 1024
    """Width of the hidden states."""
    key_heads: int = 8
    value_heads: int = 16
    key_dim: int = 128
    value_dim: int = 128
    gate_rank: int = 128
    """Width of the bottlenecks of Kimi Delta Attention's gates."""
    tokens: int = 2048
    """Tokens of a row, over all ranks."""
    batch: int = 1
    cp: int = 2
    tp: int = 1
    sequence_parallel: bool = True
    """Hidden states are sharded over TP as well."""
    order: Order = "headtail"
    dtype: Literal["float32", "bfloat16"] = "float32"
    kernel: Backend = "auto"
    exchanges: tuple[ExchangeName, ...] = field(default_factory=lambda: get_args(ExchangeName))
    """Which exchanges to run, one after the other."""
    repeats: int = 5
    """Timed forwards and backwards, after one that is not; medians are printed."""
    json: str | None = None
    """Write the figures to this file."""
