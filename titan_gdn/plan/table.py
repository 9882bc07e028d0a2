"""Prints a plan as tables."""

from dataclasses import asdict

from rich.console import Console

from titan_gdn.display.tables import console as make_console
from titan_gdn.display.tables import print_table
from titan_gdn.parallel.cost import grouped_by_reason
from titan_gdn.parallel.exchange.registry import EXCHANGES
from titan_gdn.plan.memory import ASSUMPTIONS
from titan_gdn.plan.plan import Exchanges, Plan, by_kind, crossovers

NOTES = (
    "MB that a rank sends per layer, and ms per layer: forward, its recompute if the layer is checkpointed, "
    "and backward, assuming that nothing overlaps. Compute is what the exchange adds, negative if it saves "
    "computation. Buffers (MB): the largest while the layer runs, and those kept for the backward."
)
_COLUMNS = (
    "exchange",
    *("CP, MB, forward", "CP, MB, backward", "TP, MB, forward", "TP, MB, backward"),
    *("ms, total", "ms, = CP", "ms, + TP", "ms, + compute"),
    *("buffers, MB, largest", "buffers, MB, kept"),
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
    console = make_console()
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
        f"Model: {_scaled(plan.parameters)} parameters, {_scaled(plan.active)} active per token; "
        f"{_scaled(plan.flops, giga='G')}FLOP per token (forward and backward, attention counted as not "
        "causal)\n"
    )
    _print_memory(console, plan)


def _print_exchanges(console: Console, exchanges: Exchanges) -> None:
    batch, machine = exchanges.batch, exchanges.machine
    links = {"CP": machine.link(batch.tp, batch.cp), "TP": machine.link(1, batch.tp)}
    over = ", ".join(f"{axis} at {x.bandwidth / 1e9:g} GB/s per rank" for axis, x in links.items())
    rows = []
    for name, sent in exchanges.traffic.items():
        cost = exchanges.costs[name]
        megabytes = [
            getattr(way, f"{axis}_bytes") / 1e6
            for axis in ("cp", "tp")
            for way in (sent.forward, sent.backward)
        ]
        times = (cost.total, cost.over_cp, cost.over_tp, cost.compute)
        buffers = (sent.transient / 1e6, sent.kept / 1e6)
        rows.append(
            [
                name,
                *(_number(x, 1) for x in megabytes),
                *(_number(x * 1e3, 2) for x in times),
                *(_number(x, 1) for x in buffers),
            ]
        )
    print_table(console, f"{exchanges.kind}, {exchanges.layers} layers: {over}", _COLUMNS, rows)
    if batch.cp == 1:
        console.print("Without context parallelism there is no exchange.\n")
        return
    choice = exchanges.choice
    if exchanges.way_in is not None:
        ratio, with_gates = exchanges.way_in
        told = f"Before the rule, all_to_all sends {ratio:.2f} times as many bytes over CP as all_gather."
        if with_gates is not None:
            told += f" The published comparison, which sends all gates in full, gives {with_gates:.2f}."
        console.print(told)
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
    peak = plan.memory.total
    unit, size_of_unit = ("GiB", 2**30) if peak >= 2**30 else ("MiB", 2**20)
    rows = [(_MEMORY[name], size) for name, size in memory.items()] + [("peak", peak)]
    cells = [(name, f"{size / size_of_unit:,.2f}") for name, size in rows]
    print_table(console, f"Memory of {whose}", ("", unit), cells)
    device = f"a device of {plan.machine.memory:g} GiB"
    console.print(f"It {'fits' if plan.fits else 'does not fit'} {device}.\n{ASSUMPTIONS}")


def _scaled(count: int, giga: str = "B") -> str:
    """A number of parameters or FLOPs with the letter of its unit: 79.67 B, 1.10 M."""
    for unit, letter in ((1e9, giga), (1e6, "M"), (1e3, "K")):
        if count >= unit:
            return f"{count / unit:,.2f} {letter}"
    return f"{count} "


def _number(x: float, digits: int) -> str:
    """A number with so many digits after the point, or two digits of a smaller one: never 0.0 for 0.02."""
    return f"{x:.2g}" if 0 < abs(x) < 10**-digits else f"{x:,.{digits}f}"


def print_sweep(swept: dict[int, list[Exchanges] | str], key: str) -> None:
    """Print bytes over CP and time of each exchange at each value, for each kind of linear attention."""
    console = make_console()
    for kind in by_kind(swept):
        first = next(iter(kind.values()))
        columns = [f"{name}, {unit}" for name in EXCHANGES for unit in ("MB over CP", "ms")]
        rows = [[str(value), *_cells(exchanges), _auto(exchanges)] for value, exchanges in kind.items()]
        print_table(console, f"{first.kind}, {first.layers} layers", [key, *columns, "auto takes"], rows)
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
            else [_number(cost.done.cp_bytes / 1e6, 1), _number(cost.total * 1e3, 2)]
        )
    return cells


def _auto(exchanges: Exchanges) -> str:
    return "" if exchanges.batch.cp == 1 else exchanges.choice.name
