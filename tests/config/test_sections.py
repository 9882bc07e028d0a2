"""Sections: their keys, the model, and the sections that are chosen by a name."""

import dataclasses
from typing import Any

import pytest
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

from tests.config.cases import MODEL, named, section_of, settable, toml
from titan_gdn.config.sections import SECTIONS
from titan_gdn.data.text_files import TextFilesDataLoader
from titan_gdn.models.hybrid.activation_checkpoint import MemoryBudgetAC, SelectiveAC


@pytest.mark.parametrize("section", [*SECTIONS, "linear_attention"])
def test_every_field_can_be_written_with_its_default_in_the_file(load, section):
    default = load()
    current = section_of(default, section)
    for name in settable(current):
        assert load(f"[{section}]\n{name} = {toml(getattr(current, name))}") == default
    whole = "\n".join(f"{name} = {toml(getattr(current, name))}" for name in settable(current))
    assert load(f"[{section}]\n{whole}") == default


@pytest.mark.parametrize("section", [*SECTIONS, "linear_attention"])
def test_every_field_but_tables_can_be_written_with_its_default_on_the_command_line(load, section):
    default = load()
    current = section_of(default, section)
    for name in settable(current):
        value = getattr(current, name)
        if name in ("param_groups", "optimizer_factory_kwargs_by_name") or dataclasses.is_dataclass(value):
            continue
        words = [str(item) for item in value] if isinstance(value, list) else [str(value)]
        assert load("", f"--{section}.{name}", *(words or [""])) == default


@pytest.mark.parametrize("section", [*SECTIONS, "linear_attention"])
def test_a_misspelled_key_anywhere_names_the_file_and_the_right_one(error, load, section):
    current = section_of(load(), section)
    for name in settable(current):
        misspelled = name.replace("e", "ee", 1) if "e" in name else name + "s"
        expected = f'unknown key "{misspelled}". Did you mean "{name}"? Possible: '
        assert f"run.toml: {section}.{misspelled} = 1: {expected}" in error(f"[{section}]\n{misspelled} = 1")
        assert f"{expected}" in error("", f"--{section}.{misspelled}", "1")


@named(
    "text, name, right",
    {
        "job": ("[job]\ndump_foldr = 1", "dump_foldr", "dump_folder"),
        "model": (f"{MODEL}flavour = 1", "flavour", "flavor"),
        "override": (f"{MODEL}[model.overrides]\nn_layer = 1", "n_layer", "n_layers"),
        "optimizer argument": ("[optimizer]\nweight_decoy = 1", "weight_decoy", "weight_decay"),
        "checkpointing mode": ('[activation_checkpoint]\nmode = "full"\nmoed = 1', "moed", "mode"),
        "nested section": ("[validator.dataloader]\ndatset = 1", "datset", "dataset"),
        "name of a nested section": ("[validator.dataloder]\ndataset = 1", "dataloder", "dataloader"),
        "parameter group": (
            '[[optimizer.param_groups]]\npattrn = "a"\npattern = ".*"\noptimizer_name = "Adam"',
            "pattrn",
            "pattern",
        ),
        "argument in a parameter group": (
            '[[optimizer.param_groups]]\npattern = ""\noptimizer_name = "Adam"\noptimizer_kwargs = {lrr = 1}',
            "lrr",
            "lr",
        ),
    },
)
def test_a_misspelled_key_below_the_fields_names_the_right_one(error, text, name, right):
    assert f'unknown key "{name}". Did you mean "{right}"?' in error(text)


