import dataclasses
import json
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from titan_gdn import models
from titan_gdn.config import load as config_module
from titan_gdn.config.load import ConfigError, LinearAttentionConfig, check, load_config
from titan_gdn.config.removed_keys import WHAT_BECAME_OF
from titan_gdn.data.text_files import TextFilesDataLoader
from titan_gdn.models.hybrid.activation_checkpoint import MemoryBudgetAC, SelectiveAC

SECTIONS = config_module.SECTIONS
MODEL = '[model]\nname = "fake"\nflavor = "tiny"\n'


@dataclass
class FakeModel:
    linear_attention: LinearAttentionConfig
    overrides: dict[str, Any] = field(default_factory=dict)

    def check(self, config):
        if 6 % config.parallelism.tensor_parallel_degree:
            raise ValueError(f"6 heads, tensor_parallel_degree {config.parallelism.tensor_parallel_degree}")

    def check_device(self):
        pass


def tiny(
    *,
    n_layers: int = 2,
    rope_factor: float | None = None,
    widths: tuple[int, ...] = (64,),
    layer_types: list[str] | None = None,
    tied: bool = False,
    rope_scaling: dict[str, Any] | None = None,
):
    if n_layers < 1:
        raise ValueError(f"n_layers = {n_layers}: a model has layers")


@pytest.fixture(autouse=True)
def fake_model(monkeypatch, tmp_path):
    """A model package whose flavors are `tiny` and `large`, its tokenizer's folder and its data."""
    (tmp_path / "assets").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("words")

    def trainer_config(flavor: str, *, linear_attention, converters, **overrides) -> Trainer.Config:
        tiny(**overrides)
        adamw = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}
        return Trainer.Config(
            model_spec=ModelSpec("fake", flavor, FakeModel(linear_attention, overrides), *[None] * 4),
            hf_assets_path=str(tmp_path / "assets"),
            dataloader=TextFilesDataLoader.Config(dataset_path=str(tmp_path / "data")),
            training=TrainingConfig(local_batch_size=2, seq_len=64, steps=7),
            parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
            activation_checkpoint=SelectiveAC.Config(force_recompute_mm_shapes_by_fqns=["gate"]),
            optimizer=OptimizersContainer.Config(
                implementation="for-loop",
                param_groups=[
                    ParamGroupConfig(
                        pattern=r"(A_log|dt_bias|norm\.weight)$",
                        optimizer_name="AdamW",
                        optimizer_kwargs=adamw | {"weight_decay": 0.0},
                    ),
                    ParamGroupConfig(
                        pattern=".*", optimizer_name="AdamW", optimizer_kwargs=adamw | {"weight_decay": 0.1}
                    ),
                ],
            ),
        )

    package, registry = ModuleType("fake_package"), ModuleType("fake_package.config_registry")
    package.flavors = {"tiny": tiny, "large": tiny}
    registry.trainer_config = trainer_config
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.setattr(models, "MODELS", ("fake", "faker_still"))
    monkeypatch.setattr(models, "load", {"fake": package}.__getitem__)


@pytest.fixture
def load(tmp_path):
    """Loads a file of the text given, with `[model]` unless the text has its own, and command line words."""

    def load(text: str = "", *words: str, world_size: int = 1) -> Trainer.Config:
        file = tmp_path / "run.toml"
        file.write_text(text if "[model]" in text else f"{text}\n{MODEL}")
        return load_config(["--job.config_file", str(file), *words], world_size)

    return load


@pytest.fixture
def error(load):
    """The message of the error that a file of this text, with these words, is."""

    def error(*args: str, world_size: int = 1) -> str:
        with pytest.raises(ConfigError) as raised:
            load(*args, world_size=world_size)
        return str(raised.value)

    return error


