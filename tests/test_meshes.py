"""The same numbers at any mesh: from one Hugging Face checkpoint and one stream of documents."""

import itertools

import pytest

from tests import hf, ranks
from tests.draw import in_sets
from tests.training import assert_same_numbers, train

TP, FSDP = "--parallelism.tensor_parallel_degree", "--parallelism.data_parallel_shard_degree"
NO_SP = "--parallelism.no-enable_sequence_parallel"
HALF, QUARTER = ("--training.local_batch_size", "2"), ("--training.local_batch_size", "1")
MESHES = {
    "gradient accumulation": (1, *HALF, "--training.global_batch_size", "4"),
    "fsdp 2": (2, *HALF),
    "replicate 2": (2, "--parallelism.data_parallel_replicate_degree", "2", *HALF),
    "tp 2": (2, TP, "2"),
    "tp 2 without sequence parallelism": (2, TP, "2", NO_SP),
    "fsdp 2, tp 2": (4, TP, "2", *HALF),
    "tp 4 with 2 key-value heads": (4, TP, "4"),
    "tp 4 with 2 key-value heads without sequence parallelism": (4, TP, "4", NO_SP),
    # torch 2.14 loses a gradient here (see titan_gdn/runtime/async_wait.py).
    "tp 2, one row at a time": (2, TP, "2", *QUARTER, "--training.global_batch_size", "4"),
    "replicate 2, fsdp 2": (4, "--parallelism.data_parallel_replicate_degree", "2", *QUARTER),
}


RUNS = list(itertools.product(MESHES, ("spmd_types", "partial_dtensor")))
# The meshes of one and two ranks, the backends in turns.
FAST = [(mesh, RUNS[i % 2][1]) for i, mesh in enumerate(MESHES) if MESHES[mesh][0] <= 2]


@pytest.mark.parametrize(("mesh", "backend"), in_sets(RUNS, fast=FAST))
def test_loss_gradient_norm_and_gradients_are_those_of_one_rank(run, one_rank, mesh, backend):
    world_size, *argv = MESHES[mesh]
    records = run(world_size, *argv, "--parallelism.spmd_backend", backend)
    assert_same_numbers(records, one_rank)


@pytest.mark.slow
def test_a_checkpointed_and_compiled_run_has_the_same_losses(tmp_path):
    model, overrides = hf.model(
        num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], num_experts=0
    )
    model.save_pretrained(tmp_path)
    argv = ["--job.config_file", hf.toml(str(tmp_path), overrides, checkpoint=hf.weights_of(tmp_path))]
    plain = ranks.run(train, 1, argv)[0]
    argv += ["--activation_checkpoint.mode", "full", "--compile.enable", "--compile.backend", "aot_eager"]
    for mesh in ([TP, "2"], [FSDP, "2", *HALF]):
        for record in ranks.run(train, 2, [*argv, *mesh]):
            assert record["loss"] == pytest.approx(plain["loss"], rel=1e-5)
