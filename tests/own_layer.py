"""A linear attention layer as a user would add one: this class, and no other line anywhere.

It is Gated DeltaNet written in another way, so that Gated DeltaNet is its oracle: the decay and the write
strength have linears of their own (Qwen3.5 names them `in_proj_a` and `in_proj_b`), the output gate is
low-rank, and the rule repeats the decay for every key channel.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torchtitan.models.common import Linear

from titan_gdn.layers.initialization import ONES, linear
from titan_gdn.layers.linear_attention import Decay, LinearAttention
from titan_gdn.layers.local_tensor import apply
from titan_gdn.layers.norms import GatedRMSNorm
from titan_gdn.ops import chunk_kda, gdn_gate
from titan_gdn.ops.flops import chunked_rule_flops
from titan_gdn.ops.rules import Rule


def repeated_decay_rule(q, k, v, g, beta, **kernel):
    """The rule of Kimi Delta Attention with one decay for all channels of a head."""
    return chunk_kda(q, k, v, g.unsqueeze(-1).expand(*g.shape, q.shape[-1]), beta, **kernel)


def flops(*sizes):
    return chunked_rule_flops(*sizes, per_channel=True)


class OwnLayer(LinearAttention):
    title = "Own Layer"
    rule = Rule(run=repeated_decay_rule, per_channel=False, flops=flops)
    per_head = (*LinearAttention.per_head, "in_proj_b", "in_proj_a", "gate_out")
    replicated = (*LinearAttention.replicated, "gate_in")
    exchanged = ("in_proj_qkv", "in_proj_b", "in_proj_a")
    full_precision = {"in_proj_a": "decay"}

    @dataclass(kw_only=True, slots=True)
    class Config(LinearAttention.Config):
        in_proj_b: Linear.Config
        in_proj_a: Linear.Config
        gate_in: Linear.Config
        gate_out: Linear.Config

    @classmethod
    def configure(cls, widths):
        decay = {"A_log": nn.init.zeros_, "dt_bias": nn.init.ones_}
        return super().configure(
            widths,
            in_proj_b=linear(widths.dim, widths.value_heads),
            in_proj_a=linear(widths.dim, widths.value_heads),
            gate_in=linear(widths.dim, widths.gate_rank),
            gate_out=linear(widths.gate_rank, widths.value_heads * widths.value_dim),
            decay=Decay.Config(n_value_heads=widths.value_heads, param_init=decay),
            norm=GatedRMSNorm.Config(dim=widths.value_dim, eps=widths.norm_eps, param_init=ONES),
        )

    def __init__(self, config):
        super().__init__(config)
        self.in_proj_b = config.in_proj_b.build()
        self.in_proj_a = config.in_proj_a.build()
        self.gate_in = config.gate_in.build()
        self.gate_out = config.gate_out.build()

    def output_gate(self, x_BLD):
        return apply(self.gate_out, apply(self.gate_in, x_BLD, partial_grad=True))

    def gates(self, products, low_rank_1Tr, A_log_N, dt_bias_N, heads):
        b_1TN, a_1TN = (products[f"in_proj_{name}"].float().flatten(2) for name in "ba")
        return gdn_gate(a_1TN, A_log_N, dt_bias_N), b_1TN.sigmoid()


def as_gated_delta_net(layer, groups):
    """The weights of a Gated DeltaNet that computes the same."""
    weights = {name: x.detach() for name, x in layer.state_dict().items()}
    b, a = (weights.pop(f"in_proj_{name}.weight").unflatten(0, (groups, -1)) for name in "ba")
    weights["in_proj_ba.weight"] = torch.cat([b, a], 1).flatten(0, 1)
    weights["in_proj_z.weight"] = weights.pop("gate_out.weight") @ weights.pop("gate_in.weight")
    return weights