def toml(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps("none" if value is None else value)


def settable(section: Any) -> list[str]:
    return [name for name in config_module.fields_of(type(section))]


# --- Precedence ---


def test_the_command_line_wins_over_the_file_which_wins_over_the_flavor(load):
    assert load().training.steps == 7
    assert load("[training]\nsteps = 8").training.steps == 8
    assert load("[training]\nsteps = 8", "--training.steps", "9").training.steps == 9
    assert load("", "--training.steps", "9").training.steps == 9


def test_of_two_options_the_later_wins(load):
    assert load("", "--training.steps", "9", "--training.steps=10").training.steps == 10
    assert load("", "--compile.enable", "--compile.no-enable").compile.enable is False
    assert load("", "--compile.no-enable", "--compile.enable").compile.enable is True


def test_a_section_changed_in_file_and_command_line_keeps_both_and_the_defaults(load):
    training = load("[training]\nsteps = 8", "--training.seq_len", "32").training
    assert (training.steps, training.seq_len, training.local_batch_size) == (8, 32, 2)


def test_the_job_and_the_model_fill_the_top_of_the_configuration(load, tmp_path):
    text = f'[job]\ndump_folder = "there"\ndescription = "why"\n{MODEL}hf_assets_path = "{tmp_path}"'
    config = load(text)
    assert (config.dump_folder, config.hf_assets_path) == ("there", str(tmp_path))
    assert config.model_spec.flavor == "tiny"
    assert load(text, "--model.flavor", "large").model_spec.flavor == "large"


def test_the_model_may_stand_on_the_command_line_alone(load):
    words = ["--model.name", "fake", "--model.flavor", "large"]
    assert load("# [model]", *words).model_spec.flavor == "large"


def test_the_linear_attention_section_reaches_the_model(load):
    assert load().model_spec.model.linear_attention == LinearAttentionConfig(kernel="auto")
    text = '[linear_attention]\nkernel = "torch"'
    assert load(text).model_spec.model.linear_attention.kernel == "torch"
    assert load(text, "--linear-attention.kernel=fla").model_spec.model.linear_attention.kernel == "fla"


def test_overrides_reach_the_builder_in_the_types_that_it_annotates(load):
    text = MODEL + "[model.overrides]\nn_layers = 4\nrope_factor = 2\nwidths = [1, 2]\nrope_scaling = {a = 1}"
    words = [
        "--model.overrides.n_layers",
        "3",
        "--model.overrides.tied",
        "--model.overrides.widths",
        "5",
        "6",
    ]
    overrides = load(text, *words).model_spec.model.overrides
    assert overrides == {
        "n_layers": 3,
        "rope_factor": 2.0,
        "widths": (5, 6),
        "rope_scaling": {"a": 1},
        "tied": True,
    }
    assert isinstance(overrides["rope_factor"], float)
    layers = load("", "--model.overrides.layer-types=linear,full").model_spec.model.overrides
    assert layers == {"layer_types": ["linear", "full"]}


# --- All sections and fields ---


@pytest.mark.parametrize("section", [*SECTIONS, "linear_attention"])
def test_every_field_can_be_written_with_its_default_in_the_file(load, section):
    default = load()
    current = LinearAttentionConfig() if section == "linear_attention" else getattr(default, section)
    for name in settable(current):
        assert load(f"[{section}]\n{name} = {toml(getattr(current, name))}") == default
    whole = "\n".join(f"{name} = {toml(getattr(current, name))}" for name in settable(current))
    assert load(f"[{section}]\n{whole}") == default


@pytest.mark.parametrize("section", [*SECTIONS, "linear_attention"])
def test_every_field_but_tables_can_be_written_with_its_default_on_the_command_line(load, section):
    default = load()
    current = LinearAttentionConfig() if section == "linear_attention" else getattr(default, section)
    for name in settable(current):
        value = getattr(current, name)
        if name in ("param_groups", "optimizer_factory_kwargs_by_name") or dataclasses.is_dataclass(value):
            continue
        words = [str(item) for item in value] if isinstance(value, list) else [str(value)]
        assert load("", f"--{section}.{name}", *(words or [""])) == default


@pytest.mark.parametrize("section", [*SECTIONS, "linear_attention"])
def test_a_misspelt_key_anywhere_names_the_file_and_the_right_one(error, load, section):
    current = LinearAttentionConfig() if section == "linear_attention" else getattr(load(), section)
    for name in settable(current):
        misspelt = name.replace("e", "ee", 1) if "e" in name else name + "s"
        expected = f'unknown key "{misspelt}". Did you mean "{name}"? Possible: '
        assert f"run.toml: [{section}] {misspelt} = 1: {expected}" in error(f"[{section}]\n{misspelt} = 1")
        assert f"{expected}" in error("", f"--{section}.{misspelt}", "1")


@pytest.mark.parametrize(
    "text, name, right",
    [
        ("[job]\ndump_foldr = 1", "dump_foldr", "dump_folder"),
        (f"{MODEL}flavour = 1", "flavour", "flavor"),
        (f"{MODEL}[model.overrides]\nn_layer = 1", "n_layer", "n_layers"),
        ("[optimizer]\nweight_decoy = 1", "weight_decoy", "weight_decay"),
        ('[activation_checkpoint]\nmode = "full"\nmoed = 1', "moed", "mode"),
        ("[validator.dataloader]\ndatset = 1", "datset", "dataset"),
        ("[validator.dataloder]\ndataset = 1", "dataloder", "dataloader"),
        (
            '[[optimizer.param_groups]]\npattrn = "a"\npattern = ".*"\noptimizer_name = "Adam"',
            "pattrn",
            "pattern",
        ),
        (
            '[[optimizer.param_groups]]\npattern = ""\noptimizer_name = "Adam"\noptimizer_kwargs = {lrr = 1}',
            "lrr",
            "lr",
        ),
    ],
)
def test_a_misspelt_key_below_the_fields_names_the_right_one(error, text, name, right):
    assert f'unknown key "{name}". Did you mean "{right}"?' in error(text)


def test_an_unknown_section_names_the_file_and_the_nearest_valid_one(error):
    message = error("[trainin]\nsteps = 1")
    assert (
        'run.toml: [trainin]: unknown section "trainin". Did you mean "training"? Possible: job, ' in message
    )
    assert "run.toml: [trainin]" in error("[trainin]")
    assert 'command line: [trainin]: unknown section "trainin"' in error("", "--trainin.steps", "1")


@pytest.mark.parametrize("section", ["override", "tokenizer", "loss", "model_spec", "dump_folder"])
def test_what_is_set_in_python_is_no_section(error, section):
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


def test_profiling_is_another_name_of_profiler_but_not_beside_it(load, error):
    assert load("[profiling]\nprofile_freq = 3").profiler.profile_freq == 3
    assert "the same section" in error("[profiling]\nprofile_freq = 3\n[profiler]\nprofile_freq = 3")


# --- Values ---


@pytest.mark.parametrize(
    "key, value, expected",
    [
        ("training.steps", "3", 3),
        ("training.max_norm", "1", 1.0),
        ("training.max_norm", "0.5", 0.5),
        ("training.dtype", '"bfloat16"', "bfloat16"),
        ("lr_scheduler.min_lr_factor", "1", 1.0),
        ("lr_scheduler.decay_ratio", '"none"', None),
        ("lr_scheduler.decay_ratio", "0.25", 0.25),
        ("parallelism.context_parallel_load_balancer", '"none"', None),
        ("parallelism.module_fqns_per_model_part", '[["a", "b"], ["c"]]', [["a", "b"], ["c"]]),
        ("compile.components", "[]", []),
        ("compile.components", '["loss"]', ["loss"]),
        ("compile.enable", "true", True),
        ("debug.seed", "0", 0),
        ("activation_checkpoint.determinism_check", '"none"', "none"),
        ("validator.steps", "-1", -1),
    ],
)
def test_values_of_the_file_are_taken_in_the_types_of_their_fields(load, key, value, expected):
    section, name = key.split(".")
    result = getattr(getattr(load(f"[{section}]\n{name} = {value}"), section), name)
    assert (result, type(result)) == (expected, type(expected))


@pytest.mark.parametrize(
    "words, expected",
    [
        ("--training.steps 3", 3),
        ("--training.steps=3", 3),
        ("--training.max_norm 1e-1", 0.1),
        ("--training.dtype bfloat16", "bfloat16"),
        ("--training.gc-debug", True),
        ("--training.gc_debug true", True),
        ("--training.gc_debug=False", False),
        ("--training.no-gc-debug", False),
        ("--training.no_gc_debug", False),
        ("--validator.steps -1", -1),
        ("--lr_scheduler.decay_ratio none", None),
        ("--lr-scheduler.decay-ratio 0.25", 0.25),
        ("--lr-scheduler.decay-type=cosine", "cosine"),
        ("--parallelism.context_parallel_load_balancer none", None),
        ("--parallelism.context_parallel_load_balancer None", None),
        ("--parallelism.module_fqns_per_model_part a,b c", [["a", "b"], ["c"]]),
        ("--compile.components model loss", ["model", "loss"]),
        ("--compile.components model,loss", ["model", "loss"]),
        ("--compile.components=", []),
        ("--checkpoint.exclude_from_loading dataloader", ["dataloader"]),
        ("--debug.save_config_file=--odd=name.json", "--odd=name.json"),
        ("--debug.save_config_file -odd", "-odd"),
        ("--debug.save_config_file 3", "3"),
        ("--activation_checkpoint.determinism_check none", "none"),
    ],
)
def test_words_of_the_command_line_are_taken_in_the_types_of_their_fields(load, words, expected):
    section, name = words.split()[0].removeprefix("--").split("=")[0].replace("-", "_").split(".")
    result = getattr(getattr(load("", *words.split()), section), name.removeprefix("no_"))
    assert (result, type(result)) == (expected, type(expected))


@pytest.mark.parametrize(
    "key, value, expected",
    [
        ("training.steps", '"ten"', "int"),
        ("training.steps", "1.5", "int"),
        ("training.steps", "true", "int"),
        ("training.steps", "[1]", "int"),
        ("training.steps", "1979-05-27", "int"),
        ("training.steps", '"none"', "int"),
        ("training.max_norm", '"1"', "float or int"),
        ("training.max_norm", "true", "float or int"),
        ("training.gc_debug", "1", "bool"),
        ("training.gc_debug", '"true"', "bool"),
        ("debug.seed", '"x"', 'int or "none"'),
        ("debug.save_config_file", "3", 'str or "none"'),
        ("checkpoint.folder", "3", "str"),
        ("compile.components", '"model"', 'list["model" or "loss"]'),
        ("activation_checkpoint.force_recompute_mm_shapes_by_fqns", '["a", 3]', "list[str]"),
        ("parallelism.module_fqns_per_model_part", '["a"]', 'list[list[str]] or "none"'),
        ("optimizer.lr", '"fast"', "float"),
        ("optimizer.betas", "[0.9]", "tuple[float, float]"),
        ("optimizer.betas", "[0.9, true]", "tuple[float, float]"),
        ("optimizer.amsgrad", "0", "bool"),
        ("optimizer.optimizer_factory_kwargs_by_name", "3", "dict["),
        ("linear_attention.kernel", "1", '"auto" or "fla" or "torch"'),
        ("job.description", "1", "str"),
        ("job.dump_folder", "1", "str"),
    ],
)
def test_a_value_of_the_wrong_type_names_place_value_and_type(error, key, value, expected):
    section, name = key.split(".")
    message = error(f"[{section}]\n{name} = {value}")
    assert f"run.toml: [{section}] {name} = " in message
    assert f": expected {expected}" in message


@pytest.mark.parametrize(
    "words, expected",
    [
        ("--training.steps ten", "int"),
        ("--training.steps 1.5", "int"),
        ("--training.steps 1 2", "int"),
        ("--training.steps", "int"),
        ("--training.no-steps", "int"),
        ("--training.max_norm big", "float or int"),
        ("--training.gc_debug 1", "bool"),
        ("--training.gc_debug yes", "bool"),
        ("--debug.seed x", 'int or "none"'),
        ("--checkpoint.folder", "str"),
        ("--checkpoint.folder a b", "str"),
        ("--optimizer.betas 0.9", "tuple[float, float]"),
        ("--optimizer.lr fast", "float"),
        ("--model.overrides.n_layers x", "int"),
        ("--model.overrides.widths x", "tuple[int, ...]"),
    ],
)
def test_words_of_the_wrong_type_are_repeated_with_the_type(error, words, expected):
    shown = words if "no-" not in words else words.replace("no-", "")
    assert f"command line: {shown}: expected {expected}" in error("", *words.split())


@pytest.mark.parametrize(
    "text, words, right",
    [
        ('[training]\ndtype = "bfloat61"', "--training.dtype bfloat61", "bfloat16"),
        ('[lr_scheduler]\ndecay_type = "cosin"', "--lr_scheduler.decay_type cosin", "cosine"),
        ('[linear_attention]\nkernel = "fa"', "--linear_attention.kernel fa", "fla"),
        ('[compile]\ncomponents = ["model", "los"]', "--compile.components model los", "loss"),
        (
            '[checkpoint]\nexclude_from_loading = ["dataloder"]',
            "--checkpoint.exclude_from_loading dataloder",
            "dataloader",
        ),
        (
            '[parallelism]\ncontext_parallel_load_balancer = "headtial"',
            "--parallelism.context_parallel_load_balancer headtial",
            "headtail",
        ),
        ('[activation_checkpoint]\nmode = "selectiv"', "--activation_checkpoint.mode selectiv", "selective"),
        ('[optimizer]\nname = "AdmaW"', "--optimizer.name AdmaW", "AdamW"),
        ('[optimizer]\nimplementation = "fuse"', "--optimizer.implementation fuse", "fused"),
        ('[dataloader]\ndataset = "text_file"', "--dataloader.dataset text_file", "text_files"),
        (
            '[validator.dataloader]\ndataset = "c4_validaton"',
            "--validator.dataloader.dataset c4_validaton",
            "c4_validation",
        ),
        ('[model]\nname = "fakr"\nflavor = "tiny"', "--model.name fakr", "fake"),
        ('[model]\nname = "fake"\nflavor = "tinny"', "--model.flavor tinny", "tiny"),
    ],
)
def test_a_misspelt_value_names_the_nearest_and_all_possible_ones(error, text, words, right):
    for message in (error(text), error("", *words.split())):
        assert f'"{right}"' in message.split("Did you mean")[0]
        assert message.endswith(f'Did you mean "{right}"?')
    assert f"command line: {words}: expected " in message


# --- The command line and the file themselves ---


def test_the_command_line_without_a_file_shows_the_usage():
    for argv in ([], ["--training.steps", "3"], ["--job.config_file"]):
        with pytest.raises(ConfigError, match="--job.config_file: expected one FILE.toml\nusage: torchrun"):
            load_config(argv, 1)


def test_help_prints_the_usage_and_exits_without_error(capsys):
    with pytest.raises(SystemExit) as exit:
        load_config(["--help"], 1)
    assert exit.value.code == 0
    assert "usage: torchrun" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["--steps", "--training.", "--.steps", "--", "--training..steps"])