@named(
    "text, words",
    {
        "optimizer": (
            "[training]\nlr = 1",
            'training.lr = 1: unknown key "lr". Did you mean optimizer.lr?',
        ),
        "training": ("[optimizer]\nmax_norm = 1", "Did you mean training.max_norm?"),
        "nested section": (
            "[linear_attention]\nmemory = 80",
            "Did you mean linear_attention.machine.memory?",
        ),
        "from a nested section": (
            "[linear_attention.machine]\nkernel = 1",
            "Did you mean linear_attention.kernel?",
        ),
        "two sections": ("[metrics]\nsteps = 1", "Did you mean training.steps or validator.steps?"),
        "override": (f"{MODEL}n_layers = 1", "Did you mean model.overrides.n_layers?"),
        "from the overrides": (f"{MODEL}[model.overrides]\nseq_len = 1", "Did you mean training.seq_len?"),
        "mode": ("[training]\nsave_exchange = true", "Did you mean activation_checkpoint.save_exchange?"),
        "converter": (
            "[training]\nrecipe_name = 1",
            "Did you mean quantize.linear.recipe_name or quantize.experts",
        ),
        "job": ("[checkpoint]\ndump_folder = 1", "Did you mean job.dump_folder?"),
        "model": ("[job]\nhf_assets_path = 1", "Did you mean model.hf_assets_path?"),
        "no section": (
            "seq_len = 1",
            'seq_len = 1: unknown section "seq_len". Did you mean training.seq_len?',
        ),
    },
)
def test_a_key_in_the_wrong_section_says_where_it_lives(error, text, words):
    message = error(text)
    assert "run.toml: " in message and words in message


def test_every_key_of_a_section_is_found_from_another(error, load):
    config = load()
    for section in SECTIONS:
        other = "lr_scheduler" if section != "lr_scheduler" else "compile"
        for name in settable(section_of(config, section)):
            if name not in settable(section_of(config, other)):
                assert f"{section}.{name}" in error(f"[{other}]\n{name} = 1"), name
    assert "Did you mean optimizer.lr?" in error("", "--training.lr", "1")


def test_an_unknown_section_names_the_file_and_the_nearest_valid_one(error):
    message = error("[trainin]\nsteps = 1")
    assert (
        'run.toml: [trainin]: unknown section "trainin". Did you mean "training"? Possible: job, ' in message
    )
    assert "run.toml: [trainin]" in error("[trainin]")
    assert 'command line: [trainin]: unknown section "trainin"' in error("", "--trainin.steps", "1")


@pytest.mark.parametrize("section", ["override", "tokenizer", "loss", "model_spec", "dump_folder"])
def test_what_is_set_in_python_is_not_a_section(error, section):
    assert f'unknown section "{section}"' in error(f"[{section}]")


def test_fields_that_hold_python_objects_cannot_be_set(error):
    assert 'unknown key "trace_post_processor"' in error("[profiler]\ntrace_post_processor = 1")


def test_a_key_outside_all_sections_or_a_value_in_place_of_a_section_is_an_error(error):
    assert 'run.toml: steps = 3: unknown section "steps"' in error("steps = 3")
    assert "run.toml: training = 3: expected a table, [training]" in error("training = 3")
    assert "expected a table, [validator.dataloader]" in error("[validator]\ndataloader = 3")
    assert "expected a table" in error("[validator]\ndataloader = 3", "--validator.dataloader.dataset", "c4")
    assert "expected a table" in error("", "--validator.dataloader", "c4")
    assert "expected a table, [model.overrides]" in error(f"{MODEL}overrides = 3")
    assert "run.toml: [training.steps]: expected int" in error("[training.steps]\na = 1")


def test_profiling_is_an_alias_of_profiler_but_not_beside_it(load, error):
    assert load("[profiling]\nprofile_freq = 3").profiler.profile_freq == 3
    assert "the same section" in error("[profiling]\nprofile_freq = 3\n[profiler]\nprofile_freq = 3")


# --- Model ---


def test_a_model_without_name_or_flavor_lists_those_there_are(error):
    assert "run.toml: [model]: name is missing. Possible: fake, faker_still." in error("# [model]")
    assert "flavor is missing. Possible: tiny, large." in error('[model]\nname = "fake"')


def test_what_the_builder_refuses_is_an_error_of_the_model_section(error):
    message = error(f"{MODEL}[model.overrides]\nn_layers = 0")
    assert "run.toml: model.overrides.n_layers = 0: a model has layers" in message


# --- Activation checkpointing ---


