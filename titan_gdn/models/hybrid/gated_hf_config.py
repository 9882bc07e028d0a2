"""Fields that the `config.json` of Qwen3-Next and of Qwen3.5 share."""

import math
from typing import Any

from titan_gdn.models.hybrid.gated import GatedArguments
from titan_gdn.models.hybrid.hf_config import Entry, Fields, Same, checked_layer_types, text

_SCALINGS = ("rope_scaling", "rope_parameters")
"""The two names of the table with the scaling of the rotary embedding. transformers 5 writes the second."""
_OF_SCALING = frozenset(
    "rope_type type factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale "
    "mscale_all_dim truncate".split()
)
"""The fields of the table that say how the rotary embedding is scaled."""
_MTP_LAYERS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")


def _rope(name: str) -> str:
    return " ".join((name, *(f"{table}.{name}" for table in _SCALINGS)))


class LayerTypes(Entry):
    """The kind of each layer: a list, or the distance between layers of full attention."""

    also = ("full_attention_interval",)

    def read(self, fields: Fields) -> dict[str, Any]:  # noqa: D102
        n_layers = fields.get("num_hidden_layers", kind=int)
        interval = fields.get("full_attention_interval", kind=int, default=None)
        kinds = fields.get("layer_types", kind=list[str], default=None)
        if interval is not None and interval < 1:
            raise ValueError(f"full_attention_interval = {interval}: expected at least 1")
        if kinds is None:
            return {"full_attention_interval": 4 if interval is None else interval}
        checked_layer_types(kinds, n_layers)
        if interval is not None and kinds != _every(interval, n_layers):
            raise ValueError(
                f"layer_types = {text(kinds)} and full_attention_interval = {interval} contradict each other"
            )
        return {"layer_types": kinds}

    def write(self, arguments: GatedArguments, fields: Fields) -> None:  # noqa: D102
        fields.config.pop("full_attention_interval", None)
        fields["layer_types"] = arguments.kinds()

    def values(self, arguments: GatedArguments) -> dict[str, Any]:  # noqa: D102
        return {"layer_types": arguments.kinds()}

    def path(self, argument: str, fields: Fields) -> str:  # noqa: D102
        explicit = fields.config.get("layer_types") is not None
        return "layer_types" if explicit or "full_attention_interval" not in fields else self.also[0]


def _every(interval: int, n_layers: int) -> list[str]:
    return ["linear_attention" if i % interval else "full_attention" for i in range(1, n_layers + 1)]


class ContextLength(Entry):
    """The longest sequence, and its extension by YaRN."""

    def read(self, fields: Fields) -> dict[str, Any]:  # noqa: D102
        length = fields.get("max_position_embeddings", kind=int)
        for table in _SCALINGS:
            fields.get(table, kind=dict, default=None)
        kind = fields.get(*_in_tables("rope_type", "type"), kind=str, default="default")
        original = fields.get(
            *_in_tables("original_max_position_embeddings"),
            "original_max_position_embeddings",
            kind=int,
            default=None,
        )
        if kind == "default":
            for path in _in_tables("original_max_position_embeddings", "factor"):
                if path in fields:
                    raise ValueError(f'{path} = {text(fields[path])}: only rope_type = "yarn" has it')
            return {"context_length": length, "yarn_factor": 1.0}
        if kind != "yarn":
            path = next(path for path in _in_tables("rope_type", "type") if path in fields)
            raise ValueError(f'{path} = {text(kind)}: only "default" and "yarn" are supported')
        factor = fields.get(*_in_tables("factor"), kind=float)
        _check_yarn(fields, factor)
        return {"context_length": length if original is None else original, "yarn_factor": factor}

    def write(self, arguments: GatedArguments, fields: Fields) -> None:  # noqa: D102
        original, factor = arguments.context_length, arguments.yarn_factor
        fields["max_position_embeddings"] = int(original * factor)
        fields.config.pop("original_max_position_embeddings", None)
        scaling = {"rope_type": "default"}
        if factor > 1:
            scaling = {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original,
            }
        tables = [table for table in _SCALINGS if fields.config.get(table)]
        for table in tables or _SCALINGS[:1]:
            old = fields.config.get(table) or {}
            kept = {name: value for name, value in old.items() if name not in _OF_SCALING}
            fields.config[table] = kept | scaling if kept or factor > 1 else None

    def values(self, arguments: GatedArguments) -> dict[str, Any]:  # noqa: D102
        return {"context_length": arguments.context_length, "yarn_factor": arguments.yarn_factor}

    def path(self, argument: str, fields: Fields) -> str:  # noqa: D102
        table = next((table for table in _SCALINGS if fields.config.get(table)), _SCALINGS[0])
        if argument == "yarn_factor":
            return f"{table}.factor" if f"{table}.factor" in fields else table
        original = f"{table}.original_max_position_embeddings"
        return original if original in fields else "max_position_embeddings"


