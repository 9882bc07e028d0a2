"""All exchanges by name. To add one, add its class to `EXCHANGES`."""

from torch.distributed.device_mesh import DeviceMesh

from titan_gdn.parallel.exchange.all_gather import AllGather
from titan_gdn.parallel.exchange.all_to_all import AllToAll
from titan_gdn.parallel.exchange.base import Exchange
from titan_gdn.parallel.exchange.local import NoExchange
from titan_gdn.parallel.exchange.state import StatePassing
from titan_gdn.parallel.traffic import LayerShape, ShardedBatch, Traffic


def by_name(*kinds: type[Exchange]) -> dict[str, type[Exchange]]:
    """Exchanges by their names.

    Raises:
        ValueError: an exchange lacks a method or a name, or its name is reserved or taken.
    """
    named: dict[str, type[Exchange]] = {}
    for kind in kinds:
        if missing := sorted(kind.__abstractmethods__):
            raise ValueError(f"exchange {kind.__name__} does not implement {', '.join(missing)}")
        for fact in ("name", "saved"):
            if not hasattr(kind, fact):
                raise ValueError(f"exchange {kind.__name__} does not declare {fact}")
        if kind.name in ("auto", "none", *named):
            raise ValueError(f"exchange {kind.__name__}: the name {kind.name!r} is reserved or taken")
        named[kind.name] = kind
    return named


EXCHANGES: dict[str, type[Exchange]] = by_name(AllToAll, AllGather, StatePassing)
"""Read it when an exchange is needed, not at import: a program may register its own."""


def choices() -> tuple[str, ...]:
    """The possible values of `linear_attention.exchange`."""
    return ("auto", *EXCHANGES)


def exchange_class(name: str, cp: int) -> type[Exchange]:
    """The class of an exchange, which without context parallelism (`cp` 1) is `NoExchange` for every name.

    Raises:
        ValueError: the name is unknown, or "auto", which a model replaces when it is configured.
    """
    if cp == 1:
        return NoExchange
    if name not in EXCHANGES:
        raise ValueError(f"exchange {name!r} is unknown; possible are {', '.join(EXCHANGES)}")
    return EXCHANGES[name]


def make_exchange(
    name: str, mesh: DeviceMesh | None, tp_mesh: DeviceMesh | None = None, regather: bool = False
) -> Exchange:
    """Build the exchange that a layer runs.

    Args:
        name: one of `EXCHANGES`. Not read without context parallelism.
        mesh: the CP sub-mesh, None without context parallelism.
        tp_mesh: the TP sub-mesh under sequence parallelism, else None.
        regather: see `Exchange`.

    Raises:
        ValueError: see `exchange_class`.
    """
    if mesh is None or mesh.size() == 1:
        return NoExchange(tp_mesh)
    return exchange_class(name, mesh.size())(mesh, tp_mesh, regather)


def traffic(name: str, shape: LayerShape, batch: ShardedBatch) -> Traffic:
    """What a layer sends, computes and holds under an exchange. Check `impossible` first."""
    return exchange_class(name, batch.cp).traffic(shape, batch)


def impossible(name: str, shape: LayerShape, batch: ShardedBatch) -> str | None:
    """Why an exchange cannot run a layer and what to change. None if it can."""
    return exchange_class(name, batch.cp).impossible(shape, batch)
