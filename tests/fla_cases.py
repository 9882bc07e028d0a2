"""What `test_fla.py` asks of FLA's kernels, in a process of its own under Triton's interpreter.

`python -m tests.fla_cases FILE NAME ...` runs the cases of these names and writes
`{name: {"errors": ..., "traceback": ...}}`.
"""

import json
import sys
import time
import traceback
from functools import partial
from unittest import mock

import torch
from torch.library import opcheck
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests import fla_interpreter
from tests.compare import conv_errors, relative_error, rule_errors, rule_inputs
from titan_gdn.ops import causal_conv1d, chunk_gated_delta_rule, chunk_kda

RAGGED = [0, 66, 67, 69, 72]
WITHOUT_GRADIENT = ("test_schema", "test_faketensor")
WITHOUT_TRACING = (*WITHOUT_GRADIENT, "test_autograd_registration")
EVERY_CHECK = (*WITHOUT_TRACING, "test_aot_dispatch_dynamic")

GDN, KDA = "chunk_gated_delta_rule", "chunk_kda"
SAFE = {GDN: {}, KDA: {"safe_gate": True}}
DECAY = {GDN: (-1.0, 0.0), KDA: (-5.0, 0.0)}  # what `safe_gate` promises


def rule_in_fla(rule, T, offsets=None, decay=None, **shape):
    inputs = rule_inputs(T, rule=rule, decay=decay or DECAY[rule], **shape)
    return rule_errors(inputs, "fla", offsets and torch.tensor(offsets), **SAFE[rule])


def ragged_rule(rule, H, R, dtype=torch.float32):
    states = len(RAGGED) - 1
    return rule_in_fla(rule, RAGGED[-1], RAGGED, H=H, R=R, K=16, V=32, states=states, dtype=dtype)


def queries_and_keys_as_they_are(rule):
    inputs = [x * 0.2 for x in rule_inputs(20, rule=rule)]
    return rule_errors(inputs, "fla", torch.tensor([0, 2, 20]), l2norm=False, **SAFE[rule])


def offsets_overwritten_in_place():
    """FLA remembers chunks by the identity of the offsets."""
    cu_seqlens = torch.tensor([0, 5, 75, 80])
    rule_errors(rule_inputs(80, H=1), "fla", cu_seqlens)
    cu_seqlens[1] = 70
    return rule_errors(rule_inputs(80, H=1), "fla", cu_seqlens)


def keys_beyond_fla():
    """FLA's own word is an assertion."""
    q = torch.ones(1, 1, 1, 257)
    try:
        chunk_gated_delta_rule(q, q, q, q[..., 0], q[..., 0], backend="fla")
    except ValueError as error:
        return {"another error": float("at most 256, not 257" not in str(error))}
    return {"no error": 1.0}


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


def layer(rule, backend, x, weight, cu_seqlens, cu_seqlens_cpu):
    """Both operators as a layer calls them: on slices."""
    documents = {"cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu}
    y = causal_conv1d(x, weight, backend=backend, **documents).unflatten(-1, (2, -1))
    q, k, v = y.split([4, 4, 8], -1)
    beta = y.mean(-1).sigmoid()
    if rule == GDN:
        rule, g = chunk_gated_delta_rule, -beta
    else:
        rule, g = partial(chunk_kda, safe_gate=True), -y.sigmoid()[..., 4:8]
    return rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, backend=backend, **documents)[0]


def layer_inputs(length, documents):
    torch.manual_seed(length)
    offsets = torch.linspace(0, length, documents + 1).long()
    x, weight = torch.randn(1, length, 32), torch.randn(32, 4)
    return x.requires_grad_(), weight.requires_grad_(), offsets, offsets.clone()


def differences(run, rule, args):
    """Of a layer that runs in FLA from one in PyTorch, in output and gradients."""
    results = []
    for function in (run, partial(layer, rule, "torch")):
        out = function(*args)
        results.append((out, *torch.autograd.grad(out.square().sum(), args[:2])))
    return dict(zip(("out", "dx", "dweight"), map(relative_error, *results), strict=True))


def compiled(rule):
    """One graph, whatever the length and the number of documents."""
    run = partial(layer, rule, "fla")
    run = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    shapes = [(20, 1), (12, 2)]
    errors = [differences(run, rule, layer_inputs(*shape)) for shape in shapes]
    return {
        f"{shape} {name}": e for shape, error in zip(shapes, errors, strict=True) for name, e in error.items()
    }


def selective_checkpointing():
    """A policy that names the operator saves its output: FLA's forward runs once."""
    from fla.ops.gated_delta_rule import chunk

    def policy(context, operator, *args, **kwargs):
        rule = operator == torch.ops.titan_gdn.fla_chunk_gated_delta_rule.default
        return CheckpointPolicy.MUST_SAVE if rule else CheckpointPolicy.PREFER_RECOMPUTE

    def checkpointed(*args):
        return checkpoint(
            partial(layer, GDN, "fla"),
            *args,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )

    kernel = "chunk_gated_delta_rule_fwd"
    with mock.patch.object(chunk, kernel, wraps=getattr(chunk, kernel)) as fla:
        errors = differences(checkpointed, GDN, layer_inputs(12, 2))
    return errors | {"runs again": float(fla.call_count - 1)}


