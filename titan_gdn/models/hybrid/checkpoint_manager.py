"""TorchTitan's checkpoints, with a last save in the Hugging Face format that is a whole model directory."""

import os
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpointer import MODEL, CheckpointManager
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger

from titan_gdn.checkpoint.export import export, record_source, recorded_source
from titan_gdn.checkpoint.model_directory import ModelDirectory
from titan_gdn.models.hybrid.state_dict_adapter import HybridStateDictAdapter


class HybridCheckpointManager(CheckpointManager):
    """Extends TorchTitan's manager: it remembers where weights came from, and exports beside the same files.

    Each step that it saves holds the path of the model directory that the run began with, so that a resumed
    run exports what the first one would have.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """The section `[checkpoint]`: `CheckpointManager.Config`, with another default."""

        export_dtype: Literal["float16", "bfloat16", "float32"] | None = None  # pyright: ignore
        """Model dtype used by a final model-only checkpoint. "none" gives each tensor of Hugging Face files
        the dtype that it had in the files that the run began with."""

    def __init__(self, config: Config, **states: Any) -> None:
        # TorchTitan's default is float32, which its DCP checkpoints of the model alone keep.
        super().__init__(replace(config, export_dtype=config.export_dtype or "float32"), **states)
        self._export_dtype = config.export_dtype and TORCH_DTYPE_MAP[config.export_dtype]
        self._source: str | None = None

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Extends `CheckpointManager.dcp_load`: remembers where the weights came from.

        A rank reads Hugging Face files into its shards, of which it makes no copies.
        """
        if from_hf and isinstance(self.sd_adapter, HybridStateDictAdapter):
            reader = self.sd_adapter.get_hf_storage_reader(checkpoint_id, from_quantized)
            dcp.load(self.sd_adapter.to_load(state_dict), storage_reader=reader)
            self.states[MODEL].load_state_dict(state_dict)
        else:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        if from_hf:
            self._source = checkpoint_id
        elif not filesystem.is_remote(checkpoint_id):
            self._source = recorded_source(checkpoint_id, self._initial_source())

    def dcp_save(self, state_dict: dict[str, Any], checkpoint_id: str, *args: Any, **kwargs: Any) -> Any:
        """Extends `CheckpointManager.dcp_save`: the folder says where the weights came from."""
        if dist.get_rank() == 0 and not filesystem.is_remote(checkpoint_id):
            record_source(checkpoint_id, self._source)
        return super().dcp_save(state_dict, checkpoint_id, *args, **kwargs)

    def _save_last_step(self, curr_step: int) -> None:
        """Replaces the save in the Hugging Face format; leaves others to TorchTitan."""
        if not self.last_save_in_hf or not isinstance(self.sd_adapter, HybridStateDictAdapter):
            super()._save_last_step(curr_step)
            return
        folder = self._create_checkpoint_id(curr_step)
        logger.info(f"Exporting the model to {os.path.abspath(folder)}")
        state_dict = self.sd_adapter.to_hf(self.states[MODEL].state_dict())
        source = None if self._source is None else ModelDirectory.read(self._source)
        if source is not None:
            state_dict = self.sd_adapter.as_in(source.tensors, state_dict)
        if self._export_dtype is not None:
            state_dict = {key: value.to(self._export_dtype) for key, value in state_dict.items()}
        dtype = self._export_dtype
        if source is None:
            dtype = next(iter(state_dict.values())).dtype
        export(state_dict, folder, self.sd_adapter.beside(source, dtype))

    def _initial_source(self) -> str | None:
        """The model directory that the configuration says a new run begins with."""
        if not self.initial_load_in_hf:
            return None
        return self.initial_load_path or (self.sd_adapter and self.sd_adapter.hf_assets_path)
