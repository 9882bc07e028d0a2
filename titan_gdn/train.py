"""Train a model from a TOML file: `torchrun -m titan_gdn.train --job.config_file FILE.toml`."""

import logging
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from titan_gdn.endings import errors
from titan_gdn.endings.signals import SIGNALS, Stopped

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

_HARMLESS = (
    "initial_load_model_only=True has no effect",  # it is TorchTitan's own default
    "will be overridden to",  # NCCL's environment variables, which torchrun has just set
    "Pipeline Parallel loss is not visible",  # it is: see _metrics_rank
)

# Without torchrun, `python -m titan_gdn.train` runs on one rank.
_ONE_RANK = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def main(argv: list[str] | None = None) -> None:
    """Read the configuration and run TorchTitan's trainer.

    Args:
        argv: The command line, `sys.argv[1:]` by default.
    """
    SIGNALS.install()
    for name, value in _ONE_RANK.items():
        os.environ.setdefault(name, value)
    # Only now, because these imports take seconds, in which a signal must be handled.
    from titan_gdn.runtime import cpu
    from titan_gdn.runtime.silence import silence_libraries

    silence_libraries()
    cpu.enable()
    from torchtitan.observability import structured_logger
    from torchtitan.tools.logging import init_logger, logger

    from titan_gdn.config.load import ConfigError, load_config
    from titan_gdn.runtime import loader_state

    loader_state.patch()
    init_logger()
    logging.raiseExceptions = False  # a log on a full disk would print a traceback for each line
    logger.handlers[0].addFilter(lambda record: not any(text in record.getMessage() for text in _HARMLESS))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank != 0:
        logger.setLevel(logging.ERROR)
    try:
        config = load_config(sys.argv[1:] if argv is None else argv, world_size)
    except ConfigError as error:
        if rank != 0:
            time.sleep(errors.TURN)  # torchrun ends all ranks when one has: rank 0 has the same error
        errors.tell(str(error))
        sys.exit(2)
    logger.setLevel(logging.INFO if rank == _metrics_rank(config, world_size) else logging.ERROR)
    structured_logger.init_structured_logger(
        source="training", output_dir=config.dump_folder, enable=config.debug.enable_structured_logging
    )
    if "://" not in config.dump_folder:
        errors.REPORTER.folder = os.path.join(config.dump_folder, "errors")
    errors.REPORTER.traceback = getattr(config.debug, "traceback", False)
    logger.info(f"Outputs are in {os.path.abspath(config.dump_folder)}")
    _run(config)


def _run(config: "Trainer.Config") -> None:
    import torch
    from torchtitan.tools.logging import logger

    from titan_gdn.display import progress
    from titan_gdn.endings import nonfinite

    trainer = config.build()
    nonfinite.watch(trainer)
    ended = _note_end_of_data(trainer)
    try:
        if config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
            logger.info("Created seed checkpoint")
        else:
            SIGNALS.watch(trainer)
            with progress.shown(trainer):
                trainer.train()
        if ended:
            _end_early(trainer)
        trainer.close()
    except Stopped:
        _stop(trainer)
    torch.distributed.destroy_process_group()
    logger.info(f"Outputs are in {os.path.abspath(config.dump_folder)}")


def _stop(trainer: "Trainer") -> None:
    """Save the step after which all ranks have stopped, say how to go on, and exit."""
    from torchtitan.tools.logging import logger

    from titan_gdn.models.hybrid.checkpoint_manager import HybridCheckpointManager

    checkpointer, step = trainer.checkpointer, trainer.step
    folder = os.path.join(trainer.config.dump_folder, trainer.config.checkpoint.folder)
    saved = isinstance(checkpointer, HybridCheckpointManager) and checkpointer.save_now(step)
    trainer.close()
    if logger.isEnabledFor(logging.INFO):
        if saved:
            kept = f"which is saved in {os.path.abspath(folder)}. To go on"
        else:
            key = "checkpoint.enable" if not trainer.config.checkpoint.enable else "checkpoint.save_on_signal"
            kept = f"which is not saved ({key} = false). To begin with the newest step that is"
        errors.tell(
            f"{SIGNALS.name}: stopped after step {step} of training.steps = {trainer.config.training.steps}, "
            f"{kept}: {SIGNALS.command}"
        )
    else:
        time.sleep(errors.TURN)  # torchrun ends all ranks when one has: the rank that logs speaks first
    sys.exit(SIGNALS.code)


class DataError(RuntimeError):
    """The data do not suffice for the run."""


def _note_end_of_data(trainer: "Trainer") -> list[bool]:
    """Return a list that is empty until the data end. TorchTitan's trainer then stops without saving."""
    from torchtitan.components.dataloader import DataloaderExhaustedError
    from torchtitan.tools.logging import logger

    ended: list[bool] = []
    batches = trainer.batch_generator

    def watched(loader: Any) -> Iterator[Any]:
        try:
            yield from batches(loader)
        except DataloaderExhaustedError:
            ended.append(True)
            logger.addFilter(lambda record: record.getMessage() != "Training completed")
            raise

    trainer.batch_generator = watched  # pyright: ignore
    return ended


def _end_early(trainer: "Trainer") -> None:
    """Save the last step that was taken. The trainer's counter already counts the one without data."""
    from torchtitan.tools.logging import logger

    from titan_gdn.models.hybrid.checkpoint_manager import HybridCheckpointManager

    trainer.step -= 1
    steps = trainer.config.training.steps
    if trainer.step == 0:
        raise DataError("the data end before the first step: they hold less than one batch for each rank")
    if isinstance(trainer.checkpointer, HybridCheckpointManager):
        trainer.checkpointer.save_early(trainer.step)
    logger.warning(
        f"Training ended after step {trainer.step} of training.steps = {steps}, because the data ended "
        "(dataloader.infinite = false)"
    )


def _metrics_rank(config: "Trainer.Config", world_size: int) -> int:
    """The rank whose metrics TorchTitan logs. With pipeline stages, it is one that computes the loss."""
    from torchtitan.components import metrics
    from torchtitan.distributed import ParallelDims

    parallelism = config.parallelism
    if parallelism.pipeline_parallel_degree == 1:  # a dry run has a single process, whatever its degrees
        return 0
    return metrics._get_metrics_rank(
        parallel_dims=ParallelDims.from_config(parallelism, world_size),
        pp_schedule=parallelism.pipeline_parallel_schedule,
    )


if __name__ == "__main__":
    errors.run(main)
