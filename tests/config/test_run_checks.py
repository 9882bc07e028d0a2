"""Checks of a whole configuration: what values are possible together, and on this machine."""

import dataclasses
import json

import pytest
from torchtitan.config import ParallelismConfig

from tests.config.cases import MODEL, named
from titan_gdn.config.run_checks import check
from titan_gdn.config.source import ConfigError


def degrees(replicate: int, shard: int, tp: int) -> str:
    return (
        f"[parallelism]\ndata_parallel_replicate_degree = {replicate}\ndata_parallel_shard_degree = {shard}\n"
        f"tensor_parallel_degree = {tp}\n"
    )


@named(
    "replicate, shard, tp, world_size",
    {
        "one rank": (1, -1, 1, 1),
        "remaining ranks shard beside TP": (1, -1, 2, 4),
        "remaining ranks shard beside replicas": (2, -1, 1, 4),
        "all degrees are given": (2, 2, 2, 8),
        "sharding alone": (1, 4, 1, 4),
        "TP alone": (1, -1, 3, 3),
    },
)
def test_degrees_whose_product_is_the_world_size_pass(load, replicate, shard, tp, world_size):
    load(degrees(replicate, shard, tp) + "[training]\nseq_len = 12", world_size=world_size)


@named(
    "replicate, shard, tp, world_size",
    {
        "TP is not a divisor": (1, -1, 2, 3),
        "TP is more than all ranks": (1, -1, 2, 1),
        "replicas times TP is more": (2, -1, 2, 2),
        "a rank is left": (1, 1, 1, 2),
        "sharding is more than all ranks": (1, 4, 1, 2),
        "half of the ranks are left": (2, 2, 1, 8),
        "replicas are not a divisor": (3, -1, 1, 4),
    },
)
def test_degrees_whose_product_is_not_the_world_size_are_named(error, replicate, shard, tp, world_size):
    rest = " (-1: all remaining ranks)" if shard == -1 else ""
    assert error(degrees(replicate, shard, tp), world_size=world_size).endswith(
        f"run.toml: [parallelism]: expected a product of WORLD_SIZE = {world_size}, got "
        f"data_parallel_replicate_degree = {replicate} * data_parallel_shard_degree = {shard} * "
        f"context_parallel_degree = 1 * tensor_parallel_degree = {tp} * pipeline_parallel_degree = 1{rest}"
    )


@pytest.mark.parametrize("kind", ["data_parallel_replicate", "data_parallel_shard", "tensor_parallel"])
def test_a_degree_below_one_is_an_error(error, kind):
    for degree in (0, -2):
        message = error(f"[parallelism]\n{kind}_degree = {degree}")
        assert f"run.toml: parallelism.{kind}_degree = {degree}: expected at least 1" in message


@named(
    "key, value, sentence",
    {
        "SPMD backend": (
            "spmd_backend",
            '"full_dtensor"',
            "is not supported yet. Possible: spmd_types, partial_dtensor",
        ),
        "load balancer": (
            "context_parallel_load_balancer",
            '"ptrr"',
            "depends on the data. Possible: headtail, none",
        ),
    },
)
def test_a_feature_that_is_not_supported_is_refused_with_a_sentence(error, key, value, sentence):
    text = f"[training]\ndisable_cuda_graphs = true\n[parallelism]\n{key} = {value}"
    message = error(text, world_size=2)
    assert f"parallelism.{key} = {value}" in message and sentence in message


def test_the_global_batch_is_a_multiple_of_the_local_batches(load, error):
    assert load("[training]\nglobal_batch_size = 12", world_size=3).training.global_batch_size == 12
    load("[training]\nglobal_batch_size = 4\n[parallelism]\ntensor_parallel_degree = 2", world_size=4)
    message = error("[training]\nglobal_batch_size = 8", world_size=3)
    assert "training.global_batch_size = 8: expected a multiple of 6 (training.local" in message
    for size in (0, -2):
        assert f"training.global_batch_size = {size}" in error(f"[training]\nglobal_batch_size = {size}")


@pytest.mark.parametrize("key", ["steps", "seq_len", "local_batch_size"])
def test_a_size_below_one_is_an_error(error, key):
    assert f"training.{key} = 0: expected at least 1" in error(f"[training]\n{key} = 0")


def test_sequence_parallelism_needs_a_sequence_that_is_divisible(load, error):
    text = "[training]\nseq_len = 64\n[parallelism]\ntensor_parallel_degree = 3"
    message = error(text, world_size=3)
    assert "training.seq_len = 64: expected a multiple of parallelism.tensor_parallel_degree = 3" in message
    load(text, "--parallelism.no-enable-sequence-parallel", world_size=3)


