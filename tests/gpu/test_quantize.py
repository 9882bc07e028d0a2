"""Quantized layers and experts on a GPU that multiplies so: `python -m pytest tests/gpu/test_quantize.py`."""

import itertools

import pytest
import torch

from tests import quantize_cases
from tests.compare import relative_error
from titan_gdn.models.hybrid.quantize import PARTS, check_device
from titan_gdn.parallel.sequence import SequenceLayout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

# Four bits, scaled in sixteens, are 10% off before anything is summed.
BOUNDS = {"float8": (1e-3, 1e-1), "mxfp8": (1e-3, 1e-1), "nvfp4": (1e-2, 1.0)}
RECIPES = [
    ("float8", {"recipe_name": "rowwise"}),
    ("float8", {"recipe_name": "rowwise_with_gw_hp"}),
    ("mxfp8", {}),
    ("nvfp4", {}),
]
DOCUMENTS = [0, 1, 3, 6, 130, 131, 256]
SHAPE = {
    "dim": 256,
    "n_linear_key_heads": 4,
    "n_linear_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
RUN = {"training": {"seq_len": DOCUMENTS[-1], "mixed_precision_param": "bfloat16"}}


def need(part, name, options):
    """The converter, if this GPU has it."""
    converter = PARTS[part][name](**options)
    try:
        check_device([converter])
    except ValueError as error:
        pytest.skip(str(error))
    return converter


def on_gpu(module):
    """In bfloat16 but for the decay, its buffers made where it is."""
    module.to("cuda")
    for child in module.modules():
        if hasattr(child, "_sr_seed"):
            child._init_self_buffers(buffer_device=torch.device("cuda"))
    for name, parameter in module.named_parameters():
        if "decay" not in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    return module


@pytest.mark.parametrize(("name", "options"), RECIPES)
@pytest.mark.parametrize("layer", quantize_cases.MODELS)
def test_a_layer_is_off_by_the_rounding_of_its_format(layer, name, options):
    converter = need("linear", name, options)
    layers = [on_gpu(x) for x in quantize_cases.pair(layer, converter, {"run": RUN}, **SHAPE)]
    positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(DOCUMENTS)])[None].cuda()
    sequence = SequenceLayout.from_positions(positions)
    torch.manual_seed(1)
    x, d_out = torch.randn(2, *positions.shape, SHAPE["dim"], device="cuda", dtype=torch.bfloat16)
    results = []
    for module in layers:
        mine = x.clone().requires_grad_()
        out = module(mine, *module.decay(), sequence=sequence)
        out.backward(d_out.sign())
        gradients = {key: parameter.grad for key, parameter in module.named_parameters()}
        results.append({"output": out.detach(), "input": mine.grad, **gradients})
    low, high = BOUNDS[name]
    for key, plain in results[0].items():
        error = relative_error(results[1][key], plain)
        assert (0 if key.startswith("decay.") else low) < error < high, (key, error)


@pytest.mark.parametrize(
    ("name", "options"), [("float8", {}), ("mxfp8", {}), ("mxfp8", {"pad_multiple": 128})]
)
def test_experts_are_off_by_the_rounding_of_their_format(name, options):
    converter = need("experts", name, options)
    shape = {"dim": 256, "n_layers": 1, "layer_types": ["linear_attention"], "expert_hidden_dim": 128}
    run = {"training": {"mixed_precision_param": "bfloat16"}}
    plain, quantized = (
        quantize_cases.configured("qwen3_next", "debug_moe", converters, run=run, **shape)
        .layers[0]
        .moe.routed_experts.build()
        .inner_experts
        for converters in ((), [converter])
    )
    torch.manual_seed(0)
    plain.init_states()
    quantized.load_state_dict(plain.state_dict())
    counts = torch.tensor([128, 0, 256, 128, 0, 0, 384, 128], device="cuda")
    x = torch.randn(int(counts.sum()), shape["dim"], device="cuda", dtype=torch.bfloat16)
    results = []
    for module in (plain, quantized):
        module.to("cuda", torch.bfloat16)
        mine = x.clone().requires_grad_()
        out = module(mine, counts)
        out.backward(x.sign())
        results.append({"output": out.detach(), "input": mine.grad})
        results[-1] |= {key: parameter.grad for key, parameter in module.named_parameters()}
    low, high = BOUNDS[name]
    for key, expected in results[0].items():
        error = relative_error(results[1][key], expected)
        assert low < error < high, (key, error)
