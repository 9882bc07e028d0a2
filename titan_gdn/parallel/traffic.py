"""What crosses the CP group, in elements that a rank sends, per layer and forward."""

from dataclasses import dataclass

from titan_gdn.parallel.exchange import ExchangeName


@dataclass(frozen=True, slots=True)
class LayerShape:
    """A head-parallel layer.

    Attributes:
        width: `D`, of the hidden states.
        exchanged: `W`, elements a token that are projected and cross in: `G * (2K + R*V + 2R)` for GDN.
        output: `O`, elements a token that cross back: `G * R * V`.
        bottleneck: `r`, elements a token that every rank needs, whatever its heads; 0 for GDN.
    """

    width: int
    exchanged: int
    output: int
    bottleneck: int = 0


def elements_in(
    name: ExchangeName, shape: LayerShape, tokens: int, cp: int, tp: int, sequence_parallel: bool
) -> int:
    """Elements that a rank sends over CP on the way in; the backward sends as many.

    Args:
        name: the exchange.
        shape: the layer.
        tokens: `B * T`, all tokens of the batch.
        cp: degree of context parallelism.
        tp: degree of tensor parallelism.
        sequence_parallel: whether hidden states are sharded over TP.
    """
    mine = tokens // (cp * (tp if sequence_parallel else 1))  # as hidden states lie between layers
    if name == "all_gather":
        return mine * shape.width * (cp - 1)
    return tokens // cp * (shape.exchanged // tp) * (cp - 1) // cp + mine * shape.bottleneck * (cp - 1)


def elements_out(shape: LayerShape, tokens: int, cp: int, tp: int) -> int:
    """Elements that a rank sends over CP on the way back, whichever the exchange."""
    return tokens // cp * (shape.output // tp) * (cp - 1) // cp


def choose(shape: LayerShape, cp: int, tp: int, sequence_parallel: bool) -> tuple[ExchangeName, str]:
    """The exchange that `auto` takes, and why.

    The gather sends `cp * D / W` of the all-to-all's elements on the way in (`cp * tp * D / W` without
    sequence parallelism; a bottleneck shifts it in the gather's favour). Within 10%, its larger gather over
    TP and its full-length transient decide against it; so they do under sequence parallelism beyond CP 2.
    """
    sequence_parallel = sequence_parallel and tp > 1
    gather, exchange = (
        elements_in(name, shape, cp * cp * tp, cp, tp, sequence_parallel)
        for name in ("all_gather", "all_to_all")
    )
    ratio = gather / exchange
    told = f"all_gather sends {ratio:.2f} of all_to_all's elements on the way in"
    if ratio >= 0.9:
        return "all_to_all", told
    if sequence_parallel and cp > 2:
        return "all_to_all", f"{told}, and {cp} times its rows over TP"
    return "all_gather", told
