"""Checks the folders and files that a run writes, before the run rather than at its first save."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress

from torchtitan.trainer import Trainer

from titan_gdn.config.source import ConfigError

_BLOCK = b"\0" * 4096


def check_folders(config: Trainer.Config) -> None:
    """Check that each folder which the run will write to exists or can be made, and takes a file.

    Nothing is made: the nearest folder that exists takes a file without a name, which is gone at once. Remote
    folders ("://") are not checked.

    Raises:
        ConfigError: A folder is a file, is "", or cannot be written to; the message names its key.
    """
    dump = config.dump_folder
    if "://" in dump:
        return
    _check_folder("job.dump_folder", dump, dump)
    for key, value in _folders(config):
        if "://" not in value:
            _check_folder(key, value, os.path.join(dump, value))
    file = config.debug.save_config_file
    if file is not None:
        key, path = "debug.save_config_file", os.path.join(dump, file)
        if not os.path.basename(path) or os.path.isdir(path):
            raise ConfigError(f'{key} = "{file}": expected the name of a file, not of a folder')
        _check_folder(key, file, os.path.dirname(path))
    prefix = config.comm.save_traces_file_prefix
    if os.path.basename(prefix) != prefix:
        raise ConfigError(
            f'comm.save_traces_file_prefix = "{prefix}": expected the beginning of a file\'s name, without '
            '"/"; the folder is comm.save_traces_folder'
        )


def _folders(config: Trainer.Config) -> Iterator[tuple[str, str]]:
    """The keys of the folders below `job.dump_folder` that this run writes to, with their values."""
    checkpoint, metrics, profiler = config.checkpoint, config.metrics, config.profiler
    if checkpoint.enable and not checkpoint.load_only:
        yield "checkpoint.folder", checkpoint.folder
    if metrics.enable_tensorboard or metrics.enable_wandb:
        yield "metrics.save_tb_folder", metrics.save_tb_folder
    if profiler.enable_profiling:
        yield "profiler.save_traces_folder", profiler.save_traces_folder
    if profiler.enable_memory_snapshot:
        yield "profiler.save_memory_snapshot_folder", profiler.save_memory_snapshot_folder
    if config.comm.trace_buf_size > 0:
        yield "comm.save_traces_folder", config.comm.save_traces_folder


def _check_folder(key: str, value: str, path: str) -> None:
    if not value.strip():
        raise ConfigError(f'{key} = "{value}": expected the name of a folder')
    existing, missing = os.path.abspath(path), []
    while not os.path.lexists(existing):
        existing, name = os.path.split(existing)
        missing.append(name)
    try:
        for name in missing:
            with suppress(FileNotFoundError, NotADirectoryError):
                os.lstat(os.path.join(existing, name))  # raises if the name is too long
        if os.path.isdir(existing):
            with tempfile.TemporaryFile(dir=existing) as file:  # unlike os.access, true for every user
                file.write(_BLOCK)
            return
        problem = ""
    except OSError as error:
        problem = f" ({error.strerror})"
    raise ConfigError(
        f'{key} = "{value}": "{existing}" is not a directory that this user may write to{problem}'
    )
