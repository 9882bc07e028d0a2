"""The names that Qwen3-Next and Qwen3.5 share in Hugging Face files."""

import torch

from titan_gdn.models.hybrid.state_dict_adapter import (
    LAYER,
    HybridStateDictAdapter,
    RowPermutation,
    conv_shape,
    query_key_value,
)

CONVOLUTION = RowPermutation(
    parameters={"linear_attention.conv.weight": conv_shape},
    hf_names=("linear_attn.conv1d.weight",),
    order=lambda config: [torch.cat(query_key_value(config))],
    depthwise=True,
)
"""The convolution: the files hold all channels of q, then those of k, then those of v."""


class GatedStateDictAdapter(HybridStateDictAdapter):
    """The names of gated attention, experts and Gated DeltaNet in the files of both families."""

    layer = LAYER | {
        "attention.wq.weight": "self_attn.q_proj.weight",
        "attention.wk.weight": "self_attn.k_proj.weight",
        "attention.wv.weight": "self_attn.v_proj.weight",
        "attention.wo.weight": "self_attn.o_proj.weight",
        "attention.q_norm.weight": "self_attn.q_norm.weight",
        "attention.k_norm.weight": "self_attn.k_norm.weight",
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
