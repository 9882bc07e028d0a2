"""Reads a TOML file and a command line into values that remember where they were written.

The error messages need the place. Which keys exist and which types they have is for other modules of this
package: here a value is what TOML made of it, or a list of words.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import tomli

from titan_gdn.config.removed_keys import WHAT_BECAME_OF

USAGE = """\
usage: torchrun --nproc-per-node N -m titan_gdn.train --job.config_file FILE.toml [--section.key value ...]

  --section.key value    override section.key of the file; --section.key=value does the same
  --section.key v1 v2    a list; a list of names may also be v1,v2
  --section.key          true, and --section.no-key false
  "none" means no value, in the file too. Dashes and underscores in names are interchangeable."""

COMMAND_LINE = "command line"
Options = dict[tuple[str, ...], list[str] | bool]


class ConfigError(ValueError):
    """A wrong configuration. The message says what was given and where, what is possible, what is closest."""


class UnknownKeyError(ConfigError):
    """A key or section that does not exist.

    Attributes:
        given: The key, with the value that was written.
    """

    def __init__(self, given: "SourcedValue", message: str) -> None:
        super().__init__(message)
        self.given = given


@dataclass(frozen=True, slots=True)
class SourcedValue:
    """A value and the place where it was written.

    Attributes:
        value: The value as TOML parsed it; from the command line, a list of words, or a bool for an option
            without words. A table is a dict of `SourcedValue`, an array of tables is a list of them.
        source: The file's name, or `COMMAND_LINE`.
        path: The names of the enclosing sections, then the key.
    """

    value: Any
    source: str
    path: tuple[str, ...] = ()

    @property
    def table(self) -> dict[str, "SourcedValue"]:
        """The entries of a table; an error if the value is not a table."""
        if not isinstance(self.value, dict):
            raise self.error(f"expected a table, [{'.'.join(self.path)}]")
        return self.value

    @property
    def plain(self) -> Any:
        """The value without its sources."""
        if isinstance(self.value, dict):
            return {key: given.plain for key, given in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain if isinstance(item, SourcedValue) else item for item in self.value]
        return self.value

    @property
    def sources(self) -> list[str]:
        """Where the value was written: the file, the command line, or, for a table, both."""
        below = self.value.values() if isinstance(self.value, dict) else ()
        return list(dict.fromkeys(source for given in below for source in given.sources)) or [self.source]

    def __str__(self) -> str:
        key = ".".join(self.path)
        if isinstance(self.value, dict):
            return " and ".join(self.sources) + (f": [{key}]" if key else "")
        if self.source == COMMAND_LINE:
            words = self.value if isinstance(self.value, list) else []
            return " ".join([f"{COMMAND_LINE}: --{key}", *words])
        plain = self.plain
        if isinstance(plain, float):  # as TOML writes it: inf, not Infinity
            return f"{self.source}: {key} = {plain}"
        return f"{self.source}: {key} = {json.dumps(plain, default=str, ensure_ascii=False)}"

    def error(self, problem: str) -> ConfigError:
        """The exception for a problem with this value, to be raised by the caller."""
        return ConfigError(f"{self}: {problem}")

    def unknown(self, possible: Iterable[str]) -> ConfigError:
        """The exception for a name not in `possible`: what became of the key, or the closest name."""
        if news := WHAT_BECAME_OF.get(".".join(self.path)):
            return self.error(news)
        kind = "section" if len(self.path) == 1 else "key"
        problem = f'unknown {kind} "{self.path[-1]}".{one_of(self.path[-1], possible)}'
        return UnknownKeyError(self, str(self.error(problem)))


def one_of(given: str, possible: Iterable[str]) -> str:
    """The end of an error message: the name that was probably meant, and all possible names."""
    possible = list(dict.fromkeys(possible))
    return f"{nearest(given, possible)} Possible: {', '.join(possible)}."


def nearest(given: str, possible: list[str]) -> str:
    """A question for the end of an error message; empty if no possible name is close."""
    close = get_close_matches(given, possible, n=1)
    return f' Did you mean "{close[0]}"?' if close else ""


_UNNAMED = {
    "debug.batch_invariant = true": "Batch-invariant mode",
    "debug.spmd_typechecking = true": "SPMD typechecking is not supported",
    "compile.enable_async_tensor_parallel = true": "Async TP requires",
}
"""How messages of TorchTitan begin that do not name their key."""


def built(table: SourcedValue, build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `build(*args, **kwargs)`; an error that it raises becomes a ConfigError that names `table`.

    An error that begins with a field, as in `dim = -1: expected at least 1`, names the key in full.
    """
    try:
        return build(*args, **kwargs)
    except (ValueError, AssertionError, ArithmeticError, RuntimeError) as error:
        problem = str(error) or repr(error)
        problem = next(
            (f"{key}: {problem}" for key in _UNNAMED if problem.startswith(_UNNAMED[key])), problem
        )
        if re.match(r"\w+ = ", problem):
            key = ".".join((*table.path, problem))
            raise ConfigError(f"{' and '.join(table.sources)}: {key}") from error
        raise table.error(problem) from error


