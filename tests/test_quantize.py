"""Float8, MXFP8 and NVFP4: what is converted, what is left and why, and float8 emulated.

The rest needs a GPU to multiply: `tests/gpu/test_quantize.py`. Here TorchTitan's question for one is answered
with yes, and configurations are looked at.
"""

import logging
from collections import Counter
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from torchtitan.components.quantization import (
    Float8GroupedExpertsConverter,
    Float8Linear,
    Float8LinearConverter,
    MXFP8GroupedExpertsConverter,
    MXFP8Linear,
    MXFP8LinearConverter,
    NVFP4LinearConverter,
    float8,
    mx,
    nvfp4,
)
from torchtitan.components.quantization.utils import has_quantization
from torchtitan.models.common import Linear
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.token_dispatcher import TorchAOTokenDispatcher

from tests import hf, quantize_cases, ranks
from tests.draw import in_sets
from tests.quantize_cases import configured, emulated
from tests.training import train
from titan_gdn.config.load import ConfigError, load_config
from titan_gdn.models.hybrid.quantize import MULTIPLE, PARTS, LocalNVFP4Linear

BFLOAT16 = {"training": {"mixed_precision_param": "bfloat16"}}
LONG = {"training": {"seq_len": 4096}}


@pytest.fixture
def any_gpu(monkeypatch):
    """A machine that has whatever TorchTitan asks for."""
    for module in (float8, mx, nvfp4):
        monkeypatch.setattr(module, "has_cuda_capability", lambda major, minor: True)


@pytest.fixture
def lines(monkeypatch):
    """What `quantize` logs."""
    said = []
    monkeypatch.setattr("titan_gdn.models.hybrid.quantize.logger.info", said.append)
    return said


def of_class(model, kind):
    """How often each linear of a class stands in a model, by the last part of its name."""
    found = Counter()
    for fqn, config, _, _ in model.traverse(Linear.Config):
        found[fqn.rpartition(".")[2]] += isinstance(config, kind)
    return +found


# --- What is converted ---


def test_projections_and_feed_forwards_are_converted_and_counted(lines):
    model = configured("qwen3_next", "debug_moe", [emulated()])
    once = dict.fromkeys(["wq", "wk", "wv", "wo"], 1)
    assert of_class(model, Float8Linear.Config) == {
        **once,
        **dict.fromkeys(["in_proj_qkv", "in_proj_z", "out_proj"], 3),
        **dict.fromkeys(["w1", "w2", "w3"], 4),
    }
    assert has_quantization(model)
    (line,) = [line for line in lines if line.startswith("Quantized")]
    assert "float8, recipe_name = tensorwise, emulate = True at TP 1, CP 1: 25 of 37 linears" in line
    for kept in ("3 in_proj_ba (decay and beta)", "8 gate (routing)", "1 lm_head (logits)"):
        assert kept in line


def test_kimi_linear_keeps_what_makes_decay_and_beta():
    model = configured("kimi_linear", "debug_moe", [emulated()])
    assert of_class(model, Float8Linear.Config) == {
        **dict.fromkeys(["wq", "wkv_a", "wkv_b", "wo"], 1),
        **dict.fromkeys(["in_proj_qkv", "g_a", "g_b", "out_proj"], 3),
        **dict.fromkeys(["w1", "w2", "w3"], 4),
    }


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("float8", {}),
        ("mxfp8", {}),
        # 512 rows of the shared expert are 64 on a rank.
        ("nvfp4", {"w1": "64 x 2048", "w2": "2048 x 64", "w3": "64 x 2048"}),
    ],
)
def test_the_80b_at_tp_8_and_cp_2_leaves_what_its_slices_say(any_gpu, lines, name, left):
    converter = PARTS["linear"][name]()
    model = configured("qwen3_next", "80B-A3B", [converter], tp=8, cp=2, exchange="all_gather", run=LONG)
    widths = {
        **dict.fromkeys(["in_proj_qkv", "in_proj_z", "out_proj"], 36),
        **dict.fromkeys(["wq", "wk", "wv", "wo"], 12),
        **dict.fromkeys(["w1", "w2", "w3"], 48),
    }
    kinds = (Float8Linear.Config, MXFP8Linear.Config, nvfp4.NVFP4Linear.Config)
    assert of_class(model, kinds) == {attr: n for attr, n in widths.items() if attr not in left}
    assert "36 in_proj_ba (decay and beta)" in lines[-1]
    for attr, shape in left.items():
        assert f"48 {attr}" in lines[-1] and f"({shape} per rank is not divisible by 128)" in lines[-1]
    with torch.device("meta"):
        built = model.layers[0].linear_attention.build()
    assert type(built.in_proj_qkv).__name__.removeprefix("Local").lower() == f"{name}linear"
    assert type(built.in_proj_ba) is Linear


