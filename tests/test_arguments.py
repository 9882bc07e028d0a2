"""What the operators take, and what they say of the rest."""

import ast
import importlib.util
import inspect
import pathlib
import re

import pytest
import torch

from tests.compare import RULES, relative_error, rule_inputs
from titan_gdn import ops
from titan_gdn.ops import backends
from titan_gdn.ops.causal_conv1d import CONV_NOT_TAKEN
from titan_gdn.ops.gated_delta_rule import GDN_NOT_TAKEN
from titan_gdn.ops.kda import KDA_NOT_TAKEN

NAMES = ("q", "k", "v", "g", "beta")
FILES = {
    "chunk_gated_delta_rule": ("ops/gated_delta_rule/chunk.py", GDN_NOT_TAKEN),
    "chunk_kda": ("ops/kda/chunk.py", KDA_NOT_TAKEN),
    "causal_conv1d": ("modules/causal_conv1d/ops.py", CONV_NOT_TAKEN),
}


@pytest.fixture(params=RULES)
def rule(request):
    return request.param


def arguments(operator, **changes):
    """Arguments of an operator that it takes, but for `changes`."""
    torch.manual_seed(0)
    if operator in RULES:
        given = dict(zip(NAMES, rule_inputs(5, R=2, K=4, V=6, rule=operator), strict=True))
    elif operator == "causal_conv1d":
        given = {"x": torch.randn(1, 5, 3), "weight": torch.randn(3, 4)}
    elif operator == "document_attention":
        given = {"q": torch.randn(1, 5, 4, 8), "k": torch.randn(1, 5, 2, 8), "v": torch.randn(1, 5, 2, 6)}
    else:
        heads = (3, 4) if operator == "kda_gate" else (3,)
        given = {"x": torch.randn(1, 5, *heads), "A_log": torch.rand(3), "dt_bias": torch.rand(heads)}
    return given | changes


def signature_of_fla(operator):
    """The arguments of FLA's function and the other keywords that it reads, without importing FLA."""
    spec = importlib.util.find_spec("fla")
    if spec is None:
        pytest.skip("needs FLA")
    tree = ast.parse((pathlib.Path(spec.submodule_search_locations[0]) / FILES[operator][0]).read_text())
    (function,) = (x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == operator)
    body = "\n".join(ast.unparse(x) for x in function.body[1:])
    keywords = re.findall(r"kwargs\.(?:get|pop)\('(\w+)'|'(\w+)' in kwargs", body)
    return [x.arg for x in function.args.args], {name for pair in keywords for name in pair if name}


@pytest.mark.parametrize("operator", FILES)
def test_the_arguments_of_fla_are_taken_or_named_in_the_docstring(operator):
    function, not_taken = getattr(ops, operator), FILES[operator][1]
    theirs, keywords = signature_of_fla(operator)
    everything = {*theirs, *keywords}
    parameters = inspect.signature(function).parameters.values()
    ours = {x.name for x in parameters if x.kind != x.VAR_KEYWORD}
    promise = function.__doc__[: function.__doc__.index("Args:")]
    assert everything - ours == not_taken.keys()
    assert ours - everything <= {"backend"}
    assert all(f"`{name}`" in promise for name in not_taken)
    by_position = [x.name for x in parameters if x.kind == x.POSITIONAL_OR_KEYWORD]
    assert by_position == theirs[: len(by_position)]


@pytest.mark.parametrize("operator", FILES)
def test_an_argument_that_is_not_taken_is_refused_by_name_unless_it_asks_for_nothing(operator):
    function, expected = getattr(ops, operator), getattr(ops, operator)(**arguments(operator))
    for name, instead in FILES[operator][1].items():
        with pytest.raises(
            TypeError, match=re.escape(f"{operator} does not take FLA's argument '{name}': {instead}")
        ):
            function(**arguments(operator, **{name: 1}))
        for nothing in (None, False):
            out = function(**arguments(operator, **{name: nothing}))
            assert torch.equal(out[0], expected[0])
    with pytest.raises(TypeError, match="has no argument 'cu_seqlen', and neither has FLA's"):
        function(**arguments(operator, cu_seqlen=torch.tensor([0, 5])))


