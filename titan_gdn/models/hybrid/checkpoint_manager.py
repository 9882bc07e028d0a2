"""TorchTitan's checkpoints, safe against interruptions, with a last save that is a whole model directory."""

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torchtitan.components.checkpointer import MODEL, CheckpointManager
from torchtitan.components.checkpointer.dcp import AsyncMode
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

from titan_gdn.checkpoint.checksums import StepWriter, damaged, has_checksums
from titan_gdn.checkpoint.export import export, record_source, recorded_source
from titan_gdn.checkpoint.model_directory import ModelDirectory, ModelDirectoryError
from titan_gdn.checkpoint.steps import (
    MARKERS,
    STEP_FILES,
    SaveError,
    complete_steps,
    incomplete_steps,
    path_of,
    remove_files,
    stale_steps,
)
from titan_gdn.checkpoint.trusted import StepError, StepPlanner, StepReader
from titan_gdn.models.hybrid.state_dict_adapter import HybridStateDictAdapter


class HybridCheckpointManager(CheckpointManager):
    """Extends TorchTitan's manager: it remembers where weights came from, and exports beside the same files.

    Each step that it saves holds the path of the model directory that the run began with, so that a resumed
    run exports what the first one would have. A step that is saved over another is not taken for complete
    until it is, and only complete steps count when old ones are purged.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """The section `[checkpoint]`: `CheckpointManager.Config`, with another default."""

        export_dtype: Literal["float16", "bfloat16", "float32"] | None = None  # pyright: ignore
        """Model dtype used by a final model-only checkpoint. "none" gives each tensor of Hugging Face files
        the dtype that it had in the files that the run began with."""

        save_on_signal: bool = True
        """Whether Ctrl-C and SIGTERM save the step after which they end the run"""

    def __init__(self, config: Config, **states: Any) -> None:
        # TorchTitan's default is float32, which its DCP checkpoints of the model alone keep.
        super().__init__(replace(config, export_dtype=config.export_dtype or "float32"), **states)
        self._export_dtype = config.export_dtype and TORCH_DTYPE_MAP[config.export_dtype]
        self._save_on_signal = config.save_on_signal
        self._now = False
        self._source: str | None = None
        self._at: str | None = None  # what was loaded or saved last

    def save_early(self, step: int) -> None:
        """Saves the last step of a run whose data ended before `training.steps`.

        If the step was just saved or loaded with its training state, it is not saved again without it.
        """
        if not self.enable or self.load_only:
            return
        self.maybe_wait_for_saving()
        if self.last_save_in_hf or self._at != self._create_checkpoint_id(step):
            self.save(step, last_step=True)

    def save_now(self, step: int) -> bool:
        """Saves a step with its training state, whatever the interval, unless it was just saved or loaded.

        Returns:
            Whether the step is saved: not if `enable` or `save_on_signal` is off, or the run only loads.
        """
        if not self.enable or self.load_only or not self._save_on_signal:
            return False
        self.maybe_wait_for_saving()
        if self._at != self._create_checkpoint_id(step):
            self._now = True
            self.save(step)
            self.maybe_wait_for_saving()
        return True

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        return (self._now and not self.load_only) or super()._should_save(curr_step, last_step)

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
        elif from_hf or filesystem.is_remote(checkpoint_id):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        else:
            self._load_step(state_dict, checkpoint_id)
        self._at = checkpoint_id
        if from_hf:
            self._source = checkpoint_id
        elif not filesystem.is_remote(checkpoint_id):
            self._source = recorded_source(checkpoint_id, self._initial_source())

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Extends `CheckpointManager.dcp_save`: the folder has checksums and says where weights came from.

        Raises:
            SaveError: some rank could not write.
        """
        try:
            # Other ranks write only after the first one has collected their plans, and so after this.
            if dist.get_rank() == 0 and not filesystem.is_remote(checkpoint_id):
                remove_files(checkpoint_id, STEP_FILES)
                record_source(checkpoint_id, self._source, self._tied())
            self._at = checkpoint_id
            if filesystem.is_remote(checkpoint_id) or to_hf:
                return super().dcp_save(
                    state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
                )
            return self._save_step(state_dict, checkpoint_id, async_mode, enable_garbage_collection)
        except (CheckpointException, OSError) as error:
            raise self._save_error(error) from error

    def _save_step(
        self, state_dict: dict[str, Any], folder: str, async_mode: AsyncMode, enable_garbage_collection: bool
    ) -> Any:
        """As `CheckpointManager.dcp_save` for local folders, with a writer that computes checksums."""
        writer = StepWriter(folder)
        if async_mode == AsyncMode.DISABLED:
            dcp.save(state_dict, storage_writer=writer)
            if enable_garbage_collection:
                GarbageCollection.collect("GC collection invoked by checkpointer.")
            return None
        if async_mode == AsyncMode.ASYNC:
            return dcp.async_save(state_dict, storage_writer=writer, process_group=self.pg)
        return dcp.async_save(
            state_dict,
            storage_writer=writer,
            process_group=self.pg,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=self.stager,
        )

    def _load_step(self, state_dict: dict[str, Any], folder: str) -> None:
        """As `CheckpointManager.dcp_load`, but damaged files and foreign code are refused by name."""
        if not has_checksums(folder):
            logger.warning(f"{folder} has no checksums: damage of its files is not noticed")
        # Every rank reads a part of the files, and all of them hear of what one has found.
        found: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, damaged(folder, dist.get_rank(), dist.get_world_size()))
        if problem := next(filter(None, found), None):
            raise StepError(problem)
        dcp.load(state_dict, storage_reader=StepReader(folder), planner=StepPlanner(folder))
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)

    def _wait_for_saving(self) -> None:
        """Extends `CheckpointManager._wait_for_saving`: says which step could not be saved."""
        try:
            super()._wait_for_saving()
        except (CheckpointException, OSError) as error:
            raise self._save_error(error) from error

    def _save_error(self, error: BaseException) -> SaveError:
        """The error of a failed save, which says what is left."""
        if isinstance(error, CheckpointException) and error.failures:
            errors = [failure for failure, _ in error.failures.values()]
            # When a file cannot be written, torch.save may raise a RuntimeError about its own position.
            error = next((one for one in errors if isinstance(one, OSError)), errors[0])
        reason = f"{type(error).__name__}: {error}"
        if "unexpected pos" in reason:  # what torch.save says in place of the system's error
            reason = "a file could not be written to its end"
        if not os.path.isdir(self.folder):  # remote, or it could not be created
            return SaveError(f'the step could not be saved to "{self._at}": {reason}')
        whole = complete_steps(self.folder)
        left = f"The newest complete one is step-{whole[-1]}." if whole else "No step is complete."
        free = f"{shutil.disk_usage(self.folder).free:,} bytes are free on its disk"
        return SaveError(f'the step could not be saved to "{self._at}": {reason} ({free}). {left}')

    def _find_load_step(self, folder: str = "") -> int:
        """Replaces the search by one that knows names such as `step-5.bak` from steps."""
        folder = folder or self.folder
        if filesystem.is_remote(folder):
            return super()._find_load_step(folder)
        newest = max(complete_steps(folder), default=-1)
        if broken := [step for step in incomplete_steps(folder) if step > newest]:
            begin = f"step-{newest}" if newest >= 0 else "the beginning"
            logger.warning(
                f"{path_of(folder, broken[-1])} is not complete, because its save was interrupted: the run "
                f"goes on from {begin}"
            )
        return newest

    def _purge_stale_checkpoints(self) -> None:
        """Replaces a purge that counts incomplete steps, and so may remove the last complete one."""
        if filesystem.is_remote(self.folder):
            super()._purge_stale_checkpoints()
        elif self._should_purge():
            for path in stale_steps(self.folder, self.keep_latest_k):
                if path != self._at:
                    with suppress(OSError):  # the thread that purges logs it
                        remove_files(path, MARKERS)  # at once: a step that is half purged is not complete
                    self.purge_queue.put(path)

    def _save_last_step(self, curr_step: int) -> None:
        """Replaces the save in the Hugging Face format; leaves others to TorchTitan."""
        if not self.last_save_in_hf or not isinstance(self.sd_adapter, HybridStateDictAdapter):
            super()._save_last_step(curr_step)
            return
        folder = self._create_checkpoint_id(curr_step)
        keeps_step = self._at == folder  # data ended right behind a step that holds the training state
        self._at = folder
        logger.info(f"Exporting the model to {os.path.abspath(folder)}")
        dtype = self._export_dtype
        try:
            source = None if self._source is None else ModelDirectory.read(self._source)
            state_dict = self.sd_adapter.to_hf(self.states[MODEL].state_dict())
            if source is not None:
                state_dict = self.sd_adapter.as_in(source.tensors, state_dict)
            if dtype is not None:
                state_dict = {key: value.to(dtype) for key, value in state_dict.items()}
            if source is None:
                dtype = next(iter(state_dict.values())).dtype
            beside = self.sd_adapter.beside(source, dtype)
            export(state_dict, folder, beside, keeps_step=keeps_step)
        except (CheckpointException, ModelDirectoryError, OSError) as error:
            raise self._save_error(error) from error

    def _tied(self) -> bool | None:
        """Whether the output layer is the embedding, None if the adapter does not say so."""
        if not isinstance(self.sd_adapter, HybridStateDictAdapter):
            return None
        return self.sd_adapter.model_config.enable_weight_tying

    def _initial_source(self) -> str | None:
        """The model directory that the configuration says a new run begins with."""
        if not self.initial_load_in_hf:
            return None
        return self.initial_load_path or (self.sd_adapter and self.sd_adapter.hf_assets_path)
