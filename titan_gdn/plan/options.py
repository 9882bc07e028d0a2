"""The command line of the planner."""

import argparse
import os
from dataclasses import dataclass
from typing import NoReturn

DESCRIPTION = """\
Estimates what a run sends, how long it communicates and what memory it needs on N ranks. For each kind of
linear attention it prints the bytes over CP and TP, the time and the buffers of each exchange, which
exchanges are impossible, and which one "auto" takes and why. It also prints parameters, FLOPs per token and
the memory of a rank.

It needs no GPU, process group, weights, tokenizer or data. It plans for the machine that the file describes
in [linear_attention.machine]."""

SWEPT = {
    "cp": ("parallelism", "context_parallel_degree"),
    "tp": ("parallelism", "tensor_parallel_degree"),
    "seq_len": ("training", "seq_len"),
}
"""The keys that can be swept, with their section and key in the file."""

EVERY_CP = "cp=1,2,4,8,16"


@dataclass(frozen=True, slots=True)
class Options:
    """The command line.

    Attributes:
        world_size: the number of ranks.
        json: whether to print JSON and nothing else.
        sweep: the key to sweep and its values in ascending order, or None.
        plot: the PNG file to draw the sweep to, or None.
        run: the command line of the run.
    """

    world_size: int
    json: bool
    sweep: tuple[str, list[int]] | None
    plot: str | None
    run: list[str]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"command line: {message}. --help explains all options")


def parse(argv: list[str]) -> Options:
    """Read the command line.

    Raises:
        ValueError: the command line is wrong; says what was given and what is possible.
        SystemExit: the command line asks for help.
    """
    parser = _Parser(
        prog="python -m titan_gdn.plan",
        usage="python -m titan_gdn.plan --job.config_file FILE.toml --world-size N [--json] "
        "[--sweep KEY=V1,V2,...] [--plot FILE.png] [--section.key value ...]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--world-size", "--world_size", metavar="N", help="number of ranks")
    add("--json", action="store_true", help="print one JSON object with bytes, seconds and FLOPs")
    add(
        "--sweep",
        metavar="KEY=V1,V2,...",
        help=f"also print a table over values of {', '.join(SWEPT)} (such as {EVERY_CP}); data parallelism "
        "takes the remaining ranks",
    )
    add("--plot", metavar="FILE.png", help=f"draw time and bytes of the sweep, by default {EVERY_CP}")
    # Keys of the run are left to `parse_known_args`: argparse would split "--section.key -1".
    add("--job.config_file", metavar="FILE.toml", dest="file", help="the run, as titan_gdn.train reads it")
    parser.epilog = "--section.key value overrides a key of the file, as for titan_gdn.train."
    given, run = parser.parse_known_args(argv)
    if given.file is None:
        parser.error("--job.config_file FILE.toml, the run to plan, is missing")
    sweep = given.sweep or (EVERY_CP if given.plot else None)
    return Options(
        world_size=_world_size(given.world_size),
        json=given.json,
        sweep=None if sweep is None else _sweep(sweep),
        plot=None if given.plot is None else _png(given.plot),
        run=["--job.config_file", given.file, *run],
    )


def _world_size(given: str | None) -> int:
    if given is None:
        raise ValueError("command line: --world-size N, the number of ranks to plan for, is missing")
    if not given.isdecimal() or int(given) < 1:
        raise ValueError(f"command line: --world-size {given}: expected a number of ranks, at least 1")
    return int(given)


def _sweep(given: str) -> tuple[str, list[int]]:
    key, _, values = given.partition("=")
    numbers = values.split(",")
    if key not in SWEPT or not all(number.isdecimal() and int(number) for number in numbers):
        raise ValueError(
            f"command line: --sweep {given}: expected KEY=V1,V2,... where KEY is one of {', '.join(SWEPT)} "
            f"and values are positive integers, such as {EVERY_CP}"
        )
    return key, sorted({int(number) for number in numbers})


def _png(path: str) -> str:
    folder = os.path.dirname(path) or "."
    writable = os.path.isdir(folder) and os.access(folder, os.W_OK) and not os.path.isdir(path)
    if not path.endswith(".png") or not writable:
        raise ValueError(
            f"command line: --plot {path}: expected a file *.png in a folder that exists and is writable"
        )
    return path
