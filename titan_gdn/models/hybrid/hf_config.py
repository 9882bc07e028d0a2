"""Reads the arguments of a model from the `config.json` of a Hugging Face directory, and writes it.

A model family declares a `ConfigJson` (see `titan_gdn.models.qwen3_next.hf_config`): which fields give which
arguments, which fields must have one value because the model supports no other, and which change nothing.
A field has several spellings: that of the published files and that of transformers' `save_pretrained`.
"""

import copy
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args, get_origin

from titan_gdn.models.hybrid.builders import KINDS

FROM_HF = "from_hf"
"""The flavor whose arguments are those of a `config.json`."""

TRAINING_ONLY = frozenset({"load_balance_coeff", "mtp", "mtp_loss_weight"})
"""Arguments that say how a model is trained. No `config.json` holds them."""

CHANGE_NOTHING = frozenset(
    "_attn_implementation _name_or_path architectures attn_implementation auto_map bos_token_id "
    "chunk_size_feed_forward dtype id2label label2id problem_type "
    "eos_token_id initializer_range model_type name_or_path output_attentions output_hidden_states "
    "output_router_logits pad_token_id quantization_config return_dict router_aux_loss_coef "
    "tokenizer_class torch_dtype transformers_version use_cache".split()
)
"""Fields of every family that do not change the model: how it is stored, generates or is initialized."""

REQUIRED: Any = object()
"""The default of a field that must be in the file."""

_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string", dict: "a table"}


def text(value: Any) -> str:
    """Returns a value as it is written in a `config.json`."""
    return json.dumps(value, default=str)


_TIED = "tie_word_embeddings"
"""A field that the whole model's file may have beside the text model's."""


class Fields:
    """The fields of a `config.json`, by paths such as `linear_attn_config.head_dim`."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.known: set[str] = set()

    def __contains__(self, path: str) -> bool:
        table, name = self._table(path)
        return name in table

    def __getitem__(self, path: str) -> Any:
        table, name = self._table(path)
        return table[name]

    def __setitem__(self, path: str, value: Any) -> None:
        above, dot, name = path.rpartition(".")
        table = self.config
        if dot:
            table = self.config[above] = self.config.get(above) or {}
        table[name] = value

    def _table(self, path: str) -> tuple[dict[str, Any], str]:
        above, dot, name = path.rpartition(".")
        table = self.config.get(above) if dot else self.config
        return table if isinstance(table, dict) else {}, name

    def get(self, *paths: str, kind: Any, default: Any = REQUIRED) -> Any:
        """Returns the value of a field.

        Args:
            *paths: the spellings of the field. Those that the file has must agree.
            kind: type of the value, such as `int` or `list[str]`.
            default: the value if the file has no such field. If it is None, the field may be null.

        Raises:
            ValueError: the field is missing, has another type, or has two values.
        """
        self.known.update(paths)
        found = {path: self[path] for path in paths if path in self}
        if default is None:
            found = {path: value for path, value in found.items() if value is not None}
        for path, value in found.items():
            if not _is(value, kind):
                raise ValueError(f"{path} = {text(value)}: expected {_name(kind)}")
        values = list(found.items())
        for path, value in values[1:]:
            if value != values[0][1]:
                raise ValueError(
                    f"{values[0][0]} = {text(values[0][1])} and {path} = {text(value)} contradict each other"
                )
        if values:
            return float(values[0][1]) if kind is float else values[0][1]
        if default is REQUIRED:
            first, *others = paths
            raise ValueError(
                f"{first} is missing" + (f" (also spelled {', '.join(others)})" if others else "")
            )
        return default

    def paths(self) -> list[str]:
        """Returns the paths of all fields. Tables are entered if a path into them is known."""
        entered = {path.split(".")[0] for path in self.known if "." in path}
        paths: list[str] = []
        for name, value in self.config.items():
            nested = name in entered and isinstance(value, dict)
            paths += [f"{name}.{key}" for key in value] if nested else [name]
        return paths


def _is(value: Any, kind: Any) -> bool:
    """Whether a value of a file has a type. A bool is no number, and a number is finite."""
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_is(item, get_args(kind)[0]) for item in value)
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is kind


def _name(kind: Any) -> str:
    return "a list" if get_origin(kind) is list else _NAMES[kind]


class Entry:
    """Fields that belong together, and the arguments that they give.

    Attributes:
        also: arguments that change what the fields say beside those that `values` names.
    """

    also: tuple[str, ...] = ()

    def read(self, fields: Fields) -> dict[str, Any]:
        """Returns the arguments that the file gives.

        Raises:
            ValueError: names the field whose value is wrong or not supported, and what is expected.
        """
        raise NotImplementedError

    def write(self, arguments: Any, fields: Fields) -> None:
        """Sets the fields to what the arguments say, in the spellings that the file already has.

        Raises:
            ValueError: the file cannot say it.
        """
        raise NotImplementedError

    def values(self, arguments: Any) -> dict[str, Any]:
        """Returns values by the names of arguments. They are equal if two models are equal in them."""
        raise NotImplementedError

    def path(self, argument: str, fields: Fields) -> str:
        """Returns the path of the field that gives an argument, in the file's spelling."""
        raise NotImplementedError


