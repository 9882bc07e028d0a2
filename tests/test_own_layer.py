"""A layer and a model family that only tests know get everything without an edit in titan_gdn/."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from torchtitan.models.common import Linear

from tests import hf, layer_cases, ranks
from tests.compare import relative_error
from tests.own_layer import OwnLayer, as_gated_delta_net, repeated_decay_rule
from tests.own_model import OwnAdapter
from tests.training import assert_same_numbers, train
from titan_gdn import models
from titan_gdn.config.load import ConfigError, load_config
from titan_gdn.layers.gated_delta_net import GatedDeltaNet
from titan_gdn.layers.initialization import linear
from titan_gdn.layers.linear_attention import LinearAttention, Widths
from titan_gdn.models.hybrid.builders import feed_forward
from titan_gdn.ops.rules import KIMI_DELTA_RULE
from titan_gdn.parallel.exchange.registry import EXCHANGES
from titan_gdn.parallel.sequence import SequenceLayout
from titan_gdn.plan.__main__ import main as plan

OWN = "tests.own_layer"
WIDTHS = Widths(dim=64, key_heads=4, value_heads=8, key_dim=16, value_dim=16, gate_rank=6)


def test_the_layer_computes_what_gated_delta_net_computes():
    torch.manual_seed(0)
    own, other = OwnLayer.configure(WIDTHS).build(), GatedDeltaNet.configure(WIDTHS).build()
    own.init_states()
    other.load_state_dict(as_gated_delta_net(own, 4))
    x = torch.randn(2, 48, 64)
    positions = torch.cat([torch.arange(30), torch.arange(18)]).expand(2, -1)
    sequence = SequenceLayout.from_positions(positions)
    found, expected = (layer(x, *layer.decay(), sequence=sequence) for layer in (own, other))
    assert relative_error(found, expected) < 1e-5


CASES = [
    (exchange, order, "ragged", mesh, 2, 12)
    for exchange in EXCHANGES
    for order, mesh in (
        ("headtail", (1, 2, False)),
        ("contiguous", (1, 4, False)),
        ("headtail", (2, 2, True)),
        ("contiguous", (2, 2, False)),
        ("headtail", (2, 1, True)),
    )
]


def test_every_exchange_and_tensor_parallelism_give_the_numbers_of_one_rank():
    for record in ranks.run(layer_cases.matrix, 4, OWN, CASES, timeout=300):
        assert len(record) == len(CASES)
        for case, (errors, _) in record.items():
            assert max(errors.values()) < 1e-5, (case, errors)


def variant(*fields, configure=None, **declarations):
    """A class like `OwnLayer` with other declarations, and with further fields in its `Config`."""
    config = dataclasses.make_dataclass("Config", fields, bases=(OwnLayer.Config,), kw_only=True, slots=True)
    return type("Variant", (OwnLayer,), {"Config": config, "__module__": __name__, **declarations})


def field(name, make):
    return name, Linear.Config, dataclasses.field(default_factory=make)


WITHOUT_IN_PROJ = ("in_proj_b", "in_proj_qkv", "in_proj_a")
WRONG = {
    "a linear without a placement": (
        variant(field("extra", lambda: linear(8, 8))),
        r"Variant.extra has no placement: .*per_head .* or .replicated",
    ),
    "linears inside another module": (
        variant(field("mlp", lambda: feed_forward(8, 8)), replicated=(*OwnLayer.replicated, "mlp")),
        "Variant.mlp.w1 has no placement: make the linear a field",
    ),
    "a name that is no field": (
        variant(full_precision={"in_proj_aa": "decay"}),
        "Variant.full_precision names 'in_proj_aa': expected names among",
    ),
    "a misspelled per-head linear": (
        variant(per_head=("in_proj_qkv", "conv", "in_proj_b", "in_proj_a", "gateout")),
        "Variant.per_head names 'gateout': expected names among",
    ),
    "a linear both per head and replicated": (
        variant(replicated=(*OwnLayer.replicated, "in_proj_b")),
        "Variant.in_proj_b is in both per_head and replicated: keep one",
    ),
    "q, k and v not first": (variant(exchanged=WITHOUT_IN_PROJ), "expected 'in_proj_qkv' first"),
    "an exchanged linear twice": (
        variant(exchanged=(*OwnLayer.exchanged, "in_proj_a")),
        "and each name once",
    ),
    "an exchanged module that is no linear": (
        variant(exchanged=(*OwnLayer.exchanged, "conv")),
        "Variant.exchanged names 'conv'",
    ),
    "a low-rank linear that is per head": (
        variant(low_rank="in_proj_b"),
        "Variant.low_rank names 'in_proj_b'",
    ),
    "names as a string": (variant(exchanged="in_proj_qkv"), "exchanged = 'in_proj_qkv': expected a tuple"),
    "full precision as a tuple": (variant(full_precision=("in_proj_a",)), "expected a dict"),
    "no title": (variant(title=None), "Variant.title is missing"),
    "a function as the rule": (variant(rule=repeated_decay_rule), "Variant.rule is missing"),
    "no gates": (variant(gates=LinearAttention.gates), "Variant.gates is missing"),
    "decays that the rule does not take": (
        variant(rule=KIMI_DELTA_RULE),
        "Variant.decay has 1 channels per value head: expected 16",
    ),
    "no Config of its own": (type("Variant", (OwnLayer,), {}), "Variant has no Config of its own"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_declaration_is_an_error_that_names_it(mistake):
    layer, message = WRONG[mistake]
    with pytest.raises(ValueError, match=message):
        layer.configure(WIDTHS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: replace_linear(config, out_features=9), "in_proj_a has 9 rows: expected a multiple"),
        (lambda config: replace_linear(config, bias=True), "in_proj_a has a bias, which is not supported"),
    ],
    ids=["rows that groups do not share evenly", "a bias"],
)
def test_a_linear_that_the_layer_cannot_slice_is_an_error_that_names_it(change, message):
    with pytest.raises(ValueError, match=message):
        change(OwnLayer.configure(WIDTHS)).set_sharding(tp=1, enable_sp=False)


def replace_linear(config, **changes):
    return dataclasses.replace(config, in_proj_a=dataclasses.replace(config.in_proj_a, **changes))


def test_a_linear_that_is_built_beside_the_config_is_an_error_that_names_it():
    layer = OwnLayer.configure(WIDTHS).build()
    layer.extra = torch.nn.Linear(8, 8)
    with pytest.raises(ValueError, match="OwnLayer.extra has no placement: build it from a field"):
        layer.split_sequence(None, None)


TOML = """
[model]
name = "own_model"
flavor = "debug"
[training]
steps = 2
seq_len = 64
local_batch_size = 2
[parallelism]
context_parallel_degree = {cp}
[lr_scheduler]
warmup_steps = 0
[debug]
seed = 1
enable_structured_logging = false
"""


@pytest.fixture
def toml(tmp_path, monkeypatch):
    """A run of the family at CP 2, known in this process."""
    monkeypatch.setitem(models.MODELS, "own_model", "tests.own_model")

    def write(cp=2):
        path = tmp_path / "own.toml"
        path.write_text(f'[job]\ndump_folder = "{tmp_path}/out"\n' + TOML.format(cp=cp))
        return str(path)

    return write


FLOAT8 = ("--quantize.linear.name", "float8", "--quantize.linear.emulate")


def test_quantization_leaves_out_what_the_layer_keeps_in_full_precision(toml):
    # With 32 value heads in_proj_a and in_proj_b have enough rows per rank for float8.
    wide = ("--model.overrides.n_linear_value_heads", "32")
    config = load_config(["--job.config_file", toml(), *wide, *FLOAT8], 2)
    model = config.model_spec.model
    model.update_from_config(config=config)
    layer = model.layers[0].linear_attention
    quantized = {
        field.name
        for field in dataclasses.fields(layer)
        if type(getattr(layer, field.name)).__qualname__.startswith("Float8")
    }
    assert quantized == {"in_proj_qkv", "in_proj_b", "gate_in", "gate_out", "out_proj"}


def train_own(argv):
    models.MODELS["own_model"] = "tests.own_model"
    return train(argv)


def test_the_family_trains_on_a_mesh_as_on_one_rank_from_its_own_files(toml, tmp_path):
    """Without experts; its files are named by its adapter, with its own prefix."""
    argv = ["--job.config_file", toml(cp=1)]
    config = load_config(argv, 1).model_spec.model
    model = config.build()
    model.init_states()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    files = OwnAdapter(config, None).to_hf(model.state_dict())
    assert "model.language_model.layers.0.linear_attention.in_proj_a.weight" in files
    save_file({name: x.contiguous() for name, x in files.items()}, tmp_path / "model.safetensors")
    for key, value in hf.weights_of(tmp_path).items():
        argv += [f"--checkpoint.{key}", str(value).lower() if isinstance(value, bool) else value]
    (one_rank,) = ranks.run(train_own, 1, argv)
    mesh = ["--parallelism.context_parallel_degree", "2", "--parallelism.tensor_parallel_degree", "2"]
    assert_same_numbers(ranks.run(train_own, 4, [*argv, *mesh]), one_rank)


def test_a_parameter_without_a_name_in_files_is_named_before_the_run(toml, monkeypatch):
    names = {name: hf for name, hf in OwnAdapter.layer.items() if "in_proj_a" not in name}
    monkeypatch.setattr(OwnAdapter, "layer", names)
    argv = ["--checkpoint.enable", "--checkpoint.last_save_model_only", "--checkpoint.last_save_in_hf"]
    with pytest.raises(
        ConfigError, match="OwnAdapter has no Hugging Face name for linear_attention.in_proj_a"
    ):
        load_config(["--job.config_file", toml(), *argv], 2)


def test_the_planner_knows_it_by_its_title(toml, capsys):
    plan(["--job.config_file", toml(), "--world-size", "2", "--training.seq_len", "512", "--json"])
    told = json.loads(capsys.readouterr().out)
    (exchanges,) = told["linear_attention"]
    assert exchanges["kind"] == "Own Layer" and exchanges["layers"] == 1
    assert list(exchanges["exchanges"]) == list(EXCHANGES)


def test_the_bench_takes_it_by_its_module(tmp_path):
    """In a process of its own: the command forks its ranks, which pytest's autograd threads forbid."""
    file = tmp_path / "figures.json"
    words = (
        f"layer --layer {OWN} --dim 32 --key-heads 4 --value-heads 8 --key-dim 8 --value-dim 8 --gate-rank 6"
    )
    command = [sys.executable, "-m", "titan_gdn.bench", *words.split(), "--tokens", "64", "--repeats", "1"]
    folder = os.path.dirname(os.path.dirname(__file__))
    ended = subprocess.run(
        [*command, "--json", file], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(file.read_text())["figures"]
    assert [row["exchange"] for row in rows] == list(EXCHANGES)
    assert all(row["cp forward (bytes)"] == row["cp forward, formula"] for row in rows)


def test_an_unknown_flavor_or_argument_of_the_family_is_refused_by_name(toml):
    with pytest.raises(ConfigError, match='unknown key "n_experts"'):
        load_config(["--job.config_file", toml(), "--model.overrides.n_experts", "8"], 2)
