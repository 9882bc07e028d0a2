"""What holds for the whole model: documents apart, decay exact, resuming, validation, imports."""

import importlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torchtitan.components.optimizer import OptimizersContainer

from tests import hf, ranks
from tests.draw import covering, in_sets
from tests.hf import PUBLISHED
from tests.training import train, train_until
from titan_gdn.assets import BYTE_TOKENIZER
from titan_gdn.config import checkpoint_checks
from titan_gdn.config.load import ConfigError, load_config
from titan_gdn.models import MODELS, load
from titan_gdn.models.kimi_linear import KimiLinearArguments
from titan_gdn.models.qwen3_next import Qwen3NextArguments
from titan_gdn.parallel.sequence import SequenceLayout

DOCUMENTS = [0, 40, 41, 43, 46, 110, 180, 256]


def positions_of(cu_seqlens, batch):
    row = torch.cat([torch.arange(b - a) for a, b in zip(cu_seqlens, cu_seqlens[1:], strict=False)])
    return row.expand(batch, -1).contiguous()


BUILDERS = {"qwen3_next": Qwen3NextArguments, "kimi_linear": KimiLinearArguments}
every_family = pytest.mark.parametrize("family", BUILDERS)


@every_family
@pytest.mark.parametrize(("experts", "tolerance"), [(False, 0.0), (True, 1e-6)])
def test_a_document_does_not_depend_on_its_neighbors(family, experts, tolerance):
    """Outputs and gradients of the embeddings, after every token of one document is changed."""
    torch.manual_seed(0)
    _, overrides = hf.model(family, **({} if experts else hf.without_experts(family)))
    model = BUILDERS[family](**overrides).config().build()
    model.init_states()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    positions = positions_of(DOCUMENTS, 2)
    tokens = torch.randint(0, 264, positions.shape)
    changed = tokens.clone()
    changed[1, 46:110] = torch.randint(0, 264, (64,))
    weights = torch.randn(2, DOCUMENTS[-1], 264)

    results = []
    for ids in (tokens, changed):
        seen = []
        hook = model.tok_embeddings.register_forward_hook(lambda m, a, out, seen=seen: seen.append(out))
        logits = model(ids, positions)
        hook.remove()
        results.append((logits, torch.autograd.grad((logits * weights).sum(), seen[0])[0]))
    untouched = torch.ones(2, DOCUMENTS[-1], dtype=torch.bool)
    untouched[1, 46:110] = False
    for before, after in zip(*results, strict=True):
        difference = (before - after)[untouched].abs().max() / before.abs().max()
        assert difference <= tolerance
        assert not torch.equal(before[~untouched], after[~untouched])


def test_without_positions_every_row_is_a_document():
    _, overrides = hf.model(num_experts=0)
    model = Qwen3NextArguments(**overrides).config().build()
    model.init_states()
    tokens = torch.randint(0, 264, (2, 50))
    torch.testing.assert_close(model(tokens), torch.cat([model(row[None]) for row in tokens]))


def test_all_layers_turn_by_one_table():
    _, overrides = hf.model(num_experts=0, layer_types=["full_attention"] * 4)
    model = Qwen3NextArguments(**overrides).config().build()
    tables = [layer.attention.rope.cache for layer in model.layers.values()]
    model.init_states()
    shared = [layer.attention.rope.cache for layer in model.layers.values()]
    assert len(shared) == 4 and all(table is shared[0] for table in shared)
    assert torch.equal(shared[0], tables[1])


GROUP = """
[[optimizer.param_groups]]
pattern = {}
optimizer_name = "AdamW"
optimizer_kwargs = {{ lr = 1e-3 }}
"""


def grouped(tmp_path, *patterns):
    """A run file with these groups of parameters."""
    path = tmp_path / "groups.toml"
    groups = "".join(GROUP.format(f"'{pattern}'") for pattern in patterns)
    path.write_text(f'[model]\nname = "qwen3_next"\nflavor = "debug"\n{groups}')
    return ["--job.config_file", str(path)]


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "patterns",
    [
        [r"layers\.0\.attention_norm", ".*"],
        [r"layers\.0\..*attention_norm", ".*"],
        [r"^norm\.", "attention", ".*"],
        ["nothing"],
        [".*", "norm"],
    ],
)
def test_groups_of_parameters_are_refused_as_the_optimizer_refuses_them(patterns, mode, tmp_path):
    """Before anything is built; with checkpointing, modules that are wrapped have other names."""
    mode_of = ("--activation_checkpoint.mode", mode)
    config = load_config([*grouped(tmp_path, ".*"), *mode_of], 1)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    argv = [*grouped(tmp_path, *patterns), *mode_of]
    if mode != "none":
        config.activation_checkpoint.build(dump_folder="").apply(model)
    groups = [replace(config.optimizer.param_groups[0], pattern=pattern) for pattern in patterns]
    try:
        OptimizersContainer._build_param_groups(model, groups, {})
    except ValueError as error:
        pattern = re.search("'(.*)'", str(error))[1]
        with pytest.raises(ConfigError, match=re.escape(f"optimizer.param_groups: pattern = {pattern!r}")):
            load_config(argv, 1)
    else:
        load_config(argv, 1)


