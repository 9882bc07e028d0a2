"""Checks of a whole configuration, before anything is built.

`check_run` needs nothing but the configuration, so that the planner can check a run of another machine;
`check` also looks at this machine: its devices, the folders that are written, the tokenizer, the data and the
checkpoints.
"""

import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config import ParallelismConfig
from torchtitan.trainer import Trainer

from titan_gdn.config.checkpoint_checks import check_checkpoint
from titan_gdn.config.folder_checks import check_folders
from titan_gdn.config.input_checks import check_data, check_tokenizer
from titan_gdn.config.machine_checks import check_machine
from titan_gdn.config.source import ConfigError, one_of


def check(config: Trainer.Config, world_size: int) -> None:
    """Check a run that starts on this machine.

    Raises:
        ConfigError: As `check_run`; also, a folder or data is missing, or this machine cannot run it.
    """
    if config.comm.mode == "fake_backend":  # TorchTitan's dry run: one process stands for all ranks
        world_size = _dry_ranks()
    check_run(config, world_size)
    _raised(_model(config).check_device)
    check_machine(config)
    check_folders(config)
    check_tokenizer(config.hf_assets_path, _model(config))
    check_checkpoint(config)
    check_data("dataloader", config.dataloader)
    if config.validator.enable:
        check_data("validator.dataloader", config.validator.dataloader)


def _dry_ranks() -> int:
    """The number of ranks of a dry run, which TorchTitan reads from the environment."""
    ranks = os.environ.get("NGPU", "")
    if not ranks.isdecimal() or int(ranks) < 1:
        raise ConfigError(
            f'comm.mode = "fake_backend": the environment variable NGPU = "{ranks}" must be the number of '
            "ranks, as in NGPU=64 torchrun --nproc-per-node 1 ..."
        )
    return int(ranks)


def check_run(config: Trainer.Config, world_size: int) -> None:
    """Check a run independently of the machine, including the model's own checks.

    Raises:
        ConfigError: The product of the degrees is not `world_size`, a size is not divisible by a degree, or
            a feature is not supported.
    """
    shard = _check_degrees(config.parallelism, world_size)
    _check_sizes(config, world_size)
    _check_numbers(config)
    _check_workers("dataloader", config.dataloader)
    if config.validator.enable:
        _check_workers("validator.dataloader", config.validator.dataloader)
    _check_supported(config, world_size)
    resolved = replace(config.parallelism, data_parallel_shard_degree=shard)
    _raised(_model(config).check, replace(config, parallelism=resolved))
    # The loss computes the logits of one chunk of the sequence at a time, to save memory.
    chunks = getattr(config.loss, "num_chunks", 1) * config.parallelism.context_parallel_degree
    if config.training.seq_len % chunks:
        raise ConfigError(
            f"training.seq_len = {config.training.seq_len}: expected a multiple of {chunks} (the number of "
            "chunks of the loss times parallelism.context_parallel_degree)"
        )


def _model(config: Trainer.Config) -> Any:
    """The model's configuration, a `HybridModel.Config`; TorchTitan annotates its base class."""
    assert config.model_spec is not None
    return config.model_spec.model