def test_an_option_that_is_no_section_and_key_is_an_error(error, word):
    assert "is not --section.key" in error("", word, "3")


def test_a_word_that_belongs_to_no_option_is_an_error(error):
    assert "run.toml extra: expected one FILE.toml" in error("", "extra")
    with pytest.raises(ConfigError, match='unexpected "run.toml"'):
        load_config(["run.toml"], 1)


def test_dashes_and_underscores_are_alike_for_the_file_too(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(MODEL)
    assert load_config([f"--job.config-file={file}"], 1).training.steps == 7


def test_a_file_that_is_not_there_or_a_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match="gone.toml: No such file or directory"):
        load_config(["--job.config_file", str(tmp_path / "gone.toml")], 1)
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(["--job.config_file", str(tmp_path)], 1)


def test_broken_toml_names_file_and_line(error, tmp_path):
    message = error("[training]\nsteps = = 3")
    assert "run.toml: this is not TOML: " in message and "line 2" in message
    assert "not TOML" in error("[training]\nsteps = 3\nsteps = 4")
    (tmp_path / "latin.toml").write_bytes("# é".encode("latin-1"))
    with pytest.raises(ConfigError, match="latin.toml: this is not TOML"):
        load_config(["--job.config_file", str(tmp_path / "latin.toml")], 1)


