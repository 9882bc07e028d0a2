"""What an exchange costs in time on a machine, and which one `exchange = "auto"` takes.

The machine is a model: one link for each mesh axis, a rate of floating point operations, a memory. Nothing
overlaps in it, neither the two axes nor communication and computation. So times are upper bounds, and
exchanges whose communication overlaps well rank too low.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from titan_gdn.parallel.exchange.registry import EXCHANGES, impossible, traffic
from titan_gdn.parallel.machine import Machine
from titan_gdn.parallel.traffic import LayerShape, PassCost, ShardedBatch, Traffic

TIE = 0.01
"""Exchanges that cost up to this share more than the cheapest count as equally fast."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a layer under an exchange, for forward and backward of one batch on one rank.

    Counts communication, and computation in addition to this rank's share of the layer.

    Attributes:
        forward: seconds of the forward.
        recompute: seconds of the forward that activation checkpointing repeats in the backward.
        backward: seconds of the backward.
        over_cp: seconds of communication over CP in all three passes.
        over_tp: seconds of communication over TP in all three passes.
        compute: seconds of computation in all three passes. Negative if the exchange saves some.
        done: bytes, messages and FLOPs of all three passes.
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
        """Seconds of all three passes."""
        return self.forward + self.recompute + self.backward


@dataclass(frozen=True, slots=True)
class Choice:
    """What `choose` returns.

    Attributes:
        name: the exchange that it takes.
        costs: the cost of each possible exchange.
        impossible: for each of the others, why it is impossible.
        reason: the numbers that decide, in one line.
    """

    name: str
    costs: dict[str, Cost]
    impossible: dict[str, str]
    reason: str


def cost(
    traffic: Traffic, batch: ShardedBatch, machine: Machine, recompute: bool, saved: bool = False
) -> Cost:
    """The time of a layer under an exchange.

    Args:
        traffic: what it sends and computes.
        batch: the batch and the mesh, which determines the link of each axis.
        machine: what it runs on.
        recompute: whether activation checkpointing repeats the forward, collectives included, in the
            backward.
        saved: whether it keeps the results of collectives over CP and of what is computed for them, so that
            these are not repeated.
    """
    again = traffic.forward if recompute else PassCost()
    if saved:
        again = replace(again, cp_bytes=0, cp_messages=0, flops=0)
    passes = (traffic.forward, again, traffic.backward)
    cp, tp = machine.link(batch.tp, batch.cp), machine.link(1, batch.tp)

    def seconds(sent: PassCost) -> tuple[float, float, float]:
        return (
            sent.cp_bytes / cp.bandwidth + sent.cp_messages * cp.latency,
            sent.tp_bytes / tp.bandwidth + sent.tp_messages * tp.latency,
            sent.flops / (machine.tflops * 1e12),
        )

    forward, recomputed, backward = (sum(seconds(sent)) for sent in passes)
    done = sum(passes, PassCost())
    over_cp, over_tp, compute = seconds(done)
    return Cost(forward, recomputed, backward, over_cp, over_tp, compute, done)


def choose(
    shape: LayerShape,
    batch: ShardedBatch,
    machine: Machine,
    recompute: bool,
    layers: int = 1,
    saved: Collection[str] = (),
) -> Choice:
    """Take the exchange that costs the least time.

    Among those within 1% of the cheapest, takes the one with the smallest buffers. An exchange whose buffers
    alone do not fit the device is impossible.

    Args:
        shape: the layer.
        batch: the batch and the mesh.
        machine: what it runs on.
        recompute: whether activation checkpointing repeats the forward in the backward. Then only the layer
            that is being repeated keeps something, except under `saved` exchanges.
        layers: how many layers keep something from forward to backward at the same time. In a pipeline a
            layer counts once for each micro-batch in flight.
        saved: exchanges whose results are kept although layers are checkpointed.

    Raises:
        ValueError: no exchange is possible; says why each is not.
    """
    costs, ruled_out, buffers = {}, {}, {}
    for name in EXCHANGES:
        if reason := impossible(name, shape, batch):
            ruled_out[name] = reason
            continue
        sent = traffic(name, shape, batch)
        kept = sent.kept * (1 if recompute and name not in saved else layers)
        buffers[name] = sent.transient + kept
        if buffers[name] > machine.memory * 2**30:
            ruled_out[name] = (
                f"its buffers take {_gib(buffers[name])}, {_gib(kept)} of them from forward to "
                f"backward, and the device has {machine.memory:g} GiB (linear_attention.machine.memory)"
            )
        else:
            costs[name] = cost(sent, batch, machine, recompute, name in saved)
    if not costs:
        raise ValueError(f"no exchange is possible: {_with_reasons(ruled_out)}")
    ranked = sorted(costs, key=lambda name: costs[name].total)
    # An exchange may save more than it sends, so costs may be negative.
    limit = costs[ranked[0]].total + TIE * abs(costs[ranked[0]].total)
    name = min((name for name in ranked if costs[name].total <= limit), key=buffers.__getitem__)
    clauses = [f"{name} {_breakdown(costs[name])}" for name in ranked]
    if ruled_out:
        clauses.append(f"impossible: {_with_reasons(ruled_out)}")
    if name != ranked[0]:
        clauses.append(
            f"{name} is within 1% of {ranked[0]} and its buffers take {_gib(buffers[name])}, not "
            f"{_gib(buffers[ranked[0]])}"
        )
    links = (
        f"{axis} {link.bandwidth / 1e9:g} GB/s and {link.latency * 1e6:g} us per message"
        for axis, link in (("CP", machine.link(batch.tp, batch.cp)), ("TP", machine.link(1, batch.tp)))
    )
    passes = "forward, recompute and backward" if recompute else "forward and backward"
    setting = f"{passes} of one layer with {', '.join(links)}, {machine.tflops:g} TFLOP/s"
    return Choice(name, costs, ruled_out, f"{setting}: {'; '.join(clauses)}")


def grouped_by_reason(impossible: dict[str, str]) -> dict[str, list[str]]:
    """The impossible exchanges, grouped by reason."""
    names: dict[str, list[str]] = {}
    for name, reason in impossible.items():
        names.setdefault(reason, []).append(name)
    return names


def _with_reasons(impossible: dict[str, str]) -> str:
    groups = grouped_by_reason(impossible).items()
    return "; ".join(f"{' and '.join(names)}, because {reason}" for reason, names in groups)


def _gib(size: float) -> str:
    return f"{size / 2**30:.4g} GiB"


def _breakdown(cost: Cost) -> str:
    done = cost.done
    return (
        f"{cost.total * 1e3:.3f} ms = over CP {cost.over_cp * 1e3:.3f} ({done.cp_bytes / 1e6:.3f} MB, "
        f"{done.cp_messages} messages) + over TP {cost.over_tp * 1e3:.3f} ({done.tp_bytes / 1e6:.3f} MB, "
        f"{done.tp_messages} messages) + compute {cost.compute * 1e3:.3f}"
    )
