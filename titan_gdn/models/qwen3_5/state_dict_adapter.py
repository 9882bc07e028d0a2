"""Converts Qwen3.5's state dict to the names and layouts of Hugging Face files and back.

Besides names, three things differ. The files' `in_proj_qkv` and `conv1d` hold all channels of q, then those
of k, then those of v; the model orders them by head group. The files have a separate `in_proj_b` and
`in_proj_a`; the model has the rows of both in `in_proj_ba`, by head group. The decoder's names begin with
`model.language_model.` in files of the whole model and with `model.` in those of its text alone.
"""

import torch
from torch import Tensor

from titan_gdn.layers.gated_delta_net import GatedDeltaNet
from titan_gdn.models.hybrid.gated_state_dict_adapter import CONVOLUTION, GatedStateDictAdapter
from titan_gdn.models.hybrid.state_dict_adapter import RowPermutation, query_key_value
from titan_gdn.models.qwen3_5.hf_config import config_json


def _beta_decay(config: GatedDeltaNet.Config) -> list[Tensor]:
    """Returns the rows of `in_proj_b` and those of `in_proj_a` in `in_proj_ba`."""
    rows = torch.arange(config.in_proj_ba.out_features).view(config.n_key_heads, 2, -1)
    return [rows[:, 0].flatten(), rows[:, 1].flatten()]


class Qwen3_5StateDictAdapter(GatedStateDictAdapter):
    """The names of Qwen3.5's files, and the order of rows in them."""

    hf_config_of = staticmethod(config_json.hf_config_of)
    kept = ("mtp.", "model.visual.")
    layer = GatedStateDictAdapter.layer | {
        "linear_attention.in_proj_z.weight": "linear_attn.in_proj_z.weight",
    }
    rows = (
        RowPermutation(
            parameters={
                "linear_attention.in_proj_qkv.weight": lambda config: (config.in_proj_qkv.out_features,)
            },
            hf_names=("linear_attn.in_proj_qkv.weight",),
            order=lambda config: [torch.cat(query_key_value(config))],
        ),
        RowPermutation(
            parameters={
                "linear_attention.in_proj_ba.weight": lambda config: (config.in_proj_ba.out_features,)
            },
            hf_names=("linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight"),
            order=_beta_decay,
        ),
        CONVOLUTION,
    )

    @classmethod
    def canonical(cls, key: str) -> str:
        """Returns the name of a tensor in files of the text alone."""
        return key.replace("model.language_model.", "model.", 1)
