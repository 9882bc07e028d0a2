"""Values of a TOML file and a command line, each with the place where it was written, for the errors.

What they mean is not known here: `titan_gdn.config.load` says which names and types there are.
"""

import io
import json
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import tomli
import tyro
from torchtitan.config.manager import ConfigManager, custom_registry

from titan_gdn.config.removed_keys import WHAT_BECAME_OF

USAGE = """\
usage: torchrun --nproc-per-node N -m titan_gdn.train --job.config_file FILE.toml [--section.key value ...]

  --section.key value    change [section] key of the file; --section.key=value does the same
  --section.key v1 v2    a list; a list of names may also be v1,v2
  --section.key          true, and --section.no-key false
  "none" stands for no value, in the file too. Dashes and underscores in names are alike."""

COMMAND_LINE = "command line"
Options = dict[tuple[str, ...], list[str] | bool]

ConfigManager.register_tyro_rules(custom_registry)


class ConfigError(ValueError):
    """What is wrong with a configuration: what was given, where, what is possible, and the nearest to it."""


@dataclass(frozen=True, slots=True)
class SourcedValue:
    """A value and the place where it was written.

    Attributes:
        value: What TOML made of it; on the command line a list of words, or a bool where there are none. A
            table is a dict of `SourcedValue`, an array of tables a list of them.
        source: The file, or `COMMAND_LINE`.
        path: Names of its sections, then its own.
    """

    value: Any
    source: str
    path: tuple[str, ...] = ()

    @property
    def table(self) -> dict[str, "SourcedValue"]:
        """The value, which must be a table."""
        if not isinstance(self.value, dict):
            raise self.error(f"expected a table, [{'.'.join(self.path)}]")
        return self.value

    @property
    def plain(self) -> Any:
        """The value without places."""
        if isinstance(self.value, dict):
            return {key: given.plain for key, given in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain if isinstance(item, SourcedValue) else item for item in self.value]
        return self.value

    @property
    def sources(self) -> list[str]:
        """The file and the command line, those of them that the value comes from."""
        below = self.value.values() if isinstance(self.value, dict) else ()
        return list(dict.fromkeys(source for given in below for source in given.sources)) or [self.source]

    def __str__(self) -> str:
        *section, key = self.path or [""]
        if isinstance(self.value, dict):
            return " and ".join(self.sources) + (f": [{'.'.join(self.path)}]" if key else "")
        if self.source == COMMAND_LINE:
            words = self.value if isinstance(self.value, list) else []
            return " ".join([f"{COMMAND_LINE}: --{'.'.join(self.path)}", *words])
        header = f"[{'.'.join(section)}] " if section else ""
        return f"{self.source}: {header}{key} = {json.dumps(self.plain, default=str, ensure_ascii=False)}"

    def error(self, problem: str) -> ConfigError:
        """The error to raise for `problem`."""
        return ConfigError(f"{self}: {problem}")

    def unknown(self, possible: Iterable[str]) -> ConfigError:
        """The error to raise for a name that is none of `possible`: where it went, or the nearest."""
        if news := WHAT_BECAME_OF.get(".".join(self.path)):
            return self.error(news)
        kind = "section" if len(self.path) == 1 else "key"
        return self.error(f'unknown {kind} "{self.path[-1]}".{one_of(self.path[-1], possible)}')


def one_of(given: str, possible: Iterable[str]) -> str:
    """The end of an error message: the one of `possible` that was perhaps meant, and all of them."""
    possible = list(dict.fromkeys(possible))
    return f"{_nearest(given, possible)} Possible: {', '.join(possible)}."


def _nearest(given: str, possible: list[str]) -> str:
    close = get_close_matches(given, possible, n=1)
    return f' Did you mean "{close[0]}"?' if close else ""


