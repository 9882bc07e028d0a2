"""Prints a plan as tables."""

from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.table import Table

from titan_gdn.parallel.cost import grouped_by_reason
from titan_gdn.parallel.exchange.registry import EXCHANGES
from titan_gdn.plan.memory import ASSUMPTIONS
from titan_gdn.plan.plan import Exchanges, Plan, by_kind, crossovers

NOTES = (
    "MB that a rank sends per layer, and ms per layer: forward, its recompute if the layer is checkpointed, "
    "and backward, assuming that nothing overlaps. Compute is what the exchange adds, negative if it saves "
    "computation. Buffers (MB): the largest while the layer runs, and those kept for the backward."
)
_MEMORY = {
    "parameters": "parameters, sharded",
    "gradients": "gradients, sharded",
    "optimizer": "optimizer, sharded",
    "buffers": "rotary table and expert counters",
    "activations": "activations kept by all layers",
    "exchange": "kept by exchanges of linear attention",
    "block": "temporary, in a block's backward",
    "gathered": "gathered and reduced by FSDP",
    "loss": "or the loss, instead of the last two",
}


def print_plan(plan: Plan, world_size: int) -> None:
    """Print the exchanges of each kind of linear attention, then the model and its memory."""
    console = Console(width=120, highlight=False, markup=False)
    degrees = {
        name: getattr(plan.dims, name) for name in ("dp_replicate", "dp_shard", "cp", "tp", "ep", "pp")
    }
    listed = ", ".join(f"{name} {degree}" for name, degree in degrees.items())
    batch = plan.exchanges[0].batch
    console.print(
        f"{world_size} ranks: {listed}; {batch.rows} x {batch.length:,} tokens, {batch.order}; "
        f"{batch.itemsize} bytes per element; activation checkpointing {plan.checkpointing}\n"
    )
    for exchanges in plan.exchanges:
        _print_exchanges(console, exchanges)
    console.print(f"{NOTES}\n")
    console.print(
        f"Model: {plan.parameters / 1e9:.2f} B parameters, {plan.active / 1e9:.2f} B active per token; "
        f"{plan.flops / 1e9:,.1f} GFLOP per token, forward and backward, with attention counted as not causal\n"
    )
    _print_memory(console, plan)


def _print_exchanges(console: Console, exchanges: Exchanges) -> None:
    batch, machine = exchanges.batch, exchanges.machine
    links = {"CP": machine.link(batch.tp, batch.cp), "TP": machine.link(1, batch.tp)}
    over = ", ".join(f"{axis} at {x.bandwidth / 1e9:g} GB/s per rank" for axis, x in links.items())
    table = Table(title=f"{exchanges.kind}, {exchanges.layers} layers: {over}", box=box.SIMPLE_HEAD)
    table.add_column("exchange")
    for name in (
        "CP, MB\nforward", "\nbackward", "TP, MB\nforward", "\nbackward",
        "\ntotal, ms", "\n= CP", "\n+ TP", "\n+ compute", "buffers\nlargest", "\nkept",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for name in exchanges.traffic:
        sent, cost = exchanges.traffic[name], exchanges.costs[name]
        bytes_ = [
            x
            for axis in ("cp", "tp")
            for x in (getattr(each, f"{axis}_bytes") for each in (sent.forward, sent.backward))
        ]
        times = (cost.total, cost.over_cp, cost.over_tp, cost.compute)
        table.add_row(
            name,
            *(f"{x / 1e6:,.1f}" for x in bytes_),
            *(f"{x * 1e3:,.2f}" for x in times),
            *(f"{x / 1e6:,.1f}" for x in (sent.transient, sent.kept)),
        )
    console.print(table)
    if batch.cp == 1:
        console.print("Without context parallelism there is no exchange.\n")
        return
    choice = exchanges.choice
    if exchanges.way_in is not None:
        ratio, with_gates = exchanges.way_in
        console.print(
            f"Before the rule, all_to_all sends {ratio:.2f} times as many bytes over CP as all_gather. The "
            f"published comparison, which sends all gates in full, would give {with_gates:.2f}."
        )
    for sentence in _impossible(choice.impossible):
        console.print(sentence)
    named = exchanges.named
    if named == "auto":
        console.print(f"auto takes {choice.name}: {choice.reason}\n")
        return
    same = "auto would take it too" if named == choice.name else f"auto would take {choice.name}"
    console.print(f"The configuration names {named}; {same}: {choice.reason}\n")


def _print_memory(console: Console, plan: Plan) -> None:
    memory = asdict(plan.memory)
    rank = memory.pop("pipeline_rank")
    whose = "a rank" if plan.dims.pp == 1 else f"pipeline rank {rank}, which needs the most"
    table = Table(title=f"Memory of {whose}", box=box.SIMPLE_HEAD)
    table.add_column("")
    table.add_column("GiB", justify="right")
    for name, size in memory.items():
        table.add_row(_MEMORY[name], _gib(size))
    table.add_row("peak", _gib(plan.memory.total))
    console.print(table)
    device = f"a device of {plan.machine.memory:g} GiB"
    console.print(f"It {'fits' if plan.fits else 'does not fit'} {device}.\n{ASSUMPTIONS}")


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f}"


def print_sweep(swept: dict[int, list[Exchanges] | str], key: str) -> None:
    """Print bytes over CP and time of each exchange at each value, for each kind of linear attention."""
    console = Console(width=120, highlight=False, markup=False)
    for kind in by_kind(swept):
        first = next(iter(kind.values()))
        table = Table(title=f"{first.kind}, {first.layers} layers", box=box.SIMPLE_HEAD)
        table.add_column(key, justify="right")
        for name in EXCHANGES:
            table.add_column(f"{name}\nMB over CP", justify="right")
            table.add_column("\nms", justify="right")
        table.add_column("\nauto takes")
        for value, exchanges in kind.items():
            table.add_row(str(value), *_cells(exchanges), _auto(exchanges))
        console.print(table)
        for a, b in crossovers(kind):
            console.print(f"Between {key} {a} and {b} auto changes from {kind[a].taken} to {kind[b].taken}.")
        for value, exchanges in kind.items():
            for sentence in _impossible(exchanges.choice.impossible):
                console.print(f"{key} {value}: {sentence}")
        console.print()
    for value, reason in swept.items():
        if isinstance(reason, str):
            console.print(f"{key} {value} is impossible: {reason.strip()}")


def _impossible(impossible: dict[str, str]) -> list[str]:
    """The impossible exchanges, one sentence for each reason."""
    return [
        f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} impossible because {reason}"
        for reason, names in grouped_by_reason(impossible).items()
    ]


def _cells(exchanges: Exchanges) -> list[str]:
    cells = []
    for name in EXCHANGES:
        cost = exchanges.costs.get(name)
        ruled_out = name in exchanges.choice.impossible
        cells += (
            ["impossible", ""]
            if cost is None or ruled_out
            else [f"{cost.done.cp_bytes / 1e6:,.1f}", f"{cost.total * 1e3:,.2f}"]
        )
    return cells


def _auto(exchanges: Exchanges) -> str:
    return "" if exchanges.batch.cp == 1 else exchanges.choice.name
