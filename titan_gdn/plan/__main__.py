"""The command `python -m titan_gdn.plan`."""

import json
import logging
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from titan_gdn.plan.options import parse
from titan_gdn.runtime import cpu
from titan_gdn.runtime.silence import silence_libraries

if TYPE_CHECKING:
    from titan_gdn.plan.plan import Exchanges


def main(argv: list[str] | None = None) -> None:
    """Plan a run and print the plan.

    Args:
        argv: the command line, `sys.argv[1:]` by default.
    """
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
    except ValueError as error:
        _refuse(error)
    silence_libraries()
    cpu.enable()  # before anything of TorchTitan is imported
    from torchtitan.tools.logging import logger

    from titan_gdn.config.load import ConfigError, load_config
    from titan_gdn.plan.plan import by_kind, make_plan, sweep

    logger.setLevel(logging.ERROR)  # TorchTitan would log about a run that does not happen
    key, values = options.sweep or ("", [])
    try:
        config = load_config(options.run, options.world_size, here=False)
        plan = make_plan(config, options.world_size)
        swept = sweep(config, options.world_size, key, values) if options.sweep else {}
        if options.plot and not by_kind(swept):
            raise ConfigError(
                f"command line: --plot: all values of the sweep are impossible: {swept[values[0]]}"
            )
        if options.plot and all(x.batch.cp == 1 for kind in by_kind(swept) for x in kind.values()):
            raise ConfigError(
                "command line: --plot: without context parallelism there is no exchange to draw"
            )
    except ConfigError as error:
        _refuse(error)
    if options.plot:
        from titan_gdn.plan.chart import draw

        draw(swept, key, options.plot)
    if options.json:
        figures = plan.as_json()
        if options.sweep:
            figures["sweep"] = {"key": key, "values": {value: _json(kinds) for value, kinds in swept.items()}}
        print(json.dumps(figures, indent=2))
        return
    from titan_gdn.plan.table import print_plan, print_sweep

    print_plan(plan, options.world_size)
    if options.sweep:
        print_sweep(swept, key)


def _refuse(error: ValueError) -> NoReturn:
    print(f"titan_gdn: {error}", file=sys.stderr, flush=True)
    sys.exit(2)


def _json(kinds: "list[Exchanges] | str") -> list[dict[str, Any]] | str:
    return kinds if isinstance(kinds, str) else [kind.as_json() for kind in kinds]


if __name__ == "__main__":
    main()
