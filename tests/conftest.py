"""Without an accelerator TorchTitan needs our shim before it is imported, by tests as by the command."""

import torch

from titan_gdn import cpu

cpu.enable()
torch.set_num_threads(1)
