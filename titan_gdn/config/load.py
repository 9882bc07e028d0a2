"""Reads a TOML file and a command line into TorchTitan's `Trainer.Config`.

TorchTitan 0.3 is configured by Python functions. Here a run is a file, `[section] key = value`, in
TorchTitan's own field names, and the command line changes single keys. Later wins: the defaults of the
model's flavor, the file, the command line. Names and values are checked against TorchTitan's dataclasses
before any process group or weight exists, and nothing is silently ignored: that a misspelt key became the
default is why TOML left TorchTitan (its pull request 2386).
"""

import importlib
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import fields, is_dataclass, replace
from functools import partial, reduce, singledispatch
from operator import or_
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
import tyro
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.config import ParallelismConfig
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, FullAC
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.tools.utils import device_type
from torchtitan.trainer import Trainer

from titan_gdn import models
from titan_gdn.config.checkpoint_checks import check_checkpoint
from titan_gdn.config.source import ConfigError, SourcedValue, converted, one_of, read
from titan_gdn.data.text_files import TextFilesDataLoader, list_files
from titan_gdn.layers.linear_attention import LinearAttentionConfig
from titan_gdn.models.hybrid.activation_checkpoint import MemoryBudgetAC, SelectiveAC
from titan_gdn.models.hybrid.pipeline import SCHEDULES, SPLIT_BACKWARD
from titan_gdn.models.hybrid.quantize import PARTS

__all__ = ["ConfigError", "LinearAttentionConfig", "check", "check_run", "load_config"]

_OURS = ("job", "model", "linear_attention", "quantize")
SECTIONS = (
    "dataloader training optimizer lr_scheduler parallelism activation_checkpoint compile checkpoint "
    "metrics profiler validator comm debug"
).split()
_ALIASES = {"profiling": "profiler"}  # its name in TorchTitan 0.2, with the same keys

POLICIES = {
    "none": NoneType,
    "selective": SelectiveAC.Config,
    "full": FullAC.Config,
    "memory_budget": MemoryBudgetAC.Config,
}
# Not DistMuon: it needs Python objects (its buckets and shardings) that no file can hold.
_OPTIMIZERS = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
OPTIMIZER_NAME = Literal[tuple(_OPTIMIZERS)]

# Fields that TorchTitan annotates as more than it understands. Of these, it ignores what it does not.
_NARROWER: dict[str, Any] = {
    "components": list[Literal["model", "loss"]],
    "context_parallel_load_balancer": Literal["headtail", "ptrr"] | None,
    "determinism_check": Literal["default", "none"],
    "exclude_from_loading": list[Literal["optimizer", "lr_scheduler", "dataloader", "train_state"]],
    "pipeline_parallel_schedule": Literal[*SCHEDULES, *SPLIT_BACKWARD],
    "optimizer_factory_kwargs_by_name": dict[OPTIMIZER_NAME, dict[str, Any]],
}


def load_config(argv: list[str], world_size: int, here: bool = True) -> Trainer.Config:
    """The configuration of a run, from `--job.config_file FILE.toml [--section.key value ...]`.

    The sections are `[job]` (`dump_folder`; `description`, a string for who reads the file, dropped here),
    `[model]` (`name`, `flavor`, `hf_assets_path`, and `[model.overrides]`, arguments of the flavor's
    builder), `[linear_attention]`, `[quantize.linear]` and `[quantize.experts]` (`name`, and the fields of
    that converter of TorchTitan's), and those of `Trainer.Config` by their names. `[optimizer]` also takes
    `name` and the optimizer's own arguments (`lr`, `weight_decay`, ...) for all parameter groups, and
    `[activation_checkpoint]` a `mode`. In file and command line alike, "none" is the value None.

    Args:
        argv: The command line without the program's name. `--help` prints the usage and exits.
        world_size: Number of ranks.
        here: The run begins on this machine, which therefore has to have what it needs; else it is planned.

    Raises:
        ConfigError: The command line, the file, a name or a value is wrong, or they do not go together.
    """
    root = read(argv)
    sections = dict(root.table)
    for name, table in sections.items():
        if name not in (*_OURS, *SECTIONS, *_ALIASES):
            raise table.unknown([*_OURS, *SECTIONS])
    job, *of_model = (sections.pop(name, SourcedValue({}, root.source, (name,))) for name in _OURS)

    config = _defaults(*of_model)
    changes = _values(job.table, {"dump_folder": str, "description": str})
    changes.pop("description", None)
    for name, table in sections.items():
        field = _ALIASES.get(name, name)
        if field in changes:
            raise table.error(f"[{name}] and [{field}] are the same section: write one of them")
        changes[field] = _configured(getattr(config, field), table)
    config = _built(root, replace, config, **changes)
    try:
        (check if here else check_run)(config, world_size)
    except ConfigError as error:
        raise root.error(str(error)) from error
    return config


