"""Qwen3-Next's parameters in the names and layouts of Hugging Face files, and back.

The files' layout, not that of transformers in memory: experts stand one by one. Three things differ
from ours beside the names. `in_proj_qkvz` holds q, k, v and z of a key head together, where ours keeps
z apart. `conv1d` holds all q channels, then all k, then all v, where ours goes by head group. Experts
are ours in one tensor.
"""

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torchtitan.protocols.state_dict_adapter import StateDictAdapter
from torchtitan.tools.logging import logger

_MODEL = {"tok_embeddings.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
_MODEL["lm_head.weight"] = "lm_head.weight"

_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
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
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "moe.router.gate.weight": "mlp.gate.weight",
    "moe.shared_experts.w1.weight": "mlp.shared_expert.gate_proj.weight",
    "moe.shared_experts.w2.weight": "mlp.shared_expert.down_proj.weight",
    "moe.shared_experts.w3.weight": "mlp.shared_expert.up_proj.weight",
    "moe.shared_experts.gate.weight": "mlp.shared_expert_gate.weight",
}
_EXPERTS = {
    "moe.routed_experts.inner_experts.w1_EFD": "mlp.experts.{}.gate_proj.weight",
    "moe.routed_experts.inner_experts.w2_EDF": "mlp.experts.{}.down_proj.weight",
    "moe.routed_experts.inner_experts.w3_EFD": "mlp.experts.{}.up_proj.weight",
}
_QKV, _Z, _QKVZ = (
    "linear_attention.in_proj_qkv.weight",
    "linear_attention.in_proj_z.weight",
    "linear_attn.in_proj_qkvz.weight",
)
_CONV, _CONV1D = "linear_attention.conv.weight", "linear_attn.conv1d.weight"
_BIAS = "moe.expert_bias_E"


class Qwen3NextStateDictAdapter(StateDictAdapter):
    """Converts state dicts of this rank's tensors, sharded or whole.

    `from_hf` puts tensors back into the shards that the last `to_hf` took them from, which is how the
    checkpointer calls them; without a `to_hf` before, tensors stay whole.
    """

    def __init__(self, model_config: Any, hf_assets_path: str | None) -> None:
        # Without weights beside the tokenizer there is no index to complain about.
        super().__init__(model_config, hf_assets_path if _weight_files(hf_assets_path) else None)
        self.hf_assets_path = hf_assets_path
        self._sharded: dict[str, DTensor] = {}

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Our names and layouts to Hugging Face's; of experts, the ones that lie on this rank."""
        self._sharded = {key: value for key, value in state_dict.items() if isinstance(value, DTensor)}
        hf: dict[str, Any] = {}
        for key, value in state_dict.items():
            prefix, name = _split(key)
            hf_prefix = f"model.{prefix}"
            if not prefix:
                if not (name == "lm_head.weight" and self.model_config.enable_weight_tying):
                    hf[_MODEL[name]] = value
            elif name in _EXPERTS:
                for expert, weight in _local_experts(value):
                    hf[hf_prefix + _EXPERTS[name].format(expert)] = weight
            elif name == _QKV:
                rows = torch.cat([_whole(value), _whole(state_dict[prefix + _Z])])
                hf[hf_prefix + _QKVZ] = _by_columns(rows[self._qkvz_rows(prefix)], value)
            elif name == _CONV:
                rows = _whole(value).flatten(0, 1)[self._conv_rows(prefix)].unsqueeze(1)
                hf[hf_prefix + _CONV1D] = _by_columns(rows, value)
            elif name == _BIAS:
                if isinstance(value, Tensor) and _whole(value).any():
                    logger.warning(
                        f"{key} balances experts and has no place in a Hugging Face checkpoint: left out"
                    )
            elif name != _Z:
                hf[hf_prefix + _LAYER[name]] = value
        return hf

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Hugging Face's names and layouts to ours. Keys that the model has no place for are left out."""
        ours: dict[str, Any] = {}
        experts: dict[str, dict[int, Tensor]] = {}
        names = {hf: name for name, hf in (_MODEL | _LAYER).items()}
        for hf_key, value in hf_state_dict.items():
            if hf_key in _MODEL.values():
                ours[names[hf_key]] = value
                continue
            prefix, hf_name = _split(hf_key.removeprefix("model."))
            if hf_name in names:
                ours[prefix + names[hf_name]] = value
            elif hf_name == _QKVZ:
                order = self._qkvz_rows(prefix)
                rows = _unpermute(_whole(value), order)
                widths = [len(order) - self._values(prefix), self._values(prefix)]
                for key, part in zip((prefix + _QKV, prefix + _Z), rows.split(widths), strict=True):
                    ours[key] = self._as_sharded(key, part)
            elif hf_name == _CONV1D:
                rows = _unpermute(_whole(value).squeeze(1), self._conv_rows(prefix))
                key = prefix + _CONV
                ours[key] = self._as_sharded(key, rows.unflatten(0, (self._linear(prefix).n_key_heads, -1)))
            elif hf_name.startswith("mlp.experts."):
                number, hf_name = hf_name.removeprefix("mlp.experts.").split(".", 1)
                name = next(ours for ours, hf in _EXPERTS.items() if hf.endswith(f"{{}}.{hf_name}"))
                experts.setdefault(prefix + name, {})[int(number)] = value
        for key, weights in experts.items():
            stacked = torch.stack([_local(weights[i]) for i in sorted(weights)])
            like = self._sharded.get(key)
            ours[key] = stacked if like is None else _from_local(stacked, like)
        if self.model_config.enable_weight_tying:
            ours["lm_head.weight"] = ours["tok_embeddings.weight"]
        return ours

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> HuggingFaceStorageReader:
        """The reader of the checkpointer; says once which parts of the files are not read."""
        if any(key.startswith("mtp.") for key in _keys(path)):
            logger.info(
                "The checkpoint's mtp.* keys (multi-token prediction) are skipped: there is no such layer"
            )
        return super().get_hf_storage_reader(path, from_quantized)

    def _linear(self, prefix: str) -> Any:
        return self.model_config.layers[int(prefix.split(".")[1])].linear_attention

    def _values(self, prefix: str) -> int:
        config = self._linear(prefix)
        return config.n_value_heads * config.value_head_dim

    def _qkvz_rows(self, prefix: str) -> Tensor:
        """Which row of `[in_proj_qkv; in_proj_z]` each row of `in_proj_qkvz` is."""
        config, values = self._linear(prefix), self._values(prefix)
        rows = config.in_proj_qkv.out_features
        qkv = torch.arange(rows).view(config.n_key_heads, -1)
        z = torch.arange(rows, rows + values).view(config.n_key_heads, -1)
        return torch.cat([qkv, z], 1).flatten()

    def _conv_rows(self, prefix: str) -> Tensor:
        """Which channel of ours, group by group, each channel of `conv1d` is."""
        config = self._linear(prefix)
        K, W = config.key_head_dim, config.conv.group_width
        channels = torch.arange(config.n_key_heads * W).view(-1, W)
        return torch.cat([part.flatten() for part in channels.split([K, K, W - 2 * K], 1)])

    def _as_sharded(self, key: str, whole: Tensor) -> Tensor:
        """Cut a whole tensor as our parameter `key` is cut."""
        like = self._sharded.get(key)
        if like is None:
            return whole
        shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
        part = whole[tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))]
        return _from_local(part.contiguous(), like)


