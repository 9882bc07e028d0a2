"""The machine for which exchanges are compared: the links between its ranks, its FLOP/s and its memory."""

import math
from dataclasses import dataclass, fields
from typing import Literal

LinkName = Literal["nvlink", "infiniband", "efa", "tcp"]


@dataclass(frozen=True, slots=True)
class Link:
    """What the ranks of a mesh axis communicate over.

    Attributes:
        bandwidth: bytes per second that a rank sends. If ranks share a network card, each has its part.
        latency: seconds that a collective takes however little it sends.
    """

    bandwidth: float
    latency: float


# Bandwidths are nine tenths of what the hardware sends in one direction, except for NVLink, where collectives
# that the switch does not reduce reach eight tenths, and EFA. Latencies of NVLink and InfiniBand are those of
# NCCL's own model (src/graph/tuning.cc: 8.4 us for a ring, plus 3.4 us per hop over NVLink and 14 over a
# network). Those of EFA and TCP are of the order that nccl-tests show for small messages; no figure is
# published.
LINKS: dict[LinkName, Link] = {
    "nvlink": Link(360e9, 12e-6),  # NVLink 4, H100: 900 GB/s, half of it each way
    "infiniband": Link(45e9, 22e-6),  # NDR, 400 Gb/s, one card per GPU
    "efa": Link(40e9, 50e-6),  # AWS p5 and p6: 3,200 Gb/s for 8 GPUs
    "tcp": Link(1.4e9, 100e-6),  # 100 Gb/s for 8 GPUs
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine for which "auto" chooses: the TOML table `[linear_attention.machine]`. Defaults: H100s.

    Raises:
        ValueError: a link is unknown or a number is not positive.
    """

    gpus_per_node: int = 8
    """Number of consecutive ranks that the link inside a node connects."""

    inside: LinkName = "nvlink"
    """Link inside a node."""

    across: LinkName = "infiniband"
    """Link between nodes."""

    inside_bandwidth: float | None = None
    """GB/s that a rank sends inside a node, instead of the link's."""

    across_bandwidth: float | None = None
    """GB/s that a rank sends between nodes, instead of the link's. If ranks share a network card, the card's
    bandwidth divided by their number."""

    inside_latency: float | None = None
    """Microseconds that a collective takes inside a node however little it sends, instead of the link's."""

    across_latency: float | None = None
    """Microseconds that a collective takes between nodes however little it sends, instead of the link's."""

    tflops: float = 200.0
    """TFLOP/s at which a device computes what an exchange adds, which is chunked rules and narrow products.
    The default is a fifth of an H100's dense bfloat16 peak; whole models reach two fifths."""

    memory: float = 80.0
    """GiB of a device."""

    def __post_init__(self) -> None:
        for name in ("inside", "across"):
            if getattr(self, name) not in LINKS:
                raise ValueError(f"{name} = {getattr(self, name)!r}: expected one of {', '.join(LINKS)}")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not 0 < value < math.inf:
                raise ValueError(f"{field.name} = {value}: expected a positive number")

    def link(self, stride: int, size: int) -> Link:
        """The link that a mesh axis uses: that between nodes if any of its ranks are on different nodes.

        Args:
            stride: distance between its ranks: 1 for TP, the innermost axis, and `tp` for CP.
            size: number of its ranks.
        """
        where = "inside" if stride * size <= self.gpus_per_node else "across"
        link = LINKS[getattr(self, where)]
        bandwidth, latency = (getattr(self, f"{where}_{name}") for name in ("bandwidth", "latency"))
        return Link(
            link.bandwidth if bandwidth is None else bandwidth * 1e9,
            link.latency if latency is None else latency * 1e-6,
        )
