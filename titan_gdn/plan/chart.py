"""Draws a sweep as a chart."""

from matplotlib.figure import Figure

from titan_gdn.parallel.exchange.registry import EXCHANGES
from titan_gdn.plan.plan import Exchanges, by_kind, crossovers


def draw(swept: dict[int, list[Exchanges] | str], key: str, path: str) -> None:
    """Draw time and bytes over CP of each exchange against the values of a sweep, both axes logarithmic.

    Dotted lines separate values between which "auto" changes to another exchange.

    Args:
        swept: the sweep.
        key: the key that was swept.
        path: the PNG file to write.
    """
    kinds = by_kind(swept)
    figure = Figure(figsize=(10, 4 * len(kinds)), layout="constrained")
    axes = figure.subplots(len(kinds), 2, squeeze=False)
    for (time_axes, bytes_axes), kind in zip(axes, kinds, strict=True):
        for name in EXCHANGES:
            possible = {
                value: x.costs[name]
                for value, x in kind.items()
                if name in x.costs and name not in x.choice.impossible and x.batch.cp > 1
            }
            time_axes.plot(list(possible), [x.total * 1e3 for x in possible.values()], "o-", label=name)
            bytes_axes.plot(list(possible), [x.done.cp_bytes / 1e6 for x in possible.values()], "o-")
        time_axes.set_ylabel("ms per layer and step")
        bytes_axes.set_ylabel("MB per rank over CP")
        for each in (time_axes, bytes_axes):
            each.set(xscale="log", yscale="log", xlabel=key, title=next(iter(kind.values())).kind)
            each.set_xticks(list(kind), [str(value) for value in kind])
            each.minorticks_off()
            each.grid(which="both", alpha=0.3)
            for a, b in crossovers(kind):
                each.axvline((a * b) ** 0.5, color="black", linestyle=":")
                each.annotate(
                    f"{kind[a].taken} | {kind[b].taken}",
                    ((a * b) ** 0.5, 0.98),
                    xycoords=each.get_xaxis_transform(),
                    ha="center",
                    va="top",
                    fontsize="small",
                )
        time_axes.legend()
    figure.savefig(path, dpi=150)