@dataclass(frozen=True)
class Same(Entry):
    """A field whose value is that of one argument, or of several.

    Attributes:
        arguments: the names of the arguments, separated by spaces.
        spellings: the paths of the field, separated by spaces, that of the published files first.
        kind: type of the value.
        default: what a file without the field means.
    """

    arguments: str
    spellings: str
    kind: Any = int
    default: Any = REQUIRED

    def read(self, fields: Fields) -> dict[str, Any]:  # noqa: D102
        value = fields.get(*self.spellings.split(), kind=self.kind, default=self.default)
        return dict.fromkeys(self.arguments.split(), value)

    def write(self, arguments: Any, fields: Fields) -> None:  # noqa: D102
        value = getattr(arguments, self.arguments.split()[0])
        spellings = self.spellings.split()
        for path in [path for path in spellings if path in fields] or spellings[:1]:
            fields[path] = value

    def values(self, arguments: Any) -> dict[str, Any]:  # noqa: D102
        return {name: getattr(arguments, name) for name in self.arguments.split()}

    def path(self, argument: str, fields: Fields) -> str:  # noqa: D102
        spellings = self.spellings.split()
        return next((path for path in spellings if path in fields), spellings[0])


@dataclass(frozen=True)
class Implied(Entry):
    """An argument that every file of the family leaves at one value."""

    argument: str
    value: Any

    def read(self, fields: Fields) -> dict[str, Any]:  # noqa: D102
        return {self.argument: self.value}

    def write(self, arguments: Any, fields: Fields) -> None:  # noqa: D102
        pass

    def values(self, arguments: Any) -> dict[str, Any]:  # noqa: D102
        return {self.argument: getattr(arguments, self.argument)}

    def path(self, argument: str, fields: Fields) -> str:  # noqa: D102
        return "model_type"


def checked_layer_types(kinds: list[str], n_layers: int) -> list[str]:
    """Returns the kinds of layers that a file lists.

    Raises:
        ValueError: there are not as many as layers, or a kind is unknown.
    """
    if len(kinds) != n_layers:
        raise ValueError(f"layer_types has {len(kinds)} entries and num_hidden_layers = {n_layers}")
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"layer_types: {text(kind)} is not supported; possible are {', '.join(KINDS)}")
    return kinds


class Difference(NamedTuple):
    """A difference between a file and the arguments of a model.

    Attributes:
        path: the field of the file.
        theirs: the value of the argument according to the file.
        argument: the name of the argument.
        ours: the value of the argument.
        decided_by: the names of all arguments that `ours` depends on.
    """

    path: str
    theirs: Any
    argument: str
    ours: Any
    decided_by: tuple[str, ...]


class WholeModel(NamedTuple):
    """The `config.json` of a model whose text model is trained here.

    Attributes:
        model_type: the `model_type` of the whole model.
        architecture: the only entry of its `architectures`.
        table: the table that holds the text model's fields.
    """

    model_type: str
    architecture: str
    table: str