def _split(key: str) -> tuple[str, str]:
    """`layers.3.norm.weight` to `("layers.3.", "norm.weight")`; keys outside layers have no prefix."""
    parts = key.split(".", 2)
    return (f"layers.{parts[1]}.", parts[2]) if parts[0] == "layers" else ("", key)


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _from_local(part: Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _unpermute(rows: Tensor, order: Tensor) -> Tensor:
    out = torch.empty_like(rows)
    out[order] = rows
    return out


def _by_columns(rows: Tensor, like: Tensor) -> Tensor:
    """Rows in another order than `like`'s cannot be cut as `like` is: cut the last dimension instead."""
    if not isinstance(like, DTensor):
        return rows
    mesh = like.device_mesh
    placements = [Replicate() if p.is_replicate() else Shard(rows.ndim - 1) for p in like.placements]
    shape, offset = compute_local_shape_and_global_offset(rows.shape, mesh, placements)
    part = rows.narrow(-1, offset[-1], shape[-1]).contiguous()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=rows.shape, stride=rows.stride())


def _local_experts(weight: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The experts of `[E, ...]` that lie on this rank, each with the shards that are left of it."""
    if not isinstance(weight, DTensor):
        yield from enumerate(weight)
        return
    _, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    mesh, placements = _mesh_of_one_expert(weight)
    for i, expert in enumerate(weight.to_local()):
        if mesh is not None:
            shape = weight.shape[1:]
            stride = torch.empty(shape, device="meta").stride()
            expert = DTensor.from_local(expert, mesh, placements, run_check=False, shape=shape, stride=stride)
        yield offset[0] + i, expert


def _mesh_of_one_expert(weight: DTensor) -> tuple[DeviceMesh | None, list[Placement]]:
    """The mesh axes that do not divide the experts, and what they do to the dimensions of one expert."""
    moved: dict[type, Callable[[Any], Placement]] = {
        Shard: lambda p: Shard(p.dim - 1),
        _StridedShard: lambda p: _StridedShard(p.dim - 1, split_factor=p.split_factor),
        Replicate: lambda p: p,
    }
    names, placements = [], []
    for name, placement in zip(weight.device_mesh.mesh_dim_names, weight.placements, strict=True):
        if getattr(placement, "dim", None) != 0:
            names.append(name)
            placements.append(moved[type(placement)](placement))
    return (weight.device_mesh[tuple(names)], placements) if names else (None, [])


def _weight_files(path: str | None) -> list[str]:
    if path is None or not os.path.isdir(path):
        return []
    return [os.path.join(path, name) for name in sorted(os.listdir(path)) if name.endswith(".safetensors")]


def _keys(path: str) -> Iterator[str]:
    """The names of the tensors in a folder of safetensors files."""
    index = os.path.join(path, "model.safetensors.index.json")
    if os.path.exists(index):
        with open(index) as file:
            yield from json.load(file)["weight_map"]
        return
    for name in _weight_files(path):
        with safe_open(name, "pt") as file:
            yield from file.keys()