def safe_gate_reaches_fla():
    """Its kernels differ in speed alone."""
    from fla.ops.kda import chunk_bwd, chunk_fwd

    errors = {}
    for module, kernel in ((chunk_fwd, "chunk_kda_fwd"), (chunk_bwd, "chunk_kda_bwd")):
        with mock.patch.object(module, kernel, wraps=getattr(module, kernel)) as fla:
            errors |= differences(partial(layer, KDA, "fla"), KDA, layer_inputs(12, 2))
        errors[kernel] = float(not fla.call_args.kwargs["safe_gate"])
    return errors


def rule_passes_opcheck(rule, states):
    shape = {"H": 1, "R": 2, "states": 2 * states, "dtype": torch.float32 if states else torch.bfloat16}
    inputs = [x.requires_grad_() for x in rule_inputs(12, rule=rule, **shape)]
    offsets = torch.tensor([0, 5, 12]) if states else None
    args = (*inputs[:5], 0.5, inputs[5] if states else None, offsets, offsets, states, *SAFE[rule].values())
    forward, backward = (getattr(torch.ops.titan_gdn, f"fla_{rule}{way}") for way in ("", "_backward"))
    # Above a chunk's diagonal FLA's scores of KDA are no numbers, and so never equal to themselves.
    checks = EVERY_CHECK if rule == GDN else WITHOUT_TRACING
    opcheck(forward.default, args, test_utils=checks)
    with torch.no_grad():
        out, final, *saved = forward(*args)
    args = (*args, saved, out, final if states else None)
    opcheck(backward.default, args, test_utils=WITHOUT_GRADIENT)
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


def of_both_rules():
    """Cases by name."""
    for name, rule in (("gdn", GDN), ("kda", KDA)):
        yield f"{name} R=1 in ragged documents", partial(ragged_rule, rule, 2, 1)
        yield f"{name} R=2 in ragged documents", partial(ragged_rule, rule, 1, 2)
        yield f"{name} of rows", partial(rule_in_fla, rule, 67, H=1, R=2, batch=2, states=2)
        yield f"{name} of empty documents", partial(rule_in_fla, rule, 70, [0, 0, 70, 70], H=1, states=3)
        yield f"{name} of queries and keys as they are", partial(queries_and_keys_as_they_are, rule)
        yield f"{name} with states passes opcheck", partial(rule_passes_opcheck, rule, True)
        yield f"{name} without passes opcheck", partial(rule_passes_opcheck, rule, False)
        yield f"{name} in a layer compiles to one graph", partial(compiled, rule)


FLOAT32 = dict(of_both_rules()) | {
    "offsets overwritten in place": offsets_overwritten_in_place,
    "one gradient alone": one_gradient_alone,
    "convolution in ragged documents": lambda: convolution(4, RAGGED),
    "convolution of empty documents": lambda: convolution(4, [0, 0, RAGGED[-1], RAGGED[-1]]),
    "convolution of rows": lambda: convolution(4, None, batch=2),
    "convolution of other widths": lambda: convolution(3, RAGGED) | convolution(1, RAGGED),
    "convolution in documents passes opcheck": lambda: convolution_passes_opcheck([0, 5, 20]),
    "convolution without passes opcheck": lambda: convolution_passes_opcheck(None),
    "selective checkpointing names the rule": selective_checkpointing,
    "safe_gate reaches FLA": safe_gate_reaches_fla,
}
STRONG_DECAY = {
    "kda at the bound of safe_gate": lambda: rule_in_fla(KDA, 20, [0, 17, 20], decay=(-5.0, -5.0)),
    "kda beyond it without safe_gate": lambda: rule_errors(
        rule_inputs(20, R=2, H=1, rule=KDA, decay=(-20.0, 0.0)), "fla", torch.tensor([0, 17, 20])
    ),
}
"""The gradient of `g` is a difference of far larger sums in FLA."""
BFLOAT16 = {
    "gdn in bfloat16": lambda: ragged_rule(GDN, 1, 2, torch.bfloat16),
    "kda in bfloat16": lambda: ragged_rule(KDA, 1, 1, torch.bfloat16),
    "convolution in bfloat16": lambda: convolution(4, RAGGED, dtype=torch.bfloat16),
}
EXACT = {
    "bfloat16 arithmetic of the interpreter": bfloat16_arithmetic,
    "keys beyond FLA's are refused": keys_beyond_fla,
}


def main(path, names):
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN: FLA leaves some of it so
    fla_interpreter.install()
    records = {}
    cases = EXACT | FLOAT32 | STRONG_DECAY | BFLOAT16
    for name in names:
        record = records[name] = {"errors": None, "traceback": None}
        start = time.process_time()
        try:
            record["errors"] = cases[name]()
        except Exception:
            record["traceback"] = traceback.format_exc()
        record["seconds"] = time.process_time() - start
    with open(path, "w") as file:
        json.dump(records, file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
