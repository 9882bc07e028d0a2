"""Converts Kimi Linear's state dict to the names and layouts of the published files and back.

Besides names, three things differ. The files have a projection and a convolution each for q, k and v; the
model has one of each, ordered by head group. `A_log` has four dimensions in the files and one in the model.
The files have tensors for each expert; the model has one for all experts.
"""

import re
from typing import Any

from titan_gdn.models.hybrid.state_dict_adapter import (
    LAYER,
    HybridStateDictAdapter,
    RowPermutation,
    conv_shape,
    query_key_value,
)
from titan_gdn.models.kimi_linear.hf_config import hf_config_of


def published(key: str) -> str:
    """Returns the name in the published files.

    transformers 5.24 saves a dense feed-forward under the name of a sparse one, `block_sparse_moe`.
    """
    return re.sub(r"\.block_sparse_moe\.(?=(gate|up|down)_proj\.)", ".mlp.", key)


class KimiLinearStateDictAdapter(HybridStateDictAdapter):
    """The names of Kimi Linear's files, and the order of rows in them."""

    hf_config_of = staticmethod(hf_config_of)
    layer = LAYER | {
        "attention.wq.weight": "self_attn.q_proj.weight",
        "attention.wkv_a.weight": "self_attn.kv_a_proj_with_mqa.weight",
        "attention.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
        "attention.wkv_b.weight": "self_attn.kv_b_proj.weight",
        "attention.wo.weight": "self_attn.o_proj.weight",
        "linear_attention.in_proj_b.weight": "self_attn.b_proj.weight",
        "linear_attention.f_a.weight": "self_attn.f_a_proj.weight",
        "linear_attention.f_b.weight": "self_attn.f_b_proj.weight",
        "linear_attention.g_a.weight": "self_attn.g_a_proj.weight",
        "linear_attention.g_b.weight": "self_attn.g_b_proj.weight",
        "linear_attention.decay.A_log": "self_attn.A_log",
        "linear_attention.decay.dt_bias": "self_attn.dt_bias",
        "linear_attention.norm.weight": "self_attn.o_norm.weight",
        "linear_attention.out_proj.weight": "self_attn.o_proj.weight",
        "moe.router.gate.weight": "block_sparse_moe.gate.weight",
        "moe.expert_bias_E": "block_sparse_moe.gate.e_score_correction_bias",
        "moe.shared_experts.w1.weight": "block_sparse_moe.shared_experts.gate_proj.weight",
        "moe.shared_experts.w2.weight": "block_sparse_moe.shared_experts.down_proj.weight",
        "moe.shared_experts.w3.weight": "block_sparse_moe.shared_experts.up_proj.weight",
    }
    experts = {
        "moe.routed_experts.inner_experts.w1_EFD": "block_sparse_moe.experts.{}.w1.weight",
        "moe.routed_experts.inner_experts.w2_EDF": "block_sparse_moe.experts.{}.w2.weight",
        "moe.routed_experts.inner_experts.w3_EFD": "block_sparse_moe.experts.{}.w3.weight",
    }
    rows = (
        RowPermutation(
            parameters={
                "linear_attention.in_proj_qkv.weight": lambda config: (config.in_proj_qkv.out_features,)
            },
            hf_names=tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
            order=query_key_value,
        ),
        RowPermutation(
            parameters={"linear_attention.conv.weight": conv_shape},
            hf_names=tuple(f"self_attn.{part}_conv1d.weight" for part in "qkv"),
            order=query_key_value,
            depthwise=True,
        ),
    )
    shapes = {"linear_attention.decay.A_log": (1, 1, -1, 1)}

    @classmethod
    def canonical(cls, key: str) -> str:
        """Returns the published name of a tensor, also for the names that transformers saves."""
        return published(key)

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Extends `HybridStateDictAdapter.from_hf` to the names that transformers saves."""
        return super().from_hf({published(key): value for key, value in hf_state_dict.items()})