def _in_tables(*names: str) -> list[str]:
    return [f"{table}.{name}" for table in _SCALINGS for name in names]


def _check_yarn(fields: Fields, factor: float) -> None:
    """Checks the further parameters of YaRN: only those with which it was published are supported."""
    if factor < 1:
        path = next(path for path in _in_tables("factor") if path in fields)
        raise ValueError(f"{path} = {factor}: expected at least 1")
    temperature = 0.1 * math.log(factor) + 1
    supported = {
        "attention_factor": temperature,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": None,
        "mscale_all_dim": None,
        "truncate": True,
    }
    for name, only in supported.items():
        kind = bool if only is True else float
        value = fields.get(*_in_tables(name), kind=kind, default=None)
        if value is not None and (only is None or not math.isclose(value, only, rel_tol=1e-6)):
            path = next(path for path in _in_tables(name) if path in fields)
            raise ValueError(f"{path} = {text(value)}: only {text(only)} is supported")


class MultiToken(Entry):
    """The number of layers of multi-token prediction (`mtp.*`). They do not change the model itself."""

    def read(self, fields: Fields) -> dict[str, Any]:  # noqa: D102
        fields.get(*_MTP_LAYERS, kind=int, default=None)
        return {}

    def write(self, arguments: GatedArguments, fields: Fields) -> None:  # noqa: D102
        if arguments.mtp and not any(path in fields for path in _MTP_LAYERS):
            fields[_MTP_LAYERS[0]] = 1

    def values(self, arguments: GatedArguments) -> dict[str, Any]:  # noqa: D102
        return {}


SHARED: tuple[Entry, ...] = (
    Same("vocab_size", "vocab_size"),
    Same("dim", "hidden_size"),
    Same("n_layers", "num_hidden_layers"),
    LayerTypes(),
    Same("norm_eps", "rms_norm_eps", float),
    Same("tie_word_embeddings", "tie_word_embeddings", bool, default=False),
    Same("n_heads", "num_attention_heads"),
    Same("n_key_value_heads", "num_key_value_heads"),
    Same("head_dim", "head_dim"),
    Same("partial_rotary_factor", _rope("partial_rotary_factor"), float, default=0.25),
    Same("rope_theta", _rope("rope_theta"), float),
    ContextLength(),
    Same("n_linear_key_heads", "linear_num_key_heads"),
    Same("n_linear_value_heads", "linear_num_value_heads"),
    Same("linear_key_head_dim", "linear_key_head_dim"),
    Same("linear_value_head_dim", "linear_value_head_dim"),
    Same("linear_conv_kernel", "linear_conv_kernel_dim"),
    MultiToken(),
)
"""The fields of dense and of sparse models."""

DENSE: tuple[Entry, ...] = (Same("hidden_dim", "intermediate_size"),)
"""The fields of dense feed-forwards."""

EXPERTS: tuple[Entry, ...] = (
    Same("n_experts", "num_experts"),
    Same("n_experts_per_token", "num_experts_per_tok"),
    Same("expert_hidden_dim", "moe_intermediate_size"),
    Same("shared_expert_hidden_dim", "shared_expert_intermediate_size"),
)
"""The fields of experts."""

ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0,),
    "is_encoder_decoder": (False,),
    "per_layer_config": (None, {}),
    "attn_output_gate": (True,),
}
"""The values of other fields that are supported."""

COMPLETE: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "hidden_act": "silu",
    "pad_token_id": None,
}
"""Fields that a `config.json` has which is written without an original."""
