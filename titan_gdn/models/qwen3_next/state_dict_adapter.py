"""Converts Qwen3-Next's state dict to the names and layouts of Hugging Face files and back.

Besides names, three things differ. The files hold q, k, v and z of a key head together in `in_proj_qkvz`;
the model has a separate `in_proj_z`. The files' `conv1d` holds all channels of q, then those of k, then those
of v; the model orders them by head group. The files have tensors for each expert; the model has one for all
experts.
"""

import torch
from torch import Tensor

from titan_gdn.layers.gated_delta_net import GatedDeltaNet
from titan_gdn.models.hybrid.state_dict_adapter import (
    LAYER,
    HybridStateDictAdapter,
    RowPermutation,
    conv_shape,
    query_key_value,
)
from titan_gdn.models.qwen3_next.hf_config import hf_config_of


def _query_key_value_gate(config: GatedDeltaNet.Config) -> list[Tensor]:
    """For each row of `in_proj_qkvz`, the index of the same row in `[in_proj_qkv; in_proj_z]`."""
    rows, groups = config.in_proj_qkv.out_features, config.n_key_heads
    qkv = torch.arange(rows).view(groups, -1)
    z = torch.arange(rows, rows + config.in_proj_z.out_features).view(groups, -1)
    return [torch.cat([qkv, z], 1).flatten()]


class Qwen3NextStateDictAdapter(HybridStateDictAdapter):
    """The names of Qwen3-Next's files, and the order of rows in them."""

    hf_config_of = staticmethod(hf_config_of)
    layer = LAYER | {
        "attention.wq.weight": "self_attn.q_proj.weight",
        "attention.wk.weight": "self_attn.k_proj.weight",
        "attention.wv.weight": "self_attn.v_proj.weight",
        "attention.wo.weight": "self_attn.o_proj.weight",
        "attention.q_norm.weight": "self_attn.q_norm.weight",
        "attention.k_norm.weight": "self_attn.k_norm.weight",
        "linear_attention.in_proj_ba.weight": "linear_attn.in_proj_ba.weight",
        "linear_attention.decay.A_log": "linear_attn.A_log",
        "linear_attention.decay.dt_bias": "linear_attn.dt_bias",
        "linear_attention.norm.weight": "linear_attn.norm.weight",
        "linear_attention.out_proj.weight": "linear_attn.out_proj.weight",
        "moe.router.gate.weight": "mlp.gate.weight",
        "moe.shared_experts.w1.weight": "mlp.shared_expert.gate_proj.weight",
        "moe.shared_experts.w2.weight": "mlp.shared_expert.down_proj.weight",
        "moe.shared_experts.w3.weight": "mlp.shared_expert.up_proj.weight",
        "moe.shared_experts.gate.weight": "mlp.shared_expert_gate.weight",
    }
    experts = {
        "moe.routed_experts.inner_experts.w1_EFD": "mlp.experts.{}.gate_proj.weight",
        "moe.routed_experts.inner_experts.w2_EDF": "mlp.experts.{}.down_proj.weight",
        "moe.routed_experts.inner_experts.w3_EFD": "mlp.experts.{}.up_proj.weight",
    }
    rows = (
        RowPermutation(
            parameters={
                "linear_attention.in_proj_qkv.weight": lambda config: (config.in_proj_qkv.out_features,),
                "linear_attention.in_proj_z.weight": lambda config: (config.in_proj_z.out_features,),
            },
            hf_names=("linear_attn.in_proj_qkvz.weight",),
            order=_query_key_value_gate,
        ),
        RowPermutation(
            parameters={"linear_attention.conv.weight": conv_shape},
            hf_names=("linear_attn.conv1d.weight",),
            order=lambda config: [torch.cat(query_key_value(config))],
            depthwise=True,
        ),
    )
