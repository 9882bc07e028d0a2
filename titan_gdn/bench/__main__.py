"""The command `python -m titan_gdn.bench`."""

import io
import operator
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial
from itertools import dropwhile, takewhile
from typing import NoReturn

import tyro

from titan_gdn.bench.options import LayerOptions, RuleOptions


def rule(options: tyro.conf.OmitArgPrefixes[RuleOptions]) -> Callable[[], object]:
    """Time, share of the machine's matrix FLOP/s, and memory of a rule, in this process."""
    options.check()
    return partial(_run_rule, options)


def layer(options: tyro.conf.OmitArgPrefixes[LayerOptions]) -> Callable[[], object]:
    """The whole layer with each exchange, on several ranks."""
    options.check()
    return partial(_run_layer, options, computes=True)


def exchange(options: tyro.conf.OmitArgPrefixes[LayerOptions]) -> Callable[[], object]:
    """The communication of each exchange, without projections and rule."""
    options.check()
    return partial(_run_layer, options, computes=False)


def _run_rule(options: RuleOptions) -> None:
    from titan_gdn.bench.rule import run

    run(options)


def _run_layer(options: LayerOptions, computes: bool) -> None:
    from titan_gdn.runtime import cpu

    cpu.enable()  # before anything of TorchTitan is imported
    from titan_gdn.bench.layer import run

    run(options, computes)


def main(argv: list[str] | None = None) -> None:
    """Measure and print.

    Args:
        argv: the command line, `sys.argv[1:]` by default.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # torch's profiler measures memory, and logs its start
    commands = {"rule": rule, "layer": layer, "exchange": exchange}
    box = io.StringIO()
    try:
        with redirect_stderr(box):
            run = tyro.extras.subcommand_cli_from_dict(commands, args=argv, prog="python -m titan_gdn.bench")
        run()
    except ValueError as error:
        _refuse(str(error))
    except SystemExit as ended:
        if ended.code:
            _refuse(f"command line: {_sentence(box.getvalue())} --help explains all options")
        raise


def _sentence(box: str) -> str:
    """What tyro says in a box, below the title and above the next rule, which is followed by options."""
    lines = [line.strip("│─-╰╯ ") for line in box.splitlines()[1:]]
    return " ".join(takewhile(bool, dropwhile(operator.not_, lines))).rstrip(".") + "."


def _refuse(problem: str) -> NoReturn:
    print(f"titan_gdn: {problem}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