def test_a_missing_folder_of_the_tokenizer_is_an_error(error):
    message = error(f'{MODEL}hf_assets_path = "/nowhere/at/all"')
    assert 'run.toml: model.hf_assets_path = "/nowhere/at/all": there is no such folder' in message


def test_a_file_that_is_not_a_tokenizer_is_an_error(error, load, tmp_path):
    file = tmp_path / "assets" / "tokenizer.json"
    file.write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    load()
    for broken in ("{", "[]", "{}", '{"model": {"vocab": {"a": "b"}}}'):
        file.write_text(broken)
        message = error()
        assert f'model.hf_assets_path = "{tmp_path}/assets": its tokenizer.json is not a Hugging' in message


def test_a_path_without_text_files_is_an_error_before_the_run(error, load, tmp_path):
    text = f'dataset_path = "{tmp_path}/nowhere"\n'
    message = f"dataset = \"text_files\": no text file at dataset_path = '{tmp_path}/nowhere'"
    assert f"run.toml: dataloader.{message}" in error(f"[dataloader]\n{text}")
    text = f'[validator.dataloader]\ndataset = "text_files"\n{text}'
    assert f"run.toml: validator.dataloader.{message}" in error(text + "[validator]\nenable = true")
    load(text)  # without validation, its data are not needed


def test_an_unknown_compiler_is_an_error_only_when_compiling(load, error):
    message = error('[compile]\nenable = true\nbackend = "inducter"')
    assert 'compile.backend = "inducter" is unknown. Did you mean "inductor"?' in message
    load('[compile]\nenable = true\nbackend = "aot_eager"')
    load('[compile]\nbackend = "inducter"')


def test_the_models_own_conditions_are_checked(error):
    message = error("[parallelism]\ntensor_parallel_degree = 4", world_size=4)
    assert "run.toml: 6 heads, tensor_parallel_degree 4" in message


def test_errors_of_a_run_changed_on_the_command_line_name_both_places(error):
    message = error("", "--parallelism.tensor_parallel_degree", "4", world_size=4)
    assert "run.toml and command line: 6 heads" in message


def test_a_configuration_made_in_python_can_be_checked_alone(load):
    config = load()
    check(config, 1)
    with pytest.raises(ConfigError, match="^\\[parallelism\\]: expected a product of WORLD_SIZE = 2"):
        check(dataclasses.replace(config, parallelism=ParallelismConfig(data_parallel_shard_degree=1)), 2)


@named(
    "section, key, value, words",
    {
        "negative seed": ("debug", "seed", -1, "at least 0"),
        "timeout": ("comm", "train_timeout_seconds", 2**50, "at most 1000000000"),
        "buffer": ("comm", "trace_buf_size", -1, "at least 0"),
        "profile": ("profiler", "profile_freq", 0, "at least 1"),
        "cycles": ("profiler", "profiler_repeat", -1, "at least 0"),
        "batch": ("training", "local_batch_size", 2**50, "less than 2**40 tokens"),
    },
)
def test_a_number_outside_its_range_names_its_key(error, section, key, value, words):
    message = error(f"[{section}]\n{key} = {value}")
    assert f"{section}.{key} = {value}" in message and f"expected {words}" in message


def test_naming_tensors_needs_modules_and_numbers(error, load):
    text = "[debug]\nname_nonfinite = true\n"
    assert "set compile.enable = false" in error(text + "[compile]\nenable = true")
    load(text + '[compile]\nenable = true\ncomponents = ["loss"]')


def test_a_package_that_is_not_installed_is_an_error(error, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for section, key, value in (("metrics", "enable_wandb", "true"), ("comm", "mode", '"torchcomms"')):
        assert "is not installed (pip install " in error(f"[{section}]\n{key} = {value}")


def test_errors_of_torchtitan_name_the_key_that_they_are_of(error):
    assert "debug.batch_invariant = true: " in error("[debug]\nbatch_invariant = true")
    message = error("[compile]\nenable_async_tensor_parallel = true")
    assert "compile.enable_async_tensor_parallel = true: " in message


@pytest.mark.parametrize("section", ["dataloader", "validator.dataloader"])
def test_what_workers_do_needs_workers(error, load, section):
    head = f"[validator]\nenable = true\nsteps = 1\n[{section}]\n"
    for key, value in (("num_workers", -1), ("prefetch_factor", 2), ("persistent_workers", "true")):
        assert f"{section}.{key} = {value}: " in error(f"{head}{key} = {value}")
    assert f"{section}.prefetch_factor = 0: " in error(f"{head}num_workers = 1\nprefetch_factor = 0")
    load(f"{head}num_workers = 1\nprefetch_factor = 2\npersistent_workers = true")