def defaults(name: str, flavor: str) -> Trainer.Config:
    """The run of a model's flavour before any file changes it.

    Raises:
        ConfigError: there is no such model or flavour.
    """
    own = {"name": name, "flavor": flavor}
    model = {key: SourcedValue(value, "", ("model", key)) for key, value in own.items()}
    return _defaults(SourcedValue(model, "", ("model",)), SourcedValue({}, ""), SourcedValue({}, ""))


def _defaults(model: SourcedValue, linear_attention: SourcedValue, quantize: SourcedValue) -> Trainer.Config:
    """What the authors of the flavor chose, but for the overrides of its builder."""
    own = {key: given for key, given in model.table.items() if key != "overrides"}
    own = _values(own, {"name": str, "flavor": str, "hf_assets_path": str}, also=["overrides"])
    package = models.load(_required(model, "name", models.MODELS))
    flavor = _required(model, "flavor", package.flavors)
    overrides = model.table.get("overrides", SourcedValue({}, model.source, ("model", "overrides")))
    registry = importlib.import_module(f"{package.__name__}.config_registry")
    config = _built(
        model,
        registry.trainer_config,
        flavor,
        linear_attention=_configured(LinearAttentionConfig(), linear_attention),
        converters=_converters(quantize),
        **_values(overrides.table, fields_of(type(package.flavors[flavor].arguments))),
    )
    return replace(config, hf_assets_path=own.get("hf_assets_path", config.hf_assets_path))


def _converters(quantize: SourcedValue) -> list[QuantizationConverter.Config]:
    """One of each table of `[quantize]`."""
    converters = []
    for part, table in quantize.table.items():
        if part not in PARTS:
            raise table.unknown(PARTS)
        name = _required(table, "name", PARTS[part])
        options = {key: given for key, given in table.table.items() if key != "name"}
        annotations = fields_of(PARTS[part][name])
        del annotations["model_compile_enabled"]  # [compile] says it
        converters.append(_built(table, PARTS[part][name], **_values(options, annotations, also=["name"])))
    return converters


def _required(table: SourcedValue, key: str, possible: Iterable[str]) -> str:
    if key not in table.table:
        raise table.error(f"{key} is missing. Possible: {', '.join(possible)}.")
    return converted(table.table[key], Literal[tuple(possible)])


def _values(
    table: dict[str, SourcedValue], annotations: dict[str, Any], also: Collection[str] = ()
) -> dict[str, Any]:
    """The values of `table`, converted. An error for another name lists the names `also` as well."""
    for name, given in table.items():
        if name not in annotations:
            raise given.unknown([*also, *annotations])
    return {name: converted(given, annotations[name]) for name, given in table.items()}


def _arguments(function: Callable[..., Any]) -> dict[str, Any]:
    """Names and annotations of the arguments that `function` takes by name."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    return {parameter.name: parameter.annotation for parameter in parameters if parameter.kind in by_name}


def fields_of(config: type) -> dict[str, Any]:
    """Names and annotations of the fields that a file may set; those hidden from tyro hold Python objects."""
    hints = get_type_hints(config, include_extras=True)
    # Choices that a program may extend, such as exchanges, are asked for now rather than at import.
    hints |= {x.name: Literal[x.metadata["choices"]()] for x in fields(config) if "choices" in x.metadata}
    return {
        field.name: _NARROWER.get(field.name, hints[field.name])
        for field in fields(config)
        if tyro.conf.Suppress not in getattr(hints[field.name], "__metadata__", ())
    }


def _built(table: SourcedValue, build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`build(...)`, whose complaints (TorchTitan's own checks among them) name `table`."""
    try:
        return build(*args, **kwargs)
    except (ValueError, AssertionError, ArithmeticError, RuntimeError) as error:
        raise table.error(str(error) or repr(error)) from error


