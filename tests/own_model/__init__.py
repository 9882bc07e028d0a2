"""A family of dense models as a user would add one: its arguments, its flavors, its names in files.

It has the layer of `tests.own_layer` and gated attention, which it takes from `titan_gdn.layers`.
"""

from dataclasses import dataclass
from functools import partial

from torch import nn
from torchtitan.tools.utils import device_type

from tests.own_layer import OwnLayer
from titan_gdn.layers.document_attention import inner_attention
from titan_gdn.layers.gated_attention import GatedAttention
from titan_gdn.layers.initialization import linear
from titan_gdn.layers.norms import OffsetRMSNorm
from titan_gdn.layers.rotary import PartialRotary
from titan_gdn.models.hybrid import Flavor, model_spec
from titan_gdn.models.hybrid.builders import HybridArguments, decoder, feed_forward
from titan_gdn.models.hybrid.config_registry import DEBUG_RUN
from titan_gdn.models.hybrid.state_dict_adapter import LAYER, HybridStateDictAdapter


@dataclass(frozen=True, kw_only=True)
class OwnArguments(HybridArguments):
    head_dim: int = 32
    """Width of the heads of the full attention."""

    def config(self):
        return decoder(
            self,
            linear_attention=lambda: OwnLayer.configure(self.linear_attention_widths()),
            attention=self._attention,
            mlp=lambda i: feed_forward(self.dim, self.hidden_dim),
            norm=self._norm,
        )

    def _norm(self, width):
        return OffsetRMSNorm.Config(dim=width, eps=self.norm_eps, param_init={"weight": nn.init.zeros_})

    def _attention(self):
        return GatedAttention.Config(
            n_heads=self.n_heads,
            n_key_value_heads=self.n_heads,
            head_dim=self.head_dim,
            rope=PartialRotary.Config(dim=self.head_dim, max_seq_len=4096, theta=1e4),
            wq=linear(self.dim, 2 * self.n_heads * self.head_dim),
            wk=linear(self.dim, self.n_heads * self.head_dim),
            wv=linear(self.dim, self.n_heads * self.head_dim),
            wo=linear(self.n_heads * self.head_dim, self.dim),
            q_norm=self._norm(self.head_dim),
            k_norm=self._norm(self.head_dim),
            inner_attention=inner_attention(device_type),
        )


class OwnAdapter(HybridStateDictAdapter):
    layer = LAYER | {
        f"{layer}.{name}": f"{layer}.{name}"
        for layer, names in {
            "linear_attention": (
                *(f"{name}.weight" for name in ("in_proj_qkv", "in_proj_b", "in_proj_a", "gate_in")),
                *(f"{name}.weight" for name in ("gate_out", "conv", "norm", "out_proj")),
                "decay.A_log",
                "decay.dt_bias",
            ),
            "attention": [f"{name}.weight" for name in ("wq", "wk", "wv", "wo", "q_norm", "k_norm")],
        }.items()
        for name in names
    }
    experts = {}
    rows = ()
    prefix = "model.language_model."


_DEBUG = {
    "vocab_size": 264,
    "dim": 64,
    "n_layers": 2,
    "full_attention_interval": 2,
    "norm_eps": 1e-6,
    "n_heads": 4,
    "n_linear_key_heads": 4,
    "n_linear_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "hidden_dim": 96,
}
flavors = {"debug": Flavor(OwnArguments(**_DEBUG), DEBUG_RUN)}
model_registry = partial(model_spec, "own_model", flavors, OwnAdapter)
