"""Multi-head latent attention (arXiv 2405.04434) without rotary embedding.

The keys and values of all heads are projected from one compressed vector per token. All heads share a further
part of the key, which carries the position in models that rotate it.

Shape suffixes: B batch, S tokens of this rank between layers, L tokens of this CP rank, T all tokens, D model
width, C width of the compressed vector plus the shared part of the key, N heads, H head width of queries and
keys, V head width of values.
"""

from dataclasses import dataclass

import spmd_types as spmd
import torch
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.models.common import Linear, RMSNorm
from torchtitan.models.common.attention import AttentionMasksType, BaseAttention

from titan_gdn.layers.document_attention import DocumentAttention, DocumentFlexAttention
from titan_gdn.layers.local_tensor import apply
from titan_gdn.layers.sharding import local_region, set_weights
from titan_gdn.parallel.collectives import gather_all, gather_sequence, in_shards
from titan_gdn.parallel.sequence import SequenceLayout


class LatentAttention(BaseAttention):
    """Full attention over compressed keys and values, as in Kimi Linear (arXiv 2510.26692).

    Reference: transformers, `KimiLinearAttention`.

    Parameters, with `H = key_head_dim + qk_rope_head_dim` and `V = value_head_dim`: `wq.weight` `[N*H, D]`,
    `wkv_a.weight` `[kv_lora_rank + qk_rope_head_dim, D]`, `kv_norm.weight` `[kv_lora_rank]`, `wkv_b.weight`
    `[N*(key_head_dim + V), kv_lora_rank]` (for each head its key, then its value), `wo.weight` `[D, N*V]`.
    Heads are sharded over TP; `wkv_a` and `kv_norm` are replicated.

    The layer works on local tensors (see its `sharding_config`). Each rank applies `wkv_a` to its own tokens.
    The results are gathered over CP, and over TP under sequence parallelism, because they are far narrower
    than the keys and values that each rank then computes from them for its own heads.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseAttention.Config):
        n_heads: int
        kv_lora_rank: int
        key_head_dim: int
        qk_rope_head_dim: int
        value_head_dim: int
        wq: Linear.Config
        wkv_a: Linear.Config
        kv_norm: RMSNorm.Config
        wkv_b: Linear.Config
        wo: Linear.Config
        inner_attention: DocumentAttention.Config | DocumentFlexAttention.Config

        @property
        def pair_width(self) -> int:
            """Products per head and pair of tokens: the width of a key plus the width of a value."""
            return self.key_head_dim + self.qk_rope_head_dim + self.value_head_dim

        def set_sharding(self, *, tp: int, enable_sp: bool) -> None:
            """Declares the placements of the layer's parameters, inputs and outputs.

            Args:
                tp: degree of tensor parallelism.
                enable_sp: whether hidden states between layers are sharded over TP.
            """
            set_weights(spmd.S(0), self.wq, self.wkv_b)
            set_weights(spmd.R, self.wkv_a, self.kv_norm)
            set_weights(spmd.S(1), self.wo)
            self.sharding_config = local_region(enable_sp, "x_BSD")

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.kv_lora_rank = config.kv_lora_rank
        self.key_head_dim = config.key_head_dim
        self.qk_rope_head_dim = config.qk_rope_head_dim
        self.value_head_dim = config.value_head_dim
        self.wq = config.wq.build()
        self.wkv_a = config.wkv_a.build()
        self.kv_norm = config.kv_norm.build()
        self.wkv_b = config.wkv_b.build()
        self.wo = config.wo.build()
        self.inner_attention = config.inner_attention.build()
        self.cp_mesh: DeviceMesh | None = None
        self.tp_mesh: DeviceMesh | None = None

    def split_sequence(self, cp_mesh: DeviceMesh | None, tp_mesh: DeviceMesh | None) -> None:
        """Sets the sub-meshes over which sequences are sharded.

        Args:
            cp_mesh: the CP sub-mesh, None without context parallelism.
            tp_mesh: the TP sub-mesh if hidden states are sharded over it between layers, else None.
        """
        self.cp_mesh, self.tp_mesh = cp_mesh, tp_mesh

    def forward(
        self,
        x_BSD: torch.Tensor,
        *,
        attention_masks: AttentionMasksType | None,
        sequence: SequenceLayout,
        **_: object,
    ) -> torch.Tensor:
        """Computes attention inside each document.

        Args:
            x_BSD: hidden states of this rank's tokens, `[B, L, D]`, or `[B, L / tp, D]` if they are sharded
                over TP.
            attention_masks: the block mask of FlexAttention; `DocumentAttention` ignores it.
            sequence: the documents of this forward.

        Returns:
            `[B, L, D]`, under TP a partial sum.
        """
        q_width = self.key_head_dim + self.qk_rope_head_dim
        q_BLNH = apply(self.wq, gather_sequence(x_BSD, self.tp_mesh)).unflatten(-1, (-1, q_width))
        k_BTNH, v_BTNV = self.expand(self.gather(apply(self.wkv_a, x_BSD, partial_grad=True), sequence))
        out_BLNV = self.inner_attention(
            q_BLNH,
            k_BTNH,
            v_BTNV,
            attention_masks=attention_masks,
            scale=q_width**-0.5,
            sequence=sequence,
        )
        return apply(self.wo, out_BLNV.flatten(2))

    def gather(self, kv_BSC: torch.Tensor, sequence: SequenceLayout) -> torch.Tensor:
        """Gathers `wkv_a(x)` of all tokens, `[B, T, C]`, in the order that the inner attention takes."""
        kv_BTC = in_shards(gather_all(kv_BSC, self.cp_mesh, self.tp_mesh), self.cp_mesh, self.tp_mesh)
        return kv_BTC if self.cp_mesh is None else self.inner_attention.order_keys(kv_BTC, sequence)

    def expand(self, kv_BTC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the keys `[B, T, N, H]` and values `[B, T, N, V]` of this rank's heads."""
        kv_BTC, shared_BTC = kv_BTC.split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        kv_BTC = apply(self.kv_norm, kv_BTC, partial_grad=True)
        kv_BTNC = apply(self.wkv_b, kv_BTC).unflatten(-1, (-1, self.key_head_dim + self.value_head_dim))
        k_BTNC, v_BTNV = kv_BTNC.split([self.key_head_dim, self.value_head_dim], -1)
        shared_BTNC = shared_BTC.unsqueeze(2).expand(-1, -1, k_BTNC.shape[2], -1)
        return torch.cat([k_BTNC, shared_BTNC], -1), v_BTNV
