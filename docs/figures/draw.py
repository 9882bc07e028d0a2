"""Draws the diagrams of the documentation: `python docs/figures/draw.py`.

Writes `exchanges.svg` and `layout.svg` beside this file. It needs nothing but Python. The chart of the
planner has a script of its own, `draw_planner.py`, because it runs the planner.
"""

from collections.abc import Iterable
from html import escape
from pathlib import Path

HERE = Path(__file__).parent

RANKS = ("#8ec5f4", "#f8bd7f")  # rank 0, rank 1
EDGE, TEXT, MUTED, WIRE, CARD, RULE = "#57606a", "#1f2328", "#57606a", "#c2255c", "#ffffff", "#1f2328"
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"


class Drawing:
    """An SVG file in the making. It has a light background of its own, so it reads on a dark page too.

    Args:
        width: of the drawing, in pixels at README width.
        height: likewise.
        title: what a screen reader says.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'font-family="{FONT}" font-size="14" fill="{TEXT}" role="img">',
            f"<title>{escape(title)}</title>",
            "<defs>",
            *(
                f'<marker id="{name}" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="{size}" '
                f'markerHeight="{size}" markerUnits="userSpaceOnUse" orient="auto">'
                f'<path d="M0 0 L10 5 L0 10 z" fill="{color}"/></marker>'
                for name, color, size in (("local", EDGE, 9), ("wire", WIRE, 13), ("rule", RULE, 8))
            ),
            "</defs>",
        ]
        self.box(0.5, 0.5, width - 1, height - 1, fill=CARD, stroke="#d0d7de", radius=8)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        stroke: str = EDGE,
        radius: float = 0,
    ) -> None:
        """A rectangle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
            f'fill="{fill}" stroke="{stroke}"/>'
        )

    def text(
        self, x: float, y: float, line: str, size: int = 14, anchor: str = "start", mono: bool = False,
        bold: bool = False, color: str = TEXT,
    ) -> None:  # fmt: skip
        """One line of text, whose baseline is at `y`."""
        font = f' font-family="{MONO}"' if mono else ""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{color}"'
            f"{font}{weight}>{escape(line)}</text>"
        )

    def lines(self, x: float, y: float, lines: Iterable[str], size: int = 13, color: str = MUTED) -> None:
        """Lines of text below each other."""
        for i, line in enumerate(lines):
            self.text(x, y + i * (size + 5), line, size, color=color)

    def arrow(self, points: list[tuple[float, float]], kind: str = "local") -> None:
        """An arrow along points: "local" inside a rank, "wire" between ranks, "rule" over tokens."""
        color, width = {"local": (EDGE, 1.5), "wire": (WIRE, 4), "rule": (RULE, 1.5)}[kind]
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        self.parts.append(
            f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="{width}" '
            f'marker-end="url(#{kind})"/>'
        )

    def save(self, path: Path) -> None:
        """Write the file."""
        path.write_text("\n".join([*self.parts, "</svg>"]) + "\n")


CELL = 22
"""Pixels of a cell: a quarter of the tokens by a quarter of the heads."""


def grid(drawing: Drawing, x: float, y: float, columns: int, owner: list[list[int]]) -> None:
    """A tensor, 4 parts of the sequence high; `owner[row][column]` is the rank that holds a cell."""
    for row in range(4):
        for column in range(columns):
            fill = RANKS[owner[row][column]]
            drawing.box(x + column * CELL, y + row * CELL, CELL, CELL, fill)


