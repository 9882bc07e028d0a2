"""Converts a hybrid model's state dict to the names and layouts of Hugging Face files and back, on any mesh.

The layout is that of the published files, in which each expert has tensors of its own. transformers' modules
have another layout in memory. The adapter of a model family declares which names correspond, and which
tensors have their rows in another order.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torchtitan.protocols.state_dict_adapter import StateDictAdapter
from torchtitan.tools.logging import logger

from titan_gdn.checkpoint.accounting import Account, Expected, account
from titan_gdn.checkpoint.export import DTYPES, Beside
from titan_gdn.checkpoint.model_directory import ModelDirectory, TensorEntry
from titan_gdn.checkpoint.reader import ModelDirectoryReader, Rows

LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
}
"""Names of parameters in a layer of every hybrid model, with the corresponding names in the files."""
_EXPERT_BIAS = "moe.expert_bias_E"
_MTP = "mtp."
"""The beginning of the names of multi-token prediction, in the model and in the files of every family."""
_MTP_OUTSIDE_LAYER = {
    "mtp.fc.weight": "mtp.fc.weight",
    "mtp.embedding_norm.weight": "mtp.pre_fc_norm_embedding.weight",
    "mtp.hidden_norm.weight": "mtp.pre_fc_norm_hidden.weight",
    "mtp.norm.weight": "mtp.norm.weight",
}


@dataclass(frozen=True, eq=False)
class RowPermutation:
    """Parameters of a linear attention layer whose rows the files hold in other tensors or in another order.

    Attributes:
        parameters: the parameters, each with a function from the layer's `Config` to all dimensions of the
            tensor but the last.
        hf_names: the names of the tensors in the files.
        order: a function from the layer's `Config` to one index tensor for each of `hf_names`. Row `i` of the
            tensor in the file is row `order[i]` of the concatenated `parameters`.
        depthwise: whether the tensors in the files are kernels of a depthwise convolution, `[rows, 1, C]`.
    """

    parameters: dict[str, Callable[[Any], tuple[int, ...]]]
    hf_names: tuple[str, ...]
    order: Callable[[Any], list[Tensor]]
    depthwise: bool = False


def conv_shape(config: Any) -> tuple[int, int]:
    """Returns the first two dimensions of a layer's `conv.weight`: groups and rows of a group."""
    return config.conv.n_groups, config.conv.group_width


def query_key_value(config: Any) -> list[Tensor]:
    """Returns the rows of q, of k and of v among rows that are ordered by head group."""
    K, W = config.key_head_dim, config.conv.group_width
    rows = torch.arange(config.n_key_heads * W).view(-1, W)
    return [part.flatten() for part in rows.split([K, K, W - 2 * K], 1)]


