"""The command `python -m titan_gdn.bench`."""

import sys
import warnings

import tyro

from titan_gdn.bench.options import LayerOptions, RuleOptions


def rule(options: tyro.conf.OmitArgPrefixes[RuleOptions]) -> None:
    """Time, share of the machine's matrix FLOP/s, and memory of a rule, in this process."""
    options.check()
    from titan_gdn.bench.rule import run

    run(options)


def layer(options: tyro.conf.OmitArgPrefixes[LayerOptions]) -> None:
    """The whole layer with each exchange, on several ranks."""
    _run_layer(options, computes=True)


def exchange(options: tyro.conf.OmitArgPrefixes[LayerOptions]) -> None:
    """The communication of each exchange, without projections and rule."""
    _run_layer(options, computes=False)


def _run_layer(options: LayerOptions, computes: bool) -> None:
    options.check()
    from titan_gdn.runtime import cpu

    cpu.enable()  # before anything of TorchTitan is imported
    from titan_gdn.bench.layer import run

    run(options, computes)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    try:
        tyro.extras.subcommand_cli_from_dict({"rule": rule, "layer": layer, "exchange": exchange})
    except ValueError as error:
        print(f"titan_gdn: {error}", file=sys.stderr)
        sys.exit(2)