@singledispatch
def _configured(current: Any, table: SourcedValue) -> Any:
    """`current`, the dataclass of a section, with the changes of `table`."""
    return _replaced(current, table)


def _replaced(current: Any, table: SourcedValue, handled: Collection[str] = (), **changes: Any) -> Any:
    """`current` with `changes` and the fields that `table` names but those `handled`, set all in one."""
    annotations = fields_of(type(current))
    for name, given in table.table.items():
        if name in handled:
            continue
        if name not in annotations:
            raise given.unknown([*handled, *annotations])
        value = getattr(current, name)
        # A section by its value, not its annotation: all data loaders are annotated as their base class.
        nested = is_dataclass(value)
        changes[name] = _configured(value, given) if nested else converted(given, annotations[name])
    return _built(table, replace, current, **changes)


@_configured.register(NoneType)
@_configured.register(ActivationCheckpointing.Config)
def _activation_checkpoint(
    current: ActivationCheckpointing.Config | None, table: SourcedValue
) -> ActivationCheckpointing.Config | None:
    if mode := table.table.get("mode"):
        policy = POLICIES[converted(mode, Literal[tuple(POLICIES)])]
        current = current if isinstance(current, policy) else policy()
    if current is not None:
        return _replaced(current, table, handled=["mode"])
    for name, given in table.table.items():
        if name != "mode":
            raise given.unknown(["mode"])
    return None


@_configured.register
def _dataloader(current: BaseDataLoader.Config, table: SourcedValue) -> BaseDataLoader.Config:
    if dataset := table.table.get("dataset"):
        ours = converted(dataset, Literal["text_files", *DATASETS]) == "text_files"
        loader = TextFilesDataLoader.Config if ours else HuggingFaceTextDataLoader.Config
        if not isinstance(current, loader):
            # A validation that reads its data once reads other data once, too.
            current = loader(infinite=getattr(current, "infinite", True))
    return _replaced(current, table)


@_configured.register
def _optimizer(current: OptimizersContainer.Config, table: SourcedValue) -> OptimizersContainer.Config:
    own = fields_of(type(current))
    shorthand = {name: given for name, given in table.table.items() if name not in own}
    if array := table.table.get("param_groups"):
        for given in shorthand.values():
            raise given.error("[[optimizer.param_groups]] replaces all groups: say this in each of them")
        if not isinstance(array.value, list) or not all(
            isinstance(item, SourcedValue) for item in array.value
        ):
            raise array.error("expected an array of tables in the file, [[optimizer.param_groups]]")
        groups = [_param_group(item) for item in array.value]
    else:
        groups = _changed_groups(current.param_groups, shorthand, also=own)
    for group in groups:  # the optimizer itself knows which rates and betas there are
        _built(table, _OPTIMIZERS[group.optimizer_name], [torch.zeros(1)], **group.optimizer_kwargs)
    return _replaced(current, table, handled=["param_groups", *shorthand], param_groups=groups)


def _changed_groups(
    groups: list[ParamGroupConfig], shorthand: dict[str, SourcedValue], also: Collection[str]
) -> list[ParamGroupConfig]:
    """`groups` with the optimizer's name and arguments as `shorthand` has them.

    A weight decay leaves alone the groups without any, those of the norms and the decay rates.
    """
    if shorthand and not groups:
        first = next(iter(shorthand.values()))
        raise first.error("this flavor has no parameter groups; write [[optimizer.param_groups]]")
    changes = dict(shorthand)
    name = changes.pop("name", None) and converted(shorthand["name"], OPTIMIZER_NAME)
    kwargs = _values(changes, optimizer_kwargs(name or "AdamW"), also=["name", *also])
    decays = [group.optimizer_kwargs.get("weight_decay") != 0 for group in groups]
    if "weight_decay" in kwargs and not any(decays):
        raise changes["weight_decay"].error(
            "no group of this flavor decays; write [[optimizer.param_groups]]"
        )
    undecayed = {key: value for key, value in kwargs.items() if key != "weight_decay"}
    return [
        replace(
            group,
            optimizer_name=name or group.optimizer_name,
            optimizer_kwargs=group.optimizer_kwargs | (kwargs if decay else undecayed),
        )
        for group, decay in zip(groups, decays, strict=True)
    ]


