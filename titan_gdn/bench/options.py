"""What the benchmarks may be told."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

from titan_gdn.ops.backends import Backend
from titan_gdn.parallel.exchange import ExchangeName
from titan_gdn.parallel.sequence import Order


def _check(options: "RuleOptions | LayerOptions", counts: Iterable[str], files: dict[str, str]) -> None:
    """Refuse what no benchmark can be.

    Args:
        options: what was given.
        counts: names of numbers that are at least 1.
        files: names of paths that will be written, with the suffixes that they must have.

    Raises:
        ValueError: says which option, what was given and what is possible.
    """
    for name in (*counts, "batch", "key_heads", "value_heads", "key_dim", "value_dim", "repeats"):
        given = getattr(options, name)
        numbers = given if isinstance(given, tuple) else (given,)
        if not numbers or min(numbers) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {given}: expected at least 1")
    if options.value_heads % options.key_heads:
        raise ValueError(f"--key-heads {options.key_heads} do not divide --value-heads {options.value_heads}")
    for name, suffix in files.items():
        path = getattr(options, name)
        if path is not None and not (
            path.endswith(suffix) and os.path.isdir(os.path.dirname(path) or ".") and not os.path.isdir(path)
        ):
            raise ValueError(f"--{name} {path}: expected a file *{suffix} in a folder that exists")


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

    def check(self) -> None:
        """Refuse what cannot be run, before anything is measured.

        Raises:
            ValueError: see `_check`; or a peer that has no such rule.
        """
        _check(
            self, ["tokens", *(["threads"] if self.threads is not None else [])], {"json": "", "plot": ".png"}
        )
        if self.peer and self.rule == "chunk_kda" and self.key_heads != self.value_heads:
            raise ValueError(
                "--peer transformers has no groups of value heads in its chunk_kda: make --value-heads "
                f"{self.value_heads} equal to --key-heads {self.key_heads}"
            )


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
    regather: bool = False
    """Gather again in the backward instead of keeping what was gathered, see `[linear_attention]`."""
    repeats: int = 5
    """Timed forwards and backwards, after one that is not; medians are printed."""
    json: str | None = None
    """Write the figures to this file."""

    def check(self) -> None:
        """Refuse what cannot be run, before a rank starts.

        Raises:
            ValueError: see `_check`; or heads and tokens that the ranks do not divide.
        """
        _check(self, ("tokens", "dim", "gate_rank", "cp", "tp"), {"json": ""})
        if self.key_heads % self.tp:
            raise ValueError(f"--key-heads {self.key_heads} do not divide by --tp {self.tp}")
        if self.key_heads % (self.tp * self.cp) and self.exchanges != ("state",):
            raise ValueError(
                f"--key-heads {self.key_heads} do not divide by --tp {self.tp} times --cp {self.cp}, as they "
                "need not with --exchanges state"
            )
        shards = 2 * self.cp * (self.tp if self.sequence_parallel else 1)
        if self.tokens % shards:
            raise ValueError(
                f"--tokens {self.tokens} do not divide by {shards}: twice --cp"
                + (", times --tp under sequence parallelism" if self.sequence_parallel else "")
            )