def test_a_file_cannot_name_another_file(error):
    assert "only the command line names the file" in error('[job]\nconfig_file = "b.toml"')


# --- Model ---


def test_a_model_without_name_or_flavor_lists_those_there_are(error):
    assert "run.toml: [model]: name is missing. Possible: fake, faker_still." in error("# [model]")
    assert "flavor is missing. Possible: tiny, large." in error('[model]\nname = "fake"')


def test_what_the_builder_refuses_is_an_error_of_the_model_section(error):
    message = error(f"{MODEL}[model.overrides]\nn_layers = 0")
    assert "run.toml: [model]: n_layers = 0: a model has layers" in message


def test_a_table_of_free_keys_is_refused_on_the_command_line(error):
    assert "write it in the file" in error("", "--model.overrides.rope_scaling.factor", "3")
    words = ["--optimizer.optimizer_factory_kwargs_by_name.AdamW.fused", "true"]
    assert "write it in the file" in error("", *words)


# --- Optimizer ---


def test_the_optimizers_arguments_reach_all_groups(load):
    text = '[optimizer]\nname = "Adam"\nlr = 2\nbetas = [0.8, 0.9]\neps = 1e-6'
    for group in load(text).optimizer.param_groups:
        assert group.optimizer_name == "Adam"
        assert group.optimizer_kwargs["lr"] == 2.0
        assert group.optimizer_kwargs["betas"] == (0.8, 0.9)
        assert group.optimizer_kwargs["eps"] == 1e-6
    words = ["--optimizer.lr", "1e-4", "--optimizer.betas", "0.7", "0.9", "--optimizer.amsgrad"]
    optimizer = load(text, *words).optimizer
    assert [group.optimizer_kwargs["lr"] for group in optimizer.param_groups] == [1e-4, 1e-4]
    assert optimizer.param_groups[0].optimizer_kwargs["betas"] == (0.7, 0.9)
    assert optimizer.param_groups[1].optimizer_kwargs["amsgrad"] is True


