"""Draws what each exchange costs, as the planner sees it: `python docs/figures/draw_planner.py`.

Writes `planner.svg` beside this file and prints the table of docs/context_parallelism.md. No number is typed
here: both come from the sweep of `python -m titan_gdn.plan --sweep cp=2,4,8,16`. The file also holds the
plotted numbers as a comment, which tests/test_docs.py computes again.
"""

import json
from pathlib import Path

HERE = Path(__file__).parent
CONFIGS = HERE.parent.parent / "train_configs"
MODELS = {"Qwen3-Next": "qwen3_next_1M.toml", "Kimi Linear": "kimi_linear_1M.toml"}
WORLD_SIZE = 128
CP = [2, 4, 8, 16]
TP = (1, 8)

Point = dict[str, float | str]
"""Milliseconds of each exchange that is possible, and `"taken"`, the one that "auto" takes."""


def points(model: str, tp: int) -> dict[int, Point]:
    """The planner's sweep of a model over CP.

    Args:
        model: a key of `MODELS`.
        tp: degree of tensor parallelism.
    """
    from titan_gdn.config.load import load_config
    from titan_gdn.plan.plan import by_kind, sweep

    argv = [
        "--job.config_file",
        str(CONFIGS / MODELS[model]),
        "--parallelism.tensor_parallel_degree",
        str(tp),
    ]
    config = load_config(argv, WORLD_SIZE, here=False)
    (kind,) = by_kind(sweep(config, WORLD_SIZE, "cp", CP))
    return {
        cp: {name: cost.total * 1e3 for name, cost in x.costs.items()} | {"taken": x.taken}
        for cp, x in kind.items()
    }


def rounded(swept: dict[int, Point]) -> dict[str, dict[str, str]]:
    """The sweep as the documentation prints it, to a tenth of a millisecond."""
    return {
        str(cp): {key: x if isinstance(x, str) else f"{x:.1f}" for key, x in point.items()}
        for cp, point in swept.items()
    }


def table(model: str, swept: dict[int, dict[int, Point]]) -> list[str]:
    """Rows of Markdown, one a degree of CP; bold is what "auto" takes.

    Args:
        model: its name, which stands before the first row.
        swept: by TP, then CP.
    """
    rows = []
    for cp in CP:
        cells = []
        for tp in TP:
            point = swept[tp][cp]
            for name in ("all_to_all", "all_gather", "state"):
                number = f"{point[name]:.1f}" if name in point else "heads"
                cells.append(f"**{number}**" if name == point["taken"] else number)
        label = f"{model}, CP {cp}" if cp == CP[0] else f"CP {cp}"
        rows.append(f"| {label} | {' | '.join(cells)} |")
    return rows


def draw(swept: dict[int, dict[int, Point]], path: Path) -> None:
    """Milliseconds over CP, side by side for each TP.

    Args:
        swept: by TP, then CP.
        path: of the SVG file.
    """
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "titan_gdn"  # the same file each time
    styles = {"all_to_all": ("#1f77b4", "o"), "all_gather": ("#e8710a", "s"), "state": ("#2a8a3e", "^")}
    figure = Figure(figsize=(9, 3.7), layout="constrained")
    for axes, (tp, points) in zip(figure.subplots(1, len(swept), sharey=True), swept.items(), strict=True):
        for name, (color, marker) in styles.items():
            line = {cp: point[name] for cp, point in points.items() if name in point}
            axes.plot(list(line), list(line.values()), color=color, marker=marker, label=name)
        taken = {cp: point[point["taken"]] for cp, point in points.items()}
        axes.scatter(
            list(taken), list(taken.values()), s=170, facecolors="none", edgecolors="#1f2328", label="auto"
        )
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="context_parallel_degree",
            title=f"Qwen3-Next, 1,048,576 tokens, TP {tp}",
            ylim=(4, 500),
        )
        axes.set_xticks(CP, [str(cp) for cp in CP])
        axes.set_yticks([5, 10, 20, 50, 100, 200], ["5", "10", "20", "50", "100", "200"])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        if tp == TP[0]:
            axes.set_ylabel("ms a layer and step")
    axes.legend(loc="upper right")
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    numbers = {str(tp): rounded(points) for tp, points in swept.items()}
    with path.open("a") as file:
        file.write(f"<!-- {json.dumps(numbers)} -->\n")


def main() -> None:
    """Write the chart of Qwen3-Next, and print the rows of both models."""
    from titan_gdn.runtime import cpu

    cpu.enable()  # before anything of TorchTitan is imported
    swept = {model: {tp: points(model, tp) for tp in TP} for model in MODELS}
    draw(swept["Qwen3-Next"], HERE / "planner.svg")
    for model, of_model in swept.items():
        print("\n".join(table(model, of_model)))


if __name__ == "__main__":
    main()
