"""Operators: pure functions of local tensors. Importing them imports neither TorchTitan nor FLA."""

from titan_gdn.ops.causal_conv1d import causal_conv1d
from titan_gdn.ops.document_attention import document_attention
from titan_gdn.ops.gated_delta_rule import chunk_gated_delta_rule
from titan_gdn.ops.gates import gdn_gate, kda_gate
from titan_gdn.ops.kda import chunk_kda

__all__ = [
    "causal_conv1d",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "document_attention",
    "gdn_gate",
    "kda_gate",
]