def test_the_mode_chooses_the_policy(load):
    def policy(mode: str) -> Any:
        return load(f'[activation_checkpoint]\nmode = "{mode}"').activation_checkpoint

    assert policy("none") is None
    assert policy("full") == FullAC.Config()
    assert policy("selective").force_recompute_mm_shapes_by_fqns == ["gate"]  # the flavor's own
    assert load("", "--activation_checkpoint.mode", "none").activation_checkpoint is None
    text = '[activation_checkpoint]\nmode = "memory_budget"\nmemory_budget = 1\n[compile]\nenable = true'
    assert load(text).activation_checkpoint == MemoryBudgetAC.Config(memory_budget=1.0)


def test_without_a_mode_the_flavors_policy_is_changed(load):
    policy = load("[activation_checkpoint]\npreserve_rng_state = false").activation_checkpoint
    assert isinstance(policy, SelectiveAC.Config) and policy.preserve_rng_state is False
    assert policy.force_recompute_mm_shapes_by_fqns == ["gate"]


def test_keys_of_another_mode_are_an_error(error):
    assert 'unknown key "debug"' in error('[activation_checkpoint]\nmode = "none"\ndebug = true')
    assert 'needs activation_checkpoint.mode = "memory_budget"' in error(
        "[activation_checkpoint]\nmemory_budget = 0.5"
    )
    text = '[activation_checkpoint]\nmode = "full"\nforce_recompute_mm_shapes_by_fqns = ["a"]'
    assert 'unknown key "force_recompute_mm_shapes_by_fqns"' in error(text)


# --- Fields that depend on each other ---


def test_torchtitans_own_conditions_name_file_and_section(error):
    assert "run.toml: [checkpoint]: keep_latest_k cannot be negative" in error(
        "[checkpoint]\nkeep_latest_k = -1"
    )
    assert "command line: [checkpoint]: Checkpoint interval" in error("", "--checkpoint.interval", "0")
    assert "run.toml: [validator]: validation steps must be positive" in error("[validator]\nsteps = 0")
    assert "run.toml and command line: [checkpoint]: last_save_in_hf requires" in error(
        "[checkpoint]\nlast_save_in_hf = true", "--checkpoint.no-last-save-model-only"
    )
    text = '[activation_checkpoint]\nmode = "memory_budget"'
    assert "run.toml: Memory budget activation checkpointing requires" in error(text)


def test_keys_that_need_each_other_are_set_together(load):
    text = "[checkpoint]\ninitial_load_in_hf_quantized = true\ninitial_load_in_hf = true\n"
    text += 'initial_load_path = "/a"'
    assert load(text).checkpoint == CheckpointManager.Config(
        initial_load_in_hf=True, initial_load_in_hf_quantized=True, initial_load_path="/a"
    )
    text = "[compile]\nenable_async_tensor_parallel = true"
    assert load(text, "--compile.enable").compile.enable_async_tensor_parallel


# --- Data ---


def test_text_files_keep_the_flavors_loader_and_other_names_take_torchtitans(load, tmp_path):
    kept = load('[dataloader]\ndataset = "text_files"\nnum_workers = 1').dataloader
    assert kept == TextFilesDataLoader.Config(dataset_path=str(tmp_path / "data"), num_workers=1)
    other = load('[dataloader]\ndataset = "c4"\nnum_workers = 4').dataloader
    assert other == HuggingFaceTextDataLoader.Config(dataset="c4", num_workers=4)


def test_the_validators_data_are_a_nested_table(load, tmp_path):
    (tmp_path / "held.txt").write_text("words")
    validator = load(
        f'[validator]\nenable = true\n[validator.dataloader]\ndataset = "text_files"\n'
        f'dataset_path = "{tmp_path}/*.txt"'
    ).validator
    assert validator.enable
    assert validator.dataloader == TextFilesDataLoader.Config(
        dataset_path=f"{tmp_path}/*.txt",
        infinite=False,  # as the validator's own
    )
    words = ["--validator.dataloader.dataset", "c4", "--validator.dataloader.pin-memory"]
    assert load("", *words).validator.dataloader == HuggingFaceTextDataLoader.Config(
        dataset="c4", infinite=False, pin_memory=True
    )


def test_errors_of_a_loader_name_its_table(error):
    message = error('[validator.dataloader]\ndataset = "text_files"\nnum_workers = 2')
    assert "run.toml: validator.dataloader.num_workers = 2" in message