def _raised(check: Callable[..., None], *args: Trainer.Config) -> None:
    """Run a check that raises ValueError, and raise its error as a ConfigError."""
    try:
        check(*args)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_supported(config: Trainer.Config, world_size: int) -> None:
    """Options that TorchTitan has, but not for every value or not with this project's layers."""
    backend, backends = config.compile.backend, torch.compiler.list_backends(exclude_tags=())
    if config.compile.enable and backend not in backends:
        raise ConfigError(f'compile.backend = "{backend}" is unknown.{one_of(backend, backends)}')
    budget = getattr(config.activation_checkpoint, "memory_budget", 1.0)
    if not 0 <= budget <= 1:
        raise ConfigError(f"activation_checkpoint.memory_budget = {budget}: expected a number from 0 to 1")
    if config.debug.spmd_typechecking:
        raise ConfigError(
            "debug.spmd_typechecking = true is not supported: the exchanges of linear attention are not typed"
        )
    if getattr(config.debug, "name_nonfinite", False):
        key = "debug.name_nonfinite = true"
        if config.compile.enable and "model" in config.compile.components:
            raise ConfigError(
                f"{key} looks at the output of every module, which compiled blocks do not have: set "
                "compile.enable = false in the run that names the tensor"
            )
        if config.comm.mode == "fake_backend":
            raise ConfigError(f'{key}: a dry run (comm.mode = "fake_backend") computes no numbers to look at')
    if config.comm.mode == "local_tensor":
        raise ConfigError(
            'comm.mode = "local_tensor" is not supported: the data loader serves one rank per process. '
            "Possible: default, fake_backend."
        )
    if config.checkpoint.create_seed_checkpoint and not (config.checkpoint.enable and world_size == 1):
        raise ConfigError(
            "checkpoint.create_seed_checkpoint = true needs checkpoint.enable = true and a single rank"
        )
    if config.checkpoint.create_seed_checkpoint and config.checkpoint.last_save_in_hf:
        raise ConfigError(
            "checkpoint.create_seed_checkpoint = true: with checkpoint.last_save_in_hf = true, Hugging Face "
            "files would be written instead of a step; set --checkpoint.no-last_save_in_hf"
        )


def _check_degrees(parallelism: ParallelismConfig, world_size: int) -> int:
    """Check the degrees as TorchTitan's `ParallelDims` does, with a message that names the keys.

    Returns:
        `data_parallel_shard_degree`, with -1 resolved to the number of remaining ranks.
    """
    degrees = {
        f"{name}_degree": getattr(parallelism, f"{name}_degree")
        for name in (
            "data_parallel_replicate",
            "data_parallel_shard",
            "context_parallel",
            "tensor_parallel",
            "pipeline_parallel",
            "expert_parallel",
        )
    }
    for name, degree in degrees.items():
        least = ", or -1 for all remaining ranks" if name == "data_parallel_shard_degree" else ""
        if degree < 1 and not (least and degree == -1):
            raise ConfigError(f"parallelism.{name} = {degree}: expected at least 1{least}")
    if parallelism.spmd_backend == "full_dtensor":
        raise ConfigError(
            'parallelism.spmd_backend = "full_dtensor" is not supported yet. '
            "Possible: spmd_types, partial_dtensor."
        )
    if parallelism.context_parallel_load_balancer == "ptrr":
        raise ConfigError(
            'parallelism.context_parallel_load_balancer = "ptrr" is not supported: its order of the tokens '
            "depends on the data. Possible: headtail, none."
        )
    experts = degrees.pop(
        "expert_parallel_degree"
    )  # not a factor: experts share the ranks of the other degrees
    listed = " * ".join(f"{name} = {degree}" for name, degree in degrees.items())
    shard = degrees["data_parallel_shard_degree"]
    others = math.prod(degrees.values()) // shard
    rest = " (-1: all remaining ranks)" if shard == -1 else ""
    shard = world_size // others if shard == -1 else shard
    if others * shard != world_size:
        raise ConfigError(
            f"[parallelism]: expected a product of WORLD_SIZE = {world_size}, got {listed}{rest}"
        )
    cp, tp = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    if shard * cp * tp % experts:
        raise ConfigError(
            f"parallelism.expert_parallel_degree = {experts}: expected a divisor of {shard * cp * tp}, "
            f"the number of ranks that share the experts (data_parallel_shard_degree = {shard} * "
            f"context_parallel_degree = {cp} * tensor_parallel_degree = {tp})"
        )
    return shard