@pytest.mark.parametrize("patterns", [["norm"], ["^layers", "^norm", "^lm_head"]])
def test_groups_that_leave_parameters_out_are_refused(patterns, tmp_path):
    with pytest.raises(
        ConfigError, match="no pattern matches .* parameters, such as .*: add a last group with"
    ):
        load_config(grouped(tmp_path, *patterns), 1)


def test_groups_of_parameters_are_to_be_on_every_stage(tmp_path):
    argv = grouped(tmp_path, "embeddings", ".*")
    load_config(argv, 1)
    with pytest.raises(
        ConfigError, match="of the pipeline stage of layers.2, layers.3, norm, lm_head that no"
    ):
        load_config([*argv, "--parallelism.pipeline_parallel_degree", "2"], 2)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--training.no-disable_cuda_graphs", "training.disable_cuda_graphs = false: each forward copies"),
        (
            "--activation_checkpoint.mode selective --activation_checkpoint.debug",
            "activation_checkpoint.debug",
        ),
        ("--lr_scheduler.total_steps 0", "lr_scheduler.total_steps = 0: expected at least 1"),
        ("--lr_scheduler.decay_ratio 1.5", "lr_scheduler.decay_ratio = 1.5: expected a number from 0 to 1"),
        ("--lr_scheduler.decay_ratio nan", "--lr_scheduler.decay_ratio nan: expected a finite number"),
        ("--lr_scheduler.min_lr_factor -1", "lr_scheduler.min_lr_factor = -1"),
        ("--comm.train_timeout_seconds 0", "comm.train_timeout_seconds = 0: expected at least 1"),
        (
            "--profiler.enable_profiling --profiler.profile_freq 3",
            "profiler.profile_freq = 3: expected at least 4",
        ),
        ("--profiler.profiler_active 0", "profiler.profiler_active = 0: expected at least 1"),
        (
            "--profiler.enable_memory_snapshot",
            "profiler.enable_memory_snapshot = true: it records GPU memory",
        ),
        ("--dataloader.num_workers -1", "dataloader.num_workers = -1: expected at least 0"),
        (
            "--validator.enable --validator.steps -1 --validator.dataloader.infinite",
            "--validator.dataloader.infinite: validator.steps = -1 reads the data once",
        ),
    ],
)
def test_what_would_end_in_a_step_is_refused_before_the_job(option, said):
    with pytest.raises(ConfigError) as refused:
        load_config(["--job.config_file", "train_configs/qwen3_next_debug.toml", *option.split()], 1)
    assert said in str(refused.value)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"model": {}}'])
def test_a_file_that_is_no_tokenizer_is_refused(text, tmp_path):
    (tmp_path / "tokenizer.json").write_text(text)
    argv = ["--job.config_file", "train_configs/qwen3_next_debug.toml"]
    with pytest.raises(ConfigError, match="its tokenizer.json is not a Hugging Face tokenizer"):
        load_config([*argv, "--model.hf_assets_path", str(tmp_path)], 1)


def test_offsets_are_where_positions_start_and_where_rows_start():
    positions = torch.tensor([[3, 4, 0, 1], [0, 1, 2, 0]])
    layout = SequenceLayout.from_positions(positions)
    assert layout.cu_seqlens_cpu.tolist() == [0, 2, 4, 7, 8]
    assert layout.cu_seqlens.tolist() == layout.cu_seqlens_cpu.tolist()


def decay_bits(argv):
    """Whether the forward saw the float32 bits of `A_log` and `dt_bias`; their gradients' dtypes."""

    from torch.distributed.tensor import DTensor

    trainer = load_config(argv, int(os.environ["WORLD_SIZE"])).build()
    model = trainer.model_parts[0]
    whole = {n: p.full_tensor().clone() for n, p in model.named_parameters() if "decay" in n}
    seen, weights, same = [], [], []

    def look(layer, args, kwargs):
        seen.append(tuple((x.to_local() if isinstance(x, DTensor) else x).clone() for x in args[1:3]))
        weights.append(layer.conv.weight.dtype)

    for layer in model.layers.values():
        if layer.linear_attention is not None:
            layer.linear_attention.register_forward_pre_hook(look, with_kwargs=True)
    trainer.train()
    tp = trainer.parallel_dims.get_optional_mesh("tp")
    size, rank = (tp.size(), tp.get_local_rank()) if tp is not None else (1, 0)
    names = [n.removesuffix(".A_log") for n in whole if n.endswith("A_log")]
    for name, (seen_A_log, bias) in zip(names, seen, strict=False):
        A_log, dt_bias = (whole[f"{name}.{p}"].chunk(size)[rank] for p in ("A_log", "dt_bias"))
        same.append(torch.equal(seen_A_log, A_log) and torch.equal(bias, dt_bias))
    finite = all(torch.isfinite(x).all() for x in whole.values())
    dtypes = {p.dtype for n, p in model.named_parameters() if "decay" in n}
    return same, set(weights), finite, dtypes