def test_weight_decay_reaches_only_the_groups_that_decay(load):
    groups = load("[optimizer]\nweight_decay = 0.3").optimizer.param_groups
    assert [group.optimizer_kwargs["weight_decay"] for group in groups] == [0.0, 0.3]
    assert [group.optimizer_kwargs["lr"] for group in groups] == [1e-3, 1e-3]


def test_a_weight_decay_that_would_reach_no_group_is_an_error(error, monkeypatch):
    registry = sys.modules["fake_package.config_registry"]
    original = registry.trainer_config

    def undecayed(*args, **kwargs):
        config = original(*args, **kwargs)
        del config.optimizer.param_groups[1]
        return config

    monkeypatch.setattr(registry, "trainer_config", undecayed)
    assert "no group of this flavor decays" in error("[optimizer]\nweight_decay = 0.3")
    monkeypatch.setattr(
        registry,
        "trainer_config",
        lambda *args, **kwargs: dataclasses.replace(
            original(*args, **kwargs), optimizer=OptimizersContainer.Config()
        ),
    )
    assert "no parameter groups" in error("[optimizer]\nlr = 0.3")


def test_other_fields_of_the_optimizer_are_torchtitans(load):
    optimizer = load('[optimizer]\nimplementation = "foreach"\nlr = 0.5').optimizer
    assert optimizer.implementation == "foreach"
    assert [group.pattern for group in optimizer.param_groups][1] == ".*"


