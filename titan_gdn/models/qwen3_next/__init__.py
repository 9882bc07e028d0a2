"""Qwen3-Next: its flavors and its `model_registry`."""

from functools import partial
from typing import Any

from titan_gdn.models.hybrid import Flavor, model_spec
from titan_gdn.models.hybrid.config_registry import DEBUG_RUN
from titan_gdn.models.qwen3_next.hf_config import config_json as config_json
from titan_gdn.models.qwen3_next.model import Qwen3NextArguments
from titan_gdn.models.qwen3_next.state_dict_adapter import Qwen3NextStateDictAdapter

_DEBUG: dict[str, Any] = {
    "vocab_size": 264,  # the 257 tokens of the byte tokenizer, rounded up to a multiple of 8 TP ranks
    "dim": 128,
    "n_layers": 4,
    "n_heads": 4,
    "head_dim": 32,
    "context_length": 8192,
    "n_linear_key_heads": 4,
    "n_linear_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "hidden_dim": 384,
}
_EXPERTS: dict[str, Any] = {"n_experts_per_token": 2, "expert_hidden_dim": 96, "shared_expert_hidden_dim": 96}

flavors: dict[str, Flavor] = {
    "debug": Flavor(Qwen3NextArguments(**_DEBUG, n_experts=0), DEBUG_RUN),
    "debug_moe": Flavor(Qwen3NextArguments(**_DEBUG, **_EXPERTS, n_experts=8), DEBUG_RUN),
    "80B-A3B": Flavor(Qwen3NextArguments()),
    # The model card extends the context to a million tokens with YaRN by a factor of 4.
    "80B-A3B-1M": Flavor(Qwen3NextArguments(yarn_factor=4.0), changes=("yarn_factor",)),
}

model_registry = partial(model_spec, "qwen3_next", flavors, Qwen3NextStateDictAdapter)
