"""Kimi Linear: its flavors and its `model_registry`."""

from functools import partial
from typing import Any

from titan_gdn.models.hybrid import Flavor, model_spec
from titan_gdn.models.hybrid.config_registry import DEBUG_RUN
from titan_gdn.models.kimi_linear.hf_config import config_json as config_json
from titan_gdn.models.kimi_linear.model import KimiLinearArguments
from titan_gdn.models.kimi_linear.state_dict_adapter import KimiLinearStateDictAdapter

_DEBUG: dict[str, Any] = {
    "vocab_size": 264,  # the 257 tokens of the byte tokenizer, rounded up to a multiple of 8 TP ranks
    "dim": 128,
    "n_layers": 4,
    "n_heads": 4,
    "key_head_dim": 32,
    "qk_rope_head_dim": 16,
    "value_head_dim": 32,
    "kv_lora_rank": 64,
    "n_linear_key_heads": 4,
    "n_linear_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_gate_rank": 32,
    "hidden_dim": 384,
}
_EXPERTS: dict[str, Any] = {"n_experts_per_token": 2, "expert_hidden_dim": 96, "shared_expert_hidden_dim": 96}

flavors: dict[str, Flavor] = {
    "debug": Flavor(KimiLinearArguments(**_DEBUG, n_experts=0), DEBUG_RUN),
    "debug_moe": Flavor(KimiLinearArguments(**_DEBUG, **_EXPERTS, n_experts=8), DEBUG_RUN),
    "48B-A3B": Flavor(KimiLinearArguments()),
}

model_registry = partial(model_spec, "kimi_linear", flavors, KimiLinearStateDictAdapter)
