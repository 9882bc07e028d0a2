"""The operators against step-by-step float64 recurrences."""

import itertools
import subprocess
import sys

import pytest
import torch

from tests.compare import RULES, relative_error, rule_errors, rule_inputs
from tests.draw import in_sets
from titan_gdn import ops
from titan_gdn.ops import causal_conv1d, chunk_gated_delta_rule, document_attention, naive
from titan_gdn.ops.causal_conv1d import torch_backend as conv_backend

RAGGED = [0, 1, 3, 6, 64, 130, 131, 200]
TOLERANCE = {torch.float32: 5e-6, torch.float64: 1e-13}


@pytest.fixture(params=RULES)
def rule(request):
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("R", [1, 2, 4])
@pytest.mark.parametrize("T", in_sets([1, 3, 63, 64, 65, 200, 1000], fast=[1, 3, 63, 64, 65, 200]))
def test_rule_is_the_recurrence(rule, T, R, dtype):
    inputs = rule_inputs(T, R=R, K=8, V=12, states=1, rule=rule, dtype=dtype)
    assert max(rule_errors(inputs).values()) < TOLERANCE[dtype]


@pytest.mark.parametrize("decay", [(-0.02, -0.002), (-1.0, 0.0), (-20.0, -19.0), (0.0, 0.0)])
@pytest.mark.parametrize("states", [True, False])
def test_rule_starts_afresh_at_each_document_whatever_the_decay(rule, decay, states):
    inputs = rule_inputs(RAGGED[-1], R=2, decay=decay, states=(len(RAGGED) - 1) * states, rule=rule)
    errors = rule_errors(inputs, cu_seqlens=torch.tensor(RAGGED))
    assert max(errors.values()) < 5e-6, errors


@pytest.mark.parametrize("decay", [-5.0, -50.0, "mixed"])
def test_kda_holds_for_the_strongest_decays(decay):
    """In whole chunks; mixed: channels of -50 and of -0.001 in one head, where factors of a run overflow."""
    inputs = rule_inputs(200, R=2, states=1, rule="chunk_kda")
    if decay == "mixed":
        inputs[3][..., ::2], inputs[3][..., 1::2] = -50.0, -0.001
    else:
        inputs[3].fill_(decay)
    errors = rule_errors(inputs)
    assert max(errors.values()) < 5e-6, errors


def test_rule_takes_more_documents_than_run_at_once(rule):
    cu_seqlens = torch.arange(0, 402, 3)
    inputs = rule_inputs(
        int(cu_seqlens[-1]), H=1, K=4, V=4, states=len(cu_seqlens) - 1, rule=rule, dtype=torch.float64
    )
    assert max(rule_errors(inputs, cu_seqlens=cu_seqlens).values()) < 1e-13


def test_rule_takes_empty_documents_and_hands_their_state_through(rule):
    cu_seqlens = torch.tensor([0, 0, 70, 70])
    inputs = rule_inputs(70, R=2, states=3, rule=rule, dtype=torch.float64)
    assert max(rule_errors(inputs, cu_seqlens=cu_seqlens).values()) < 1e-13


def test_rows_of_a_batch_are_documents(rule):
    inputs = rule_inputs(70, R=2, batch=3, states=3, rule=rule, dtype=torch.float64)
    assert max(rule_errors(inputs).values()) < 1e-13


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_rule_holds_at_the_ends_of_beta_and_for_zero_queries_and_keys(rule, beta):
    inputs = rule_inputs(130, rule=rule)
    inputs[4].fill_(beta)
    inputs[0][:, 5], inputs[1][:, 7] = 0, 0
    assert max(rule_errors(inputs).values()) < 5e-6


@pytest.mark.slow
def test_rule_passes_gradcheck(rule):
    inputs = rule_inputs(70, H=1, R=2, K=3, V=2, states=1, rule=rule, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda *x: getattr(ops, rule)(*x[:5], initial_state=x[5], output_final_state=True),
        [x.requires_grad_() for x in inputs],
    )


def test_rule_scales_queries_that_it_does_not_normalize(rule):
    inputs = rule_inputs(20, rule=rule, dtype=torch.float64)
    inputs[1] = torch.nn.functional.normalize(inputs[1], dim=-1)
    assert max(rule_errors(inputs, scale=0.3, l2norm=False).values()) < 1e-13


