"""Kimi Linear's parameters in the names and layouts of the published files, and back.

Three things differ from ours beside the names. q, k and v have a projection and a convolution each, where
ours go by head group. `A_log` has four dimensions. Experts are ours in one tensor.
"""

import re
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from titan_gdn.models.hybrid.state_dict_adapter import (
    LAYER,
    HybridStateDictAdapter,
    Rows,
    conv_shape,
    keys_of,
    query_key_value,
)


def published(key: str) -> str:
    """The published name: transformers 5.24 saves a dense feed-forward by the name of the sparse ones."""
    return re.sub(r"\.block_sparse_moe\.(?=(gate|up|down)_proj\.)", ".mlp.", key)


class PublishedNamesReader(HuggingFaceStorageReader):
    """Reads files whose names are not the published ones, by the published ones."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.saved = {published(key): key for key in keys_of(path)}

    def read_metadata(self) -> Metadata:
        """Of all tensors."""
        metadata = super().read_metadata()
        tensors, places = metadata.state_dict_metadata, metadata.storage_data
        metadata.state_dict_metadata = {published(key): tensor for key, tensor in tensors.items()}
        metadata.storage_data = {
            replace(index, fqn=published(index.fqn)): place for index, place in places.items()
        }
        return metadata

    def _process_read_request(self, f: Any, req: ReadItem, planner: LoadPlanner) -> None:
        saved = replace(req.storage_index, fqn=self.saved[req.storage_index.fqn])
        super()._process_read_request(f, replace(req, storage_index=saved), planner)


class KimiLinearStateDictAdapter(HybridStateDictAdapter):
    """The names and orders of Kimi Linear's files."""

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
        Rows(
            ours={"linear_attention.in_proj_qkv.weight": lambda config: (config.in_proj_qkv.out_features,)},
            theirs=tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
            order=query_key_value,
        ),
        Rows(
            ours={"linear_attention.conv.weight": conv_shape},
            theirs=tuple(f"self_attn.{part}_conv1d.weight" for part in "qkv"),
            order=query_key_value,
            depthwise=True,
        ),
    )
    shapes = {"linear_attention.decay.A_log": (1, 1, -1, 1)}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """As `HybridStateDictAdapter.from_hf`; takes the names that transformers saves, too."""
        return super().from_hf({published(key): value for key, value in hf_state_dict.items()})

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> HuggingFaceStorageReader:
        """A reader that takes the names that transformers saves, too."""
        super().get_hf_storage_reader(path, from_quantized)  # says what is not read
        return PublishedNamesReader(path)
