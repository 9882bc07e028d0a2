"""A plan as tables for a reader."""

from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.table import Table

from titan_gdn.parallel.cost import by_reason
from titan_gdn.parallel.exchange import ExchangeName
from titan_gdn.parallel.traffic import EXCHANGES
from titan_gdn.plan.memory import ASSUMPTIONS
from titan_gdn.plan.plan import Exchanges, Plan, by_kind, crossovers

NOTES = (
    "MB that a rank sends in a layer, and ms that it takes: forward, forward again where the layer is "
    "checkpointed, and backward. Nothing is taken to overlap. Compute is what the exchange adds, below 0 "
    "where it saves some. Buffers (MB) are the largest while the layer runs, and what is kept for the "
    "backward."
)
_MEMORY = {
    "parameters": "parameters, sharded",
    "gradients": "gradients, sharded",
    "optimizer": "optimizer, sharded",
    "buffers": "rotary table and counters",
    "activations": "kept by all layers",
    "exchange": "kept by the exchange of the linear attention",
    "block": "a block at work",
    "gathered": "gathered and reduced by FSDP",
    "loss": "or, in place of the last two, the loss",
}


def print_plan(plan: Plan, world_size: int) -> None:
    """The exchanges of each kind of linear attention, then the model and its memory."""
    console = Console(width=120, highlight=False, markup=False)
    degrees = {
        name: getattr(plan.dims, name) for name in ("dp_replicate", "dp_shard", "cp", "tp", "ep", "pp")
    }
    listed = ", ".join(f"{name} {degree}" for name, degree in degrees.items())
    split = plan.exchanges[0].split
    console.print(
        f"{world_size} ranks: {listed}; {split.batch} rows of {split.length:,} tokens, {split.order}; "
        f"{split.itemsize} bytes an element; checkpointing {plan.checkpointing}\n"
    )
    for exchanges in plan.exchanges:
        _print_exchanges(console, exchanges)
    console.print(f"{NOTES}\n")
    console.print(
        f"Model: {plan.parameters / 1e9:.2f} B parameters, of which a token meets {plan.active / 1e9:.2f} B; "
        f"{plan.flops / 1e9:,.1f} GFLOP a token, forward and backward, causality not counted\n"
    )
    _print_memory(console, plan)


def _print_exchanges(console: Console, exchanges: Exchanges) -> None:
    split, machine = exchanges.split, exchanges.machine
    links = {"CP": machine.link(split.tp, split.cp), "TP": machine.link(1, split.tp)}
    over = ", ".join(f"{axis} at {x.bandwidth / 1e9:g} GB/s a rank" for axis, x in links.items())
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
            for x in (getattr(leg, f"{axis}_bytes") for leg in (sent.forward, sent.backward))
        ]
        times = (cost.total, cost.over_cp, cost.over_tp, cost.compute)
        table.add_row(
            name,
            *(f"{x / 1e6:,.1f}" for x in bytes_),
            *(f"{x * 1e3:,.2f}" for x in times),
            *(f"{x / 1e6:,.1f}" for x in (sent.transient, sent.kept)),
        )
    console.print(table)
    if split.cp == 1:
        console.print("Without context parallelism nothing is exchanged.\n")
        return
    choice = exchanges.choice
    if exchanges.way_in is not None:
        ratio, with_gates = exchanges.way_in
        console.print(
            f"On the way in all_to_all sends {ratio:.2f} times what all_gather does over CP; it would be "
            f"{with_gates:.2f} times if all gates crossed in full, as they do where it was published."
        )
    for told in _impossible(choice.impossible):
        console.print(told)
    named = exchanges.named
    if named == "auto":
        console.print(f"auto takes {choice.name}: {choice.reason}\n")
        return
    same = "auto would, too" if named == choice.name else f"auto would take {choice.name}"
    console.print(f"The configuration names {named}; {same}: {choice.reason}\n")


def _print_memory(console: Console, plan: Plan) -> None:
    memory = asdict(plan.memory)
    rank = memory.pop("pipeline_rank")
    whose = "a rank" if plan.dims.pp == 1 else f"a rank of pipeline rank {rank}, which needs most"
    table = Table(title=f"Memory of {whose}", box=box.SIMPLE_HEAD)
    table.add_column("")
    table.add_column("GiB", justify="right")
    for name, size in memory.items():
        table.add_row(_MEMORY[name], _gib(size))
    table.add_row("at the worst moment", _gib(plan.memory.total))
    console.print(table)
    device = f"a device of {plan.machine.memory:g} GiB"
    console.print(f"It {'fits' if plan.fits else 'does not fit'} {device}.\n{ASSUMPTIONS}")


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f}"


def print_sweep(swept: dict[int, list[Exchanges] | str], key: str) -> None:
    """For each kind of linear attention what the exchanges send over CP and take at each value."""
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
            for told in _impossible(exchanges.choice.impossible):
                console.print(f"{key} {value}: {told}")
        console.print()
    for value, reason in swept.items():
        if isinstance(reason, str):
            console.print(f"{key} {value} is impossible: {reason.strip()}")


def _impossible(impossible: dict[ExchangeName, str]) -> list[str]:
    """What cannot be and why, a sentence for each reason."""
    return [
        f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} impossible: {reason}"
        for reason, names in by_reason(impossible).items()
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
    return "" if exchanges.split.cp == 1 else exchanges.choice.name