def test_the_gate_and_sigmoid_and_layout_of_fla_are_what_they_stand_for(rule):
    """As FLA's docstrings define them."""
    given, function = arguments(rule), getattr(ops, rule)
    heads = given["v"].shape[2]
    channels = (4,) * (rule == "chunk_kda")
    A_log, dt_bias, states = torch.rand(heads), torch.rand(heads, *channels), torch.randn(1, heads, 4, 6)
    g, lower_bound = given["g"], {"lower_bound": -5.0} if channels else {}
    if channels:
        g = -5 * (A_log.exp()[:, None] * (g + dt_bias)).sigmoid()
    else:
        g = -A_log.exp() * torch.nn.functional.softplus(g + dt_bias)
    beta = 2 * given["beta"].sigmoid()
    expected, final = function(
        **given | {"g": g, "beta": beta}, initial_state=states, output_final_state=True
    )
    out, final_VK = function(
        **given,
        use_gate_in_kernel=True,
        A_log=A_log,
        dt_bias=dt_bias.flatten(),
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
        state_v_first=True,
        initial_state=states.mT,
        output_final_state=True,
        **lower_bound,
    )
    assert relative_error(out, expected) < 1e-6 and relative_error(final_VK.mT, final) < 1e-6
    assert final_VK.is_contiguous()


def test_arguments_that_work_together_are_refused_alone(rule):
    function = getattr(ops, rule)
    for words, wrong in {
        "use_gate_in_kernel = True needs A_log": {"use_gate_in_kernel": True},
        "A_log, dt_bias and lower_bound need use_gate_in_kernel = True": {"A_log": torch.zeros(4)},
        "allow_neg_eigval = True needs use_beta_sigmoid_in_kernel = True": {"allow_neg_eigval": True},
        r"initial_state \(1, 4, 4, 6\) must be \(1, 4, 6, 4\)": {
            "state_v_first": True,
            "initial_state": torch.zeros(1, 4, 4, 6),
        },
    }.items():
        with pytest.raises(ValueError, match=words):
            function(**arguments(rule, **wrong))


EMPTY = [(operator, empty) for operator in (*RULES, "causal_conv1d", "document_attention") for empty in "BT"]


@pytest.mark.parametrize(("operator", "empty"), [*EMPTY, ("gdn_gate", "T"), ("kda_gate", "T")])
def test_an_empty_batch_and_an_empty_sequence_have_an_empty_result(operator, empty, monkeypatch):
    """And gradients. FLA's kernels are never asked."""
    monkeypatch.setattr(backends, "why_not_fla", lambda device: None)
    dim = "BT".index(empty)
    given = {
        name: (x.narrow(dim, 0, 0) if x.ndim > 2 else x).requires_grad_()
        for name, x in arguments(operator).items()
    }
    own = {"backend": "fla"} if operator in FILES else {}
    if operator in RULES:
        states = torch.randn(given["q"].shape[0], 4, 4, 6, requires_grad=True)
        own |= {"initial_state": states, "output_final_state": True}
    out = getattr(ops, operator)(**given, **own)
    if operator in RULES:
        out, final = out
        assert torch.equal(final, states)
        out = out.sum() + final.sum()
    grads = torch.autograd.grad(out.sum(), list(given.values()))
    assert [x.shape for x in grads] == [x.shape for x in given.values()] and not any(x.any() for x in grads)


META = torch.device("meta")