def read(argv: list[str]) -> SourcedValue:
    """The tables of the file that `argv` names, overridden by the options of `argv`.

    Raises:
        ConfigError: `argv` is not a list of options or names no file, or the file does not exist or is not
            TOML.
        SystemExit: `argv` asks for help.
    """
    options = _options(argv)
    words = options.pop(("job", "config_file"), True)
    if isinstance(words, bool) or len(words) > 1:
        given = SourcedValue(words, COMMAND_LINE, ("job", "config_file"))
        raise given.error(f"expected one FILE.toml\n{USAGE}")
    file = words[0]
    root = _tree(_tables(file), file)
    for path, value in options.items():
        table = root
        for depth, name in enumerate(path[:-1], start=1):
            table = table.table.setdefault(name, SourcedValue({}, COMMAND_LINE, path[:depth]))
        table.table[path[-1]] = SourcedValue(value, COMMAND_LINE, path)
    return root


def _tables(file: str) -> dict[str, Any]:
    """The content of a TOML file."""
    try:
        with open(file, "rb") as stream:
            content = stream.read()
    except OSError as error:
        raise ConfigError(f"{COMMAND_LINE}: --job.config_file {file}: {error.strerror}") from None
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in content:
        raise ConfigError(f"{file}: this is not TOML but UTF-16 or binary; save it as text in UTF-8")
    try:
        return tomli.loads(content.decode("utf-8-sig"))  # some editors begin UTF-8 with a byte-order mark
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: this is not TOML, because it is not UTF-8: {error}") from None
    except tomli.TOMLDecodeError as error:
        line = error.doc.splitlines()[error.lineno - 1 : error.lineno]
        raise ConfigError(f"{file}: this is not TOML: {error}: {''.join(line).strip()}") from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, nested brackets
        raise ConfigError(f"{file}: this is not TOML: {error}") from None


def _tree(value: Any, source: str, path: tuple[str, ...] = ()) -> SourcedValue:
    if isinstance(value, dict):
        value = {key: _tree(below, source, (*path, key)) for key, below in value.items()}
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        value = [_tree(item, source, (*path, str(index))) for index, item in enumerate(value)]
    return SourcedValue(value, source, path)


def _options(argv: list[str]) -> Options:
    """The options by path. Of two options with the same path, the later one wins."""
    if {"-h", "--help"} & set(argv):
        print(USAGE)
        raise SystemExit(0)
    found: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found.append((name, [value] if equals else []))
        elif found:
            found[-1][1].append(word)
        else:
            raise ConfigError(f'{COMMAND_LINE}: unexpected "{word}"\n{USAGE}')

    options: Options = {}
    for name, words in found:
        *section, key = name.replace("-", "_").split(".")
        if not section or not all((*section, key)):
            raise ConfigError(f"{COMMAND_LINE}: --{name} is not --section.key\n{USAGE}")
        if not words and key.startswith("no_"):
            options[*section, key.removeprefix("no_")] = False
        else:
            options[*section, key] = words or True
    return options
