"""Converts a step of a run to a model directory and back: `python -m titan_gdn.convert SOURCE TARGET ...`."""

import logging
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from titan_gdn.runtime import cpu
from titan_gdn.runtime.silence import silence_libraries

if TYPE_CHECKING:
    from titan_gdn.models.hybrid.state_dict_adapter import HybridStateDictAdapter

USAGE = """\
usage: python -m titan_gdn.convert SOURCE TARGET --job.config_file FILE.toml [--section.key value ...]

  SOURCE   the folder of a step, or a directory of Hugging Face files
  TARGET   the directory to write: Hugging Face files for a step, a step for Hugging Face files

FILE.toml says which model it is. One process converts it tensor by tensor, without a GPU."""

DEGREES = (
    "data_parallel_replicate data_parallel_shard context_parallel tensor_parallel pipeline_parallel "
    "expert_parallel"
).split()


def main(argv: list[str] | None = None) -> None:
    """Convert what the command line names.

    Args:
        argv: the command line, `sys.argv[1:]` by default.
    """
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        print(USAGE)
        return
    if len(argv) < 3 or argv[0].startswith("--") or argv[1].startswith("--"):
        _refuse(f"expected a source, a target and a configuration\n{USAGE}")
    source, target, *run = argv
    silence_libraries()
    cpu.enable()  # before TorchTitan is imported
    from torchtitan.tools.logging import logger

    from titan_gdn.config.load import ConfigError, load_config
    from titan_gdn.models.hybrid.state_dict_adapter import HybridStateDictAdapter

    logger.setLevel(logging.ERROR)
    run += [word for degree in DEGREES for word in (f"--parallelism.{degree}_degree", "1")]
    is_step = os.path.isfile(os.path.join(source, ".metadata"))
    if (
        not is_step
    ):  # the run that begins with this directory: its config.json is the model, or compared with it
        run += ["--checkpoint.enable", "--checkpoint.initial_load_in_hf"]
        run += ["--checkpoint.initial_load_path", source, "--job.dump_folder", target]
    try:
        config = load_config(run, 1, here=False)
    except ConfigError as error:
        _refuse(str(error))
    spec = config.model_spec
    if spec is None or spec.state_dict_adapter is None:
        _refuse("the model has no adapter to Hugging Face files")
    adapter = spec.state_dict_adapter(spec.model, config.hf_assets_path)
    if not isinstance(adapter, HybridStateDictAdapter):
        _refuse("the model has no adapter to Hugging Face files")
    if os.path.exists(target) and (not os.path.isdir(target) or os.listdir(target)):
        _refuse(f'"{target}" exists and is not an empty directory')
    try:
        (to_hf if is_step else from_hf)(adapter, source, target)
    except ValueError as error:
        _refuse(str(error))
    print(f"Wrote {target}")


def to_hf(adapter: "HybridStateDictAdapter", step: str, folder: str) -> None:
    """Write the model of a step as a model directory.

    Raises:
        ValueError: the step holds another model.
    """
    import torch
    import torch.distributed.checkpoint as dcp

    from titan_gdn.checkpoint.checksums import damaged
    from titan_gdn.checkpoint.export import (
        DTYPE_NAMES,
        ExportedTensor,
        recorded_source,
        write_one_by_one,
    )
    from titan_gdn.checkpoint.model_directory import ModelDirectory
    from titan_gdn.checkpoint.step_accounting import StepError, account_step
    from titan_gdn.checkpoint.trusted import StepPlanner, StepReader

    state = _state(adapter)
    reader = StepReader(step)
    shapes = {key: tuple(x.shape) for key, x in state.items()}
    account_step(step, shapes, adapter.model_config.enable_weight_tying)
    if problem := damaged(step):
        raise StepError(problem)
    path = recorded_source(step, None)
    source = None if path is None else ModelDirectory.read(path)
    files = {} if source is None else source.tensors

    def values() -> Iterator[tuple[str, torch.Tensor]]:
        for group in adapter.groups(state):
            loaded: dict[str, Any] = {key: torch.empty(state[key].shape) for key in group}
            dcp.load(loaded, storage_reader=reader, planner=StepPlanner(step), no_dist=True)
            yield from adapter.as_in(files, adapter.to_hf(loaded)).items()

    tensors = {
        name: ExportedTensor(DTYPE_NAMES[x.dtype], tuple(x.shape))
        for name, x in adapter.as_in(files, adapter.to_hf(state)).items()
    }
    beside = adapter.beside(source, torch.float32 if source is None else None)
    write_one_by_one(folder, tensors, values(), beside)


def from_hf(adapter: "HybridStateDictAdapter", folder: str, step: str) -> None:
    """Write the model of a directory as a step, for `checkpoint.initial_load_path`.

    Raises:
        ModelDirectoryError: the directory holds another model.
    """
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors import safe_open
    from torch.distributed.checkpoint import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import MetadataIndex

    from titan_gdn.checkpoint.checksums import StepWriter
    from titan_gdn.checkpoint.export import record_source
    from titan_gdn.checkpoint.model_directory import ModelDirectory

    state = _state(adapter)
    accounted, shapes = adapter.account(ModelDirectory.read(folder))
    groups = {key: group for group in adapter.groups(state) for key in group}

    class Planner(DefaultSavePlanner):
        """Reads a parameter when it is written."""

        def lookup_object(self, index: MetadataIndex) -> Any:
            tied = index.fqn == "lm_head.weight" and adapter.model_config.enable_weight_tying
            fqn = "tok_embeddings.weight" if tied else index.fqn
            names = adapter.to_hf({key: state[key] for key in groups[fqn]})
            hf = {}
            for name in names:
                saved, entry = accounted.loaded[name]
                with safe_open(entry.file, "pt") as file:
                    hf[name] = file.get_tensor(saved).view(shapes[name])
            like = state[fqn]
            if not hf:  # a bias that balances experts, of a family whose files have none
                return torch.zeros(like.shape, dtype=like.dtype)
            return adapter.from_hf(hf)[fqn].to(like.dtype)

    record_source(step, folder, adapter.model_config.enable_weight_tying)
    # The writer keeps what it has written until the file is complete, so each parameter gets its own file.
    writer = StepWriter(step, single_file_per_rank=False)
    dcp.save(state, storage_writer=writer, planner=Planner(), no_dist=True)


def _state(adapter: "HybridStateDictAdapter") -> dict[str, Any]:
    """The parameters of the whole model, without memory."""
    import torch

    with torch.device("meta"):
        return adapter.model_config.build().state_dict()


def _refuse(reason: str) -> NoReturn:
    print(f"titan_gdn: {reason}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
