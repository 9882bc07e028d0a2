"""Both backends on a GPU: `python -m pytest tests/gpu -s`. Needs torch, FLA and pytest, not TorchTitan."""

import statistics

import pytest
import torch

from tests.compare import RULES, conv_errors, relative_error, rule_errors, rule_inputs
from titan_gdn import ops
from titan_gdn.ops import causal_conv1d
from titan_gdn.ops.backends import why_not_fla

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

RAGGED = [0, 1, 3, 6, 64, 130, 131, 200]
LONG = [0, 3, 40_000, 40_001, 65_536 + 67]
"""More than 1,024 chunks of 64."""

# FLA multiplies float32 on the tensor cores, in TF32.
TOLERANCE = {
    ("torch", torch.float32): 1e-5,
    ("torch", torch.bfloat16): 1e-2,
    ("fla", torch.float32): 1e-2,
    ("fla", torch.bfloat16): 2e-2,
}
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
documents = pytest.mark.parametrize("offsets", [RAGGED, None])
rules = pytest.mark.parametrize("rule", RULES)
safe_gates = pytest.mark.parametrize(
    ("rule", "flags", "decay"),
    [
        ("chunk_gated_delta_rule", {}, (-1.0, 0.0)),
        ("chunk_kda", {"safe_gate": True}, (-5.0, 0.0)),
        ("chunk_kda", {"safe_gate": False}, (-8.0, 0.0)),
    ],
    ids=["gdn", "kda, safe gate", "kda"],
)


def need_fla():
    if reason := why_not_fla(torch.device("cuda")):
        pytest.skip(reason)


@pytest.fixture(params=["torch", "fla"])
def backend(request):
    if request.param == "fla":
        need_fla()
    return request.param


@dtypes
@documents
@safe_gates
@pytest.mark.parametrize("R", [1, 2])
def test_rule_is_the_recurrence(backend, dtype, offsets, rule, flags, decay, R):
    states = 1 if offsets is None else len(offsets) - 1
    shape = {"H": 1, "R": R, "K": 128, "V": 128, "states": states}
    inputs = rule_inputs(200, rule=rule, decay=decay, dtype=dtype, device="cuda", **shape)
    errors = rule_errors(inputs, backend, offsets and torch.tensor(offsets), **flags)
    assert max(errors.values()) < TOLERANCE[backend, dtype], errors


@dtypes
@documents
def test_convolution_is_the_sum_over_the_past(backend, dtype, offsets):
    torch.manual_seed(0)
    x, weight = (torch.randn(shape, device="cuda").to(dtype) for shape in ((1, 200, 96), (96, 4)))
    errors = conv_errors(x, weight, backend, offsets and torch.tensor(offsets))
    assert max(errors.values()) < TOLERANCE[backend, dtype], errors


def layer(backend, inputs, x, weight, offsets):
    """Output of both operators, and every gradient; the rule is the one that `g` fits."""
    device, host = (None, None) if offsets is None else offsets
    inputs = [y.detach().requires_grad_() for y in (*inputs, x, weight)]
    *rule_arguments, x, weight = inputs
    y = causal_conv1d(x, weight, cu_seqlens=device, cu_seqlens_cpu=host, backend=backend)
    rule, flags = ops.chunk_gated_delta_rule, {}
    if rule_arguments[3].ndim == 4:
        rule, flags = ops.chunk_kda, {"safe_gate": True}
    out, _ = rule(
        *rule_arguments,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=device,
        cu_seqlens_cpu=host,
        backend=backend,
        **flags,
    )
    return out, y, *torch.autograd.grad((out, y), inputs, (torch.ones_like(out), torch.ones_like(y)))


def layer_inputs(rule, T, dtype=torch.bfloat16):
    inputs = rule_inputs(T, rule=rule, H=2, R=2, K=128, V=128, dtype=dtype, device="cuda")
    x, weight = (torch.randn(shape, device="cuda").to(dtype) for shape in ((1, T, 1024), (1024, 4)))
    return inputs, x, weight


def offsets_of(documents):
    """On the device and on the host."""
    return torch.tensor(documents, device="cuda"), torch.tensor(documents)


@rules
@dtypes
@pytest.mark.parametrize("documents", [LONG, LONG[:1] + LONG[-1:]], ids=["ragged", "one"])
def test_long_sequences_stay_finite(backend, rule, dtype, documents):
    results = layer(backend, *layer_inputs(rule, LONG[-1], dtype), offsets_of(documents))
    assert all(torch.isfinite(x).all() for x in results)


@rules
def test_backends_agree_on_long_sequences(rule):
    need_fla()
    arguments = *layer_inputs(rule, LONG[-1]), offsets_of(LONG)
    errors = [
        relative_error(*pair) for pair in zip(*(layer(b, *arguments) for b in ("fla", "torch")), strict=True)
    ]
    assert max(errors) < TOLERANCE["fla", torch.bfloat16], errors


@rules
def test_fla_never_waits_for_the_device(rule):
    need_fla()
    arguments = *layer_inputs(rule, 1000), offsets_of([0, 5, 700, 1000])
    layer("fla", *arguments)  # compiles and tunes
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer("fla", *arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@rules
@pytest.mark.parametrize("T", [8_192, 65_536])
def test_time(backend, rule, T):
    """Prints medians of 5 runs after 2 more, forward and backward together."""
    arguments = *layer_inputs(rule, T), offsets_of([0, T // 3, T])
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        layer(backend, *arguments)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    print(f"\n{backend}, {rule}: {T} tokens, forward and backward: {statistics.median(times[2:]):.2f} ms")
