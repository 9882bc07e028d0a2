"""The decay gates at the ends of float32, against their formulas in float64 logarithms."""

import itertools
import math

import pytest
import torch
from torch.nn.functional import logsigmoid

from tests.compare import relative_error
from titan_gdn.ops import gates, gdn_gate, kda_gate

MAX = torch.finfo(torch.bfloat16).max  # a float32 too
A_LOG = torch.tensor([-MAX, -100.0, -1.0, 0.0, 2.7, 50.0, 60.0, 88.0, 100.0, 9000.0, MAX])
ARGUMENTS = torch.tensor([-MAX, -1e4, -200.0, -85.0, -20.0, -1.0, 0.0, 1.0, 20.0, 200.0, 1e4, MAX])


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_gate_of_kda_is_the_published_formula(lower_bound):
    x, A_log, dt_bias = torch.randn(5, 3, 4) * 3, torch.rand(3) * 2.7, torch.randn(3, 4)
    rate = A_log.double().exp()[:, None]
    biased = x.double() + dt_bias
    expected = (
        -rate * (1 + biased.exp()).log()
        if lower_bound is None
        else lower_bound / (1 + (-rate * biased).exp())
    )
    assert relative_error(kda_gate(x, A_log, dt_bias, lower_bound), expected) < 1e-6


def log_softplus(x):
    return torch.where(x < -30, x, torch.where(x > 30, x, x.clamp(-30, 30).exp().log1p()).abs().log())


def grid(dtype):
    """Every argument `[n, 1]` for every head, the inputs of a gate, and both in float64."""
    x = ARGUMENTS.to(dtype)[:, None].expand(-1, len(A_LOG)).clone().requires_grad_()
    x_64 = ARGUMENTS.to(dtype).double().clamp(-gates.LARGEST, gates.LARGEST)[:, None]
    return x, A_LOG.clone().requires_grad_(), x_64, A_LOG.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate", [gdn_gate, kda_gate])
def test_gate_without_a_bound_is_its_formula_or_saturates(gate, dtype):
    """Beyond -1e16 it is -1e16, with gradients of 0: every decay is 0 there."""
    x, A_log, x_64, A_64 = grid(dtype)
    g = gate(x, A_log) if gate is gdn_gate else gate(x.unsqueeze(-1), A_log).squeeze(-1)
    dx, dA = torch.autograd.grad(g.sum(), (x, A_log))
    assert all(y.isfinite().all() for y in (g, dx, dA))
    log, strongest = A_64 + log_softplus(x_64), math.log(-gates.STRONGEST)
    beyond = log > strongest
    assert beyond.any() and ((log.abs() < 5).sum() > 10)
    rounded = 1e-37 + 1e-44 * x_64.abs()  # numbers below 1e-38 have fewer bits
    expected = -log.clamp_max(strongest).exp()
    assert ((g - expected).abs() <= rounded - 1e-5 * expected).all()
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    expected_dx = -(A_64 + logsigmoid(x_64)).masked_fill(beyond, -torch.inf).exp()
    assert ((dx - expected_dx).abs() <= rounded - tolerance * expected_dx).all()
    expected_dA = expected.masked_fill(beyond, 0).sum(0)
    assert ((dA - expected_dA).abs() <= rounded.max() - 1e-5 * expected_dA).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_with_a_bound_is_its_formula(dtype):
    """Gradients are 0 where the sigmoid is 0 or 1."""
    x, A_log, x_64, A_64 = grid(dtype)
    g = kda_gate(x.unsqueeze(-1), A_log, None, -5.0).squeeze(-1)
    z = x_64.sign() * (A_64 + x_64.abs().log()).exp()
    assert relative_error(g, -5 * z.sigmoid()) < 1e-6
    dx, dA = torch.autograd.grad(g.sum(), (x, A_log))
    flat = z.abs() > 110
    assert flat.any() and not flat.all() and not dx[flat].any() and dA.isfinite().all()
    A_64 = A_64.clamp_max(gates.MAX_LOG_RATE)
    expected = -5 * A_64.exp() * z.sigmoid() * (-z).sigmoid()
    assert ((dx - expected).abs() <= 1e-2 * expected.abs() + 1e-6 * A_64.exp() + 1e-37)[~flat].all()
    assert (dA - (expected * x_64).sum(0)).abs().max() < 1e-4


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_no_finite_bias_and_no_length_makes_a_gradient_infinite(lower_bound):
    """Sums over a long sequence included."""
    for A_log, x, bias in itertools.product((-MAX, -100.0, 3.0, 60.0, 100.0, MAX), ARGUMENTS, ARGUMENTS):
        inputs = [torch.full((30, 1, 4), x), torch.tensor([A_log]), torch.full((1, 4), bias)]
        inputs = [x.requires_grad_() for x in inputs]
        g = kda_gate(*inputs, lower_bound)
        grads = torch.autograd.grad(g.sum(), inputs)
        assert all(y.isfinite().all() for y in (g, *grads)), (A_log, x, bias)
        assert all((y.abs() < 1e28).all() for y in grads)  # room for 1e9 such sums


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_gates_compile_without_a_graph_break(lower_bound):
    inputs = [
        x.requires_grad_() for x in (torch.randn(20, 3, 4).bfloat16(), torch.rand(3), torch.randn(3, 4))
    ]
    results = []
    for gate in (kda_gate, torch.compile(kda_gate, fullgraph=True, backend="aot_eager")):
        g = gate(*inputs, lower_bound)
        results.append((g, *torch.autograd.grad(g.square().sum(), inputs)))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("lower_bound", ["gated_delta_net", None, -5.0])
@pytest.mark.parametrize("parameter", ["A_log", "dt_bias"])
def test_a_layer_stays_finite_whatever_its_decay(lower_bound, parameter):
    from titan_gdn.layers.gated_delta_net import GatedDeltaNet
    from titan_gdn.layers.kimi_delta_attention import KimiDeltaAttention
    from titan_gdn.layers.linear_attention import Widths
    from titan_gdn.parallel.sequence import SequenceLayout

    widths = Widths(dim=32, key_heads=2, value_heads=4, key_dim=8, value_dim=8, gate_rank=4)
    if lower_bound == "gated_delta_net":
        config = GatedDeltaNet.configure(widths)
    else:
        config = KimiDeltaAttention.configure(widths, lower_bound)
    torch.manual_seed(0)
    layer = config.build()
    layer.init_states()
    sequence = SequenceLayout.from_positions(torch.arange(100).expand(2, 100))
    for value in (-MAX, -1e4, -200.0, -100.0, 100.0, 200.0, 1e4, MAX):
        with torch.no_grad():
            getattr(layer.decay, parameter)[::2] = value
        layer.zero_grad()
        x = torch.randn(2, 100, 32, requires_grad=True)
        out = layer(x, *layer.decay(), sequence=sequence)
        out.square().sum().backward()
        assert all(y.isfinite().all() for y in (out, x.grad, *(p.grad for p in layer.parameters())))
