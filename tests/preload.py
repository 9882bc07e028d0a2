"""The imports of the server that ranks are forked from (see tests/ranks.py)."""

import logging
import warnings

warnings.simplefilter("ignore")
logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)

from titan_gdn.runtime import cpu  # noqa: E402

cpu.enable()

import torch  # noqa: E402

torch.set_num_threads(1)

import torch.distributed.checkpoint  # noqa: E402, F401

import titan_gdn.config.load  # noqa: E402, F401
import titan_gdn.models.kimi_linear.config_registry  # noqa: E402, F401
import titan_gdn.models.qwen3_5.config_registry  # noqa: E402, F401
import titan_gdn.models.qwen3_next.config_registry  # noqa: E402, F401
