"""The command lines of the benchmarks."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from titan_gdn.ops.backends import Backend
from titan_gdn.parallel.exchange.registry import EXCHANGES
from titan_gdn.parallel.segments import Order


def _check(options: "RuleOptions | LayerOptions", counts: Iterable[str], files: dict[str, str]) -> None:
    """Check the options that all benchmarks have.

    Args:
        options: the options.
        counts: names of further options that must be at least 1.
        files: names of options that are paths of files to write, with the suffix that each must have.

    Raises:
        ValueError: an option is wrong; says which one, what was given and what is possible.
    """
    for name in (*counts, "batch", "key_heads", "value_heads", "key_dim", "value_dim", "repeats"):
        given = getattr(options, name)
        numbers = given if isinstance(given, tuple) else (given,)
        if not numbers or min(numbers) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {given}: expected at least 1")
    if options.value_heads % options.key_heads:
        raise ValueError(
            f"--value-heads {options.value_heads} is not divisible by --key-heads {options.key_heads}"
        )
    for name, suffix in files.items():
        path = getattr(options, name)
        if path is not None and not (
            path.endswith(suffix) and os.path.isdir(os.path.dirname(path) or ".") and not os.path.isdir(path)
        ):
            raise ValueError(f"--{name} {path}: expected a file *{suffix} in a folder that exists")


@dataclass(kw_only=True)
class RuleOptions:
    """The shapes of the rule. Defaults: one rank of Qwen3-Next, made smaller for two CPU cores."""

    rule: Literal["chunk_gated_delta_rule", "chunk_kda"] = "chunk_gated_delta_rule"
    tokens: tuple[int, ...] = (2048, 4096, 8192)
    """Sequence lengths to measure."""
    batch: int = 1
    key_heads: int = 8
    value_heads: int = 8
    key_dim: int = 128
    value_dim: int = 128
    dtype: Literal["float32", "bfloat16"] = "float32"
    backends: tuple[Backend, ...] = ("auto",)
    """Our backends to compare."""
    peer: Literal["transformers"] | None = None
    """Also measure the PyTorch function of Qwen3-Next or Kimi Linear in transformers, in turns with ours."""
    threads: int | None = None
    """Number of CPU threads, by default all."""
    repeats: int = 5
    """Number of timed forwards and backwards, after one warm-up. Medians are printed."""
    json: str | None = None
    """Write the figures to this file."""
    plot: str | None = None
    """Draw time and memory against sequence length to this PNG file, both axes logarithmic."""

    def check(self) -> None:
        """Check the options before anything is measured.

        Raises:
            ValueError: see `_check`; or the peer has no such rule.
        """
        _check(
            self, ["tokens", *(["threads"] if self.threads is not None else [])], {"json": "", "plot": ".png"}
        )
        if self.peer and self.rule == "chunk_kda" and self.key_heads != self.value_heads:
            raise ValueError(
                "--peer transformers: its chunk_kda does not support several value heads per key head; set "
                f"--value-heads {self.value_heads} to --key-heads {self.key_heads}"
            )


@dataclass(kw_only=True)
class LayerOptions:
    """The layer, the mesh and the sequence. Defaults: Qwen3-Next's layer, made smaller for two CPU cores."""

    layer: str = "gated_delta_net"
    """A module with a linear attention layer: "gated_delta_net", "kimi_delta_attention", or a dotted name."""
    dim: int = 1024
    """Width of the hidden states."""
    key_heads: int = 8
    value_heads: int = 16
    key_dim: int = 128
    value_dim: int = 128
    gate_rank: int = 128
    """Rank of low-rank gates, in layers that have them (Kimi Delta Attention)."""
    tokens: int = 2048
    """Tokens of a row, over all ranks."""
    batch: int = 1
    cp: int = 2
    tp: int = 1
    sequence_parallel: bool = True
    """Shard hidden states over TP between layers."""
    order: Order = "headtail"
    dtype: Literal["float32", "bfloat16"] = "float32"
    kernel: Backend = "auto"
    exchanges: tuple[str, ...] = field(default_factory=lambda: tuple(EXCHANGES))
    """Exchanges to measure, by default all."""
    regather: bool = False
    """Communicate again in the backward instead of keeping what was gathered, see `[linear_attention]`."""
    repeats: int = 5
    """Number of timed forwards and backwards, after one warm-up. Medians are printed."""
    json: str | None = None
    """Write the figures to this file."""

    def check(self) -> None:
        """Check the options before a rank starts. `bench.layer.run` checks each exchange against the layer.

        Raises:
            ValueError: see `_check`; or an exchange is unknown, or the ranks do not divide the tokens.
        """
        _check(self, ("tokens", "dim", "gate_rank", "cp", "tp"), {"json": ""})
        for name in self.exchanges:
            if name not in EXCHANGES:
                raise ValueError(f"--exchanges {name}: expected some of {', '.join(EXCHANGES)}")
        shards = 2 * self.cp * (self.tp if self.sequence_parallel else 1)
        if self.tokens % shards:
            raise ValueError(
                f"--tokens {self.tokens} is not divisible by {shards}, which is twice --cp"
                + (" times --tp (sequence parallelism)" if self.sequence_parallel else "")
            )
