"""Runs of TorchTitan's trainer, as functions for `tests.ranks.run`."""

import os
import time
import types

import pytest
from torch.distributed.tensor import DTensor

from tests import ranks


def dry_run(path, folder, *argv, **overrides):
    """Train one step of a TOML file with a smaller model, on 64 ranks that one process simulates."""
    argv = ["--job.config_file", path, "--job.dump_folder", str(folder), *argv]
    argv += [word for key, value in overrides.items() for word in (f"--model.overrides.{key}", str(value))]
    argv += ["--training.seq_len", "512", "--training.steps", "1", "--checkpoint.no-enable"]
    return ranks.run(_train_as_64, 1, [*argv, "--comm.mode", "fake_backend"])[0]


def _train_as_64(argv):
    os.environ["NGPU"] = "64"
    return train(argv)


def train(argv, step_of_gradients=1):
    """Train as `titan_gdn.train` does, and return a record of the run.

    The record holds the losses and gradient norms of all steps, the full gradients of one step (of each
    pipeline stage on its first rank, else empty), the validation losses, the smallest difference in score
    between the last expert that a router chose and the next one, and each router's bias after the last step.
    The losses are empty on ranks without the last pipeline stage.
    """
    trainer = _built(argv)
    record = {"loss": [], "grad_norm": [], "gradients": {}, "validation": [], "gap": _watch_routers(trainer)}
    record["mtp"] = []

    def log(step, loss, max_loss, grad_norm, extra_metrics=None):
        record["loss"].append(loss)
        record["grad_norm"].append(grad_norm)

    trainer.metrics_processor.log = log
    # Beside `log`, the losses of multi-token prediction alone are logged.
    trainer.metrics_processor.logger.log = lambda values, step: record["mtp"].extend(values.values())
    trainer.metrics_processor.log_validation = lambda loss, step, **_: record["validation"].append(loss)
    stages = trainer.parallel_dims.pp
    step = trainer.optimizers.step

    def step_and_look():
        if trainer.step == step_of_gradients:
            record["gradients"] = whole_gradients(trainer.model_parts)
        step()

    trainer.optimizers.step = step_and_look
    trainer.train()
    record["bias"] = {
        name: _local(buffer).clone()
        for part in trainer.model_parts
        for name, buffer in part.named_buffers()
        if name.endswith("expert_bias_E")
    }
    trainer.close()
    record["gap"] = min(record["gap"], default=None)
    if not getattr(trainer, "pp_has_last_stage", True):
        record["loss"], record["validation"] = [], []
    if int(os.environ["RANK"]) % (int(os.environ["WORLD_SIZE"]) // stages):
        record["gradients"] = {}
    return record


def one_step(argv, dry_ranks=None):
    """Train one step and return the loss, or None on ranks without the last pipeline stage.

    Unlike `train` it puts no hooks into the model, so the model may be compiled.

    Args:
        argv: the command line.
        dry_ranks: in a dry run, the number of ranks that this process simulates.
    """
    if dry_ranks is not None:
        os.environ["NGPU"] = str(dry_ranks)
    trainer = _built([*argv, "--training.steps", "1"])
    losses = []
    trainer.metrics_processor.log = lambda step, loss, *_, **__: losses.append(loss)
    trainer.train()
    trainer.close()
    return losses[0] if getattr(trainer, "pp_has_last_stage", True) else None


def _built(argv):
    """Build the trainer of a command line."""
    import torchtitan.trainer

    from titan_gdn.config.load import load_config

    # The trainer sleeps at the end to let other ranks finish printing. Tests need no such pause.
    torchtitan.trainer.time = types.SimpleNamespace(
        perf_counter=time.perf_counter, sleep=lambda seconds: None
    )
    return load_config(argv, int(os.environ["WORLD_SIZE"])).build()


def train_until(argv, stop):
    """Train, but stop after `stop` steps as if killed. Return the losses."""
    from torchtitan.trainer import Trainer

    if stop is not None:
        Trainer.should_continue_training = lambda self: self.step < stop
    return train(argv)["loss"]


def whole_gradients(model_parts):
    return {
        name.replace("_checkpoint_wrapped_module.", ""): _whole(parameter.grad).clone()
        for part in model_parts
        for name, parameter in part.named_parameters()
    }


def _whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def _local(x):
    return x.to_local() if isinstance(x, DTensor) else x


def _watch_routers(trainer):
    gaps = []

    def watch(router, args, output):
        scores = _local(output[2])
        if len(args) > 1 and args[1] is not None:  # the balancing bias takes part in the choice
            scores = scores + _local(args[1])
        top = scores.detach().float().topk(router.top_k + 1, dim=-1).values
        gaps.append((top[..., -2] - top[..., -1]).min().item())

    for part in trainer.model_parts:
        for name, module in part.named_modules():
            if name.endswith("router"):
                module.register_forward_hook(watch)
    return gaps


def largest_error(gradients, reference):
    """Return the parameter with the largest relative error of its gradient, and that error."""
    assert gradients.keys() == reference.keys()
    errors = {n: ((g - reference[n]).norm() / reference[n].norm()).item() for n, g in gradients.items()}
    worst = max(errors, key=errors.get)
    return worst, errors[worst]


def assert_same_numbers(records, one_rank):
    """Check that losses, gradient norms and all gradients equal those of one rank, to a relative 1e-5."""
    losses = [record["loss"] for record in records if record["loss"]]
    assert losses
    for loss in losses:
        assert loss == pytest.approx(one_rank["loss"], rel=1e-5)
    for record in records:
        assert record["mtp"] == pytest.approx(one_rank["mtp"], rel=1e-5)
    for record in records:
        assert record["grad_norm"] == pytest.approx(one_rank["grad_norm"], rel=1e-5)
    gradients = {name: gradient for record in records for name, gradient in record["gradients"].items()}
    worst, error = largest_error(gradients, one_rank["gradients"])
    assert error < 1e-5, worst