def test_an_unknown_argument_of_the_optimizer_lists_shorthands_and_fields(error):
    message = error("[optimizer]\nmomentum = 0.9")
    assert 'unknown key "momentum"' in message
    for name in ("name", "lr", "weight_decay", "betas", "eps", "implementation", "param_groups"):
        assert name in message
    assert "params," not in message


def test_values_that_the_optimizer_refuses_are_an_error_before_there_are_weights(error):
    assert "run.toml: [optimizer]: Invalid learning rate: -1.0" in error("[optimizer]\nlr = -1")
    assert "[optimizer]: Invalid beta parameter" in error("", "--optimizer.betas", "0.9", "1.5")
    assert "Invalid epsilon" in error(f"{GROUP}optimizer_kwargs = {{lr = 1, eps = -1}}")


GROUP = '[[optimizer.param_groups]]\npattern = "norm"\noptimizer_name = "AdamW"\n'


def test_an_array_of_tables_replaces_the_groups(load):
    text = f"{GROUP}optimizer_kwargs = {{lr = 1, betas = [0.9, 0.99]}}\n" + (
        '[[optimizer.param_groups]]\npattern = ".*"\noptimizer_name = "Adam"\n'
        "[optimizer.param_groups.optimizer_kwargs]\nlr = 1e-4"
    )
    assert load(text).optimizer.param_groups == [
        ParamGroupConfig(
            pattern="norm", optimizer_name="AdamW", optimizer_kwargs={"lr": 1.0, "betas": (0.9, 0.99)}
        ),
        ParamGroupConfig(pattern=".*", optimizer_name="Adam", optimizer_kwargs={"lr": 1e-4}),
    ]
    assert load(text, "--optimizer.implementation", "foreach").optimizer.implementation == "foreach"


@pytest.mark.parametrize(
    "text, problem",
    [
        (f"{GROUP}", "[optimizer.param_groups.0]: optimizer_kwargs is missing"),
        (f"{GROUP}optimizer_kwargs = {{}}", "lr is missing"),
        ('[[optimizer.param_groups]]\noptimizer_name = "Adam"', "pattern is missing"),
        ('[[optimizer.param_groups]]\npattern = ".*"', "optimizer_name is missing"),
        (f'{GROUP}optimizer_kwargs = {{lr = "fast"}}', "expected float"),
        (f"{GROUP}optimizer_kwargs = {{lr = 1, beta1 = 0.9}}", 'unknown key "beta1"'),
        (f"{GROUP.replace('AdamW', 'Adagrad')}", '"Adagrad": expected "Adam" or "AdamW"'),
        (f"{GROUP.replace('norm', '(')}optimizer_kwargs = {{lr = 1}}", "expected a regular expression"),
        ("[optimizer]\nparam_groups = [1]", "expected an array of tables"),
        ("[optimizer]\nparam_groups = 1", "expected an array of tables"),
        ("[optimizer.param_groups]\npattern = 1", "expected an array of tables"),
        ("[optimizer]\nparam_groups = [1, {pattern = 1}]", "expected a table, [optimizer.param_groups.0]"),
    ],
)
def test_a_wrong_parameter_group_is_an_error(error, text, problem):
    assert problem in error(text)


def test_shorthands_beside_an_array_of_groups_are_an_error(error):
    group = f"{GROUP}optimizer_kwargs = {{lr = 1}}"
    assert "[optimizer] lr = 3: [[optimizer.param_groups]] replaces" in error(f"[optimizer]\nlr = 3\n{group}")
    assert "--optimizer.lr 3: [[optimizer.param_groups]] replaces" in error(group, "--optimizer.lr", "3")


def test_groups_on_the_command_line_are_an_error(error):
    words = ["--optimizer.param_groups.0.optimizer_kwargs.lr", "1"]
    assert "expected an array of tables in the file" in error("", *words)
    assert "expected an array of tables in the file" in error("", "--optimizer.param_groups", "1")
    assert "expected a table" in error(f"{GROUP}optimizer_kwargs = {{lr = 1}}", *words)


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
    assert 'needs mode = "memory_budget"' in error("[activation_checkpoint]\nmemory_budget = 0.5")
    text = '[activation_checkpoint]\nmode = "full"\nforce_recompute_mm_shapes_by_fqns = ["a"]'
    assert 'unknown key "force_recompute_mm_shapes_by_fqns"' in error(text)


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


def test_weights_that_are_not_there_are_missed_before_the_run(error, load, tmp_path):
    text = "[checkpoint]\nenable = true\ninitial_load_in_hf = true\n"
    assert "[model] hf_assets_path" in (said := error(text)) and "*.safetensors" in said
    elsewhere = f'initial_load_path = "{tmp_path}"'
    assert f'[checkpoint] initial_load_path = "{tmp_path}"' in error(text + elsewhere)
    (tmp_path / "model.safetensors").touch()
    assert load(text + elsewhere).checkpoint.initial_load_in_hf


