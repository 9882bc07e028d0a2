"""A hybrid model's parameters in the names and layouts of Hugging Face files, and back, on any mesh.

The files' layout, not that of transformers in memory: experts stand one by one. A model's adapter says
which names correspond, and which tensors' rows stand in another order.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torchtitan.protocols.state_dict_adapter import StateDictAdapter
from torchtitan.tools.logging import logger

LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
}
"""Names that all hybrid models' layers have, ours and the files'."""
_BIAS = "moe.expert_bias_E"


@dataclass(frozen=True, eq=False)
class Rows:
    """Tensors of a linear attention layer whose rows the files hold in other tensors, in another order.

    Attributes:
        ours: our names, and from the layer's `Config` all dimensions of the tensor but the last.
        theirs: the names in the files.
        order: from the layer's `Config`, for each of `theirs` the numbers of its rows, counted over `ours`.
        depthwise: the files' tensors are kernels of a convolution, `[rows, 1, C]`.
    """

    ours: dict[str, Callable[[Any], tuple[int, ...]]]
    theirs: tuple[str, ...]
    order: Callable[[Any], list[Tensor]]
    depthwise: bool = False


def conv_shape(config: Any) -> tuple[int, int]:
    """The dimensions of a grouped convolution's kernels but the last."""
    return config.conv.n_groups, config.conv.group_width


def query_key_value(config: Any) -> list[Tensor]:
    """The rows that are q, k and v, of rows that stand group by group."""
    K, W = config.key_head_dim, config.conv.group_width
    rows = torch.arange(config.n_key_heads * W).view(-1, W)
    return [part.flatten() for part in rows.split([K, K, W - 2 * K], 1)]


class HybridStateDictAdapter(StateDictAdapter):
    """Converts state dicts of this rank's tensors, sharded or whole.

    `from_hf` puts tensors back into the shards that the last `to_hf` took them from, which is how the
    checkpointer calls them; without a `to_hf` before, tensors stay whole.

    Attributes:
        layer: our names in a layer to the files'.
        experts: our names of all experts' weights to the files' of one, `{}` in place of its number.
        rows: what is in another order.
        shapes: the shapes in the files of vectors that are not vectors there.
        prefix: what the names of the decoder begin with in the files.
    """

    layer: ClassVar[dict[str, str]]
    experts: ClassVar[dict[str, str]]
    rows: ClassVar[tuple[Rows, ...]]
    shapes: ClassVar[dict[str, tuple[int, ...]]] = {}
    prefix: ClassVar[str] = "model."

    def __init__(self, model_config: Any, hf_assets_path: str | None) -> None:
        # Without weights beside the tokenizer there is no index to complain about.
        super().__init__(model_config, hf_assets_path if _weight_files(hf_assets_path) else None)
        self.hf_assets_path = hf_assets_path
        self._outside_layers = {
            "tok_embeddings.weight": f"{self.prefix}embed_tokens.weight",
            "norm.weight": f"{self.prefix}norm.weight",
            "lm_head.weight": "lm_head.weight",
        }
        self._sharded: dict[str, DTensor] = {}

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Our names and layouts to Hugging Face's; of experts, the ones that lie on this rank."""
        self._sharded = {key: value for key, value in state_dict.items() if isinstance(value, DTensor)}
        permuted = {name: rows for rows in self.rows for name in rows.ours}
        hf: dict[str, Any] = {}
        for key, value in state_dict.items():
            prefix, name = _split(key)
            hf_prefix = self.prefix + prefix
            if not prefix:
                if not (name == "lm_head.weight" and self.model_config.enable_weight_tying):
                    hf[self._outside_layers[name]] = value
            elif name in self.experts:
                for expert, weight in _local_experts(value):
                    hf[hf_prefix + self.experts[name].format(expert)] = weight
            elif name in permuted:
                if name == next(iter(permuted[name].ours)):  # the first brings the others
                    for hf_name, part in self._permuted(prefix, permuted[name], state_dict):
                        hf[hf_prefix + hf_name] = part
            elif name == _BIAS and name not in self.layer:
                if isinstance(value, Tensor) and _whole(value).any():
                    logger.warning(
                        f"{key} balances experts and has no place in a Hugging Face checkpoint: left out"
                    )
            else:
                viewed = _viewed(value, self.shapes[name]) if name in self.shapes else value
                hf[hf_prefix + self.layer[name]] = viewed
        return hf

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Hugging Face's names and layouts to ours. Keys that the model has no place for are left out."""
        ours: dict[str, Any] = {}
        experts: dict[str, dict[int, Tensor]] = {}
        permuted: dict[tuple[str, Rows], dict[str, Tensor]] = {}
        model_names = {hf: name for name, hf in self._outside_layers.items()}
        full_names, linear_names = self._names("linear_attention."), self._names("attention.")
        linear_rows = {hf: rows for rows in self.rows for hf in rows.theirs}
        for hf_key, value in hf_state_dict.items():
            prefix, hf_name = _split(hf_key.removeprefix(self.prefix))
            if hf_key in model_names:
                ours[model_names[hf_key]] = value
            if not self._has(prefix):
                continue
            full = self._linear(prefix) is None
            names, rows = (full_names, {}) if full else (linear_names, linear_rows)
            expert = re.search(r"(?<=\.experts\.)\d+", hf_name)
            if expert is not None:
                hf_name = hf_name[: expert.start()] + "{}" + hf_name[expert.end() :]
            if hf_name in rows:
                permuted.setdefault((prefix, rows[hf_name]), {})[hf_name] = value
            elif hf_name in names and expert is not None:
                experts.setdefault(prefix + names[hf_name], {})[int(expert[0])] = value
            elif hf_name in names:
                key = prefix + names[hf_name]
                flat = names[hf_name] in self.shapes
                ours[key] = self._local_as_sharded(key, _local(value).flatten()) if flat else value
        for key, weights in experts.items():
            stacked = torch.stack([_local(weights[i]) for i in sorted(weights)])
            ours[key] = self._local_as_sharded(key, stacked)
        for (prefix, group), parts in permuted.items():
            ours |= self._in_order(prefix, group, parts)
        if self.model_config.enable_weight_tying:
            ours["lm_head.weight"] = ours["tok_embeddings.weight"]
        return ours

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> HuggingFaceStorageReader:
        """The reader of the checkpointer; says once which parts of the files are not read."""
        if any(key.startswith("mtp.") for key in keys_of(path)):
            logger.info(
                "The checkpoint's mtp.* keys (multi-token prediction) are skipped: there is no such layer"
            )
        return super().get_hf_storage_reader(path, from_quantized)

    def _names(self, absent: str) -> dict[str, str]:
        """The files' names in a layer to ours, but for those that begin with `absent`."""
        every = self.layer | self.experts
        return {hf: name for name, hf in every.items() if not name.startswith(absent)}

    def _has(self, prefix: str) -> bool:
        return prefix != "" and int(prefix.split(".")[1]) < len(self.model_config.layers)

    def _linear(self, prefix: str) -> Any:
        return self.model_config.layers[int(prefix.split(".")[1])].linear_attention

    def _permuted(self, prefix: str, group: Rows, state_dict: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """The files' tensors of a layer, from ours."""
        rows = torch.cat([_whole(state_dict[prefix + name]).flatten(0, -2) for name in group.ours])
        like = state_dict[prefix + next(iter(group.ours))]
        for hf_name, order in zip(group.theirs, group.order(self._linear(prefix)), strict=True):
            part = rows[order]
            yield hf_name, _by_columns(part.unsqueeze(1) if group.depthwise else part, like)

    def _in_order(self, prefix: str, group: Rows, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Our tensors of a layer, from the files'."""
        config = self._linear(prefix)
        rows = torch.cat([_whole(parts[name]).flatten(1) for name in group.theirs])
        rows = _unpermute(rows, torch.cat(group.order(config)))
        shapes = [shape(config) for shape in group.ours.values()]
        split = rows.split([math.prod(shape) for shape in shapes])
        return {
            prefix + name: self._as_sharded(prefix + name, part.unflatten(0, shape))
            for name, shape, part in zip(group.ours, shapes, split, strict=True)
        }

    def _as_sharded(self, key: str, whole: Tensor) -> Tensor:
        """Cut a whole tensor as our parameter `key` is cut."""
        like = self._sharded.get(key)
        if like is None:
            return whole
        shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
        part = whole[tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))]
        return _from_local(part.contiguous(), like)

    def _local_as_sharded(self, key: str, part: Tensor) -> Tensor:
        """This rank's part of our parameter `key` as its shard."""
        like = self._sharded.get(key)
        return part if like is None else _from_local(part, like)


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


