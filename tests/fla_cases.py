"""What `test_fla.py` asks of FLA's kernels, in a process of its own under Triton's interpreter.

`python -m tests.fla_cases FILE` runs every case and writes `{name: {"errors": ..., "traceback": ...}}`.
"""

import json
import sys
import time
import traceback

import torch
from torch.library import opcheck
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests import fla_interpreter
from tests.compare import conv_errors, rule_errors, rule_inputs
from tests.reference import relative_error
from titan_gdn.ops import causal_conv1d, chunk_gated_delta_rule

RAGGED = [0, 66, 67, 69, 72]
WITHOUT_GRADIENT = ("test_schema", "test_faketensor")


def ragged_rule(H, R, dtype=torch.float32):
    inputs = rule_inputs(RAGGED[-1], H=H, R=R, K=16, V=32, states=len(RAGGED) - 1, dtype=dtype)
    return rule_errors(inputs, "fla", torch.tensor(RAGGED))


def empty_documents():
    cu_seqlens = torch.tensor([0, 0, 70, 70])
    rule = rule_errors(rule_inputs(70, H=1, states=3), "fla", cu_seqlens)
    conv = conv_errors(torch.randn(1, 70, 6), torch.randn(6, 4), "fla", cu_seqlens)
    return rule | {f"conv {name}": error for name, error in conv.items()}


def offsets_overwritten_in_place():
    """FLA remembers chunks by the identity of the offsets."""
    cu_seqlens = torch.tensor([0, 5, 75, 80])
    rule_errors(rule_inputs(80, H=1), "fla", cu_seqlens)
    cu_seqlens[1] = 70
    return rule_errors(rule_inputs(80, H=1), "fla", cu_seqlens)


def convolution(kernel, offsets, batch=1, dtype=torch.float32):
    torch.manual_seed(0)
    x, weight = torch.randn(batch, RAGGED[-1], 6).to(dtype), torch.randn(6, kernel).to(dtype)
    return conv_errors(x, weight, "fla", offsets and torch.tensor(offsets))


def one_gradient_alone():
    """The state's, without the output's: autograd hands over None for the other."""
    inputs = [x.requires_grad_() for x in rule_inputs(20, H=1)]
    errors = {}
    for output in (0, 1):
        grads = {
            backend: torch.autograd.grad(
                chunk_gated_delta_rule(*inputs, output_final_state=True, backend=backend)[output].sum(),
                inputs[1:],
            )
            for backend in ("fla", "torch")
        }
        errors[output] = max(map(relative_error, grads["fla"], grads["torch"]))
    return errors


def layer(x, weight, cu_seqlens, cu_seqlens_cpu):
    """Both operators as a layer calls them: on slices."""
    y = causal_conv1d(x, weight, cu_seqlens, cu_seqlens_cpu, backend="fla").unflatten(-1, (2, -1))
    q, k, v = y.split([4, 4, 8], -1)
    gate = y.mean(-1)
    out, _ = chunk_gated_delta_rule(
        q, k, v, -gate.square(), gate.sigmoid(), None, None, False, True, cu_seqlens, cu_seqlens_cpu, "fla"
    )
    return out


def layer_inputs(length, documents):
    torch.manual_seed(length)
    offsets = torch.linspace(0, length, documents + 1).long()
    x, weight = torch.randn(1, length, 32), torch.randn(32, 4)
    return x.requires_grad_(), weight.requires_grad_(), offsets, offsets.clone()


def differences(run, expected_run, args):
    """Between two runs of the layer, in output and gradients."""
    results = []
    for function in (run, expected_run):
        out = function(*args)
        results.append((out, *torch.autograd.grad(out.square().sum(), args[:2])))
    return dict(zip(("out", "dx", "dweight"), map(relative_error, *results), strict=True))


def compiled():
    """One graph, whatever the length and the number of documents."""
    whole = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    shapes = [(20, 1), (12, 2)]
    errors = [differences(whole, layer, layer_inputs(*shape)) for shape in shapes]
    return {
        f"{shape} {name}": e for shape, error in zip(shapes, errors, strict=True) for name, e in error.items()
    }


def selective_checkpointing():
    """A policy that names the operator saves its output: FLA's forward runs once."""
    from fla.ops.gated_delta_rule import chunk

    kernel, calls = chunk.chunk_gated_delta_rule_fwd, []

    def policy(context, operator, *args, **kwargs):
        rule = operator == torch.ops.titan_gdn.fla_chunk_gated_delta_rule.default
        return CheckpointPolicy.MUST_SAVE if rule else CheckpointPolicy.PREFER_RECOMPUTE

    def checkpointed(*args):
        return checkpoint(
            layer,
            *args,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )

    chunk.chunk_gated_delta_rule_fwd = lambda *args, **kwargs: calls.append(1) or kernel(*args, **kwargs)
    try:
        errors = differences(checkpointed, layer, layer_inputs(12, 2))
    finally:
        chunk.chunk_gated_delta_rule_fwd = kernel
    assert len(calls) == 2, calls  # one with checkpointing, one without
    return errors