def _param_group(table: SourcedValue) -> ParamGroupConfig:
    """One of `[[optimizer.param_groups]]`, complete in itself."""
    given = table.table
    group = _values(given, fields_of(ParamGroupConfig) | {"optimizer_name": OPTIMIZER_NAME})
    for name in fields_of(ParamGroupConfig):
        if name not in group:
            raise table.error(f"{name} is missing")
    kwargs = _values(given["optimizer_kwargs"].table, optimizer_kwargs(group["optimizer_name"]))
    if "lr" not in kwargs:
        raise given["optimizer_kwargs"].error("lr is missing; a group takes nothing from [optimizer]")
    try:
        re.compile(group["pattern"])
    except re.error as error:
        raise given["pattern"].error(f"expected a regular expression: {error}") from None
    return ParamGroupConfig(**group | {"optimizer_kwargs": kwargs})


def optimizer_kwargs(name: str) -> dict[str, Any]:
    arguments = _arguments(partial(_OPTIMIZERS[name], None))  # all but the first, the parameters
    return {key: _without_tensors(annotation) for key, annotation in arguments.items()}


def _without_tensors(annotation: Any) -> Any:
    """`float | Tensor` as `float`, at any depth: no file can hold a tensor."""
    kind = get_origin(annotation)
    if kind is None:
        return annotation
    args = [_without_tensors(option) for option in get_args(annotation) if option is not torch.Tensor]
    return reduce(or_, args) if kind in (Union, UnionType) else kind[tuple(args)]


def check(config: Trainer.Config, world_size: int) -> None:
    """Checks what can be known before a run begins on this machine.

    Raises:
        ConfigError: As `check_run`; also a folder or data is not there, or this machine cannot run it.
    """
    if config.comm.mode == "fake_backend":  # TorchTitan's dry run: one process stands for so many ranks
        world_size = _dry_ranks()
    check_run(config, world_size)
    _check_device(config)
    _check_tokenizer(config)
    _checked(check_checkpoint, config)
    _check_data("dataloader", config.dataloader)
    if config.validator.enable:
        _check_data("validator.dataloader", config.validator.dataloader)


def _dry_ranks() -> int:
    """The number of ranks of a dry run, which TorchTitan reads from the environment."""
    ranks = os.environ.get("NGPU", "")
    if not ranks.isdecimal() or int(ranks) < 1:
        raise ConfigError(
            f'[comm] mode = "fake_backend": the environment variable NGPU = "{ranks}" is to be the number of '
            "ranks, as in NGPU=64 torchrun --nproc-per-node 1 ..."
        )
    return int(ranks)


