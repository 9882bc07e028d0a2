"""Expert parallelism: whole experts on some ranks each, and every token on its way to them."""

import os

import pytest
import torch
from safetensors.torch import load_file

from tests import hf, ranks
from tests.draw import in_sets
from tests.training import assert_same_numbers, train
from titan_gdn.config.load import ConfigError, load_config

CONFIGS = os.path.join(os.path.dirname(__file__), "..", "train_configs")
FAMILIES = ("qwen3_next", "kimi_linear")
TP, CP, EP = (f"--parallelism.{name}_parallel_degree" for name in ("tensor", "context", "expert"))
HALF = ("--training.local_batch_size", "2")
DTENSOR = ("--parallelism.spmd_backend", "partial_dtensor")
NO_SP = "--parallelism.no-enable_sequence_parallel"
COEFF = "--model.overrides.load_balance_coeff"


def exchange(name):
    return ("--linear_attention.exchange", name)


# One layer of each kind, the first dense, the second with experts.
LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
DENSE = {"qwen3_next": {"mlp_only_layers": [0]}, "kimi_linear": {}}

# Four experts in Qwen3-Next, eight in Kimi Linear: of eight ranks FSDP cuts the four by rows.
MESHES = {
    "cp 2, ep 2": (4, CP, "2", EP, "2", *exchange("state"), *HALF),
    "tp 2, ep 2": (4, TP, "2", EP, "2", NO_SP, *HALF),
    "cp 2, tp 2, ep 4, partial_dtensor": (4, CP, "2", TP, "2", EP, "4", *exchange("all_gather"), *DTENSOR),
    "fsdp 2, cp 2, tp 2, ep 4": (8, CP, "2", TP, "2", EP, "4", *exchange("all_to_all"), *HALF),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family_run(request, tmp_path_factory):
    """Trains 3 steps of a model on some ranks; its experts are balanced by a bias."""
    folder = str(tmp_path_factory.mktemp(request.param))
    model, overrides = hf.model(request.param, **LAYERS, **DENSE[request.param])
    model.save_pretrained(folder)
    path = hf.toml(folder, overrides, model={"name": request.param}, checkpoint=hf.weights_of(folder))
    argv = ["--job.config_file", path, COEFF, "1e-2"]
    return lambda world_size, *mesh: ranks.run(train, world_size, [*argv, *mesh], timeout=280)


@pytest.fixture(scope="module")
def family_one_rank(family_run):
    """The reference, and that no router has to choose between experts whose scores are nearly equal."""
    record = family_run(1)[0]
    assert record["gap"] > 1e-5, "a near tie between experts: take another seed"
    return record


@pytest.mark.parametrize("mesh", in_sets(MESHES, fast=["cp 2, ep 2"]))
def test_the_numbers_are_those_of_one_rank(family_run, family_one_rank, mesh):
    """Losses, gradient norms and gradients; the biases count the tokens of all ranks, each once."""
    world_size, *argv = MESHES[mesh]
    records = family_run(world_size, *argv)
    assert_same_numbers(records, family_one_rank)
    assert family_one_rank["bias"]
    for record in records:
        torch.testing.assert_close(record["bias"], family_one_rank["bias"], atol=1e-6, rtol=0)


def test_files_and_checkpoints_are_read_and_written_in_shards(tmp_path):
    """Hugging Face files, at CP 2, EP 2 a checkpoint, at TP 2, EP 2 files again: the same bits."""
    model, overrides = hf.model("kimi_linear", **LAYERS)
    model.save_pretrained(tmp_path)
    load = {"enable": True, "initial_load_in_hf": True, "initial_load_path": str(tmp_path)}
    sections = {"model": {"name": "kimi_linear"}, "checkpoint": {**load, "last_save_model_only": False}}
    path = hf.toml(str(tmp_path), overrides, **sections)
    ranks.run(load_and_save, 4, ["--job.config_file", path, CP, "2", EP, "2", *HALF])
    argv = ["--checkpoint.last_save_model_only", "--checkpoint.last_save_in_hf", TP, "2", EP, "2"]
    ranks.run(load_and_save, 2, ["--job.config_file", path, *argv])
    files = load_file(tmp_path / "model.safetensors")
    written = {}
    folder = tmp_path / "out" / "checkpoint" / "step-1"
    for name in os.listdir(folder):
        written |= load_file(folder / name) if name.endswith(".safetensors") else {}
    assert written.keys() == files.keys()
    assert all(torch.equal(written[key], files[key]) for key in files)


def load_and_save(argv):
    """Begin a run and save what it begins with."""
    trainer = load_config(argv, int(os.environ["WORLD_SIZE"])).build()
    trainer.checkpointer.load()
    trainer.checkpointer.save(trainer.step + 1, last_step=True)
    trainer.close()


REFUSED = {
    f"{EP} 3": "expected a divisor of 8, the number of ranks that share the experts",
    f"{EP} 8 --parallelism.data_parallel_replicate_degree 2": "expected a divisor of 4",
    f"{EP} 8 --model.overrides.n_experts 12": "the 12 experts; possible degrees: 1, 2, 3, 4, 6, 12",
    f"{EP} 2 --model.overrides.n_experts 0": "no experts, so set it to 1",
    f"{EP} 2 {TP} 4 {NO_SP} --training.seq_len 258": "258 is not divisible by .*tensor_parallel_degree = 4",
    f"{EP} 2 --model.overrides.n_experts 8 --model.overrides.expert_hidden_dim 72": "into 16 parts",
    "--model.overrides.n_experts 8 --model.overrides.expert_hidden_dim 72": "into 32 parts",
}


@pytest.mark.parametrize("argv", REFUSED)
def test_experts_that_the_ranks_cannot_share_are_refused(argv):
    path = os.path.join(CONFIGS, "qwen3_next_debug_moe.toml")
    with pytest.raises(ConfigError, match=REFUSED[argv]):
        load_config(["--job.config_file", path, *argv.split()], 32 if "hidden" in argv else 8)
