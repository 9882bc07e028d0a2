"""Qwen3-Next: its flavors and its `model_registry`."""

from functools import partial

from titan_gdn.models.hybrid import Flavor, model_spec
from titan_gdn.models.hybrid.config_registry import DEBUG_RUN
from titan_gdn.models.hybrid.gated import DEBUG, DEBUG_MOE
from titan_gdn.models.qwen3_next.hf_config import config_json as config_json
from titan_gdn.models.qwen3_next.model import Qwen3NextArguments
from titan_gdn.models.qwen3_next.state_dict_adapter import Qwen3NextStateDictAdapter

flavors: dict[str, Flavor] = {
    "debug": Flavor(Qwen3NextArguments(**DEBUG), DEBUG_RUN),
    "debug_moe": Flavor(Qwen3NextArguments(**DEBUG_MOE), DEBUG_RUN),
    "80B-A3B": Flavor(Qwen3NextArguments()),
    # The model card extends the context to a million tokens with YaRN by a factor of 4.
    "80B-A3B-1M": Flavor(Qwen3NextArguments(yarn_factor=4.0), changes=("yarn_factor",)),
}

model_registry = partial(model_spec, "qwen3_next", flavors, Qwen3NextStateDictAdapter)
