"""Print every key of a run's TOML file, with its meaning: `python -m titan_gdn.reference MODEL FLAVOR`.

The flavor "from_hf" is followed by a folder, whose `config.json` gives the numbers of the model.
"""

import logging
import signal
import sys
from typing import NoReturn

from titan_gdn.runtime import cpu
from titan_gdn.runtime.silence import silence_libraries

USAGE = (
    "usage: python -m titan_gdn.reference MODEL FLAVOR, such as qwen3_next debug\n"
    "   or: python -m titan_gdn.reference MODEL from_hf FOLDER, which has a config.json"
)


def main(argv: list[str] | None = None) -> None:
    """Print the reference of a flavor, a TOML file with its defaults.

    Args:
        argv: The command line, `sys.argv[1:]` by default.
    """
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != (3 if argv[1:2] == ["from_hf"] else 2):
        _refuse("expected a model and a flavor, and after the flavor from_hf a folder")
    silence_libraries()
    cpu.enable()  # before TorchTitan is imported
    from torchtitan.tools.logging import logger

    from titan_gdn.config.load import ConfigError, defaults
    from titan_gdn.config.reference import lines

    logger.setLevel(logging.ERROR)
    try:
        config = defaults(*argv)
    except ConfigError as error:
        _refuse(str(error).removeprefix(": "))
    for line in lines(config, *argv[:2]):
        print(line)


def _refuse(reason: str) -> NoReturn:
    print(f"titan_gdn: {reason}\n{USAGE}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end without a traceback when `| head` closes the pipe
    main()
