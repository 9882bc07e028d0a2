"""The softmax attention of Qwen3-Next: an output gate, zero-centered norms of q and k, partial rotary.

Shape suffixes: B batch, L sequence, D model width, N query heads, M key-value heads, H head width.
"""

from dataclasses import dataclass

import spmd_types as spmd
import torch
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed import ParallelDims
from torchtitan.models.common import Linear
from torchtitan.models.common.attention import AttentionMasksType, BaseAttention, local_head_split
from torchtitan.models.common.decoder_sharding import (
    colwise_config,
    dense_activation_placement,
    dense_param_placement,
    rowwise_config,
)
from torchtitan.protocols.sharding import LocalMapConfig, ShardingConfig

from titan_gdn.layers.document_attention import DocumentAttention, DocumentFlexAttention
from titan_gdn.layers.local_tensor import apply
from titan_gdn.layers.norms import OffsetRMSNorm
from titan_gdn.layers.rotary import PartialRotary
from titan_gdn.layers.sharding import between_layers
from titan_gdn.parallel.sequence import SequenceLayout


class GatedAttention(BaseAttention):
    """Full attention with a sigmoid output gate.

    The rows of `wq` hold, for each head, its query and then its gate. If the number of key-value heads is
    divisible by `tp`, `wk` and `wv` are column-parallel like `wq`. If `tp` exceeds it, `wk` and `wv` are
    replicated over TP, each rank projects to the one head that its queries share, and the gradients are
    summed over TP. The field is `n_key_value_heads`, because TorchTitan's decoder raises an error if `tp`
    exceeds a field named `n_kv_heads`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseAttention.Config):
        n_heads: int
        n_key_value_heads: int
        head_dim: int
        rope: PartialRotary.Config
        wq: Linear.Config
        wk: Linear.Config
        wv: Linear.Config
        wo: Linear.Config
        q_norm: OffsetRMSNorm.Config
        k_norm: OffsetRMSNorm.Config
        inner_attention: DocumentAttention.Config | DocumentFlexAttention.Config

        @property
        def pair_width(self) -> int:
            """Products per head and pair of tokens: the width of a key plus the width of a value."""
            return 2 * self.head_dim

        def set_sharding(self, *, tp: int, enable_sp: bool) -> None:
            """Declares the placements of the layer's parameters, inputs and outputs.

            Args:
                tp: degree of tensor parallelism.
                enable_sp: whether hidden states between layers are sharded over TP.
            """
            self.sharding_config = ShardingConfig(
                in_src_shardings={"x_BLD": between_layers(enable_sp)},
                in_dst_shardings={"x_BLD": dense_activation_placement(tp=spmd.R)},
            )
            self.rope.sharding_config = ShardingConfig(
                state_shardings={"cache": dense_param_placement(tp=spmd.R)}
            )
            self.wq.sharding_config = colwise_config()
            for linear in (self.wk, self.wv):
                replicated = tp > self.n_key_value_heads
                linear.sharding_config = _replicated_key_value() if replicated else colwise_config()
            self.wo.sharding_config = rowwise_config(output_sp=enable_sp)
            self.q_norm.sharding_config = _head_norm()
            self.k_norm.sharding_config = _head_norm()
            # The inner attention takes local shards, over CP too, and gathers keys and values itself.
            # TorchTitan gathers them by a declaration under one of its SPMD backends and by a wrapped forward
            # under the other; this declaration serves both.
            heads = dense_activation_placement(tp=spmd.S(2))
            inputs = {"q_BLNH": heads, "k_BLNH": heads, "v_BLNH": heads}
            self.inner_attention.sharding_config = ShardingConfig(
                in_src_shardings=inputs,
                in_dst_shardings=inputs,
                out_src_shardings=heads,
                local_map=LocalMapConfig(in_grad_placements=(heads, heads, heads)),
            )

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.n_key_value_heads = config.n_key_value_heads
        self.key_value_rows: slice | None = None
        self.enable_gqa = config.n_heads > config.n_key_value_heads
        self.wq = config.wq.build()
        self.wk = config.wk.build()
        self.wv = config.wv.build()
        self.wo = config.wo.build()
        self.rope = config.rope.build()
        self.q_norm = config.q_norm.build()
        self.k_norm = config.k_norm.build()
        self.inner_attention = config.inner_attention.build()

    def split_sequence(self, cp_mesh: DeviceMesh | None, tp_mesh: DeviceMesh | None) -> None:
        """Sets the CP sub-mesh over which sequences are sharded, None without context parallelism.

        `tp_mesh` is unused: the placements that `Config.set_sharding` declares handle TP.
        """
        self.inner_attention.cp_mesh = cp_mesh

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """Parallelizes the layer. If TP ranks outnumber key-value heads, selects the head of this rank."""
        tp_mesh = parallel_dims.get_optional_mesh("tp")
        if tp_mesh is not None and tp_mesh.size() > self.n_key_value_heads:
            head = tp_mesh.get_local_rank() * self.n_key_value_heads // tp_mesh.size()
            self.key_value_rows = slice(head * self.head_dim, (head + 1) * self.head_dim)
        super().parallelize(parallel_dims)

    def key_value(self, linear: Linear, x_BLD: torch.Tensor) -> torch.Tensor:
        """Projects `[B, L, D]` to the keys or the values of this rank's heads, `[B, L, M, H]`."""
        if self.key_value_rows is None:
            return local_head_split(linear(x_BLD), self.head_dim)
        return local_head_split(
            apply(linear, x_BLD, rows=self.key_value_rows, partial_grad=True), self.head_dim
        )

    def forward(
        self,
        x_BLD: torch.Tensor,
        *,
        attention_masks: AttentionMasksType | None,
        positions: torch.Tensor | None,
        sequence: SequenceLayout,
    ) -> torch.Tensor:
        """Computes attention inside each document.

        Args:
            x_BLD: hidden states of this CP rank's tokens, `[B, L, D]`.
            attention_masks: the block mask of FlexAttention; `DocumentAttention` ignores it.
            positions: positions inside documents, `[B, L]`.
            sequence: the documents of this forward.

        Returns:
            `[B, L, D]` in the dtype of `x_BLD`.
        """
        q_BLNH, gate_BLNH = local_head_split(self.wq(x_BLD), 2 * self.head_dim).chunk(2, -1)
        k_BLMH, v_BLMH = self.key_value(self.wk, x_BLD), self.key_value(self.wv, x_BLD)
        q_BLNH, k_BLMH = self.rope(self.q_norm(q_BLNH), self.k_norm(k_BLMH), positions)
        out_BLNH = self.inner_attention(
            q_BLNH,
            k_BLMH,
            v_BLMH,
            attention_masks=attention_masks,
            scale=self.head_dim**-0.5,
            enable_gqa=self.enable_gqa,
            sequence=sequence,
        )
        return self.wo((out_BLNH * gate_BLNH.sigmoid()).flatten(2))


def _head_norm() -> ShardingConfig:
    """The placements of a norm inside heads. The gradient of its shared weight is summed over TP."""
    heads = dense_activation_placement(tp=spmd.S(2))
    return ShardingConfig(
        state_shardings={"weight": dense_param_placement(tp=spmd.R)},
        in_src_shardings={"input": heads},
        out_src_shardings=heads,
    )


def _replicated_key_value() -> ShardingConfig:
    """The placements of `wk` and `wv` if TP ranks outnumber key-value heads.

    The weight is replicated, and the output of each rank is its own head.
    """
    replicated = dense_activation_placement(tp=spmd.R)
    return ShardingConfig(
        state_shardings={"weight": dense_param_placement(tp=spmd.R)},
        in_src_shardings={"input": replicated},
        in_dst_shardings={"input": replicated},
        out_src_shardings=dense_activation_placement(tp=spmd.S(2)),
        local_map=LocalMapConfig(in_grad_placements=(dense_activation_placement(tp=spmd.P),)),
    )