DECAY = list(
    itertools.product(
        ("", "--parallelism.tensor_parallel_degree 2", "--activation_checkpoint.mode full"),
        ("spmd_types", "partial_dtensor"),
        BUILDERS,
    )
)


@pytest.mark.parametrize(("argv", "backend", "family"), in_sets(DECAY, fast=covering(DECAY, 1)))
def test_decay_is_exact_in_float32_under_bfloat16_mixed_precision(tmp_path, argv, backend, family):
    _, overrides = hf.model(family, **hf.without_experts(family))
    training = {"steps": 1, "local_batch_size": 1, "mixed_precision_param": "bfloat16"}
    path = hf.toml(str(tmp_path), overrides, model={"name": family}, training=training)
    argv = ["--job.config_file", path, "--parallelism.spmd_backend", backend, *argv.split()]
    for same, weights, finite, dtypes in ranks.run(decay_bits, 2, argv):
        assert same and all(same), "the forward saw rounded decay parameters"
        assert weights == {torch.bfloat16}, "the test would prove nothing without mixed precision"
        assert finite and dtypes == {torch.float32}


@pytest.mark.slow
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(tmp_path):
    """8 steps in one go, against 8 steps that were killed after 4 and started again by the same command."""
    _, overrides = hf.model(num_experts=0)
    losses = []
    for folder, stops in ((tmp_path / "whole", [None]), (tmp_path / "stopped", [4, None])):
        checkpoint = {"enable": True, "interval": 2, "last_save_model_only": False}
        folder.mkdir()
        path = hf.toml(
            str(folder), overrides, checkpoint=checkpoint, training={"steps": 8, "local_batch_size": 2}
        )
        losses.append([])
        for stop in stops:
            losses[-1] += ranks.run(train_until, 2, ["--job.config_file", path], stop)[0]
    assert len(losses[0]) == 8
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_a_run_goes_on_at_another_number_of_data_parallel_ranks(tmp_path):
    _, overrides = hf.model(
        num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], num_experts=0
    )
    losses = []
    for folder, ranks_and_rows in (
        (tmp_path / "same", [(2, 2), (2, 2)]),
        (tmp_path / "other", [(2, 2), (1, 4)]),
    ):
        folder.mkdir()
        checkpoint = {"enable": True, "interval": 2, "last_save_model_only": False}
        path = hf.toml(str(folder), overrides, checkpoint=checkpoint, training={"steps": 4})
        for stop, (world_size, rows) in zip((2, None), ranks_and_rows, strict=True):
            argv = ["--job.config_file", path, "--training.local_batch_size", str(rows)]
            losses.append(ranks.run(train_until, world_size, argv, stop)[0])
    assert losses[0] == losses[2]
    assert losses[1] == pytest.approx(losses[3], rel=1e-5)


@pytest.mark.slow
def test_the_validator_runs(tmp_path):
    _, overrides = hf.model(num_experts=0)
    text = str(tmp_path / "text")
    path = hf.toml(
        str(tmp_path),
        overrides,
        validator={"enable": True, "freq": 2, "steps": 2},
        **{"validator.dataloader": {"dataset": "text_files", "dataset_path": text}},
    )
    record = ranks.run(train, 2, ["--job.config_file", path])[0]
    assert len(record["validation"]) == 2
    assert all(3 < loss < 7 for loss in record["validation"])