@dataclass(frozen=True, kw_only=True)
class ConfigJson:
    """What the `config.json` of a model family means.

    Attributes:
        model_type: the `model_type` of the family.
        architecture: the only entry of `architectures`.
        arguments: the class of the family's arguments, all of which have defaults.
        entries: the fields that give arguments.
        only: fields with the values that are supported. A file without the field means the first one.
        change_nothing: fields of the family that do not change the model, beside `CHANGE_NOTHING`.
        complete: fields that a `config.json` has which is written without an original.
        whole: a model that the family's model is a part of, whose files are read, too.
    """

    model_type: str
    architecture: str
    arguments: type[Any]
    entries: tuple[Entry, ...]
    only: dict[str, tuple[Any, ...]]
    change_nothing: frozenset[str]
    complete: dict[str, Any] = field(default_factory=dict)
    whole: WholeModel | None = None

    def describes(self, config: dict[str, Any]) -> bool:
        """Whether a `config.json` is of this family, by its `model_type`."""
        return config.get("model_type") in self.model_types

    @property
    def model_types(self) -> list[str]:
        """The possible values of `model_type`."""
        return [self.model_type, *([self.whole.model_type] if self.whole else [])]

    def fields_of(self, config: dict[str, Any]) -> dict[str, Any]:
        """Returns the fields of the family's model: all of them, or a table in those of the whole model.

        Raises:
            ValueError: a field of the whole model contradicts the table, or the table is missing.
        """
        whole = self._whole_of(config)
        if whole is None:
            return config
        table = Fields(config).get(whole.table, kind=dict)
        _check_architectures(config, whole.architecture)
        if _TIED not in config:
            return table
        paths = (_TIED, f"{whole.table}.{_TIED}")
        return table | {_TIED: Fields(config).get(*paths, kind=bool)}

    def arguments_of(self, config: dict[str, Any]) -> Any:
        """Returns the arguments of the model that a `config.json` describes.

        Raises:
            ValueError: a field is missing, contradicts another or has a value that is not supported. The
                message names the field, its value and what is expected.
        """
        fields = Fields(self.fields_of(config))
        self._check_family(fields)
        self._check_values(fields)
        given: dict[str, Any] = {}
        for entry in self.entries:
            given |= entry.read(fields)
        for path in self._unknown(fields):
            if "." in path:  # these tables are small, and each of their fields changes the model
                raise ValueError(f"{path} = {text(fields[path])}: this field is not supported")
        try:
            return self.arguments(**given)
        except ValueError as error:
            raise ValueError(self._in_fields(str(error), fields)) from error

    def unknown_fields(self, config: dict[str, Any]) -> list[str]:
        """Returns the fields that are neither read nor known to change nothing."""
        fields = Fields(self.fields_of(config))
        for entry in self.entries:
            entry.read(fields)
        return self._unknown(fields)

    def differences(self, arguments: Any, config: dict[str, Any]) -> list[Difference]:
        """Returns in what a model differs from a `config.json`. Layers beyond the fewer count once.

        Raises:
            ValueError: as for `arguments_of`.
        """
        fields, theirs = Fields(self.fields_of(config)), self.arguments_of(config)
        layers = min(arguments.n_layers, theirs.n_layers)
        found = []
        for entry in self.entries:
            own = entry.values(arguments)
            for name, value in entry.values(theirs).items():
                a, b = (x[:layers] if isinstance(x, list) else x for x in (value, own[name]))
                if a != b:
                    decided_by = (name, *entry.also)
                    found.append(Difference(entry.path(name, fields), value, name, own[name], decided_by))
        return found

    def hf_config_of(
        self, arguments: Any, original: dict[str, Any] | None = None, dtype: str | None = None
    ) -> dict[str, Any]:
        """Returns the `config.json` of a model.

        Args:
            arguments: the arguments of the model.
            original: the `config.json` of the directory that the weights came from. What differs is changed
                in a copy of it, and all other fields stay.
            dtype: the dtype of the weights, such as "bfloat16"; None keeps what the original says.

        Raises:
            ValueError: a `config.json` of this family cannot describe the model; names the arguments.
        """
        config = {"architectures": [self.architecture], "model_type": self.model_type, **self.complete}
        if original is not None:
            config = copy.deepcopy(original)
            config.pop("quantization_config", None)  # what is written is not quantized
        tables = self._tables(config)
        if original is None or self.differences(arguments, config):
            for entry in self.entries:
                entry.write(arguments, Fields(tables[-1]))
            for table in tables:
                if _TIED in table:
                    table[_TIED] = tables[-1][_TIED]
                if (table.get("pad_token_id") or 0) >= arguments.vocab_size:
                    table["pad_token_id"] = None  # transformers refuses a row that the embedding lacks
        for table in tables:
            named = [name for name in ("dtype", "torch_dtype") if name in table]
            if dtype is not None and (named or table is tables[0]):
                table[named[0] if named else "dtype"] = dtype
        if lost := self.differences(arguments, config):
            names = ", ".join(f"{one.argument} = {text(one.ours)}" for one in lost)
            raise ValueError(f"the config.json of {self.model_type} cannot describe {names}")
        return config

    def _whole_of(self, config: dict[str, Any]) -> WholeModel | None:
        """Returns the whole model if the file is its, None if it is that of the family's model."""
        whole = self.whole
        return whole if whole is not None and config.get("model_type") == whole.model_type else None

    def _tables(self, config: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the table of all fields and, in a whole model's, that of the family's."""
        whole = self._whole_of(config)
        return [config] if whole is None else [config, config[whole.table]]

    def _check_family(self, fields: Fields) -> None:
        model_type = fields.get("model_type", kind=str)
        if model_type != self.model_type:
            raise ValueError(
                f"model_type = {text(model_type)}: this is another family than "
                + " or ".join(map(text, self.model_types))
            )
        _check_architectures(fields.config, self.architecture)

    def _check_values(self, fields: Fields) -> None:
        for path, supported in self.only.items():
            if path not in fields:
                continue
            value = fields[path]
            # In Python false equals 0, in a file it does not.
            same = [value == one and isinstance(value, bool) == isinstance(one, bool) for one in supported]
            if not any(same):
                possible = " or ".join(map(text, supported))
                raise ValueError(f"{path} = {text(value)}: only {possible} is supported")

    def _unknown(self, fields: Fields) -> list[str]:
        known = fields.known | self.only.keys() | CHANGE_NOTHING | self.change_nothing
        return [path for path in fields.paths() if path not in known]

    def _in_fields(self, message: str, fields: Fields) -> str:
        """Replaces the names of arguments in an error message by the fields that gave them."""
        for entry in self.entries:
            for name in (*entry.values(self.arguments()), *entry.also):
                message = re.sub(rf"\b{name}(?= = )", entry.path(name, fields), message)
        return message


def _check_architectures(config: dict[str, Any], only: str) -> None:
    architectures = Fields(config).get("architectures", kind=list[str], default=None)
    if architectures not in (None, [only]):
        raise ValueError(f"architectures = {text(architectures)}: only {text([only])} is supported")


@dataclass(frozen=True, kw_only=True)
class ConfigJsons:
    """What the `config.json` of a family means whose dense and sparse models have different ones.

    Its methods are those of `ConfigJson`.
    """

    dense: ConfigJson
    sparse: ConfigJson

    def _of(self, config: dict[str, Any]) -> ConfigJson:
        """Returns the one of the two that a file is of."""
        if self.sparse.describes(config):
            return self.sparse
        if not self.dense.describes(config):
            possible = [*self.dense.model_types, *self.sparse.model_types]
            raise ValueError(
                f"model_type = {text(config.get('model_type'))}: this is another family than "
                + " or ".join(map(text, possible))
            )
        return self.dense

    def fields_of(self, config: dict[str, Any]) -> dict[str, Any]:  # noqa: D102
        return self._of(config).fields_of(config)

    def arguments_of(self, config: dict[str, Any]) -> Any:  # noqa: D102
        return self._of(config).arguments_of(config)

    def unknown_fields(self, config: dict[str, Any]) -> list[str]:  # noqa: D102
        return self._of(config).unknown_fields(config)

    def differences(self, arguments: Any, config: dict[str, Any]) -> list[Difference]:  # noqa: D102
        return self._of(config).differences(arguments, config)

    def hf_config_of(  # noqa: D102
        self, arguments: Any, original: dict[str, Any] | None = None, dtype: str | None = None
    ) -> dict[str, Any]:
        own = self.sparse if arguments.n_experts else self.dense
        return (own if original is None else self._of(original)).hf_config_of(arguments, original, dtype)