class HybridStateDictAdapter(StateDictAdapter):
    """Converts state dicts of plain tensors or DTensors.

    `to_hf` stores the placements of the tensors it converts, and `from_hf` restores them. Without a `to_hf`
    before it, `from_hf` returns plain tensors. A run reads files through `to_load`, without either.

    Attributes:
        layer: names of parameters in a layer, with their names in the files.
        experts: names of parameters that hold all experts, with the names of one expert's tensors in the
            files, in which `{}` stands for the number of the expert.
        rows: parameters whose rows the files hold in another order.
        shapes: vectors that have another shape in the files, with that shape: one dimension is -1, all others
            are 1.
        prefix: the beginning of the decoder's names in the files.
        kept: beginnings of the names of tensors in the files that are not trained.
        hf_config_of: `ConfigJson.hf_config_of` of the family; None copies `config.json`.
    """

    layer: ClassVar[dict[str, str]]
    experts: ClassVar[dict[str, str]]
    rows: ClassVar[tuple[RowPermutation, ...]]
    shapes: ClassVar[dict[str, tuple[int, ...]]] = {}
    prefix: ClassVar[str] = "model."
    kept: tuple[str, ...] = (_MTP,)
    hf_config_of: ClassVar[Callable[..., dict[str, Any]] | None] = None

    def __init__(self, model_config: Any, hf_assets_path: str | None) -> None:
        # Without a path, TorchTitan's class reads no index: `titan_gdn.checkpoint.export` lays out files by
        # the tensors of the model.
        super().__init__(model_config, None)
        self.model_config: Any = model_config
        self.hf_assets_path = hf_assets_path
        self._outside_layers = {
            "tok_embeddings.weight": f"{self.prefix}embed_tokens.weight",
            "norm.weight": f"{self.prefix}norm.weight",
            "lm_head.weight": "lm_head.weight",
        }
        if model_config.mtp is not None:  # trained, and not kept
            self.kept = tuple(beginning for beginning in self.kept if beginning != _MTP)
            self._outside_layers |= _MTP_OUTSIDE_LAYER
        self._sharded: dict[str, DTensor] = {}

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Converts the model's names and layouts to those of the files.

        Args:
            state_dict: all parameters, or those of one pipeline stage.

        Returns:
            The tensors of the files, with those experts only that are on this rank.

        Raises:
            ValueError: the adapter has no name for a parameter.
        """
        self._sharded = {key: value for key, value in state_dict.items() if isinstance(value, DTensor)}
        permutations = {name: rows for rows in self.rows for name in rows.parameters}
        hf: dict[str, Any] = {}
        for key, value in state_dict.items():
            prefix, name = _split(key)
            hf_prefix = prefix if prefix.startswith(_MTP) else self.prefix + prefix
            if not prefix:
                if not (name == "lm_head.weight" and self.model_config.enable_weight_tying):
                    hf[self._outside_layers[name]] = value
            elif name in self.experts:
                for expert, weight in _local_experts(value):
                    hf[hf_prefix + self.experts[name].format(expert)] = weight
            elif name in permutations:
                rows = permutations[name]
                if name == next(iter(rows.parameters)):  # converts all parameters of the permutation at once
                    for hf_name, part in self._permute(prefix, rows, state_dict):
                        hf[hf_prefix + hf_name] = part
            elif name == _EXPERT_BIAS and name not in self.layer:
                if isinstance(value, Tensor) and not value.is_meta and _global(value).any():
                    logger.warning(
                        f"{key} (the bias that balances experts) is not saved: the Hugging Face format of "
                        "this model has no such tensor"
                    )
            elif name in self.layer:
                hf[hf_prefix + self.layer[name]] = (
                    _reshape_vector(value, self.shapes[name]) if name in self.shapes else value
                )
            else:
                adapter = type(self).__name__
                raise ValueError(
                    f"{adapter} has no Hugging Face name for {name}: add it to {adapter}.layer, .experts or "
                    ".rows"
                )
        return hf

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Converts the names and layouts of the files to the model's. Keys that the model lacks are ignored.

        Args:
            hf_state_dict: the tensors that `to_hf` returned, or global tensors.

        Returns:
            The model's parameters, with the placements that they had in the last `to_hf`.
        """
        state_dict: dict[str, Any] = {}
        experts: dict[str, dict[int, Tensor]] = defaultdict(dict)
        permuted: dict[tuple[str, RowPermutation], dict[str, Tensor]] = defaultdict(dict)
        outside_layers = {hf_name: name for name, hf_name in self._outside_layers.items()}
        full_names, linear_names = self._names("linear_attention."), self._names("attention.")
        permutations = {hf_name: rows for rows in self.rows for hf_name in rows.hf_names}
        for hf_key, value in hf_state_dict.items():
            if hf_key in outside_layers:
                state_dict[outside_layers[hf_key]] = value
            prefix, hf_name = _split(hf_key.removeprefix(self.prefix))
            if not self._has(prefix):
                continue
            linear = self._linear(prefix) is not None
            names = linear_names if linear else full_names
            expert = re.search(r"(?<=\.experts\.)\d+", hf_name)
            if expert is not None:
                hf_name = hf_name[: expert.start()] + "{}" + hf_name[expert.end() :]
            if linear and hf_name in permutations:
                permuted[prefix, permutations[hf_name]][hf_name] = value
            elif hf_name in names and expert is not None:
                experts[prefix + names[hf_name]][int(expert[0])] = value
            elif hf_name in names:
                key = prefix + names[hf_name]
                if names[hf_name] in self.shapes:
                    value = self._from_shard(key, _local(value).flatten())
                state_dict[key] = value
        for key, weights in experts.items():
            stacked = torch.stack([_local(weights[i]) for i in sorted(weights)])
            state_dict[key] = self._from_shard(key, stacked)
        for (prefix, rows), parts in permuted.items():
            state_dict |= self._unpermute(prefix, rows, parts)
        if self.model_config.enable_weight_tying and "tok_embeddings.weight" in state_dict:
            state_dict["lm_head.weight"] = state_dict["tok_embeddings.weight"]
        return state_dict

    def groups(self, keys: Iterable[str]) -> Iterator[list[str]]:
        """Yields the parameters that are converted together: rows of several may make one tensor."""
        permutations = {name: rows for rows in self.rows for name in rows.parameters}
        for key in keys:
            prefix, name = _split(key)
            if name not in permutations:
                yield [key]
            elif name == next(iter(permutations[name].parameters)):
                yield [prefix + other for other in permutations[name].parameters]

    def beside(self, source: ModelDirectory | None, dtype: torch.dtype | None = None) -> Beside:
        """Returns what an export of the model holds beside its tensors.

        Args:
            source: the directory that the weights came from, None if from none.
            dtype: the dtype that `config.json` names; None for that of `source`.

        Raises:
            ValueError: no `config.json` of the family describes the model.
        """
        original = None if source is None else source.config
        config = original
        if self.hf_config_of is not None and self.model_config.arguments is not None:
            name = None if dtype is None else str(dtype).removeprefix("torch.")
            config = self.hf_config_of(self.model_config.arguments, original, name)
        changed = None if config == original else config
        if source is None:
            return Beside({}, assets=self.hf_assets_path, config=changed)
        kept = {name: entry for name, entry in source.tensors.items() if name.startswith(self.kept)}
        return Beside(kept, source.path, self.hf_assets_path, changed, source.fused)

    def as_in(self, files: Mapping[str, TensorEntry], hf_state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gives tensors the names, dtypes and dimensions of 1 that they have in other files of the model.

        Args:
            files: the tensors in the other files. Those that they lack stay as they are.
            hf_state_dict: the tensors that `to_hf` returned.
        """
        names = {self.canonical(name): name for name in files}
        result: dict[str, Tensor] = {}
        for key, value in hf_state_dict.items():
            if (name := names.get(key)) is None:
                result[key] = value
            else:
                _, dtype, shape, *_ = files[name]
                if value.shape != shape and value.numel() == math.prod(shape) == max(shape, default=1):
                    value = _reshape_vector(value, _with_wildcard(shape))
                result[name] = value.to(DTYPES[dtype])
        return result

    @classmethod
    def canonical(cls, key: str) -> str:
        """Returns the name that this adapter has for a tensor that some files call `key`."""
        return key

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the names and shapes of the whole model's tensors in the files. Nothing is allocated."""
        with torch.device("meta"):
            model = self.model_config.build()
        hf = type(self)(self.model_config, None).to_hf(model.state_dict())
        return {key: tuple(x.shape) for key, x in hf.items()}

    def account(self, directory: ModelDirectory) -> tuple[Account, dict[str, tuple[int, ...]]]:
        """Finds each tensor of the whole model in a directory.

        Returns:
            What becomes of the directory's tensors, and `hf_shapes`.

        Raises:
            ModelDirectoryError: the directory holds another model, or one that cannot be loaded.
        """
        shapes = self.hf_shapes()
        vectors = {hf_name for name, hf_name in self.layer.items() if name in self.shapes}
        expected = Expected(
            shapes,
            vectors=frozenset(key for key in shapes if _split(key.removeprefix(self.prefix))[1] in vectors),
            kept=self.kept,
            canonical=self.canonical,
        )
        return account(directory, expected), shapes

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> ModelDirectoryReader:
        """Returns the reader of the files in a folder. Logs which tensors of the files are not trained."""
        if from_quantized:
            raise ValueError(
                "checkpoint.initial_load_in_hf_quantized = true is not supported: convert the files to "
                "bfloat16 first"
            )
        accounted, shapes = self.account(ModelDirectory.read(path))
        if accounted.kept:
            found = [one for one in self.kept if any(name.startswith(one) for name in accounted.kept)]
            patterns = ", ".join(f"{beginning}*" for beginning in found)
            logger.info(
                "Tensors of the files that are kept and not trained, because the model has no such layer: "
                f"{len(accounted.kept)} ({patterns}; {accounted.kept_bytes:,} bytes)"
            )
        return ModelDirectoryReader(path, accounted, shapes, self._rows_of_files(shapes))

    def to_load(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns what is to be read with `get_hf_storage_reader`: views of the tensors of `state_dict`.

        Parameters whose rows the files hold in another order keep their names and shapes, because their
        shards are read directly. Nothing is copied, and nothing is gathered.
        """
        names = {name for rows in self.rows for name in rows.parameters}
        rows = {key: value for key, value in state_dict.items() if _split(key)[1] in names}
        return rows | self.to_hf({key: value for key, value in state_dict.items() if key not in rows})

    def _rows_of_files(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, Rows]:
        """Returns where the files hold the rows of the parameters that have another order there."""
        found: dict[str, Rows] = {}
        for i, layer in enumerate(self.model_config.layers):
            prefix, config = f"layers.{i}.", layer.linear_attention
            for permutation in self.rows if config is not None else ():
                names = tuple(f"{self.prefix}{prefix}{name}" for name in permutation.hf_names)
                first = 0
                for name, dimensions in permutation.parameters.items():
                    shape = dimensions(config)
                    end = first + math.prod(shape)
                    order = partial(_order_in_files, permutation, config, range(first, end), shape)
                    found[prefix + name] = Rows((*shape, shapes[names[0]][-1]), names, order)
                    first = end
        return found

    def _names(self, absent: str) -> dict[str, str]:
        """Maps names in the files to the model's for a layer without the module `absent`."""
        names = self.layer | self.experts
        return {hf_name: name for name, hf_name in names.items() if not name.startswith(absent)}

    def _has(self, prefix: str) -> bool:
        """Whether `prefix` names a layer of the model."""
        if prefix.startswith(_MTP):
            return self.model_config.mtp is not None
        return prefix != "" and int(prefix.split(".")[1]) < len(self.model_config.layers)

    def _linear(self, prefix: str) -> Any:
        """The configuration of a layer's linear attention, None if the layer has full attention."""
        if prefix.startswith(_MTP):
            return None
        return self.model_config.layers[int(prefix.split(".")[1])].linear_attention

    def _permute(
        self, prefix: str, permutation: RowPermutation, state_dict: dict[str, Any]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields the names in the files and the tensors of a permutation, from the model's parameters."""
        names = [prefix + name for name in permutation.parameters]
        rows = torch.cat([_global(state_dict[name]).flatten(0, -2) for name in names])
        order = permutation.order(self._linear(prefix))
        if len(order) != len(permutation.hf_names):
            raise ValueError(
                f"the RowPermutation of {', '.join(permutation.hf_names)} has {len(permutation.hf_names)} "
                f"hf_names, but its order returns {len(order)} index tensors"
            )
        for hf_name, indices in zip(permutation.hf_names, order, strict=True):
            part = rows[indices]
            yield (
                hf_name,
                _shard_columns(part.unsqueeze(1) if permutation.depthwise else part, state_dict[names[0]]),
            )

    def _unpermute(
        self, prefix: str, permutation: RowPermutation, parts: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Returns the model's parameters of a permutation, from the tensors of the files."""
        config = self._linear(prefix)
        permuted = torch.cat([_global(parts[hf_name]).flatten(1) for hf_name in permutation.hf_names])
        rows = torch.empty_like(permuted)
        rows[torch.cat(permutation.order(config))] = permuted
        shapes = [shape(config) for shape in permutation.parameters.values()]
        split = rows.split([math.prod(shape) for shape in shapes])
        return {
            prefix + name: self._shard(prefix + name, part.unflatten(0, shape))
            for name, shape, part in zip(permutation.parameters, shapes, split, strict=True)
        }

    def _shard(self, key: str, x: Tensor) -> Tensor:
        """Shards a global tensor as the parameter `key` is sharded."""
        like = self._sharded.get(key)
        if like is None:
            return x
        shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
        part = x[tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))]
        return _from_local(part.contiguous(), like)

    def _from_shard(self, key: str, part: Tensor) -> Tensor:
        """Makes this rank's shard of the parameter `key` a DTensor if the parameter is one."""
        like = self._sharded.get(key)
        return part if like is None else _from_local(part, like)


def _order_in_files(permutation: RowPermutation, config: Any, rows: range, shape: tuple[int, ...]) -> Tensor:
    """Returns `Rows.order` of the parameter that has these rows among those of the permutation."""
    in_files = torch.cat(permutation.order(config)).argsort()
    return in_files[rows.start : rows.stop].view(shape)


def _split(key: str) -> tuple[str, str]:
    """Splits `layers.3.norm.weight` into `("layers.3.", "norm.weight")`, and `mtp.layers.0.` off likewise.

    Other keys have the prefix `""`.
    """
    found = re.match(r"((?:mtp\.)?layers\.\d+\.)(.+)", key)
    return (found[1], found[2]) if found else ("", key)


def _global(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _from_local(part: Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _shift_dim(placement: Placement, by: int) -> Placement:
    """Returns the placement with its tensor dimension, if it has one, increased by `by`."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim + by, split_factor=placement.split_factor)
    return Shard(placement.dim + by) if isinstance(placement, Shard) else placement


def _with_wildcard(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A vector's shape with -1 in place of its size, such as (1, 1, -1, 1) for (1, 1, 32, 1)."""
    dim = max(range(len(shape)), key=lambda dim: shape[dim])
    return tuple(-1 if d == dim else 1 for d in range(len(shape)))


def _reshape_vector(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Views a vector in a shape that is 1 in all dimensions but one, -1, which keeps its placements."""
    if not isinstance(x, DTensor):
        return x.view(shape)
    shift = shape.index(-1) - _with_wildcard(x.shape).index(-1)
    placements = [_shift_dim(placement, shift) for placement in x.placements]
    global_shape = torch.Size(x.numel() if size == -1 else size for size in shape)
    return DTensor.from_local(
        x.to_local().view(shape),
        x.device_mesh,
        placements,
        run_check=False,
        shape=global_shape,
        stride=torch.empty(global_shape, device="meta").stride(),
    )


def _shard_columns(rows: Tensor, like: Tensor) -> Tensor:
    """Shards a global tensor over its last dimension, on the mesh axes that shard `like`.

    The rows are in another order than those of `like`, so a shard of rows of `like` is not one of `rows`.
    """
    if not isinstance(like, DTensor):
        return rows
    mesh = like.device_mesh
    placements = [Replicate() if p.is_replicate() else Shard(rows.ndim - 1) for p in like.placements]
    shape, offset = compute_local_shape_and_global_offset(rows.shape, mesh, placements)
    part = rows.narrow(-1, offset[-1], shape[-1]).contiguous()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=rows.shape, stride=rows.stride())


def _local_experts(weight: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yields the number and the weight of each expert of `[E, ...]` that is on this rank."""
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
    """Returns the sub-mesh of the axes that do not shard experts, and the placements of one expert on it."""
    names, placements = [], []
    for name, placement in zip(weight.device_mesh.mesh_dim_names or (), weight.placements, strict=True):
        if getattr(placement, "dim", None) != 0:
            names.append(name)
            placements.append(_shift_dim(placement, -1))
    return (weight.device_mesh[tuple(names)], placements) if names else (None, [])