def check_run(config: Trainer.Config, world_size: int) -> None:
    """Checks a run in itself, wherever it will be, the model's own conditions among it.

    Raises:
        ConfigError: The degrees do not make `world_size`, a batch or a sequence does not divide, or
            something is not supported (yet).
    """
    shard = _check_degrees(config.parallelism, world_size)
    _check_sizes(config, world_size)
    _check_numbers(config)
    backend, backends = config.compile.backend, torch._dynamo.list_backends(exclude_tags=())
    if config.compile.enable and backend not in backends:
        raise ConfigError(f'[compile] backend = "{backend}" is unknown.{one_of(backend, backends)}')
    budget = getattr(config.activation_checkpoint, "memory_budget", 1.0)
    if not 0 <= budget <= 1:
        raise ConfigError(f"[activation_checkpoint] memory_budget = {budget}: expected a number from 0 to 1")
    if config.debug.spmd_typechecking:
        raise ConfigError("[debug] spmd_typechecking is not supported: the layers' exchanges are not typed")
    if config.comm.mode == "local_tensor":
        raise ConfigError(
            '[comm] mode = "local_tensor" is not supported: data are dealt out to one rank a process. '
            "Possible: default, fake_backend."
        )
    if config.checkpoint.create_seed_checkpoint and not (config.checkpoint.enable and world_size == 1):
        raise ConfigError("[checkpoint] create_seed_checkpoint needs enable = true, and one rank")
    resolved = replace(config.parallelism, data_parallel_shard_degree=shard)
    _checked(config.model_spec.model.check, replace(config, parallelism=resolved))
    # The loss takes the sequence in chunks, so that not all logits exist at once.
    chunks = getattr(config.loss, "num_chunks", 1) * config.parallelism.context_parallel_degree
    if config.training.seq_len % chunks:
        raise ConfigError(
            f"[training] seq_len = {config.training.seq_len}: expected a multiple of {chunks} (chunks of the "
            "loss times context_parallel_degree)"
        )


def _checked(check: Callable[..., None], *args: Trainer.Config) -> None:
    """One of the checks that others own."""
    try:
        check(*args)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_device(config: Trainer.Config) -> None:
    """What this machine cannot do."""
    _checked(config.model_spec.model.check_device)
    if device_type != "cpu":
        return
    if config.training.enable_cpu_offload:
        raise ConfigError("[training] enable_cpu_offload: without a GPU everything is on the CPU already")
    if config.profiler.enable_memory_snapshot:
        raise ConfigError("[profiler] enable_memory_snapshot is of a GPU's memory, and there is none")
    if getattr(config.checkpoint, "async_mode", "") == "async_with_pinned_mem":
        raise ConfigError(
            '[checkpoint] async_mode = "async_with_pinned_mem" needs a GPU. Possible: disabled, async.'
        )


def _check_tokenizer(config: Trainer.Config) -> None:
    """The folder is there, and the model has a row for each of the tokenizer's tokens."""
    folder = config.hf_assets_path
    if not os.path.isdir(folder):
        raise ConfigError(f'[model] hf_assets_path = "{folder}": there is no such folder')
    file = os.path.join(folder, "tokenizer.json")
    if not os.path.exists(file):
        return
    try:
        with open(file) as stream:
            tokenizer = json.load(stream)
        vocabulary = tokenizer["model"].get("vocab", {})
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        tokens = 1 + max([*ids, *(token["id"] for token in tokenizer.get("added_tokens", []))])
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"[model] hf_assets_path = {folder!r}: its tokenizer.json is none of Hugging Face's "
            f"({type(error).__name__}: {error})"
        ) from error
    rows = getattr(config.model_spec.model, "vocab_size", tokens)
    if tokens > rows:
        raise ConfigError(
            f"[model.overrides] vocab_size = {rows}: the tokenizer in hf_assets_path = {folder!r} has "
            f"{tokens} tokens"
        )


