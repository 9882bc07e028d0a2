"""Qwen3.5's text models: their flavors and their `model_registry`."""

from functools import partial
from typing import Any

from titan_gdn.models.hybrid import Flavor, model_spec
from titan_gdn.models.hybrid.config_registry import DEBUG_RUN
from titan_gdn.models.hybrid.gated import DEBUG, DEBUG_MOE
from titan_gdn.models.qwen3_5.hf_config import config_json as config_json
from titan_gdn.models.qwen3_5.model import Qwen3_5Arguments
from titan_gdn.models.qwen3_5.state_dict_adapter import Qwen3_5StateDictAdapter


def _dense(**arguments: Any) -> Flavor:
    return Flavor(Qwen3_5Arguments(**arguments))


def _sparse(n_experts: int, n_experts_per_token: int, width: int, **arguments: Any) -> Flavor:
    return Flavor(
        Qwen3_5Arguments(
            n_key_value_heads=2,
            n_experts=n_experts,
            n_experts_per_token=n_experts_per_token,
            expert_hidden_dim=width,
            shared_expert_hidden_dim=width,
            **arguments,
        )
    )


# The published sizes. What they do not name is as in the 9B.
flavors: dict[str, Flavor] = {
    "debug": Flavor(Qwen3_5Arguments(**DEBUG), DEBUG_RUN),
    "debug_moe": Flavor(Qwen3_5Arguments(**DEBUG_MOE), DEBUG_RUN),
    "0.8B": _dense(
        dim=1024,
        n_layers=24,
        n_heads=8,
        n_key_value_heads=2,
        n_linear_value_heads=16,
        hidden_dim=3584,
        tie_word_embeddings=True,
    ),
    "2B": _dense(
        dim=2048,
        n_layers=24,
        n_heads=8,
        n_key_value_heads=2,
        n_linear_value_heads=16,
        hidden_dim=6144,
        tie_word_embeddings=True,
    ),
    "4B": _dense(dim=2560, hidden_dim=9216, tie_word_embeddings=True),
    "9B": _dense(),
    "27B": _dense(dim=5120, n_layers=64, n_heads=24, n_linear_value_heads=48, hidden_dim=17408),
    "35B-A3B": _sparse(256, 8, 512, dim=2048, n_layers=40),
    "122B-A10B": _sparse(256, 8, 1024, dim=3072, n_layers=48, n_heads=32, n_linear_value_heads=64),
    "397B-A17B": _sparse(512, 10, 1024, dim=4096, n_layers=60, n_heads=32, n_linear_value_heads=64),
}

model_registry = partial(model_spec, "qwen3_5", flavors, Qwen3_5StateDictAdapter)
