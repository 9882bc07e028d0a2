"""Kimi Linear: its latent attention on meshes, and the model trained on them."""

import os

import pytest
import torch

from tests import hf, latent_cases, ranks
from tests.draw import in_sets
from tests.layer_cases import LENGTH
from tests.training import assert_same_numbers, dry_run, train
from titan_gdn.assets import BYTE_TOKENIZER
from titan_gdn.config.load import ConfigError, load_config
from titan_gdn.layers.kimi_delta_attention import KimiDeltaAttention
from titan_gdn.layers.linear_attention import Widths
from titan_gdn.models.hybrid.block import linear_layers
from titan_gdn.models.kimi_linear import KimiLinearArguments
from titan_gdn.parallel.sequence import SequenceLayout

TOML = os.path.join(os.path.dirname(__file__), "..", "train_configs", "kimi_linear_debug.toml")


def test_latent_attention_is_that_of_transformers():
    """Output and the gradient of everything, with the same weights."""
    theirs, overrides = hf.model("kimi_linear")
    theirs = theirs.model.layers[3].self_attn
    ours = KimiLinearArguments(**overrides).config().first_attention.build()
    names = {
        "wq": "q_proj",
        "wkv_a": "kv_a_proj_with_mqa",
        "kv_norm": "kv_a_layernorm",
        "wkv_b": "kv_b_proj",
        "wo": "o_proj",
    }
    for name, their_name in names.items():
        getattr(ours, name).weight.data = getattr(theirs, their_name).weight.data.clone()
    x = torch.randn(2, 100, 64, requires_grad=True)
    sequence = SequenceLayout.from_positions(torch.arange(100).expand(2, -1))
    mask = torch.full((100, 100), -torch.inf).triu(1)[None, None]
    d_out = torch.randn(2, 100, 64)
    out, expected = ours(x, attention_masks=None, sequence=sequence), theirs(x, mask)[0]
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    gradients = torch.autograd.grad(out, [x, *(getattr(ours, name).weight for name in names)], d_out)
    theirs = [x, *(getattr(theirs, name).weight for name in names.values())]
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected, theirs, d_out), strict=True):
        torch.testing.assert_close(gradient, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("bound", "strongest"), [(-5.0, -5.0), (None, -100.0)])
def test_a_bound_of_the_decay_reaches_the_layer(bound, strongest):
    config = KimiDeltaAttention.configure(
        Widths(dim=32, key_heads=32, value_heads=32, key_dim=128, value_dim=128), bound
    )
    layer = config.build()
    layer.init_states()
    narrow, beta = torch.full((1, 3, config.f_a.out_features), 1e3), torch.zeros(1, 3, 32, 1)
    layer.f_b.weight.data.fill_(1e-3)
    g, _ = layer.gates({"in_proj_b": beta}, narrow, *layer.decay(), slice(0, 32))
    assert g.shape == (1, 3, 32, 128) and g.max() <= strongest + 1e-5
    assert bound is None or g.min() >= bound


@pytest.fixture(scope="module")
def matrix():
    """All cases in one pool of four ranks."""
    return ranks.run(latent_cases.matrix, 4, timeout=280)


@pytest.mark.parametrize("case", latent_cases.CASES, ids=latent_cases.name)
def test_latent_attention_on_a_mesh_is_that_of_one_rank(matrix, case):
    """Output, input gradient and every parameter's gradient; what crosses CP is compressed."""
    _, _, (tp, cp, sp) = case
    for rank in matrix:
        errors, crossed = rank[latent_cases.name(case)]
        assert max(errors.values()) < 1e-5, errors
        width = latent_cases.COMPRESSED + latent_cases.SHARED
        assert crossed == 4 * LENGTH * width * (cp - 1) // cp // (tp if sp else 1)


# One layer of each kind: dense and linear, sparse and full, sparse and linear.
LAYERS = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}


@pytest.fixture(scope="module")
def kimi_run(tmp_path_factory):
    """Trains 3 steps on some ranks with some changes to the command line."""
    folder = str(tmp_path_factory.mktemp("kimi"))
    model, overrides = hf.model("kimi_linear", **LAYERS)
    model.save_pretrained(folder)
    path = hf.toml(folder, overrides, model={"name": "kimi_linear"}, checkpoint=hf.weights_of(folder))
    return lambda world_size, *argv: ranks.run(train, world_size, ["--job.config_file", path, *argv])


@pytest.fixture(scope="module")
def kimi_one_rank(kimi_run):
    """The reference, and that no router has to choose between experts whose scores are nearly equal."""
    record = kimi_run(1)[0]
    assert record["gap"] > 1e-6, "a near tie between experts: take another seed"
    return record


