"""Converts Qwen3-Next's state dict to the names and layouts of Hugging Face files and back.

Besides names, three things differ. The files hold q, k, v and z of a key head together in `in_proj_qkvz`;
the model has a separate `in_proj_z`. The files' `conv1d` holds all channels of q, then those of k, then those
of v; the model orders them by head group. The files have tensors for each expert; the model has one for all
experts.
"""

import torch
from torch import Tensor

from titan_gdn.layers.gated_delta_net import GatedDeltaNet
from titan_gdn.models.hybrid.gated_state_dict_adapter import CONVOLUTION, GatedStateDictAdapter
from titan_gdn.models.hybrid.state_dict_adapter import RowPermutation
from titan_gdn.models.qwen3_next.hf_config import hf_config_of


def _query_key_value_gate(config: GatedDeltaNet.Config) -> list[Tensor]:
    """For each row of `in_proj_qkvz`, the index of the same row in `[in_proj_qkv; in_proj_z]`."""
    rows, groups = config.in_proj_qkv.out_features, config.n_key_heads
    qkv = torch.arange(rows).view(groups, -1)
    z = torch.arange(rows, rows + config.in_proj_z.out_features).view(groups, -1)
    return [torch.cat([qkv, z], 1).flatten()]


class Qwen3NextStateDictAdapter(GatedStateDictAdapter):
    """The names of Qwen3-Next's files, and the order of rows in them."""

    hf_config_of = staticmethod(hf_config_of)
    layer = GatedStateDictAdapter.layer | {
        "linear_attention.in_proj_ba.weight": "linear_attn.in_proj_ba.weight"
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
        CONVOLUTION,
    )