def _check_sizes(config: Trainer.Config, world_size: int) -> None:
    training, parallelism = config.training, config.parallelism
    for key in ("local_batch_size", "seq_len", "steps"):
        if (value := getattr(training, key)) < 1:
            raise ConfigError(f"training.{key} = {value}: expected at least 1")
    if training.local_batch_size * training.seq_len >= 2**40:
        raise ConfigError(
            f"training.local_batch_size = {training.local_batch_size} times training.seq_len = "
            f"{training.seq_len}: expected less than 2**40 tokens for a rank"
        )
    if not training.max_norm > 0:
        raise ConfigError(f"training.max_norm = {training.max_norm}: expected a positive number")
    tp = parallelism.tensor_parallel_degree
    if parallelism.enable_sequence_parallel and training.seq_len % tp:
        raise ConfigError(
            f"training.seq_len = {training.seq_len}: expected a multiple of "
            f"parallelism.tensor_parallel_degree = {tp}, because sequence parallelism shards the sequence, "
            "or parallelism.enable_sequence_parallel = false"
        )
    dp = world_size // (tp * parallelism.context_parallel_degree * parallelism.pipeline_parallel_degree)
    validator = config.validator
    reads_once = validator.enable and validator.steps == -1
    if reads_once and getattr(validator.dataloader, "dataset", "") != "text_files" and dp > 1:
        raise ConfigError(
            f"validator.steps = -1 reads the data to their end, which {dp} data-parallel ranks reach in "
            'different steps: set a number of steps, or validator.dataloader.dataset = "text_files"'
        )
    total, step = training.global_batch_size, training.local_batch_size * dp
    if total != -1 and (total < 1 or total % step):
        raise ConfigError(
            f"training.global_batch_size = {total}: expected a multiple of {step} (training.local_batch_size "
            f"= {training.local_batch_size} times {dp} data-parallel ranks), or -1 for {step}"
        )


def _check_numbers(config: Trainer.Config) -> None:
    """Ranges that TorchTitan does not check: a number outside would fail in the middle of a run."""
    for section, key, least in (
        ("training", "gc_freq", 1),
        ("metrics", "log_freq", 1),
        ("validator", "freq", 1),
        ("debug", "seed", 0),
        ("lr_scheduler", "warmup_steps", 0),
        ("lr_scheduler", "total_steps", 1),
        ("comm", "init_timeout_seconds", 1),
        ("comm", "train_timeout_seconds", 1),
        ("comm", "trace_buf_size", 0),
        ("profiler", "profile_freq", 1),
        ("profiler", "profiler_active", 1),
        ("profiler", "profiler_warmup", 0),
        ("profiler", "profiler_repeat", 0),
        ("profiler", "profiler_skip_first", 0),
        ("profiler", "profiler_skip_first_wait", 0),
        ("profiler", "memory_snapshot_max_entries", 1),
        ("profiler", "memory_snapshot_freq", 1),
    ):
        value = getattr(getattr(config, section), key, None)
        if value is not None and value < least:
            raise ConfigError(f"{section}.{key} = {value}: expected at least {least}")
    for key in ("init_timeout_seconds", "train_timeout_seconds"):
        if (value := getattr(config.comm, key)) > 10**9:  # beyond it, sums of times overflow
            raise ConfigError(f"comm.{key} = {value}: expected at most {10**9}")
    for key in ("decay_ratio", "min_lr_factor"):
        value = getattr(config.lr_scheduler, key)
        if value is not None and not 0 <= value <= 1:
            raise ConfigError(f"lr_scheduler.{key} = {value}: expected a number from 0 to 1")
    profiler = config.profiler
    cycle = profiler.profiler_warmup + profiler.profiler_active
    if profiler.enable_profiling and profiler.profile_freq < cycle:
        raise ConfigError(
            f"profiler.profile_freq = {profiler.profile_freq}: expected at least {cycle}, the sum of "
            f"profiler_warmup = {profiler.profiler_warmup} and profiler_active = {profiler.profiler_active}"
        )


def _check_workers(section: str, loader: BaseDataLoader.Config) -> None:
    """Check what PyTorch's data loader would refuse when it is built."""
    workers = getattr(loader, "num_workers", 0)
    if workers < 0:
        raise ConfigError(f"{section}.num_workers = {workers}: expected at least 0")
    prefetched = getattr(loader, "prefetch_factor", None)
    if prefetched is not None and (prefetched < 1 or not workers):
        raise ConfigError(
            f"{section}.prefetch_factor = {prefetched}: expected at least 1, and {section}.num_workers of at "
            "least 1, whose batches it counts"
        )
    if getattr(loader, "persistent_workers", False) and not workers:
        raise ConfigError(
            f"{section}.persistent_workers = true: {section}.num_workers = 0 leaves no workers to keep"
        )