def rule_passes_opcheck(states):
    inputs = [x.requires_grad_() for x in rule_inputs(12, H=1, R=2, states=2 * states)]
    offsets = torch.tensor([0, 5, 12]) if states else None
    args = (*inputs[:5], 0.5, inputs[5] if states else None, offsets, offsets, states)
    forward = torch.ops.titan_gdn.fla_chunk_gated_delta_rule.default
    opcheck(forward, args)
    with torch.no_grad():
        out, final, *saved = forward(*args)
    backward = torch.ops.titan_gdn.fla_chunk_gated_delta_rule_backward.default
    opcheck(backward, (*args, *saved, out, final if states else None), test_utils=WITHOUT_GRADIENT)
    return {}


def convolution_passes_opcheck(offsets):
    x, weight = torch.randn(1, 20, 6, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    offsets = offsets and torch.tensor(offsets)
    args = (x, weight, offsets, offsets)
    opcheck(torch.ops.titan_gdn.fla_causal_conv1d.default, args)
    backward = torch.ops.titan_gdn.fla_causal_conv1d_backward.default
    opcheck(backward, (*args, torch.randn_like(x)), test_utils=WITHOUT_GRADIENT)
    return {}


def bfloat16_arithmetic():
    """The canary: products, sums and rounding are torch's, bit for bit, only if the interpreter is mended."""
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(a, b, c, out, N: tl.constexpr):
        row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
        place = row * N + column
        x, y = tl.load(a + place), tl.load(b + place)
        total = (tl.dot(x, y) + tl.load(c + place)).to(tl.bfloat16)
        tl.store(out + place, total + x * y + tl.sum(x * y, 1)[:, None])

    torch.manual_seed(0)
    a, b = (torch.randint(-8, 8, (16, 16)).bfloat16() for _ in range(2))
    c, out = torch.rand(16, 16), torch.empty(16, 16, dtype=torch.bfloat16)
    kernel[(1,)](a, b, c, out, 16)
    total = (a.float() @ b.float() + c).bfloat16()
    return {"bits": float((out != total + a * b + (a * b).sum(1, keepdim=True)).sum())}


FLOAT32 = {
    "rule R=1 in ragged documents": lambda: ragged_rule(2, 1),
    "rule R=2 in ragged documents": lambda: ragged_rule(2, 2),
    "rule of rows": lambda: rule_errors(rule_inputs(67, H=1, R=2, batch=2, states=2), "fla"),
    "rule of queries and keys as they are": lambda: rule_errors(
        [x * 0.2 for x in rule_inputs(20)], "fla", torch.tensor([0, 2, 20]), l2norm=False
    ),
    "empty documents": empty_documents,
    "offsets overwritten in place": offsets_overwritten_in_place,
    "one gradient alone": one_gradient_alone,
    "convolution in ragged documents": lambda: convolution(4, RAGGED),
    "convolution of rows": lambda: convolution(4, None, batch=2),
    "convolution of other widths": lambda: convolution(3, RAGGED) | convolution(1, RAGGED),
    "rule with states passes opcheck": lambda: rule_passes_opcheck(True),
    "rule without passes opcheck": lambda: rule_passes_opcheck(False),
    "convolution in documents passes opcheck": lambda: convolution_passes_opcheck([0, 5, 20]),
    "convolution without passes opcheck": lambda: convolution_passes_opcheck(None),
    "a layer compiles to one graph": compiled,
    "selective checkpointing names the rule": selective_checkpointing,
}
BFLOAT16 = {
    "rule in bfloat16": lambda: ragged_rule(1, 2, torch.bfloat16),
    "convolution in bfloat16": lambda: convolution(4, RAGGED, dtype=torch.bfloat16),
}
EXACT = {"bfloat16 arithmetic of the interpreter": bfloat16_arithmetic}


def main(path):
    torch.set_num_threads(1)
    fla_interpreter.install()
    records = {}
    for name, case in (EXACT | FLOAT32 | BFLOAT16).items():
        record = records[name] = {"errors": None, "traceback": None}
        start = time.perf_counter()
        try:
            record["errors"] = case()
        except Exception:
            record["traceback"] = traceback.format_exc()
        record["seconds"] = time.perf_counter() - start
    with open(path, "w") as file:
        json.dump(records, file)


if __name__ == "__main__":
    main(sys.argv[1])
