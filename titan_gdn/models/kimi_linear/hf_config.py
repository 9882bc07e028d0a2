"""The `config.json` of Kimi Linear, as published and as transformers 5 saves it."""

from typing import Any

from titan_gdn.models.hybrid.hf_config import (
    ConfigJson,
    Entry,
    Fields,
    Implied,
    Same,
    checked_layer_types,
    text,
)
from titan_gdn.models.kimi_linear.model import KimiLinearArguments

_FULL, _LINEAR = "linear_attn_config.full_attn_layers", "linear_attn_config.kda_layers"


class LayerTypes(Entry):
    """The kind of each layer: two lists of layers, counted from 1, or one list of kinds."""

    also = ("full_attention_interval",)

    def read(self, fields: Fields) -> dict[str, Any]:  # noqa: D102
        n_layers = fields.get("num_hidden_layers", kind=int)
        kinds = fields.get("layer_types", kind=list[str], default=None)
        fields.get("linear_attn_config", kind=dict, default=None)
        full = fields.get(_FULL, kind=list[int], default=None)
        linear = fields.get(_LINEAR, kind=list[int], default=None)
        if full is None and linear is None:
            if kinds is None:
                raise ValueError(f"{_FULL} and {_LINEAR} are missing (also spelled layer_types)")
            return {"layer_types": checked_layer_types(kinds, n_layers)}
        if sorted([*(full or []), *(linear or [])]) != list(range(1, n_layers + 1)):
            raise ValueError(
                f"{_FULL} = {text(full)} and {_LINEAR} = {text(linear)}: expected each layer from 1 to "
                f"num_hidden_layers = {n_layers} in one of them"
            )
        listed = ["full_attention" if i in (full or []) else "linear_attention" for i in _from_1(n_layers)]
        if kinds is not None and checked_layer_types(kinds, n_layers) != listed:
            raise ValueError(f"layer_types = {text(kinds)} and {_FULL} = {text(full)} contradict each other")
        return {"layer_types": listed}

    def write(self, arguments: KimiLinearArguments, fields: Fields) -> None:  # noqa: D102
        kinds = arguments.kinds()
        if "layer_types" in fields:
            fields["layer_types"] = kinds
        if "layer_types" not in fields or _FULL in fields:
            for path, kind in ((_FULL, "full_attention"), (_LINEAR, "linear_attention")):
                fields[path] = [i for i in _from_1(len(kinds)) if kinds[i - 1] == kind]

    def values(self, arguments: KimiLinearArguments) -> dict[str, Any]:  # noqa: D102
        return {"layer_types": arguments.kinds()}

    def path(self, argument: str, fields: Fields) -> str:  # noqa: D102
        return _FULL if _FULL in fields else "layer_types"


def _from_1(n_layers: int) -> range:
    return range(1, n_layers + 1)


class KeyValueHeads(Entry):
    """In latent attention each query head has a key and a value of its own."""

    def read(self, fields: Fields) -> dict[str, Any]:  # noqa: D102
        heads = fields.get("num_attention_heads", kind=int)
        own = fields.get("num_key_value_heads", kind=int)
        if own != heads:
            raise ValueError(f"num_key_value_heads = {own}: only num_attention_heads = {heads} is supported")
        return {}

    def write(self, arguments: KimiLinearArguments, fields: Fields) -> None:  # noqa: D102
        fields["num_key_value_heads"] = arguments.n_heads

    def values(self, arguments: KimiLinearArguments) -> dict[str, Any]:  # noqa: D102
        return {}


