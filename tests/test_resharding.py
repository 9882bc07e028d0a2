"""Steps of other models are refused before a run, and those of this model load on any mesh."""

import os
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests import hf, ranks
from tests.conftest import LAYERS
from tests.training import train
from titan_gdn.config.load import ConfigError, load_config

OVERRIDES = hf.overrides(hf._qwen3_next(**LAYERS)[0])


def run_toml(folder, **sections):
    return ["--job.config_file", hf.toml(str(folder), OVERRIDES, **sections)]


@pytest.fixture
def step(tmp_path):
    """A function that saves the model of a command line as a step, and returns its folder."""

    def save(argv, *states, folder="step"):
        model = load_config(argv, 1).model_spec.model.build()
        state = dict(model.state_dict()) | dict.fromkeys(states, torch.zeros(1))
        dcp.save(state, checkpoint_id=tmp_path / folder, no_dist=True)
        return str(tmp_path / folder)

    return save


CHANGES = {
    "more layers": (
        {"n_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        "the step has layers 0 to 2, the model has layers 0 to 1",
    ),
    "fewer layers": (
        {"n_layers": 1, "layer_types": ["linear_attention"]},
        "the step has layers 0 to 0, the model has layers 0 to 1",
    ),
    "another vocabulary": (
        {"vocab_size": 272},
        r"tok_embeddings.weight: the model has \[264, 64\], the step has \[272, 64\]",
    ),
    "other layers": (
        {"layer_types": ["full_attention", "linear_attention"]},
        "missing in the step: layers.0.linear_attention.* unknown to the model: layers.0.attention",
    ),
    "a bias that balances experts": (
        {"load_balance_coeff": 1e-3},
        "unknown to the model: layers.1.moe.expert_bias_E",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_step_of_another_model_is_refused_before_the_run(case, tmp_path, step):
    changes, said = CHANGES[case]
    words = []
    for key, value in changes.items():
        words += [f"--model.overrides.{key}", ",".join(value) if isinstance(value, list) else str(value)]
    plain = run_toml(tmp_path, checkpoint={"enable": False})
    path = step([*plain, *words])
    argv = run_toml(tmp_path, checkpoint={"enable": True, "initial_load_path": path})
    with pytest.raises(ConfigError, match=f'checkpoint.initial_load_path = "{path}": .*{said}'):
        load_config(argv, 1)
    assert load_config([*argv, *words], 1)


def test_a_step_of_the_run_itself_is_looked_at_too(tmp_path, step):
    plain = run_toml(tmp_path, checkpoint={"enable": False})
    step([*plain, "--model.overrides.vocab_size", "272"], folder="out/checkpoint/step-0")
    argv = run_toml(tmp_path, checkpoint={"enable": True})
    with pytest.raises(ConfigError, match='checkpoint.folder = "checkpoint": .*the step has .272, 64'):
        load_config(argv, 1)


@pytest.mark.parametrize("of_step", [False, True])
@pytest.mark.parametrize("known_from", ["optimizer", "record"])
def test_a_step_with_other_tying_is_refused_before_the_run(of_step, known_from, tmp_path, step):
    from titan_gdn.checkpoint.export import record_source

    tied, untied = (["--model.overrides.tie_word_embeddings"], [])
    plain = run_toml(tmp_path, checkpoint={"enable": False})
    names = ["tok_embeddings.weight"] if of_step else ["tok_embeddings.weight", "lm_head.weight"]
    states = [f"optimizer.state.{name}.exp_avg" for name in names] if known_from == "optimizer" else []
    path = step([*plain, *(tied if of_step else untied)], *states)
    if known_from == "record":
        record_source(path, None, of_step)
    argv = run_toml(tmp_path, checkpoint={"enable": True, "initial_load_path": path})
    with pytest.raises(ConfigError, match=f"tie_word_embeddings = {str(of_step).lower()}"):
        load_config([*argv, *(untied if of_step else tied)], 1)
    assert load_config([*argv, *(tied if of_step else untied)], 1)


def test_a_damaged_step_is_refused_before_the_run(tmp_path, step):
    path = step(run_toml(tmp_path, checkpoint={"enable": False}))
    argv = run_toml(tmp_path, checkpoint={"enable": True, "initial_load_path": path})
    assert load_config(argv, 1)
    (shard,) = (name for name in os.listdir(path) if name.endswith(".distcp"))
    os.truncate(os.path.join(path, shard), 1000)
    with pytest.raises(ConfigError, match=f'{shard}" is truncated: 1000 bytes'):
        load_config(argv, 1)
    os.remove(os.path.join(path, shard))
    with pytest.raises(ConfigError, match=f'{shard}" is missing'):
        load_config(argv, 1)
    os.truncate(os.path.join(path, ".metadata"), 100)
    with pytest.raises(ConfigError, match='.metadata" cannot be read'):
        load_config(argv, 1)


MESHES = {
    "TP 1 x CP 2": {"context_parallel": 2},
    "FSDP 4": {"data_parallel_shard": 4},
    "PP 2": {"pipeline_parallel": 2},
    "EP 2": {"data_parallel_shard": 2, "expert_parallel": 2},
    "TP 2 x CP 2": {"tensor_parallel": 2, "context_parallel": 2},
}


def mesh(degrees, batch=4):
    ranks_of = {name: degree for name, degree in degrees.items() if name != "expert_parallel"}
    rows = batch // degrees.get("data_parallel_shard", 1)
    words = [word for name, n in degrees.items() for word in (f"--parallelism.{name}_degree", str(n))]
    world = 1
    for n in ranks_of.values():
        world *= n
    return world, [*words, "--training.local_batch_size", str(rows)]


def losses_of(records):
    return next(record["loss"] for record in records if record["loss"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run on TP 2 that was never stopped: its folder, with step 2, and its losses."""
    folder = tmp_path_factory.mktemp("saved")
    argv = run_toml(
        folder,
        checkpoint={"enable": True, "interval": 2, "last_save_model_only": False, "keep_latest_k": 0},
        training={"steps": 5},
    )
    world, words = mesh({"tensor_parallel": 2})
    records = ranks.run(train, world, [*argv, *words], timeout=200)
    assert records[0]["gap"] > 1e-6, "two experts have nearly the same score: change the seed"
    return folder, argv, losses_of(records)


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_a_run_goes_on_on_another_mesh(name, saved, tmp_path):
    folder, argv, expected = saved
    shutil.copytree(folder / "out/checkpoint/step-2", tmp_path / "checkpoint/step-2")
    world, words = mesh(MESHES[name])
    argv = [*argv, *words, "--job.dump_folder", str(tmp_path)]
    assert losses_of(ranks.run(train, world, argv, timeout=300)) == pytest.approx(expected[2:], rel=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_with_a_worker_for_data(saved, tmp_path):
    folder, argv, expected = saved
    shutil.copytree(folder / "out/checkpoint/step-2", tmp_path / "checkpoint/step-2")
    words = ["--job.dump_folder", str(tmp_path), "--dataloader.num_workers", "1"]
    records = ranks.run(_train_undaemonic, 1, [*argv, *words])
    assert losses_of(records) == pytest.approx(expected[2:], rel=1e-5)


def _train_undaemonic(argv):
    import multiprocessing

    multiprocessing.current_process()._config["daemon"] = False  # a daemon may have no workers
    return train(argv)


@pytest.mark.slow
def test_meshes_that_begin_with_one_seed_checkpoint_have_the_same_losses(tmp_path):
    argv = run_toml(tmp_path, checkpoint={"enable": True}, training={"steps": 2})
    ranks.run(_create_seed_checkpoint, 1, [*argv, "--checkpoint.create_seed_checkpoint"])
    seed = ["--checkpoint.initial_load_path", str(tmp_path / "out/checkpoint/step-0")]
    losses = []
    for name, degrees in {"one": {}, "tp": {"tensor_parallel": 2}, "pp": MESHES["PP 2"]}.items():
        world, words = mesh(degrees)
        words += [*seed, "--job.dump_folder", str(tmp_path / name)]
        losses.append(losses_of(ranks.run(train, world, [*argv, *words], timeout=200)))
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-5)


def _create_seed_checkpoint(argv):
    from titan_gdn.train import main

    main(argv)
