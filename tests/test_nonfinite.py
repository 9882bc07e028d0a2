"""A step whose gradients are not finite: nothing is applied, all ranks stop, the first tensor is named."""

import os

import pytest
import torch

from tests import ranks
from tests.draw import in_sets
from titan_gdn.endings.nonfinite import NonfiniteError, watch

BASE = [
    "--job.config_file", "train_configs/qwen3_next_debug.toml", "--training.steps", "4", "--training.seq_len",
    "64", "--training.local_batch_size", "2", "--checkpoint.no-enable", "--metrics.no-enable_tensorboard",
    "--model.overrides.n_layers", "4", "--metrics.log_freq", "10",
]  # fmt: skip


def train(argv, name, kind, bad_rank, watched=True):
    """Train with a module whose output, or its gradient, becomes NaN in step 3, or a parameter that is.

    Returns:
        The message of the error, or None, and whether all weights are finite afterward.
    """
    from titan_gdn.config.load import load_config

    torch.manual_seed(0)
    trainer = load_config(argv, int(os.environ["WORLD_SIZE"])).build()

    def break_output(module, args, output):
        if trainer.step == 3 and kind == "output":
            return output * torch.nan
        if trainer.step == 3 and kind == "gradient":
            output.register_hook(lambda gradient: gradient * torch.inf)
        return None

    for part in trainer.model_parts:
        for found, module in part.named_modules():
            if found.replace("_checkpoint_wrapped_module.", "") == name and os.environ["RANK"] == str(
                bad_rank
            ):
                module.register_forward_hook(break_output)
        for found, parameter in part.named_parameters():
            if plain(found) == name:
                parameter.detach().fill_(torch.nan)
    if watched:
        watch(trainer)
    try:
        trainer.train()
        told = None
    except NonfiniteError as error:
        told = str(error)
    weights = [getattr(p, "_local_tensor", p) for part in trainer.model_parts for p in part.parameters()]
    trainer.close()
    return told, all(bool(x.isfinite().all()) for x in weights)


def plain(name):
    return name.replace("_checkpoint_wrapped_module.", "")


def test_without_names_the_step_and_the_key_are_told_and_nothing_is_applied():
    ((told, finite),) = ranks.run(train, 1, BASE, "layers.1", "output", 0)
    assert told.startswith("step 3: the norm of all gradients is nan") and finite
    assert "The weights are those of step 2" in told and "debug.name_nonfinite = true" in told


@pytest.mark.slow
def test_torchtitan_alone_applies_nan_and_goes_on():
    """Once it does not, `titan_gdn.endings.nonfinite` need not look at the norm."""
    assert ranks.run(train, 1, BASE, "layers.1", "output", 0, False) == [(None, False)]


@pytest.mark.slow
def test_a_run_of_finite_numbers_ends_with_names_on():
    argv = [
        *BASE,
        "--debug.name_nonfinite",
        "--validator.enable",
        "--validator.freq",
        "2",
        "--validator.steps",
        "1",
    ]
    assert ranks.run(train, 1, argv, "none", "output", 0) == [(None, True)]


CASES = {
    "cp, selective": (
        "layers.1.feed_forward", "output", 1, 2,
        "--parallelism.context_parallel_degree 2 --activation_checkpoint.mode selective",
    ),
    "gradient": ("layers.2.feed_forward", "gradient", 0, 1, ""),
    "parameter": ("layers.2.feed_forward.w1.weight", "parameter", 0, 1, "--activation_checkpoint.mode full"),
    "pp, first stage": ("layers.0.feed_forward", "output", 0, 2, "--parallelism.pipeline_parallel_degree 2"),
    "pp, last stage": ("layers.3.feed_forward", "gradient", 1, 2, "--parallelism.pipeline_parallel_degree 2"),
    "tp, experts": (
        "layers.1.moe", "output", 1, 2, "--parallelism.tensor_parallel_degree 2 --model.flavor debug_moe"
    ),
    "fsdp, partial_dtensor": ("tok_embeddings", "output", 1, 2, "--parallelism.spmd_backend partial_dtensor"),
    "compiled loss": (
        "layers.1", "output", 0, 1, "--compile.enable --compile.components loss --compile.backend aot_eager"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", in_sets(CASES, fast=["cp, selective"]))
def test_the_first_tensor_that_is_not_finite_is_named_on_every_rank(case):
    name, kind, bad, world_size, argv = CASES[case]
    told = ranks.run(train, world_size, [*BASE, "--debug.name_nonfinite", *argv.split()], name, kind, bad)
    what = {
        "output": "the output of",
        "gradient": "the gradient of the output of",
        "parameter": "the parameter",
    }
    for message, finite in told:
        assert f"The first such tensor is {what[kind]} {name} (rank {bad})" in message
        assert message.startswith("step 1: " if kind == "parameter" else "step 3: ")
        assert finite == (kind != "parameter")
