"""The `config.json` of Qwen3-Next, as published and as transformers 5 saves it."""

from typing import Any

from titan_gdn.models.hybrid.gated_hf_config import COMPLETE, DENSE, EXPERTS, ONLY, SHARED
from titan_gdn.models.hybrid.hf_config import ConfigJson, Entry, Fields, Same
from titan_gdn.models.qwen3_next.model import Qwen3NextArguments


class DenseLayers(Entry):
    """Which layers have no experts."""

    also = ("decoder_sparse_step", "n_experts")

    def read(self, fields: Fields) -> dict[str, Any]:  # noqa: D102
        return {
            "decoder_sparse_step": fields.get("decoder_sparse_step", kind=int, default=1),
            "mlp_only_layers": fields.get("mlp_only_layers", kind=list[int], default=None),
        }

    def write(self, arguments: Qwen3NextArguments, fields: Fields) -> None:  # noqa: D102
        fields["decoder_sparse_step"] = arguments.decoder_sparse_step
        fields["mlp_only_layers"] = arguments.mlp_only_layers or []

    def values(self, arguments: Qwen3NextArguments) -> dict[str, Any]:  # noqa: D102
        return {"mlp_only_layers": [i for i in range(arguments.n_layers) if not arguments.sparse(i)]}

    def path(self, argument: str, fields: Fields) -> str:  # noqa: D102
        return {"decoder_sparse_step": "decoder_sparse_step", "n_experts": "num_experts"}.get(
            argument, "mlp_only_layers"
        )


config_json = ConfigJson(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    arguments=Qwen3NextArguments,
    entries=(*SHARED, *DENSE, *EXPERTS, Same("norm_topk_prob", "norm_topk_prob", bool), DenseLayers()),
    only=ONLY | {"use_sliding_window": (False,), "sliding_window": (None,)},
    change_nothing=frozenset({"max_window_layers"}),
    complete=COMPLETE,
)

arguments_of = config_json.arguments_of
hf_config_of = config_json.hf_config_of