TP, CP = "--parallelism.tensor_parallel_degree", "--parallelism.context_parallel_degree"
HALF = ("--training.local_batch_size", "2")
GATHER = ("--linear_attention.exchange", "all_gather")
EXCHANGE = ("--linear_attention.exchange", "all_to_all")
STATE = ("--linear_attention.exchange", "state")
MESHES = {
    "fsdp 2": (2, *HALF),
    "tp 2": (2, TP, "2"),
    "tp 2 without sequence parallelism": (2, TP, "2", "--parallelism.no-enable_sequence_parallel"),
    "cp 2, all_to_all": (2, CP, "2", *EXCHANGE),
    "cp 2, all_gather": (2, CP, "2", *GATHER),
    "cp 2, state": (2, CP, "2", *STATE),
    "cp 2, contiguous": (2, CP, "2", "--parallelism.context_parallel_load_balancer", "none"),
    "cp 2, tp 2, all_to_all": (4, CP, "2", TP, "2", *EXCHANGE),
    "cp 2, tp 2, all_gather": (4, CP, "2", TP, "2", *GATHER),
    "cp 2, tp 2, state": (4, CP, "2", TP, "2", *STATE),
    "fsdp 2, tp 2": (4, TP, "2", *HALF),
    "fsdp 2, cp 2, tp 2": (8, CP, "2", TP, "2", *HALF),
}
# The other backend treats TP differently, and nothing else.
RUNS = [(mesh, "spmd_types") for mesh in MESHES]
RUNS += [(mesh, "partial_dtensor") for mesh in MESHES if "tp 2" in mesh and MESHES[mesh][0] <= 4]
FAST = [
    ("cp 2, all_to_all", "spmd_types"),
    ("cp 2, all_gather", "spmd_types"),
    ("cp 2, state", "spmd_types"),
    ("tp 2 without sequence parallelism", "spmd_types"),
    ("tp 2", "partial_dtensor"),
]


@pytest.mark.parametrize(("mesh", "backend"), in_sets(RUNS, fast=FAST))
def test_the_model_trains_as_on_one_rank(kimi_run, kimi_one_rank, mesh, backend):
    world_size, *argv = MESHES[mesh]
    records = kimi_run(world_size, *argv, "--parallelism.spmd_backend", backend)
    assert_same_numbers(records, kimi_one_rank)


@pytest.mark.slow
def test_a_checkpointed_and_compiled_run_has_the_same_losses(tmp_path):
    model, overrides = hf.model("kimi_linear", mlp_layer_types=["dense"] * 3, **LAYERS)
    model.save_pretrained(tmp_path)
    path = hf.toml(
        str(tmp_path), overrides, model={"name": "kimi_linear"}, checkpoint=hf.weights_of(tmp_path)
    )
    plain = ranks.run(train, 1, ["--job.config_file", path])[0]
    argv = ["--activation_checkpoint.mode", "full", "--compile.enable", "--compile.backend", "aot_eager"]
    for record in ranks.run(train, 4, ["--job.config_file", path, *argv, CP, "2", TP, "2"], timeout=280):
        assert record["loss"] == pytest.approx(plain["loss"], rel=1e-5)


def test_the_million_token_run_is_valid_at_full_size_and_runs_dry_when_scaled_down(tmp_path):
    path = TOML.replace("debug", "1M")
    local = ["--model.hf_assets_path", BYTE_TOKENIZER, "--dataloader.dataset_path", os.path.dirname(__file__)]
    config = load_config(["--job.config_file", path, *local, "--checkpoint.no-initial_load_in_hf"], 64)
    assert config.training.seq_len == 1048576 and config.model_spec.flavor == "48B-A3B"
    small = {"vocab_size": 512, "dim": 256, "n_layers": 4, "n_experts": 64, "n_experts_per_token": 2}
    small |= {"hidden_dim": 512, "expert_hidden_dim": 64, "shared_expert_hidden_dim": 64}
    assert len(dry_run(path, tmp_path, *local, **small)["loss"]) == 1


def test_the_published_order_of_layers_is_the_default():
    layers = KimiLinearArguments().config().layers
    assert [i + 1 for i, layer in enumerate(layers) if layer.attention] == [4, 8, 12, 16, 20, 24, 27]
    assert [i for i, layer in enumerate(layers) if layer.feed_forward] == [0]


def test_heads_that_do_not_divide_are_refused_by_their_name():
    argv = [CP, "2", TP, "4", *EXCHANGE]
    with pytest.raises(ConfigError, match="Kimi Delta Attention: the 4 key heads are not divisible"):
        load_config(["--job.config_file", TOML, *argv], 8)


NONSENSE = {
    "n_dense_layers=-1": "a number from 0 to n_layers = 4",
    "route_scale=0.0": "positive",
    "kv_lora_rank=0": "at least 1",
    "n_linear_value_heads=6": "divisor of n_linear_value_heads = 6",
    "layer_types=full_attention": "for each of the 4 layers",
    "load_balance_coeff=0.0": "positive",
}


@pytest.mark.parametrize("override", NONSENSE)
def test_a_model_that_cannot_be_is_refused_with_what_is_possible(override):
    with pytest.raises(ConfigError, match=NONSENSE[override]):
        load_config(["--job.config_file", TOML, f"--model.overrides.{override}"], 2)


def test_the_bound_of_the_decay_belongs_to_the_model():
    argv = ["--model.overrides.lower_bound", "-5.0"]
    model = load_config(["--job.config_file", TOML, *argv], 2).model_spec.model
    assert all(layer.lower_bound == -5.0 for layer in linear_layers(model.layers))
    with pytest.raises(ConfigError, match='unknown key "lower_bound"'):
        load_config(["--job.config_file", TOML.replace("kimi_linear", "qwen3_next"), *argv], 2)
    with pytest.raises(ConfigError, match="it is model.overrides.lower_bound of kimi_linear now"):
        load_config(["--job.config_file", TOML, "--linear_attention.lower_bound", "-5.0"], 2)
    with pytest.raises(ConfigError, match="lower_bound = 5.0: expected a negative"):
        load_config(["--job.config_file", TOML, "--model.overrides.lower_bound", "5.0"], 2)