class DenseLayers(Entry):
    """How many layers at the beginning have no experts."""

    also = ("n_experts",)

    def read(self, fields: Fields) -> dict[str, Any]:  # noqa: D102
        n_layers = fields.get("num_hidden_layers", kind=int)
        first = fields.get("first_k_dense_replace", kind=int, default=None)
        kinds = fields.get("mlp_layer_types", kind=list[str], default=None)
        if kinds is None:
            first = 1 if first is None else first
            if not 0 <= first:
                raise ValueError(f"first_k_dense_replace = {first}: expected at least 0")
            return {"n_dense_layers": min(first, n_layers)}
        dense = kinds.count("dense")
        if kinds != ["dense"] * dense + ["sparse"] * (n_layers - dense):
            raise ValueError(
                f'mlp_layer_types = {text(kinds)}: only "dense" at the beginning and then "sparse", for each '
                f"of the num_hidden_layers = {n_layers} layers, is supported"
            )
        if first is not None and min(first, n_layers) != dense:
            raise ValueError(
                f"mlp_layer_types = {text(kinds)} and first_k_dense_replace = {first} contradict each other"
            )
        return {"n_dense_layers": dense}

    def write(self, arguments: KimiLinearArguments, fields: Fields) -> None:  # noqa: D102
        dense = self.values(arguments)["n_dense_layers"]
        if "mlp_layer_types" in fields:
            fields["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (arguments.n_layers - dense)
        if "mlp_layer_types" not in fields or "first_k_dense_replace" in fields:
            fields["first_k_dense_replace"] = dense

    def values(self, arguments: KimiLinearArguments) -> dict[str, Any]:  # noqa: D102
        return {"n_dense_layers": arguments.n_dense_layers if arguments.n_experts else arguments.n_layers}

    def path(self, argument: str, fields: Fields) -> str:  # noqa: D102
        if argument == "n_experts":
            return _EXPERTS.path(argument, fields)
        return "mlp_layer_types" if "mlp_layer_types" in fields else "first_k_dense_replace"


class SharedExperts(Entry):
    """The number of shared experts. The model keeps them as one, which is as wide as all together."""

    also = ("expert_hidden_dim",)
    spellings = ("num_shared_experts", "n_shared_experts")

    def read(self, fields: Fields) -> dict[str, Any]:  # noqa: D102
        width = fields.get("moe_intermediate_size", kind=int)
        return {"shared_expert_hidden_dim": width * fields.get(*self.spellings, kind=int)}

    def write(self, arguments: KimiLinearArguments, fields: Fields) -> None:  # noqa: D102
        # A width that is no multiple is found when the file is read again.
        count = arguments.shared_expert_hidden_dim // arguments.expert_hidden_dim
        for path in [path for path in self.spellings if path in fields] or self.spellings[:1]:
            fields[path] = count

    def values(self, arguments: KimiLinearArguments) -> dict[str, Any]:  # noqa: D102
        return {"shared_expert_hidden_dim": arguments.shared_expert_hidden_dim}

    def path(self, argument: str, fields: Fields) -> str:  # noqa: D102
        if argument == "expert_hidden_dim":
            return "moe_intermediate_size"
        return next((path for path in self.spellings if path in fields), self.spellings[0])


_EXPERTS = Same("n_experts", "num_experts num_local_experts")

config_json = ConfigJson(
    model_type="kimi_linear",
    architecture="KimiLinearForCausalLM",
    arguments=KimiLinearArguments,
    entries=(
        Same("vocab_size", "vocab_size"),
        Same("dim", "hidden_size"),
        Same("n_layers", "num_hidden_layers"),
        LayerTypes(),
        Same("norm_eps", "rms_norm_eps", float),
        Same("n_heads", "num_attention_heads"),
        KeyValueHeads(),
        Same("key_head_dim", "qk_nope_head_dim"),
        Same("qk_rope_head_dim", "qk_rope_head_dim"),
        Same("value_head_dim", "v_head_dim"),
        Same("kv_lora_rank", "kv_lora_rank"),
        Same("n_linear_key_heads n_linear_value_heads", "linear_attn_config.num_heads linear_num_heads"),
        Same(
            "linear_key_head_dim linear_value_head_dim linear_gate_rank",
            "linear_attn_config.head_dim linear_head_dim",
        ),
        Same("linear_conv_kernel", "linear_attn_config.short_conv_kernel_size linear_conv_kernel_dim"),
        Implied("lower_bound", None),
        Same("hidden_dim", "intermediate_size"),
        DenseLayers(),
        _EXPERTS,
        Same("n_experts_per_token", "num_experts_per_token num_experts_per_tok"),
        Same("expert_hidden_dim", "moe_intermediate_size"),
        SharedExperts(),
        Same("route_norm", "moe_renormalize norm_topk_prob", bool),
        Same("route_scale", "routed_scaling_factor", float),
    ),
    only={
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "attention_dropout": (0,),
        "is_encoder_decoder": (False,),
        "per_layer_config": (None, {}),
        "attn_res_block_size": (None,),  # this and the next five: Kimi K3
        "latent_moe_use_norm": (False,),
        "linear_attn_config.gate_lower_bound": (None,),
        "linear_attn_config.use_full_rank_gate": (False,),
        "mla_use_output_gate": (False,),
        "routed_expert_hidden_size": (None,),
        "mla_use_nope": (True,),
        "moe_layer_freq": (1,),
        "moe_router_activation_func": ("sigmoid",),
        "n_group": (1,),
        "num_expert_group": (1,),
        "num_nextn_predict_layers": (0,),
        "q_lora_rank": (None,),
        "rope_scaling": (None,),
        "tie_word_embeddings": (False,),  # transformers never ties them in this family
        "topk_group": (1,),
        "topk_method": ("noaux_tc",),
    },
    # No layer is rotated, so neither the base of the frequencies nor a longest sequence changes anything.
    # With one group of experts it does not matter whether groups are chosen first. transformers and the
    # published code compute head_dim and qk_head_dim from other fields.
    change_nothing=frozenset(
        "head_dim max_position_embeddings model_max_length pretraining_tp qk_head_dim rope_parameters "
        "rope_theta use_grouped_topk".split()
    ),
    complete={
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "hidden_act": "silu",
        "mla_use_nope": True,
        "model_max_length": 1048576,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": 1,
        "num_nextn_predict_layers": 0,
        "pad_token_id": None,
        "q_lora_rank": None,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_grouped_topk": True,
    },
)

arguments_of = config_json.arguments_of
hf_config_of = config_json.hf_config_of