def read(argv: list[str]) -> SourcedValue:
    """The tables of the file that `argv` names, with the values of `argv` in their places.

    Raises:
        ConfigError: `argv` is no list of options or names no file, or the file is not there or not TOML.
        SystemExit: `argv` asks for help.
    """
    options = _options(argv)
    words = options.pop(("job", "config_file"), True)
    if isinstance(words, bool) or len(words) > 1:
        given = SourcedValue(words, COMMAND_LINE, ("job", "config_file"))
        raise given.error(f"expected one FILE.toml\n{USAGE}")
    file = words[0]
    try:
        with open(file, "rb") as stream:
            root = _tree(tomli.load(stream), file)
    except OSError as error:
        raise ConfigError(f"{COMMAND_LINE}: --job.config_file {file}: {error.strerror}") from None
    except (tomli.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: this is not TOML: {error}") from None
    for path, value in options.items():
        table = root
        for depth, name in enumerate(path[:-1], start=1):
            table = table.table.setdefault(name, SourcedValue({}, COMMAND_LINE, path[:depth]))
        table.table[path[-1]] = SourcedValue(value, COMMAND_LINE, path)
    return root


def _tree(value: Any, source: str, path: tuple[str, ...] = ()) -> SourcedValue:
    if isinstance(value, dict):
        value = {key: _tree(below, source, (*path, key)) for key, below in value.items()}
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        value = [_tree(item, source, (*path, str(index))) for index, item in enumerate(value)]
    return SourcedValue(value, source, path)


def _options(argv: list[str]) -> Options:
    """The options by path; of two with the same path, the later."""
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


def converted(given: SourcedValue, annotation: Any) -> Any:
    """The value of `given` as `annotation` has it.

    Raises:
        ConfigError: It cannot be had as that; says what can.
    """
    value = given.plain
    if isinstance(value, dict) and COMMAND_LINE in given.sources:
        raise given.error("a table of free keys has no place on the command line; write it in the file")
    try:
        if given.source == COMMAND_LINE and isinstance(value, list):
            return _typed(_parsed(value, annotation), annotation)
        return _typed(value, annotation)
    except TypeError:
        choices = _choices(annotation)
        names = value if isinstance(value, list) else [value]
        wrong = next((str(name) for name in names if name not in choices), "")
        raise given.error(f"expected {described(annotation)}.{_nearest(wrong, choices)}") from None


def _parsed(words: list[str], annotation: Any) -> Any:
    """The words of the command line as tyro, TorchTitan's parser, takes them for `annotation`."""
    options = (annotation, *get_args(annotation))
    if get_origin(annotation) is list and (options[1] is str or get_origin(options[1]) is Literal):
        return [name for word in words for name in word.split(",") if name]  # TorchTitan's own rule
    spellings = {"none": "None"} if NoneType in options else {}
    if bool in options:
        spellings |= {"true": "True", "false": "False"}
    words = [spellings.get(word, word) for word in words]
    try:
        # tyro prints what is wrong and exits; the message is ours to write. After "--" no word is an option.
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            return tyro.cli(annotation, args=["--", *words], registry=custom_registry)
    except SystemExit:
        raise TypeError from None


def _typed(value: Any, annotation: Any) -> Any:
    """`value` if it is an `annotation`. An int will do as a float, a list as a tuple, and "none" as None.

    Raises:
        TypeError: It is none. (typeguard would do, but takes True for an int.)
    """
    kind, args = get_origin(annotation) or annotation, get_args(annotation)
    if kind is Any or (type(value) is kind and not args):
        return value
    if kind in (Union, UnionType):
        for option in sorted(args, key=lambda option: option is not NoneType):
            with suppress(TypeError):
                return _typed(value, option)
    elif kind is NoneType and value in (None, "none"):
        return None
    elif kind is Literal and value in args:
        return value
    elif kind is float and type(value) is int:
        return float(value)
    elif kind is list and isinstance(value, list):
        return [_typed(item, args[0]) for item in value]
    elif kind is tuple and isinstance(value, list | tuple):
        kinds = args[:1] * len(value) if args[-1] is ... else args
        if len(kinds) == len(value):
            return tuple(map(_typed, value, kinds))
    elif kind is dict and isinstance(value, dict):
        return {_typed(key, args[0]): _typed(item, args[1]) for key, item in value.items()}
    raise TypeError


def described(annotation: Any) -> str:
    """A type in the words of an error message or of the reference."""
    kind, args = get_origin(annotation) or annotation, get_args(annotation)
    if kind in (Union, UnionType):
        return " or ".join(map(described, args))
    if kind is Literal:
        return " or ".join(f'"{choice}"' for choice in args)
    if kind in (NoneType, ...):
        return '"none"' if kind is NoneType else "..."
    return kind.__name__ + (f"[{', '.join(map(described, args))}]" if args else "")


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for option in get_args(annotation) for choice in _choices(option)]