def test_a_step_is_loaded_that_was_saved_with_all_that_a_run_goes_on_with(error, load, tmp_path):
    text = f'[job]\ndump_folder = "{tmp_path}"\n[checkpoint]\nenable = true\n'
    assert "load_step = 5: no such step was saved" in error(text + "load_step = 5")
    own = tmp_path / "checkpoint"
    dcp.save(
        {"weight": torch.ones(2), "train_state": torch.ones(1)}, checkpoint_id=own / "step-3", no_dist=True
    )
    dcp.save({"weight": torch.ones(2)}, checkpoint_id=own / "step-4", no_dist=True)
    (own / "step-9").mkdir()  # cut off while it was written
    assert "step-4' holds the model alone (last_save_model_only), with which no run" in error(text)
    assert load(text + "load_step = 3").checkpoint.load_step == 3
    assert "possible are -1, for the newest, and 3, 4" in error(text + "load_step = 9")
    (own / "step-9" / "model.safetensors.index.json").touch()
    assert "step-9' holds Hugging Face files" in error(text)
    assert load(text + "folder = 'other'").checkpoint.folder == "other"


def test_a_folder_to_begin_from_is_that_of_a_step(error, load, tmp_path):
    text = f'[job]\ndump_folder = "{tmp_path / "own"}"\n[checkpoint]\nenable = true\n'
    text += f'initial_load_path = "{tmp_path}"\n'
    assert "expected the folder of a step, with .metadata in it" in error(text)
    (tmp_path / ".metadata").touch()
    assert load(text).checkpoint.initial_load_path == str(tmp_path)


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


def test_the_validators_data_are_a_table_in_its_own(load, tmp_path):
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


def test_what_a_loader_refuses_names_its_table(error):
    message = error('[validator.dataloader]\ndataset = "text_files"\nnum_workers = 2')
    assert "run.toml: [validator.dataloader]: num_workers = 2" in message


def test_a_path_without_text_files_is_an_error_before_the_run(error, load, tmp_path):
    assert "run.toml: [dataloader] text_files: " in error(
        f'[dataloader]\ndataset_path = "{tmp_path}/nowhere"'
    )
    text = f'[validator.dataloader]\ndataset = "text_files"\ndataset_path = "{tmp_path}/nowhere"\n'
    assert "[validator.dataloader] text_files: " in error(text + "[validator]\nenable = true")
    load(text)  # not validating, so not needed


# --- TorchTitan 0.2 ---

GONE = {  # all keys of 0.2.2 that 0.3 has no longer, by section; the sections with only * are gone themselves
    "job": "print_config save_config_file custom_config_module",
    "model": "tokenizer_path converters print_after_conversion",
    "optimizer": "beta1 beta2 early_step_in_backward",
    "training": "dataset dataset_path dataloader",
    "parallelism": (
        "disable_loss_parallel enable_async_tensor_parallel pipeline_parallel_expert_parallel_overlap "
        "context_parallel_rotate_method expert_tensor_parallel_degree expert_parallel_comm_backend"
    ),
    "checkpoint": "enable_ft_dataloader_checkpoints",
    "quantize": "grouped_mm",
    "activation_checkpoint": (
        "selective_ac_option per_op_sac_force_recompute_mm_shapes_by_fqns early_stop "
        "memory_budget visualize_memory_budget_pareto"
    ),
    **dict.fromkeys(["memory_estimation", "fault_tolerance", "experimental", "validation"], "any"),
}


@pytest.mark.parametrize(
    "section, key", [(section, key) for section in GONE for key in GONE[section].split()]
)
def test_a_key_of_torchtitan_0_2_says_what_became_of_it(error, section, key):
    news = WHAT_BECAME_OF.get(f"{section}.{key}") or WHAT_BECAME_OF[section]
    text = f"{MODEL}{key} = 1" if section == "model" else f"[{section}]\n{key} = 1"
    assert news in error(text)
    assert news in error("", f"--{section}.{key}", "1")


def test_the_table_of_0_2_holds_nothing_that_is_valid_today(load):
    config = load()
    for name in WHAT_BECAME_OF:
        section, _, key = name.partition(".")
        if key:
            assert section in (*SECTIONS, *config_module._OURS)
            assert not hasattr(getattr(config, section, None), key)
        else:
            assert section not in (*SECTIONS, *config_module._OURS)


def test_some_moves_are_told_in_words(error):
    assert "it is [dataloader] dataset now" in error('[training]\ndataset = "c4"')
    assert "betas = [0.9, 0.95]" in error("[optimizer]\nbeta1 = 0.9")
    assert "it is [validator] now" in error("[validation]\nsteps = 3")
    assert "it is [debug] seed now" in error("[training]\nseed = 3")
    assert "[checkpoint] enable now" in error("[checkpoint]\nenable_checkpoint = true")
    assert "[quantize.linear]: name is missing" in error("[quantize.linear.float8]\nemulate = true")


