"""What an exchange costs in time on a machine, and which one `exchange = "auto"` takes.

The machine is a model: per mesh axis one link, a rate of floating point operations, a memory. Nothing is
taken to overlap, neither the axes with each other nor communication with computation, so times are upper
bounds, and what overlaps well is ranked too low.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Literal

from titan_gdn.parallel.exchange import ExchangeName
from titan_gdn.parallel.traffic import (
    EXCHANGES,
    LayerShape,
    PassCost,
    ShardedBatch,
    Traffic,
    impossible,
    traffic,
)

LinkName = Literal["nvlink", "infiniband", "efa", "tcp"]


@dataclass(frozen=True, slots=True)
class Link:
    """What a mesh axis communicates over.

    Attributes:
        bandwidth: bytes a second that a rank sends, that is a network card's over the ranks that share it.
        latency: seconds that a collective takes however little it sends.
    """

    bandwidth: float
    latency: float


# Bandwidths are nine tenths of what the hardware sends in one direction, but for NVLink, where collectives
# that the switch does not reduce reach eight tenths, and EFA. Latencies of the first two are those of NCCL's
# own model (src/graph/tuning.cc: 8.4 us of a ring, 3.4 us a hop over NVLink and 14 over a network); EFA's
# and TCP's are of the order that nccl-tests show for small messages, not from a published figure.
LINKS: dict[LinkName, Link] = {
    "nvlink": Link(360e9, 12e-6),  # NVLink 4, H100: 900 GB/s, half of it each way
    "infiniband": Link(45e9, 22e-6),  # NDR, 400 Gb/s, a card for each GPU
    "efa": Link(40e9, 50e-6),  # AWS p5 and p6: 3,200 Gb/s for 8 GPUs
    "tcp": Link(1.4e9, 100e-6),  # 100 Gb/s for 8 GPUs
}

TIE = 0.01
"""Of the cheapest, as much more as counts for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What an exchange is chosen for: the TOML section `[linear_attention.machine]`. The defaults: H100s.

    Raises:
        ValueError: a number that is not positive.
    """

    gpus_per_node: int = 8
    """Consecutive ranks that the link inside a node connects."""

    inside: LinkName = "nvlink"
    """The link inside a node."""

    across: LinkName = "infiniband"
    """The link between nodes."""

    inside_bandwidth: float | None = None
    """GB/s that a rank sends inside a node, instead of the link's."""

    across_bandwidth: float | None = None
    """GB/s that a rank sends between nodes, instead of the link's: a card's over the ranks that share it."""

    inside_latency: float | None = None
    """Microseconds of a collective inside a node, instead of the link's."""

    across_latency: float | None = None
    """Microseconds of a collective between nodes, instead of the link's."""

    tflops: float = 200.0
    """TFLOP/s of what an exchange computes in addition, chunked rules and narrow products: a fifth of what
    an H100 is sold for in dense bfloat16, where whole models reach two fifths."""

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
        """What a mesh axis communicates over, all of it, if only some of its ranks are on other nodes.

        Args:
            stride: between its ranks: 1 for TP, the innermost axis, and `tp` for CP.
            size: ranks of it.
        """
        where = "inside" if stride * size <= self.gpus_per_node else "across"
        link = LINKS[getattr(self, where)]
        bandwidth, latency = (getattr(self, f"{where}_{name}") for name in ("bandwidth", "latency"))
        return Link(
            link.bandwidth if bandwidth is None else bandwidth * 1e9,
            link.latency if latency is None else latency * 1e-6,
        )


@dataclass(frozen=True, slots=True)
class Cost:
    """A layer under an exchange, forward and backward of one batch on one rank, in seconds.

    Times are those of communication, and of computation beyond this rank's share of the layer's.

    Attributes:
        forward: of the forward.
        recompute: of the forward once more, where the layer is checkpointed.
        backward: of the backward.
        over_cp: of all three, communication over CP.
        over_tp: of all three, communication over TP.
        compute: of all three, computation; below 0 where the exchange saves some.
        done: bytes, messages and FLOPs of all three.
    """

    forward: float
    recompute: float
    backward: float
    over_cp: float
    over_tp: float
    compute: float
    done: PassCost

    @property
    def total(self) -> float:
        """All three passes, which is also the sum of communication and computation."""
        return self.forward + self.recompute + self.backward


@dataclass(frozen=True, slots=True)
class Choice:
    """What `choose` takes.

    Attributes:
        name: the exchange.
        costs: of each that can be.
        impossible: of each that cannot be, why.
        reason: in one line, the numbers.
    """

    name: ExchangeName
    costs: dict[ExchangeName, Cost]
    impossible: dict[ExchangeName, str]
    reason: str