def test_rule_does_not_see_the_future(rule):
    inputs = [x.requires_grad_() for x in rule_inputs(200, R=2, rule=rule)]
    out, _ = getattr(ops, rule)(*inputs)
    later = [torch.cat([x[:, :150], torch.randn_like(x[:, 150:]).abs().neg()], 1) for x in inputs]
    changed, _ = getattr(ops, rule)(*later)
    assert torch.equal(out[:, :150], changed[:, :150])
    for grad in torch.autograd.grad(out[:, :150].square().sum(), inputs):
        assert not grad[:, 150:].any()


def test_bfloat16_goes_in_and_comes_out(rule):
    inputs = rule_inputs(100, R=2, rule=rule, dtype=torch.bfloat16)
    out, state = getattr(ops, rule)(*inputs, output_final_state=True)
    assert out.dtype == torch.bfloat16 and state.dtype == torch.float32
    errors = rule_errors(inputs)
    assert max(errors.values()) < 4e-3, errors


def operators():
    """Each custom operator with arguments."""
    offsets = torch.tensor([0, 5, 70])
    for name in RULES:
        inputs = [x.requires_grad_() for x in rule_inputs(70, R=2, states=2, rule=name)]
        operator = getattr(torch.ops.titan_gdn, name)
        yield operator, (*inputs[:5], 0.5, inputs[5], offsets, True)
        yield operator, (*inputs[:5], 0.5, None, None, False)
    q, k, v = (torch.randn(1, 70, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    some = q[:, 20:50].detach().requires_grad_()
    yield torch.ops.titan_gdn.document_attention, (q, k, v, 0.5, offsets, None)
    yield torch.ops.titan_gdn.document_attention, (some, k, v, 0.5, offsets, torch.arange(20, 50))
    x, weight = (torch.randn(shape, requires_grad=True) for shape in ((1, 70, 8), (8, 4)))
    yield torch.ops.titan_gdn.causal_conv1d, (x, weight, offsets)


@pytest.mark.parametrize(("operator", "args"), list(operators()))
def test_operators_pass_opcheck(operator, args):
    torch.library.opcheck(operator.default, args)


def test_a_layer_of_operators_compiles_without_a_graph_break():
    def layer(x, weight, cu_seqlens, cu_seqlens_cpu):
        y = causal_conv1d(x, weight, cu_seqlens=cu_seqlens).unflatten(-1, (2, -1))
        gate = y.float().mean(-1)
        out, _ = chunk_gated_delta_rule(
            y, y, y, -gate.square(), gate.sigmoid(), cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu
        )
        return document_attention(out, y, y, 0.3, cu_seqlens_cpu)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for length, documents in itertools.product((70, 130, 200), (1, 3, 7)):
        x = torch.randn(1, length, 16, requires_grad=True)
        weight = torch.randn(16, 4)
        offsets = torch.linspace(0, length, documents + 1).long()
        expected = layer(x, weight, offsets, offsets)
        out = compiled(x, weight, offsets, offsets.clone())
        assert relative_error(out, expected) < 1e-6
        (grad,), (grad_ref,) = (torch.autograd.grad(o.square().sum(), x) for o in (out, expected))
        assert relative_error(grad, grad_ref) < 1e-5


@pytest.mark.parametrize("kernel", [1, 2, 4])
@pytest.mark.parametrize("cu_seqlens", [None, RAGGED])
@pytest.mark.parametrize("block", [1, 7, 64, 1000])
def test_convolution_is_the_sum_over_the_past_of_the_document(kernel, cu_seqlens, block, monkeypatch):
    """Whatever blocks of tokens it is computed in, documents' starts beside their edges or not."""
    monkeypatch.setitem(conv_backend.ELEMENTS_AT_ONCE, "cpu", block * 6)
    torch.manual_seed(0)
    x = torch.randn(1, RAGGED[-1], 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, kernel, dtype=torch.float64, requires_grad=True)
    offsets = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    out = causal_conv1d(x, weight, cu_seqlens=offsets)
    expected = naive.causal_conv1d(x, weight, offsets)
    d_out = torch.randn_like(out)
    assert relative_error(out, expected) < 1e-14
    for a, b in zip(*(torch.autograd.grad(y, (x, weight), d_out) for y in (out, expected)), strict=True):
        assert relative_error(a, b) < 1e-14


def test_convolution_takes_sequences_shorter_than_its_kernel():
    x, weight = (torch.randn(shape, requires_grad=True) for shape in ((2, 2, 3), (3, 4)))
    out, expected = causal_conv1d(x, weight), naive.causal_conv1d(x, weight)
    assert relative_error(out, expected) < 1e-6
    for a, b in zip(*(torch.autograd.grad(y.sum(), (x, weight)) for y in (out, expected)), strict=True):
        assert relative_error(a, b) < 1e-6


def test_convolution_rounds_to_bfloat16_once():
    x, weight = torch.randn(1, 50, 6).bfloat16(), torch.randn(6, 4).bfloat16()
    out = causal_conv1d(x, weight)
    assert torch.equal(out, causal_conv1d(x.float(), weight.float()).bfloat16())


def test_importing_the_operators_is_quick():
    """Beside `import torch`, without TorchTitan and FLA. One of three runs, for a busy machine."""
    code = (
        "import sys, time, torch; begin = time.perf_counter(); import titan_gdn.ops; "
        "assert not {'torchtitan', 'fla', 'triton'} & sys.modules.keys(); print(time.perf_counter() - begin)"
    )
    runs = (subprocess.run([sys.executable, "-c", code], capture_output=True, check=True) for _ in range(3))
    assert any(float(run.stdout) < 0.2 for run in runs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_is_the_masked_softmax(dtype):
    torch.manual_seed(0)
    shapes = ((2, 300, 6, 8), (2, 300, 2, 8), (2, 300, 2, 5))
    inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    offsets = torch.tensor([0, 1, 3, 130, 300, 301, 555, 600])
    out, expected = (
        document_attention(*inputs, 0.3, offsets),
        naive.document_attention(*inputs, 0.3, offsets),
    )
    d_out = torch.randn_like(out)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    assert relative_error(out, expected) < tolerance
    for a, b in zip(*(torch.autograd.grad(y, inputs, d_out) for y in (out, expected)), strict=True):
        assert relative_error(a, b) < tolerance


def test_attention_of_some_tokens_is_theirs_of_all():
    """As a context parallel rank has them: two runs of a row, keys of all tokens, a batch of two."""
    torch.manual_seed(0)
    tokens = torch.cat([torch.arange(20, 170), torch.arange(290, 300)])
    q, k, v = (torch.randn(2, 300, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    offsets = torch.tensor([0, 1, 130, 300, 301, 555, 600])
    some = document_attention(q[:, tokens], k, v, 0.3, offsets, tokens)
    expected = naive.document_attention(q, k, v, 0.3, offsets)[:, tokens]
    assert relative_error(some, expected) < 1e-14
    d_out = torch.randn_like(some)
    for a, b in zip(*(torch.autograd.grad(y, (q, k, v), d_out) for y in (some, expected)), strict=True):
        assert relative_error(a, b) < 1e-14


def test_attention_memory_is_linear_in_the_sequence():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for x in torch.utils._pytree.tree_leaves(out):
                if isinstance(x, torch.Tensor):
                    Largest.elements = max(Largest.elements, x.numel())
            return out

    sizes = []
    for length in (1024, 4096):
        q, k, v = (torch.randn(1, length, 2, 4, requires_grad=True) for _ in range(3))
        with Largest():
            document_attention(q, k, v).sum().backward()
        sizes.append(Largest.elements)
        Largest.elements = 0
    assert sizes[1] <= 4 * sizes[0]


@pytest.mark.parametrize(
    "offsets", [[0, 60], [3, 70], [5, 3, 70], [0, 40, 30, 70], [0, 90], [0], [], [0.0, 35.5, 70.0], [[0, 70]]]
)
@pytest.mark.parametrize("operator", [*RULES, "causal_conv1d"])
def test_offsets_that_cut_no_sequence_are_refused(operator, offsets):
    inputs = (torch.zeros(1, 70, 3), torch.zeros(3, 4))
    if operator in RULES:
        inputs = rule_inputs(70, rule=operator)
    with pytest.raises(ValueError, match="cu_seqlens must"):
        getattr(ops, operator)(*inputs, cu_seqlens=torch.tensor(offsets))


def test_offsets_on_the_host_are_those_on_the_device(rule):
    for device, host in ((None, [0, 70]), ([0, 30, 70], [0, 70])):
        device = None if device is None else torch.tensor(device)
        with pytest.raises(ValueError, match="the same offsets"):
            getattr(ops, rule)(
                *rule_inputs(70, rule=rule), cu_seqlens=device, cu_seqlens_cpu=torch.tensor(host)
            )


def test_rule_computes_in_float32_under_autocast(rule):
    inputs = rule_inputs(70, R=2, rule=rule)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        errors = rule_errors(inputs)
    assert max(errors.values()) < 5e-6, errors


@pytest.mark.parametrize("strongest", [-1e6, -1e30, -torch.inf])
def test_one_token_may_forget_everything(rule, strongest):
    inputs = rule_inputs(130, R=2, rule=rule)
    inputs[3][:, 40] = strongest
    errors = rule_errors(inputs)
    assert max(errors.values()) < 5e-6, errors


@pytest.mark.parametrize("decay", [-1e4, -1e16, "mixed"])
def test_rule_holds_where_tokens_forget_everything(rule, decay):
    """All of them, or every fifth, whose decays are far larger than those of the others in a sum."""
    inputs = rule_inputs(130, R=2, states=1, rule=rule)
    if decay == "mixed":
        inputs[3][:, ::5] = -1e4
    else:
        inputs[3].fill_(decay)
    errors = rule_errors(inputs)
    assert max(errors.values()) < 5e-6, errors


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("l2norm", [True, False])
def test_a_document_that_is_not_finite_changes_no_other(rule, value, l2norm):
    """Outputs, final states and gradients, bit for bit. The first token stands in for padding."""
    offsets = torch.tensor([0, 1, 60, 64, 130, 200])
    inputs = rule_inputs(200, R=2, states=5, rule=rule)
    spoiled = [x.clone() for x in inputs]
    for x in spoiled[:5]:
        x[:, :1] = x[:, 60:64] = value
    spoiled[5][[0, 2]] = value
    results = []
    for given in (inputs, spoiled):
        given = [x.requires_grad_() for x in given]
        out, final = getattr(ops, rule)(
            *given[:5],
            initial_state=given[5],
            output_final_state=True,
            use_qk_l2norm_in_kernel=l2norm,
            cu_seqlens=offsets,
        )
        grads = torch.autograd.grad(out.sum() + final.sum(), given)
        results.append(([out, *grads[:5]], [final, grads[5]]))
    others = torch.cat([torch.arange(1, 60), torch.arange(64, 200)])
    for a, b in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(a[:, others], b[:, others])
    for a, b in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(a[[1, 3, 4]], b[[1, 3, 4]])
    assert not results[1][0][0][:, 60:64].isfinite().all()


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-4, 1e18])
def test_rule_normalizes_the_smallest_and_the_largest_keys(rule, scale):
    """Their squares are 0, or the largest that float32 holds: 1e36."""
    inputs = rule_inputs(70, rule=rule)
    inputs[0] *= scale
    inputs[1] *= scale
    errors = rule_errors(inputs)
    # Gradients of keys of this size are its inverse: 1e-18 of the others.
    assert max(errors.values()) < 2e-5, errors


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"v": torch.zeros(1, 5, 3, 4)}, "HV is a multiple of H"),
        ({"g": torch.zeros(1, 5, 3)}, "to fit q and v"),
        ({"cu_seqlens": torch.tensor([0, 5]), "batch": 2}, "reshape"),
        ({"backend": "cuda"}, "'auto', 'fla' or 'torch'"),
        ({"q": torch.zeros(1, 5, 2, 4, dtype=torch.long)}, "floating point, not int64"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, words):
    batch = change.pop("batch", 1)
    args = {
        "q": torch.zeros(batch, 5, 2, 4),
        "k": torch.zeros(batch, 5, 2, 4),
        "v": torch.zeros(batch, 5, 2, 4),
    }
    args |= {"g": torch.zeros(batch, 5, 2), "beta": torch.zeros(batch, 5, 2)} | change
    with pytest.raises(ValueError, match=words):
        chunk_gated_delta_rule(**args)
