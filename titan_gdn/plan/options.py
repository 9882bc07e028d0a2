"""What the planner may be told."""

import argparse
import os
from dataclasses import dataclass
from typing import NoReturn

DESCRIPTION = """\
Say what a run would send, take and hold on N ranks, before there are any: for each kind of linear attention
the bytes over CP and TP, time and buffers of each exchange, which are impossible, and which one "auto" takes
and why; parameters, FLOPs a token, and the memory of a rank.

No GPU, process group, weights, tokenizer or data are needed. The machine that it is planned for is
[linear_attention.machine] of the file."""

SWEPT = {
    "cp": ("parallelism", "context_parallel_degree"),
    "tp": ("parallelism", "tensor_parallel_degree"),
    "seq_len": ("training", "seq_len"),
}
"""What can be swept: its section and key in the file."""

EVERY_CP = "cp=1,2,4,8,16"


@dataclass(frozen=True, slots=True)
class Options:
    """The command line.

    Attributes:
        world_size: number of ranks.
        json: print JSON, nothing else.
        sweep: what is swept and its values, in rising order; None without.
        plot: PNG file to draw the sweep to.
        run: the rest, the command line of the run.
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
        ValueError: it is wrong; says what was given and what is possible.
        SystemExit: it asks for help.
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
    add("--json", action="store_true", help="print one JSON object: bytes, seconds, FLOPs")
    add(
        "--sweep",
        metavar="KEY=V1,V2,...",
        help=f"also a table over {', '.join(SWEPT)} (such as {EVERY_CP}); data parallelism takes the ranks "
        "that are left",
    )
    add("--plot", metavar="FILE.png", help=f"draw time and bytes of the sweep, {EVERY_CP} if none is given")
    # Not argparse's: it would take "--section.key -1" apart.
    add("--job.config_file", metavar="FILE.toml", dest="file", help="the run, as titan_gdn.train reads it")
    parser.epilog = "--section.key value changes a key of the file, as for titan_gdn.train."
    given, run = parser.parse_known_args(argv)
    if given.file is None:
        parser.error("--job.config_file FILE.toml is missing, the run that is planned")
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
        raise ValueError("command line: --world-size N is missing, the number of ranks that are planned for")
    if not given.isdecimal() or int(given) < 1:
        raise ValueError(f"command line: --world-size {given}: expected a number of ranks, at least 1")
    return int(given)


def _sweep(given: str) -> tuple[str, list[int]]:
    key, _, values = given.partition("=")
    numbers = values.split(",")
    if key not in SWEPT or not all(number.isdecimal() and int(number) for number in numbers):
        raise ValueError(
            f"command line: --sweep {given}: expected KEY=V1,V2,... with KEY one of {', '.join(SWEPT)} and "
            f"numbers from 1, such as {EVERY_CP}"
        )
    return key, sorted({int(number) for number in numbers})


def _png(path: str) -> str:
    folder = os.path.dirname(path) or "."
    writable = os.path.isdir(folder) and os.access(folder, os.W_OK) and not os.path.isdir(path)
    if not path.endswith(".png") or not writable:
        raise ValueError(f"command line: --plot {path}: expected a file *.png in a folder to write to")
    return path