def test_operators_and_exchanges_need_neither_torchtitan_nor_fla():
    code = (
        "import sys, titan_gdn.ops, titan_gdn.parallel.sequence\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('torchtitan', 'fla', 'transformers')])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


RUNS = {
    "qwen3_next": ("debug", "debug_moe", "80b_a3b", "80b_a3b_1m"),
    "kimi_linear": ("debug", "debug_moe", "48b_a3b"),
}


@pytest.mark.parametrize(("family", "run"), [(family, run) for family in RUNS for run in RUNS[family]])
def test_torchtitans_own_command_finds_the_runs(family, run):
    from torchtitan.config import ConfigManager

    argv = ["--module", f"titan_gdn.models.{family}", "--config", f"{family}_{run}", "--training.steps", "7"]
    config = ConfigManager().parse_args(argv)
    assert config.training.steps == 7 and config.model_spec.name == family


@pytest.mark.parametrize(
    "name", sorted(os.listdir(os.path.join(os.path.dirname(__file__), "..", "train_configs")))
)
def test_the_configurations_that_we_ship_are_valid(name, tmp_path, monkeypatch):
    path = os.path.join(os.path.dirname(__file__), "..", "train_configs", name)
    # Weights and tokenizers of published models are not in the repository.
    (tmp_path / "model.safetensors").touch()
    shutil.copy(f"{BYTE_TOKENIZER}/tokenizer.json", tmp_path)
    monkeypatch.setattr(checkpoint_checks, "_account", lambda *args: None)
    monkeypatch.setattr(checkpoint_checks, "_check_export", lambda *args: None)
    family = next(family for family in MODELS if name.startswith(family))
    file = PUBLISHED.get(family)
    if file is None:  # that of the flavor, as we write it
        flavor = "9B" if "9B" in name else "35B-A3B"
        package = load(family)
        file = package.config_json.hf_config_of(package.flavors[flavor].arguments)
    (tmp_path / "config.json").write_text(json.dumps(file))
    argv = ["--job.config_file", path, "--model.hf_assets_path", str(tmp_path)]
    if "debug" not in name and "80B" not in name:  # the reader's own texts
        argv += ["--dataloader.dataset_path", os.path.dirname(__file__)]
    load_config(argv, 2 if "debug" in name else 64)


NORMS = {
    "qwen3_next": {"norm", "q_norm", "k_norm", "ffn_norm", "attention_norm"},
    "kimi_linear": {"norm", "kv_norm", "ffn_norm", "attention_norm"},
}


@every_family
def test_parameters_of_norms_and_decays_have_no_weight_decay(family):
    registry = importlib.import_module(f"titan_gdn.models.{family}.config_registry")
    config = registry.trainer_config("debug_moe")
    model = config.model_spec.model.build()
    optimizers = config.optimizer.build(model_parts=[model])
    decayed = {
        name: group["weight_decay"]
        for optimizer in optimizers
        for group in optimizer.param_groups
        for name in group["param_names"]
    }
    without = {name for name, weight_decay in decayed.items() if weight_decay == 0}
    assert without == {n for n in decayed if n.endswith(("A_log", "dt_bias", "norm.weight"))}
    assert {n.rsplit(".", 2)[-2] for n in without} == {"decay", *NORMS[family]}


NONSENSE = {
    "n_layers=0": "at least 1",
    "full_attention_interval=0": "at least 1",
    "linear_conv_kernel=0": "at least 1",
    "n_heads=3": "divisor of n_heads = 3",
    "n_linear_value_heads=6": "divisor of n_linear_value_heads = 6",
    "n_experts_per_token=9": "at most n_experts = 8",
    "n_experts_per_token=0": "at least 1",
    "expert_hidden_dim=3": "multiple of 8",
    "partial_rotary_factor=0.1": "even number",
    "partial_rotary_factor=2.0": "even number",
    "yarn_factor=0.5": "at least 1",
    "norm_eps=-1": "between 0 and 1",
    "rope_theta=0": "above 1",
    "load_balance_coeff=-1": "positive",
    "mlp_only_layers=9": "layers from 0 to 3",
    "vocab_size=256": "257 tokens",
    "context_length=100": "exceeds the 100 tokens",
}


@pytest.mark.parametrize("override", NONSENSE)
def test_a_model_that_cannot_be_is_refused_with_what_is_possible(override):
    path = os.path.join(os.path.dirname(__file__), "..", "train_configs", "qwen3_next_debug_moe.toml")
    with pytest.raises(ConfigError, match=NONSENSE[override]) as error:
        load_config(["--job.config_file", path, f"--model.overrides.{override}"], 2)
    assert override.split("=")[0] in str(error.value)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--training.seq_len 60", "multiple of 8"),
        ("--training.max_norm 0", "positive"),
        ("--metrics.log_freq 0", "at least 1"),
        ("--linear_attention.kernel fla", "needs a GPU"),
        ("--training.enable_cpu_offload", "on the CPU already"),
        ("--checkpoint.create_seed_checkpoint", "needs checkpoint.enable"),
        ("--debug.spmd_typechecking", "not supported"),
        ("--compile.enable", "grouped products in float32"),
        ("--parallelism.tensor_parallel_degree 8", "4 key heads"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_it_starts(argv, words):
    path = os.path.join(os.path.dirname(__file__), "..", "train_configs", "qwen3_next_debug_moe.toml")
    with pytest.raises(ConfigError, match=words):
        load_config(["--job.config_file", path, *argv.split()], 8)