# --- How the values go together ---


@pytest.mark.parametrize(
    "replicate, shard, tp, world_size",
    [(1, -1, 1, 1), (1, -1, 2, 4), (2, -1, 1, 4), (2, 2, 2, 8), (1, 4, 1, 4), (1, -1, 3, 3)],
)
def test_degrees_whose_product_is_the_world_size_pass(load, replicate, shard, tp, world_size):
    text = (
        f"[parallelism]\ndata_parallel_replicate_degree = {replicate}\ndata_parallel_shard_degree = {shard}\n"
        f"tensor_parallel_degree = {tp}\n[training]\nseq_len = 12"
    )
    load(text, world_size=world_size)


@pytest.mark.parametrize(
    "replicate, shard, tp, world_size",
    [(1, -1, 2, 3), (1, -1, 2, 1), (2, -1, 2, 2), (1, 1, 1, 2), (1, 4, 1, 2), (2, 2, 1, 8), (3, -1, 1, 4)],
)
def test_degrees_that_do_not_make_the_world_size_are_named(error, replicate, shard, tp, world_size):
    text = (
        f"[parallelism]\ndata_parallel_replicate_degree = {replicate}\ndata_parallel_shard_degree = {shard}\n"
        f"tensor_parallel_degree = {tp}"
    )
    assert (
        f"run.toml: [parallelism] data_parallel_replicate_degree {replicate} "
        f"* data_parallel_shard_degree {shard} * context_parallel_degree 1 "
        f"* tensor_parallel_degree {tp} * pipeline_parallel_degree 1 "
        f"does not make WORLD_SIZE {world_size}"
    ) in error(text, world_size=world_size)


@pytest.mark.parametrize("kind", ["data_parallel_replicate", "data_parallel_shard", "tensor_parallel"])
def test_a_degree_below_one_is_an_error(error, kind):
    for degree in (0, -2):
        message = error(f"[parallelism]\n{kind}_degree = {degree}")
        assert f"[parallelism] {kind}_degree = {degree}: expected at least 1" in message


@pytest.mark.parametrize(
    "key, value, sentence",
    [
        ("spmd_backend", '"full_dtensor"', "is not supported yet. Possible: spmd_types, partial_dtensor"),
        ("context_parallel_load_balancer", '"ptrr"', "depends on the data. Possible: headtail, none"),
    ],
)
def test_what_is_not_supported_is_refused_with_a_sentence(error, key, value, sentence):
    text = f"[training]\ndisable_cuda_graphs = true\n[parallelism]\n{key} = {value}"
    message = error(text, world_size=2)
    assert f"[parallelism] {key} = {value}" in message and sentence in message


def test_the_global_batch_is_a_multiple_of_the_local_batches(load, error):
    assert load("[training]\nglobal_batch_size = 12", world_size=3).training.global_batch_size == 12
    load("[training]\nglobal_batch_size = 4\n[parallelism]\ntensor_parallel_degree = 2", world_size=4)
    message = error("[training]\nglobal_batch_size = 8", world_size=3)
    assert "global_batch_size = 8: expected a multiple of 6 (local_batch_size = 2 times 3" in message
    for size in (0, -2):
        assert f"global_batch_size = {size}" in error(f"[training]\nglobal_batch_size = {size}")


@pytest.mark.parametrize("key", ["steps", "seq_len", "local_batch_size"])
def test_a_size_below_one_is_an_error(error, key):
    assert f"[training] {key} = 0: expected at least 1" in error(f"[training]\n{key} = 0")


def test_sequence_parallelism_divides_the_sequence(load, error):
    text = "[training]\nseq_len = 64\n[parallelism]\ntensor_parallel_degree = 3"
    assert "[training] seq_len = 64: expected a multiple of" in error(text, world_size=3)
    load(text, "--parallelism.no-enable-sequence-parallel", world_size=3)


def test_a_missing_folder_of_the_tokenizer_is_an_error(error):
    message = error(f'{MODEL}hf_assets_path = "/nowhere/at/all"')
    assert 'run.toml: [model] hf_assets_path = "/nowhere/at/all": there is no such folder' in message


def test_an_unknown_compiler_is_an_error_only_when_compiling(load, error):
    message = error('[compile]\nenable = true\nbackend = "inducter"')
    assert 'backend = "inducter" is unknown. Did you mean "inductor"?' in message
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
    with pytest.raises(ConfigError, match="^\\[parallelism\\] .* does not make WORLD_SIZE 2"):
        check(dataclasses.replace(config, parallelism=ParallelismConfig(data_parallel_shard_degree=1)), 2)