def cost(
    traffic: Traffic, split: ShardedBatch, machine: Machine, recompute: bool, saved: bool = False
) -> Cost:
    """The time of a layer under an exchange.

    Args:
        traffic: what it sends and computes.
        split: the mesh, which says what link each axis has.
        machine: what it runs on.
        recompute: activation checkpointing repeats the forward in the backward, its collectives included.
        saved: but not those over CP and what is computed for them, whose results it keeps.
    """
    again = traffic.forward if recompute else PassCost()
    if saved:
        again = replace(again, cp_bytes=0, cp_messages=0, flops=0)
    passes = [traffic.forward, again, traffic.backward]
    cp, tp = machine.link(split.tp, split.cp), machine.link(1, split.tp)

    def parts(leg: PassCost) -> tuple[float, float, float]:
        return (
            leg.cp_bytes / cp.bandwidth + leg.cp_messages * cp.latency,
            leg.tp_bytes / tp.bandwidth + leg.tp_messages * tp.latency,
            leg.flops / (machine.tflops * 1e12),
        )

    done = sum(passes, PassCost())
    return Cost(*(sum(parts(leg)) for leg in passes), *parts(done), done)


def choose(
    shape: LayerShape,
    split: ShardedBatch,
    machine: Machine,
    recompute: bool,
    layers: int = 1,
    saved: Collection[ExchangeName] = (),
) -> Choice:
    """The exchange that takes the least time.

    Of those within 1% of it, the one whose buffers take the least memory. One whose buffers do not fit the
    device, next to nothing else, is ruled out.

    Args:
        shape: the layer.
        split: the batch and the mesh.
        machine: what it runs on.
        recompute: see `cost`; nothing is then kept but by the layer that is being repeated.
        layers: how many such layers keep something from forward to backward at once, each as often as
            micro-batches of a pipeline are on their way.
        saved: exchanges whose results are kept although layers are checkpointed.

    Raises:
        ValueError: no exchange is possible; says why each is not.
    """
    costs, without, buffers = {}, {}, {}
    for name in EXCHANGES:
        if reason := impossible(name, shape, split):
            without[name] = reason
            continue
        sent = traffic(name, shape, split)
        kept = sent.kept * (1 if recompute and name not in saved else layers)
        buffers[name] = sent.transient + kept
        if buffers[name] > machine.memory * 2**30:
            without[name] = (
                f"its buffers take {_gib(buffers[name])}, {_gib(kept)} of them from forward to "
                f"backward, and the device has {machine.memory:g} GiB (linear_attention.machine.memory)"
            )
        else:
            costs[name] = cost(sent, split, machine, recompute, name in saved)
    if not costs:
        raise ValueError(f"no exchange is possible: {_listed(without)}")
    ranked = sorted(costs, key=lambda name: costs[name].total)
    # Costs below 0 are possible: an exchange may save more than it sends.
    limit = costs[ranked[0]].total + TIE * abs(costs[ranked[0]].total)
    name = min((name for name in ranked if costs[name].total <= limit), key=buffers.__getitem__)
    told = [f"{name} {_told(costs[name])}" for name in ranked]
    if without:
        told.append(f"impossible: {_listed(without)}")
    if name != ranked[0]:
        told.append(
            f"{name} is within 1% of {ranked[0]} and its buffers take {_gib(buffers[name])}, not "
            f"{_gib(buffers[ranked[0]])}"
        )
    links = (
        f"{axis} {link.bandwidth / 1e9:g} GB/s and {link.latency * 1e6:g} us a message"
        for axis, link in (("CP", machine.link(split.tp, split.cp)), ("TP", machine.link(1, split.tp)))
    )
    passes = "forward, recompute and backward" if recompute else "forward and backward"
    machine_told = f"with {', '.join(links)}, {machine.tflops:g} TFLOP/s"
    return Choice(name, costs, without, f"a layer's {passes}, {machine_told}: {'; '.join(told)}")


def by_reason(without: dict[ExchangeName, str]) -> dict[str, list[ExchangeName]]:
    """The exchanges that cannot be, by what they cannot for."""
    names: dict[str, list[ExchangeName]] = {}
    for name, reason in without.items():
        names.setdefault(reason, []).append(name)
    return names


def _listed(without: dict[ExchangeName, str]) -> str:
    return "; ".join(f"{' and '.join(names)}, for {reason}" for reason, names in by_reason(without).items())


def _gib(size: float) -> str:
    return f"{size / 2**30:.4g} GiB"


def _told(cost: Cost) -> str:
    done = cost.done
    return (
        f"{cost.total * 1e3:.3f} ms = over CP {cost.over_cp * 1e3:.3f} ({done.cp_bytes / 1e6:.3f} MB, "
        f"{done.cp_messages} messages) + over TP {cost.over_tp * 1e3:.3f} ({done.tp_bytes / 1e6:.3f} MB, "
        f"{done.tp_messages} messages) + compute {cost.compute * 1e3:.3f}"
    )