@pytest.mark.parametrize(
    ("exchange", "cp", "tp", "shape"),
    [
        ("all_gather", 2, 1, "56 x 64"),
        ("all_to_all", 2, 1, None),
        ("state", 2, 1, None),
        ("all_to_all", 2, 2, "56 x 64"),
        ("all_gather", 2, 2, "28 x 64"),
    ],
)
def test_a_slice_that_is_no_multiple_of_16_is_left_with_a_line(lines, exchange, cp, tp, shape):
    """112 rows of `in_proj_qkv` in 4 groups; `all_gather` alone cuts them over CP too."""
    heads = {"n_linear_key_heads": 4, "n_linear_value_heads": 4}
    widths = {"dim": 64, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
    model = configured("qwen3_next", "debug", [emulated()], tp, cp, exchange, **heads, **widths)
    assert ("in_proj_qkv" in of_class(model, Float8Linear.Config)) == (shape is None)
    assert (f"3 in_proj_qkv ({shape} per rank is not divisible by 16)" in lines[-1]) == (shape is not None)


def test_auto_is_resolved_before_slices_are_measured(lines):
    model = configured("qwen3_next", "debug", [emulated()], cp=2, exchange="auto")
    assert model.layers[0].linear_attention.run.exchange != "auto"
    assert "CP 2" in lines[-1]


def test_key_value_heads_fewer_than_tp_ranks_are_measured_by_what_a_rank_uses(lines):
    model = configured("qwen3_next", "debug", [emulated()], tp=4, head_dim=24, partial_rotary_factor=0.5)
    assert not {"wk", "wv"} & of_class(model, Float8Linear.Config).keys()
    assert "1 wk, 1 wv (24 x 128 per rank is not divisible by 16)" in lines[-1]


def test_placements_survive_the_conversion():
    plain, quantized = (configured("qwen3_next", "debug_moe", c, tp=2) for c in ([], [emulated()]))
    for (fqn, a, *_), (_, b, *_) in zip(
        plain.traverse(Linear.Config), quantized.traverse(Linear.Config), strict=True
    ):
        assert a.sharding_config == b.sharding_config, fqn
        assert a.param_init == b.param_init


# --- Every recipe ---


def test_every_converter_of_torchtitan_is_reachable():
    import torchtitan.components.quantization as all_of_them

    theirs = {name for name in all_of_them.__all__ if name.endswith("Converter")} - {"QuantizationConverter"}
    ours = {kind._owner.__name__ for kinds in PARTS.values() for kind in kinds.values()}
    assert ours == theirs


RECIPES = [
    ("linear", "float8", {"recipe_name": "rowwise"}),
    ("linear", "float8", {"recipe_name": "rowwise_with_gw_hp", "filter_fqns": ["feed_forward"]}),
    ("linear", "mxfp8", {"fqns": ["attention"]}),
    ("linear", "nvfp4", {"fqns": ["layers.0."]}),
    ("experts", "float8", {}),
    ("experts", "mxfp8", {"recipe_name": "mxfp8_rceil", "pad_multiple": 128}),
]


def toml(value):
    return str(value).lower() if isinstance(value, bool) else repr(value)


@pytest.mark.parametrize(("part", "name", "options"), RECIPES)
def test_a_file_reaches_every_recipe(tmp_path, part, name, options):
    file = tmp_path / "run.toml"
    text = '[model]\nname = "qwen3_next"\nflavor = "debug_moe"\n'
    text += '[training]\nseq_len = 512\nmixed_precision_param = "bfloat16"\n'
    text += f'[quantize.{part}]\nname = "{name}"\n'
    file.write_text(text + "".join(f"{key} = {toml(value)}\n" for key, value in options.items()))
    config = load_config(["--job.config_file", str(file)], 1, here=False)
    assert config.model_spec.model.converters == [PARTS[part][name](**options)]
    words = ["--quantize.linear.name", "float8", "--quantize.linear.emulate"]
    both = load_config(["--job.config_file", str(file), *words], 1, here=False) if part == "experts" else None
    assert both is None or len(both.model_spec.model.converters) == 2


def test_float8_recipes_are_those_of_torchao(any_gpu):
    for recipe in ("rowwise", "rowwise_with_gw_hp"):
        model = configured("qwen3_next", "debug", [Float8LinearConverter.Config(recipe_name=recipe)])
        torchao = model.layers[0].linear_attention.in_proj_qkv._torchao_config
        assert torchao == type(torchao).from_recipe_name(recipe)


def test_mxfp8_and_nvfp4_convert_what_they_are_told(any_gpu, lines):
    model = configured("qwen3_next", "debug", [MXFP8LinearConverter.Config(fqns=["linear_attention"])])
    assert of_class(model, MXFP8Linear.Config) == dict.fromkeys(["in_proj_qkv", "in_proj_z", "out_proj"], 3)
    assert "4 w1, 4 w2, 4 w3, 1 wk, 1 wo, 1 wq, 1 wv (excluded by name)" in lines[-1]
    only = NVFP4LinearConverter.Config(fqns=["layers.0."])
    model = configured("qwen3_next", "debug", [only], run={"training": {"seq_len": 512}})
    assert of_class(model, LocalNVFP4Linear.Config) == {"in_proj_qkv": 1, "in_proj_z": 1, "out_proj": 1}
    assert of_class(model, nvfp4.NVFP4Linear.Config) == {
        **dict.fromkeys(["in_proj_qkv", "in_proj_z", "out_proj"], 1),
        **dict.fromkeys(["w1", "w2", "w3"], 1),
    }


@pytest.mark.parametrize(
    ("converter", "kind", "pad"),
    [
        (Float8GroupedExpertsConverter.Config(), "Float8GroupedExperts", 16),
        (MXFP8GroupedExpertsConverter.Config(), "MXFP8GroupedExperts", 32),
        (MXFP8GroupedExpertsConverter.Config(pad_multiple=128), "MXFP8GroupedExperts", 128),
    ],
)
def test_experts_are_converted_and_their_tokens_padded(any_gpu, lines, converter, kind, pad):
    model = configured("qwen3_next", "debug_moe", [converter], run=BFLOAT16)
    for layer in model.layers:
        routed = layer.moe.routed_experts
        assert type(routed.inner_experts)._owner.__name__ == kind
        assert isinstance(routed.token_dispatcher, TorchAOTokenDispatcher.Config)
        assert routed.token_dispatcher.pad_multiple == pad
        assert routed.inner_experts.sharding_config is not None
    assert "4 of 4 experts: 4 inner_experts; not quantized: none" in lines[-1]
    model = configured("qwen3_next", "debug_moe", [converter], tp=4, run=BFLOAT16)  # 96 / 4 = 24
    assert "0 of 4 experts; not quantized: 4 inner_experts (24 x 128 per rank" in lines[-1]
    assert not isinstance(model.layers[0].moe.routed_experts.token_dispatcher, TorchAOTokenDispatcher.Config)


@pytest.mark.parametrize("name", PARTS["experts"])
def test_quantized_experts_multiply_by_torchaos_grouped_product(any_gpu, monkeypatch, name):
    """Ours override TorchTitan's forward: it has to arrive there all the same."""
    from torchao.prototype import moe_training

    products = []

    def product(A, B_t, offs, *args, **kwargs):
        assert type(B_t) is torch.Tensor or type(B_t) is torch.nn.Parameter
        products.append((A.dtype, tuple(B_t.shape)))
        return torch._grouped_mm(A, B_t, offs=offs)

    for function in ("_to_fp8_rowwise_then_scaled_grouped_mm", "_to_mxfp8_then_scaled_grouped_mm"):
        monkeypatch.setattr(moe_training, function, product)
    model = configured("qwen3_next", "debug_moe", [PARTS["experts"][name]()], run=BFLOAT16)
    experts = model.layers[0].moe.routed_experts.inner_experts.build()
    experts.init_states()
    experts.to(torch.bfloat16)
    x = torch.randn(32, 128, dtype=torch.bfloat16)
    experts(x, torch.tensor([16, 0, 0, 16, 0, 0, 0, 0])).square().sum().backward()
    assert products == [(torch.bfloat16, shape) for shape in [(8, 128, 96)] * 2 + [(8, 96, 128)]]
    assert all(parameter.grad is not None for parameter in experts.parameters())


def test_compilation_is_told_to_the_converter(any_gpu, monkeypatch):
    told = []
    build = Float8LinearConverter.__init__
    monkeypatch.setattr(
        Float8LinearConverter, "__init__", lambda self, config: (told.append(config), build(self, config))[1]
    )
    for enable in (False, True):
        run = {"compile": {"enable": enable}}
        configured("qwen3_next", "debug", [Float8LinearConverter.Config()], run=run)
        assert told[-1].model_compile_enabled == enable
    assert "model_compile_enabled" in {field.name for field in fields(told[-1])}


# --- What cannot be ---


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ('[quantize]\nlinear = "float8"', (), "expected a table, [quantize.linear]"),
        ("[quantize.linear]\nemulate = true", (), "name is missing. Possible: float8, mxfp8, nvfp4."),
        ('[quantize.linear]\nname = "fp8"', (), 'expected "float8" or "mxfp8" or "nvfp4"'),
        ('[quantize.experts]\nname = "nvfp4"', (), 'expected "float8" or "mxfp8"'),
        ('[quantize.expert]\nname = "mxfp8"', (), 'Did you mean "experts"?'),
        ('[quantize.linear]\nname = "float8"\nrecipe = "rowwise"', (), 'Did you mean "recipe_name"?'),
        ('[quantize.linear]\nname = "float8"\nrecipe_name = "tensorwise"', (), 'or "rowwise_with_gw_hp"'),
        ('[quantize.linear]\nname = "mxfp8"\nmodel_compile_enabled = true', (), "Possible: name, fqns."),
        ('[quantize.linear]\nname = "mxfp8"\nemulate = true', (), 'unknown key "emulate"'),
        ('[quantize.linear]\nname = "float8"', (), 'Possible here: "float8" with emulate = true.'),
        ('[quantize.linear]\nname = "mxfp8"', (), "MXFP8 is only supported on SM100"),
        ('[quantize.linear]\nname = "nvfp4"', ("--training.seq_len", "512"), "only supported on SM100"),
        (
            '[quantize.experts]\nname = "mxfp8"',
            ("--training.mixed_precision_param", "bfloat16"),
            "SM100 or later architectures. No format is possible here.",
        ),
        ('[quantize.experts]\nname = "mxfp8"', (), 'needs training.mixed_precision_param = "bfloat16"'),
        (
            '[quantize.experts]\nname = "mxfp8"\npad_multiple = 48',
            ("--training.mixed_precision_param", "bfloat16"),
            "quantize.experts.pad_multiple = 48: expected a multiple of 32",
        ),
        (
            '[quantize.experts]\nname = "float8"',
            ("--model.flavor", "debug"),
            "the model has no experts; remove the table",
        ),
        (
            '[quantize.linear]\nname = "float8"\nemulate = true',
            ("--compile.enable",),
            "does not support torch.compile: set compile.enable = false",
        ),
        (
            '[quantize.linear]\nname = "float8"\nemulate = true\nrecipe_name = "rowwise_with_gw_hp"',
            (),
            "remove recipe_name, or remove emulate",
        ),
        (
            '[quantize.linear]\nname = "float8"\nemulate = true\nfilter_fqns = ["auto_filter_small_kn"]',
            (),
            "list the linears to exclude by name",
        ),
        (
            '[quantize.linear]\nname = "float8"\nemulate = true',
            ("--training.seq_len", "72"),
            "training.seq_len = 72 gives each rank 72 tokens",
        ),
        (
            '[quantize.linear]\nname = "nvfp4"',
            (
                *("--parallelism.tensor_parallel_degree", "2", "--parallelism.spmd_backend"),
                *("partial_dtensor", "--training.seq_len", "512"),
            ),
            'needs parallelism.spmd_backend = "spmd_types"',
        ),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_anything_runs(tmp_path, text, words, said):
    file = tmp_path / "run.toml"
    file.write_text(f'[model]\nname = "qwen3_next"\nflavor = "debug_moe"\n{text}\n')
    ranks = 2 if "--parallelism.tensor_parallel_degree" in words else 1
    with pytest.raises(ConfigError) as raised:
        load_config(["--job.config_file", str(file), *words], ranks)
    assert said in str(raised.value)


def test_asking_what_is_possible_says_nothing_else(caplog, any_gpu):
    with caplog.at_level(logging.INFO):
        configured("qwen3_next", "debug_moe", [MXFP8LinearConverter.Config()]).check_device()
    assert sum("torch.compile enablement" in record.getMessage() for record in caplog.records) <= 1


def test_the_multiples_are_torchtitans(any_gpu):
    """Sixteen: its own filter. 128: its NVFP4 linear refuses others. 32: the default of padded tokens."""
    config = SimpleNamespace(in_features=32, out_features=24)
    assert not float8.module_filter_fn(config, "w1", [])
    assert float8.module_filter_fn(SimpleNamespace(in_features=16, out_features=16), "w1", [])
    assert Float8GroupedExpertsConverter.PAD_MULTIPLE == MULTIPLE["float8"]
    assert MXFP8GroupedExpertsConverter.Config().pad_multiple == MULTIPLE["mxfp8"]
    with pytest.raises(ValueError, match="divisible by 128"):
        nvfp4.NVFP4Linear.Config(in_features=128, out_features=64)


# --- Float8 emulated ---


@pytest.fixture(scope="module")
def layer_errors():
    """All layers and cases, in one pool of four ranks."""
    return ranks.run(quantize_cases.errors, 4, timeout=200)


def float8_rows(layer, case):
    """Rows that each quantized linear multiplies on a rank, 64 of `in_proj_qkv` a group."""
    exchange, _, _, (tp, cp, _), *_ = case
    qkv = 4 * 64 // (tp * cp if exchange == "all_gather" else tp)
    gate = {
        "gated_delta_net": {"in_proj_z": 128 // tp},
        "kimi_delta_attention": {"g_a": 16, "g_b": 128 // tp},
    }
    return {"in_proj_qkv": qkv, "out_proj": 64, **gate[layer]}


@pytest.mark.parametrize("case", quantize_cases.CASES, ids=quantize_cases.layer_cases.name)
@pytest.mark.parametrize("layer", quantize_cases.MODELS)
def test_a_layer_is_off_by_the_rounding_of_float8(layer_errors, layer, case):
    for rank in layer_errors:
        errors, rows = rank[layer, case]
        assert rows == float8_rows(layer, case), "all_gather's slices too"
        for name, error in errors.items():
            # The decay's parameters feel float8 only through sums over all tokens, where it cancels.
            assert (0 if name.startswith("decay.") else 1e-3) < error < 1e-1, (name, error)


EMULATED = ("--quantize.linear.name", "float8", "--quantize.linear.emulate")
TP, CP = "--parallelism.tensor_parallel_degree", "--parallelism.context_parallel_degree"
BACKEND = "--parallelism.spmd_backend"
ALL_GATHER = ("--linear_attention.exchange", "all_gather")
MESHES = {
    "one rank": (1,),
    "cp 2, tp 2": (4, CP, "2", TP, "2", *ALL_GATHER, BACKEND, "spmd_types"),
    "tp 4 with 2 key-value heads": (4, TP, "4", BACKEND, "partial_dtensor"),
}


@pytest.mark.parametrize("mesh", in_sets(MESHES, fast=["one rank"]))
def test_a_quantized_run_trains_and_its_loss_is_another(run, one_rank, mesh):
    world_size, *argv = MESHES[mesh]
    for record in run(world_size, *argv, *EMULATED):
        for loss, plain in zip(record["loss"], one_rank["loss"], strict=True):
            assert 1e-6 < abs(loss / plain - 1) < 1e-2
        assert record["grad_norm"] == pytest.approx(one_rank["grad_norm"], rel=1e-1)


@pytest.mark.slow
def test_a_quantized_kimi_linear_trains_under_tp(tmp_path):
    model, overrides = hf.model("kimi_linear", **hf.without_experts("kimi_linear"))
    model.save_pretrained(tmp_path)
    path = hf.toml(
        str(tmp_path),
        overrides,
        model={"name": "kimi_linear", "flavor": "debug"},
        checkpoint=hf.weights_of(tmp_path),
    )
    argv = ["--job.config_file", path, "--training.steps", "1"]
    plain = ranks.run(train, 1, argv)[0]
    for record in ranks.run(train, 2, [*argv, *EMULATED, TP, "2", BACKEND, "partial_dtensor"]):
        assert 1e-6 < abs(record["loss"][0] / plain["loss"][0] - 1) < 1e-2


def test_experts_of_a_model_stay_those_of_titan_gdn_unless_told():
    model = configured("qwen3_next", "debug_moe", [emulated()])
    kinds = {type(config)._owner.__module__ for _, config, _, _ in model.traverse(GroupedExperts.Config)}
    assert kinds == {"titan_gdn.layers.experts"}