def _check_degrees(parallelism: ParallelismConfig, world_size: int) -> int:
    """TorchTitan's rule (`ParallelDims`), in words, and what is not supported yet.

    Returns:
        `data_parallel_shard_degree`, in place of -1 the number of ranks that are left.
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
        least = ", or -1 for all ranks that are left" if name == "data_parallel_shard_degree" else ""
        if degree < 1 and not (least and degree == -1):
            raise ConfigError(f"[parallelism] {name} = {degree}: expected at least 1{least}")
    if parallelism.spmd_backend == "full_dtensor":
        raise ConfigError(
            '[parallelism] spmd_backend = "full_dtensor" is not supported yet. '
            "Possible: spmd_types, partial_dtensor."
        )
    if parallelism.context_parallel_load_balancer == "ptrr":
        raise ConfigError(
            '[parallelism] context_parallel_load_balancer = "ptrr" is not supported, for its order of the '
            "tokens depends on the data. Possible: headtail, none."
        )
    experts = degrees.pop("expert_parallel_degree")  # its ranks are those of the others
    listed = " * ".join(f"{name} {degree}" for name, degree in degrees.items())
    shard = degrees["data_parallel_shard_degree"]
    others = math.prod(degrees.values()) // shard
    rest = " (-1: all ranks that are left)" if shard == -1 else ""
    shard = world_size // others if shard == -1 else shard
    if others * shard != world_size:
        raise ConfigError(f"[parallelism] {listed} does not make WORLD_SIZE {world_size}{rest}")
    cp, tp = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    if shard * cp * tp % experts:
        raise ConfigError(
            f"[parallelism] expert_parallel_degree = {experts}: expected a divisor of {shard * cp * tp}, "
            f"the ranks that share the experts (data_parallel_shard_degree {shard} * "
            f"context_parallel_degree {cp} * tensor_parallel_degree {tp})"
        )
    return shard


def _check_sizes(config: Trainer.Config, world_size: int) -> None:
    training, parallelism = config.training, config.parallelism
    for key in ("local_batch_size", "seq_len", "steps"):
        if (value := getattr(training, key)) < 1:
            raise ConfigError(f"[training] {key} = {value}: expected at least 1")
    if not training.max_norm > 0:
        raise ConfigError(f"[training] max_norm = {training.max_norm}: expected a positive number")
    tp = parallelism.tensor_parallel_degree
    if parallelism.enable_sequence_parallel and training.seq_len % tp:
        raise ConfigError(
            f"[training] seq_len = {training.seq_len}: expected a multiple of [parallelism] "
            f"tensor_parallel_degree = {tp}, by which sequence parallelism divides it, or "
            "enable_sequence_parallel = false"
        )
    dp = world_size // (tp * parallelism.context_parallel_degree * parallelism.pipeline_parallel_degree)
    total, step = training.global_batch_size, training.local_batch_size * dp
    if total != -1 and (total < 1 or total % step):
        raise ConfigError(
            f"[training] global_batch_size = {total}: expected a multiple of {step} (local_batch_size = "
            f"{training.local_batch_size} times {dp} data-parallel ranks), or -1 for {step}"
        )


def _check_numbers(config: Trainer.Config) -> None:
    """What TorchTitan would take as it is, and stumble over in a step."""
    for section, key, least in (
        ("training", "gc_freq", 1),
        ("metrics", "log_freq", 1),
        ("validator", "freq", 1),
        ("lr_scheduler", "warmup_steps", 0),
        ("lr_scheduler", "total_steps", 1),
        ("comm", "init_timeout_seconds", 1),
        ("comm", "train_timeout_seconds", 1),
        ("profiler", "profiler_active", 1),
        ("profiler", "profiler_warmup", 0),
        ("profiler", "memory_snapshot_freq", 1),
        ("dataloader", "num_workers", 0),
    ):
        value = getattr(getattr(config, section), key, None)
        if value is not None and value < least:
            raise ConfigError(f"[{section}] {key} = {value}: expected at least {least}")
    for key in ("decay_ratio", "min_lr_factor"):
        value = getattr(config.lr_scheduler, key)
        if value is not None and not 0 <= value <= 1:
            raise ConfigError(f"[lr_scheduler] {key} = {value}: expected a number from 0 to 1")
    profiler = config.profiler
    cycle = profiler.profiler_warmup + profiler.profiler_active
    if profiler.enable_profiling and profiler.profile_freq < cycle:
        raise ConfigError(
            f"[profiler] profile_freq = {profiler.profile_freq}: expected at least {cycle}, which is "
            f"profiler_warmup = {profiler.profiler_warmup} and profiler_active = {profiler.profiler_active}"
        )
    validator = config.validator
    if validator.enable and validator.steps < 1 and getattr(validator.dataloader, "infinite", False):
        raise ConfigError(
            f"[validator] steps = {validator.steps} takes all data, and [validator.dataloader] infinite = "
            "true has no end: set one of them otherwise"
        )


def _check_data(section: str, loader: BaseDataLoader.Config) -> None:
    if loader.dataset != "text_files":
        return  # TorchTitan finds out when it downloads
    try:
        list_files(loader.dataset_path)
    except ValueError as error:
        raise ConfigError(f"[{section}] {error}") from error