def wrong_arguments():
    """Each operator, an argument that it refuses, and the words that it has for it."""
    for rule in RULES:
        q, k, v, g, beta = arguments(rule).values()
        integers, half = q.long(), q.bfloat16()
        yield rule, {"q": integers}, "floating point, not int64, float32"
        yield rule, {"k": half}, "q, k and v must have one dtype, not float32, bfloat16, float32"
        yield rule, {"v": v.double()}, "q, k and v must have one dtype, not float32, float32, float64"
        yield rule, {"g": g.to(META)}, "on one device, not cpu, cpu, cpu, meta, cpu"
        yield rule, {"beta": 0.5}, "beta must be a tensor, not float"
        yield rule, {"initial_state": torch.zeros(1, 4, 4, 6).long()}, "initial_state must be floating point"
        yield rule, {"q": q[:, :, :0], "k": k[:, :, :0]}, "H, HV, K and V are at least 1"
        yield rule, {"v": v[:, :, :0]}, "H, HV, K and V are at least 1"
        yield rule, {"q": q[..., :0], "k": k[..., :0]}, "H, HV, K and V are at least 1"
        yield rule, {"q": q[0], "k": k[0]}, r"must be \[B, T, H, K\]"
        yield rule, {"v": v[0, 0]}, r"must be \[B, T, H, K\]"
    x, weight = arguments("causal_conv1d").values()
    yield "causal_conv1d", {"x": x.long()}, "x and weight must be floating point, not int64, float32"
    yield "causal_conv1d", {"weight": weight.to(META)}, "x and weight must be on one device, not cpu, meta"
    yield "causal_conv1d", {"weight": weight[:, :0]}, "D and C are at least 1"
    yield "causal_conv1d", {"x": x[0]}, r"must be \[B, T, D\]"
    yield "causal_conv1d", {"activation": None}, "activation = None must be 'silu' or 'swish'"
    for operator in (*RULES, "causal_conv1d"):
        yield operator, {"cu_seqlens": [0, 5]}, r"not list: torch.tensor\(cu_seqlens, device='cpu'\)"
        offsets = torch.tensor([0, 5])
        yield operator, {"cu_seqlens": offsets.to(META)}, r"cu_seqlens must be on cpu, not on meta"
        on_host = {"cu_seqlens": offsets, "cu_seqlens_cpu": offsets.to(META)}
        yield operator, on_host, "cu_seqlens_cpu must be on cpu, not on meta"
        yield operator, on_host | {"cu_seqlens_cpu": [0, 5]}, "cu_seqlens_cpu must be a tensor"
        yield operator, {"cu_seqlens": torch.tensor([False, True])}, "cu_seqlens must be .* not bool"
    q, k, v = arguments("document_attention").values()
    yield "document_attention", {"q": q.long()}, "floating point, not int64, float32, float32"
    yield "document_attention", {"k": k.to(META)}, "on one device, not cpu, meta, cpu"
    yield "document_attention", {"q": q[:, :, :3]}, "N is a multiple of M"
    yield "document_attention", {"k": k[:, :, :0], "v": v[:, :, :0]}, "at least 1"
    yield "document_attention", {"q": q[:, :4]}, "must be .* for 5 tokens"
    yield "document_attention", {"cu_seqlens_cpu": [0, 5]}, "not list: torch.tensor"
    yield (
        "document_attention",
        {"cu_seqlens_cpu": torch.tensor([0, 3])},
        "cu_seqlens must increase from 0",
    )
    for gate in ("gdn_gate", "kda_gate"):
        x, A_log, dt_bias = arguments(gate).values()
        yield gate, {"x": x.long()}, "x, A_log and dt_bias must be floating point, not int64"
        yield gate, {"A_log": A_log[:2]}, r"A_log \(2,\) must be \[HV\]"
        yield gate, {"dt_bias": dt_bias[:2]}, r"dt_bias \(2.* must be \[HV"
        yield gate, {"A_log": A_log.to(META)}, "on one device, not cpu, meta, cpu"
    yield "kda_gate", {"lower_bound": 0.0}, "lower_bound = 0.0 must be below 0"


@pytest.mark.parametrize(("operator", "wrong", "words"), list(wrong_arguments()))
def test_an_argument_that_does_not_fit_is_refused_in_a_sentence(operator, wrong, words):
    with pytest.raises(ValueError, match=words):
        getattr(ops, operator)(**arguments(operator, **wrong))


def test_offsets_of_32_bits_are_taken(rule):
    given = arguments(rule)
    results = [
        getattr(ops, rule)(**given, cu_seqlens=torch.tensor([0, 2, 5], dtype=dtype))[0]
        for dtype in (torch.int32, torch.int64)
    ]
    assert torch.equal(*results)
