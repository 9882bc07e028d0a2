"""Tables on a terminal of any width."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 120
"""Columns of what is not a terminal: a file, a pipe."""

Rows = Sequence[Sequence[str]]


def console() -> Console:
    """A console as wide as the terminal, or `WIDTH` where there is none."""
    made = Console(highlight=False, markup=False)
    if not made.is_terminal:
        made.width = WIDTH
    return made


def cell(x: str | float) -> str:
    """A figure of a benchmark."""
    return x if isinstance(x, str) else f"{x:,}" if isinstance(x, int) else f"{x:.3f}"


def print_table(console: Console, title: str, names: Sequence[str], rows: Rows) -> None:
    """Print a table; where it is too wide, its transpose, in as many parts as it takes.

    No cell is shortened or broken.

    Args:
        console: where to print.
        title: the line above.
        names: names of the columns. What stands before ", " is a heading, which consecutive columns share.
        rows: the cells; those of the first column name the rows.
    """
    console.print(title)
    table = _table(_headings(names), rows)
    if _fits(table, console):
        console.print(table)
        return
    for size in range(len(rows), 0, -1):
        parts = [_transposed(names, rows[i : i + size]) for i in range(0, len(rows), size)]
        if size == 1 or all(_fits(part, console) for part in parts):
            console.print(*parts)
            return


def _fits(table: Table, console: Console) -> bool:
    return console.measure(table, options=console.options.update(width=10_000)).maximum <= console.width


def _transposed(names: Sequence[str], rows: Rows) -> Table:
    first, *others = zip(names, *rows, strict=True)
    return _table(first, others)


def _table(names: Sequence[str], rows: Rows) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for i, name in enumerate(names):
        table.add_column(name, justify="right" if i else "left", no_wrap=True, vertical="bottom")
    for row in rows:
        table.add_row(*row)
    return table


def _headings(names: Sequence[str]) -> list[str]:
    """Names of two lines: the heading, above the first of its columns, and the rest."""
    parts = [name.rpartition(", ") for name in names]
    shown = ["" if i and parts[i - 1][0] == heading else heading for i, (heading, _, _) in enumerate(parts)]
    return [f"{heading}\n{rest}".lstrip("\n") for heading, (_, _, rest) in zip(shown, parts, strict=True)]