def _moved(placement: Placement, by: int) -> Placement:
    """The same cut of a tensor whose dimensions have moved by so many places."""
    if isinstance(placement, Replicate):
        return placement
    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim + by, split_factor=placement.split_factor)
    return Shard(placement.dim + by)


def _viewed(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A vector in a shape whose sizes are all 1 but the one of its entries, -1."""
    if not isinstance(x, DTensor):
        return x.view(shape)
    placements = [_moved(placement, shape.index(-1)) for placement in x.placements]
    whole = torch.Size(x.numel() if size == -1 else size for size in shape)
    stride = torch.empty(whole, device="meta").stride()
    return DTensor.from_local(
        x.to_local().view(shape), x.device_mesh, placements, run_check=False, shape=whole, stride=stride
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
    names, placements = [], []
    for name, placement in zip(weight.device_mesh.mesh_dim_names, weight.placements, strict=True):
        if getattr(placement, "dim", None) != 0:
            names.append(name)
            placements.append(_moved(placement, -1))
    return (weight.device_mesh[tuple(names)], placements) if names else (None, [])


def _weight_files(path: str | None) -> list[str]:
    if path is None or not os.path.isdir(path):
        return []
    return [os.path.join(path, name) for name in sorted(os.listdir(path)) if name.endswith(".safetensors")]


def keys_of(path: str) -> Iterator[str]:
    """The names of the tensors in a folder of safetensors files."""
    index = os.path.join(path, "model.safetensors.index.json")
    if os.path.exists(index):
        with open(index) as file:
            yield from json.load(file)["weight_map"]
        return
    for name in _weight_files(path):
        with safe_open(name, "pt") as file:
            yield from file.keys()
