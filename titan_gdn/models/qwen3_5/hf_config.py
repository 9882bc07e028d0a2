"""The `config.json` of Qwen3.5: that of the text model, or that of the whole model, which contains it."""

from titan_gdn.models.hybrid.gated_hf_config import COMPLETE, DENSE, EXPERTS, ONLY, SHARED
from titan_gdn.models.hybrid.hf_config import ConfigJson, ConfigJsons, Implied, WholeModel
from titan_gdn.models.qwen3_5.model import Qwen3_5Arguments

_ONLY = ONLY | {"mtp_use_dedicated_embeddings": (False,)}
# Positions of images, which texts do not have; see `titan_gdn.models.qwen3_5.model`.
_MROPE = frozenset({"rope_parameters.mrope_section", "rope_parameters.mrope_interleaved"})

config_json = ConfigJsons(
    dense=ConfigJson(
        model_type="qwen3_5_text",
        architecture="Qwen3_5ForCausalLM",
        arguments=Qwen3_5Arguments,
        entries=(*SHARED, *DENSE, Implied("n_experts", 0)),
        only=_ONLY,
        change_nothing=_MROPE,
        complete=COMPLETE,
        whole=WholeModel("qwen3_5", "Qwen3_5ForConditionalGeneration", "text_config"),
    ),
    sparse=ConfigJson(
        model_type="qwen3_5_moe_text",
        architecture="Qwen3_5MoeForCausalLM",
        arguments=Qwen3_5Arguments,
        entries=(*SHARED, *EXPERTS),
        only=_ONLY,
        change_nothing=_MROPE,
        complete=COMPLETE,
        whole=WholeModel("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "text_config"),
    ),
)
