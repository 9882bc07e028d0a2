"""Tables of the planner and the benchmarks: they fit the terminal, and no figure is cut."""

import io
import itertools
import os
import pty
import random
import sys
import termios

import pytest
from rich.console import Console

from titan_gdn.bench import layer
from titan_gdn.bench.__main__ import main as bench
from titan_gdn.bench.options import LayerOptions
from titan_gdn.display.tables import console, print_table
from titan_gdn.plan import table
from titan_gdn.plan.__main__ import main as plan

WIDTHS = [80, 100, 120]


def printed(width, names, rows):
    file = io.StringIO()
    print_table(Console(file=file, width=width, highlight=False, markup=False), "Title", names, rows)
    return file.getvalue()


@pytest.mark.parametrize("width", [60, *WIDTHS])
@pytest.mark.parametrize("seed", range(20))
def test_every_cell_is_printed_whole_beside_its_names(width, seed):
    draw = random.Random(seed)
    columns, count = draw.randrange(2, 14), draw.randrange(1, 12)
    names = ["row", *(f"{draw.choice('ABC')}, {'n' * draw.randrange(1, 20)}{i}" for i in range(1, columns))]
    rows = [
        [f"r{i}", *(f"{draw.randrange(10 ** draw.randrange(1, 12)):,}" for _ in names[1:])]
        for i in range(count)
    ]
    lines = printed(width, names, rows).splitlines()
    assert max(map(len, lines)) <= width and not any("…" in line for line in lines)
    words = [line.split() for line in lines]
    straight = all(any(row == found for found in words) for row in rows)
    columns = [[name, *column] for name, *column in zip(names, *rows, strict=True)]
    found = [list(group) for _, group in itertools.groupby(words, key=lambda line: line[:1] == ["row"])]
    parts = [group for group in found if group != [] and group[0][:1] != ["row"]][1:]
    turned = {name: [cell for part in parts for line in part if line[: len(name.split())] == name.split()
              for cell in line[len(name.split()) :]] for name in names[1:]}  # fmt: skip
    assert straight or turned == {name: cells for name, *cells in columns[1:]}


def test_columns_of_one_heading_share_it():
    lines = printed(80, ["x", "A, one", "A, two", "B, one"], [["r", "1", "2", "3"]]).splitlines()
    head, names = lines[2:4]
    assert head.split() == ["A", "B"] and names.split() == ["x", "one", "two", "one"]


def test_what_is_no_terminal_has_120_columns_and_a_terminal_its_own(monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    assert console().width == 120
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (20, 90))
    with os.fdopen(theirs, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setenv("TERM", "xterm")
        assert console().width == 70
    os.close(ours)


RUNS = {
    "a million": "qwen3_next_1M.toml 128 --parallelism.tensor_parallel_degree 1 --sweep cp=1,2,4,8,16,32",
    "debug": "kimi_linear_debug.toml 2 --parallelism.context_parallel_degree 2 --sweep seq_len=512,1024",
}


@pytest.fixture(scope="module")
def told():
    """What the planner prints of a run at a width."""
    kept = {}

    def told(run, width):
        if (run, width) not in kept:
            file, world_size, *argv = RUNS[run].split()
            out = io.StringIO()
            with pytest.MonkeyPatch.context() as patch:
                make = lambda: Console(file=out, width=width, highlight=False, markup=False)  # noqa: E731
                patch.setattr(table, "make_console", make)
                plan(["--job.config_file", f"train_configs/{file}", "--world-size", world_size, *argv])
            kept[run, width] = out.getvalue()
        return kept[run, width]

    return told


@pytest.mark.parametrize("run", RUNS)
def test_the_planner_prints_the_same_figures_at_every_width(told, run):
    figures = {}
    for width in WIDTHS:
        text = told(run, width)
        assert max(map(len, text.splitlines())) <= width and "…" not in text
        figures[width] = sorted(word for word in text.replace("─", "").split() if word[0].isdigit())
    assert figures[80] == figures[100] == figures[120]


def test_a_small_model_has_units_that_show_its_numbers(told):
    text = " ".join(told("debug", 120).split())
    assert "978.60 K parameters, 978.60 K active per token; 6.87 MFLOP per token" in text
    assert "parameters, sharded 1.87" in text and " MiB " in text
    assert "The published comparison, which sends all gates in full, gives" in text
    large = " ".join(told("a million", 120).split())
    assert "79.67 B parameters" in large and "640.20 GFLOP per token" in large and " GiB " in large
    assert "Before the rule, all_to_all sends" in large and "published" not in large  # of KDA


@pytest.mark.parametrize("width", WIDTHS)
def test_a_benchmark_fits_the_terminal_and_names_the_layer(width, monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(layer, "console", lambda: Console(file=out, width=width))
    keys = ["forward (s)", "backward (s)", "peak memory (MiB)", "cp forward (bytes)", "cp backward (bytes)"]
    keys += ["tp forward (bytes)", "tp backward (bytes)", "cp forward, formula", "cp backward, formula"]
    rows = [
        {"exchange": name, **dict.fromkeys(keys, 2**40)} for name in ("all_to_all", "all_gather", "state")
    ]
    layer._print(LayerOptions(tokens=2**20), rows)
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert text.count(f"{2**40:,}") == 27
    assert text.startswith("Gated DeltaNet, 1,048,576 tokens, CP 2, TP 1, rank 0")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "command line: Expected one of {rule, layer, exchange}."),
        (["rules"], "command line: Unrecognized options: rules."),
        (["rule", "--tokes", "5"], "command line: Unrecognized options: --tokes, 5."),
        (["rule", "--tokens", "x"], "command line: Error parsing --tokens: "),
        (["rule", "--repeats"], "command line: Missing value for argument '--repeats'."),
        (["rule", "--repeats", "0"], "--repeats 0: expected at least 1"),
        (["layer", "--layer", "nowhere"], "--layer nowhere: No module named"),
        (["exchange", "--cp", "16"], "--exchanges all_to_all: the 8 key heads are not divisible"),
        (["rule", "--json", "/nowhere/x"], "--json /nowhere/x: expected a file"),
    ],
)
def test_the_benchmark_refuses_in_a_sentence_and_exits_with_2(argv, words, capsys):
    with pytest.raises(SystemExit) as ended:
        bench(argv)
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out == ""
    assert err.startswith(f"titan_gdn: {words}") and err.count("\n") == 1


def test_help_of_the_benchmark_exits_with_0(capsys):
    with pytest.raises(SystemExit) as ended:
        bench(["--help"])
    assert not ended.value.code and "rule" in capsys.readouterr().out