BY_TOKENS = [[row // 2] * 4 for row in range(4)]
BY_HEADS = [[column // 2 for column in range(4)]] * 4
COLUMNS = (150, 285, 470, 665)
"""Left edges of the four stages."""
NOTES = 775
HEADS_OVER_BOTH = "heads divisible by TP x CP"


def exchanges() -> Drawing:
    """The three exchanges on two ranks, one below the other."""
    top, row_height = 78, 150
    drawing = Drawing(1010, top + 3 * row_height + 40, "The three exchanges on two context-parallel ranks")
    for x, width, title in zip(
        COLUMNS,
        (44, 88, 88, 88),
        ("hidden states", "", "convolution, rule", "output"),
        strict=True,
    ):
        drawing.text(x + width / 2, 34, title, anchor="middle", bold=True)
    drawing.text(NOTES, 34, "what a rank sends over CP", bold=True)
    drawing.text(20, 54, "rows: tokens", 12, color=MUTED)
    for x, columns in ((COLUMNS[0] + 22, "width D"), *((x + 44, "heads") for x in COLUMNS[2:])):
        drawing.text(x, 54, f"columns: {columns}", 12, anchor="middle", color=MUTED)
    notes = {
        "all_to_all": ("projected tokens, T / CP of", "them: falls with CP", "", HEADS_OVER_BOTH),
        "all_gather": ("hidden states, nearly all T", "of them", "", HEADS_OVER_BOTH),
        "state": (
            "a K x (K + V) state a head and",
            "3 tokens for the convolution,",
            "however large T is",
            "heads divisible by TP",
        ),
    }
    for i, (name, draw_stages) in enumerate(
        {"all_to_all": _all_to_all, "all_gather": _all_gather, "state": _state}.items()
    ):
        y = top + i * row_height
        drawing.parts.append(f'<path d="M20 {y - 10} H990" stroke="#d0d7de" stroke-width="1" fill="none"/>')
        drawing.text(20, y + 62, name, 16, mono=True, bold=True)
        y += 14
        grid(drawing, COLUMNS[0], y, 2, BY_TOKENS)
        draw_stages(drawing, y)
        grid(drawing, COLUMNS[3], y, 4, BY_TOKENS)
        drawing.lines(NOTES, y + 20, notes[name])
    y = top + 3 * row_height
    drawing.parts.append(f'<path d="M20 {y - 10} H990" stroke="#d0d7de" stroke-width="1" fill="none"/>')
    for rank, x in enumerate((20, 110)):
        drawing.box(x, y + 4, 16, 16, RANKS[rank])
        drawing.text(x + 24, y + 17, f"rank {rank}", 13)
    drawing.arrow([(205, y + 12), (245, y + 12)], "wire")
    drawing.text(256, y + 17, "crosses the CP group", 13)
    drawing.arrow([(420, y + 12), (460, y + 12)])
    drawing.text(471, y + 17, "inside a rank", 13)
    drawing.arrow([(590, y + 3), (590, y + 24)], "rule")
    drawing.text(603, y + 17, "the recurrence", 13)
    return drawing


def _step(drawing: Drawing, start: float, end: float, y: float, label: str, kind: str) -> None:
    """An arrow from a stage to the next, with its label above."""
    color = WIRE if kind == "wire" else MUTED
    drawing.text((start + end) / 2, y - 9, label, 13, "middle", color=color, bold=kind == "wire")
    drawing.arrow([(start + 6, y), (end - 6, y)], kind)


def _below(drawing: Drawing, stage: int, y: float, caption: str) -> None:
    """A caption below a grid of the width of heads."""
    drawing.text(COLUMNS[stage] + 44, y + 4 * CELL + 17, caption, 12, "middle", color=MUTED)


def _over_all_tokens(drawing: Drawing, y: float) -> None:
    """All tokens of half of the heads on each rank: the rule runs from the first token to the last."""
    grid(drawing, COLUMNS[2], y, 4, BY_HEADS)
    _below(drawing, 2, y, "all tokens of own heads")
    for column in range(4):
        x = COLUMNS[2] + (column + 0.5) * CELL
        drawing.arrow([(x, y + 6), (x, y + 4 * CELL - 5)], "rule")


def _all_to_all(drawing: Drawing, y: float) -> None:
    middle = y + 2 * CELL
    _step(drawing, COLUMNS[0] + 44, COLUMNS[1], middle, "project", "local")
    grid(drawing, COLUMNS[1], y, 4, BY_TOKENS)
    _below(drawing, 1, y, "q, k, v, gates")
    _step(drawing, COLUMNS[1] + 88, COLUMNS[2], middle, "all-to-all", "wire")
    _over_all_tokens(drawing, y)
    _step(drawing, COLUMNS[2] + 88, COLUMNS[3], middle, "all-to-all", "wire")


def _all_gather(drawing: Drawing, y: float) -> None:
    middle = y + 2 * CELL
    _step(drawing, COLUMNS[0] + 44, COLUMNS[1] - 6, middle, "all-gather", "wire")
    for rank in range(2):  # each rank has hidden states of all tokens
        grid(drawing, COLUMNS[1] - 6 + rank * 56, y, 2, [[rank] * 2] * 4)
    _below(drawing, 1, y, "all tokens, on each rank")
    _step(drawing, COLUMNS[1] + 94, COLUMNS[2], middle, "project", "local")
    _over_all_tokens(drawing, y)
    _step(drawing, COLUMNS[2] + 88, COLUMNS[3], middle, "all-to-all", "wire")


def _state(drawing: Drawing, y: float) -> None:
    middle = y + 2 * CELL
    _step(drawing, COLUMNS[0] + 44, COLUMNS[1], middle, "project", "local")
    grid(drawing, COLUMNS[1], y, 4, BY_TOKENS)
    _below(drawing, 1, y, "q, k, v, gates")
    _step(drawing, COLUMNS[1] + 88, COLUMNS[2], middle, "3 tokens", "wire")
    grid(drawing, COLUMNS[2], y, 4, BY_TOKENS)
    _below(drawing, 2, y, "own tokens of all heads")
    for column in range(4):
        x = COLUMNS[2] + (column + 0.5) * CELL
        drawing.arrow([(x, y + 5), (x, middle - 5)], "rule")
        drawing.arrow([(x, middle + 5), (x, y + 4 * CELL - 5)], "rule")
    right = COLUMNS[2] + 88
    out = right + 18
    drawing.arrow(
        [(right + 2, middle - 14), (out, middle - 14), (out, middle + 14), (right + 4, middle + 14)], "wire"
    )
    drawing.text(right + 27, middle - 8, "states", 13, color=WIRE, bold=True)
    drawing.arrow([(right + 29, middle + 3), (COLUMNS[3] - 6, middle + 3)])


FLOORS = (
    ("commands", ("train.py", "plan/", "bench/", "reference.py", "convert.py"), "what a person runs"),
    ("runs", ("config/",), "a TOML file to TorchTitan's Trainer.Config, and the checks of a run"),
    (
        "families",
        ("models/qwen3_next/", "models/qwen3_5/", "models/kimi_linear/"),
        "one folder per model family; no family imports another",
    ),
    (
        "hybrid",
        ("models/hybrid/",),
        "what the families share: block, builders, checks, pipeline, quantization",
    ),
    ("layers", ("layers/",), "TorchTitan Modules with a Config; each declares what is true of it"),
    (
        "parallel",
        ("parallel/",),
        "a DeviceMesh and tensors in, tensors out; one file per exchange",
    ),
    (
        "around",
        ("data/", "checkpoint/", "endings/", "display/"),
        "data sets; model directories; how a run ends; what a terminal shows",
    ),
    (
        "ground",
        ("ops/", "assets/", "runtime/"),
        "pure functions on local tensors; patches of libraries",
    ),
)
"""From the top: a floor's name, its folders and files in titan_gdn, and what they hold."""


def layout() -> Drawing:
    """The folders as floors."""
    height, gap, top = 48, 14, 20
    total = len(FLOORS) * (height + gap)
    drawing = Drawing(1010, top + total + 30, "The folders of titan_gdn as floors: lower never imports upper")
    for i, (name, folders, what) in enumerate(FLOORS):
        y = top + i * (height + gap)
        drawing.box(20, y, 970, height, "#e4f0fb", "#8aa9c4", 6)
        drawing.text(36, y + 29, name, 15, bold=True)
        drawing.text(150, y + 29, " · ".join(folders), 13, mono=True)
        drawing.text(500, y + 29, what, 13, color=MUTED)
        if i + 1 < len(FLOORS):
            drawing.arrow([(75, y + height + 1), (75, y + height + gap - 1)])
    drawing.text(
        20,
        top + total + 12,
        "An arrow reads: may import. A file imports from its own folder and from lower floors.",
        13,
    )
    return drawing


def main() -> None:
    """Write the drawings beside this file."""
    for name, drawing in {"exchanges": exchanges(), "layout": layout()}.items():
        drawing.save(HERE / f"{name}.svg")


if __name__ == "__main__":
    main()
