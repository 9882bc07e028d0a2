"""Compares a latent attention layer on four ranks with the same layer on one rank (see layer_cases.py)."""

import itertools

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.layer_cases import LENGTH, MESHES, WIDTH, dims, layouts, local, set_up

CASES = list(itertools.product(("contiguous", "headtail"), ("one", "ragged"), MESHES))
COMPRESSED, SHARED = 16, 4


def name(case):
    order, documents, (tp, cp, sp) = case
    return f"{order}-{documents}-tp{tp}-cp{cp}-{'sp' if sp else 'no_sp'}"


def build(tp, cp, sp):
    """Build the layer on a mesh; its weights do not depend on the mesh."""

    from titan_gdn.models.kimi_linear import KimiLinearArguments

    model = KimiLinearArguments(
        dim=WIDTH,
        n_layers=1,
        layer_types=["full_attention"],
        n_experts=0,
        n_heads=4,
        key_head_dim=8,
        qk_rope_head_dim=SHARED,
        value_head_dim=12,
        kv_lora_rank=COMPRESSED,
    ).config()
    config = model.first_attention
    sharded = sp and tp > 1
    config.set_sharding(tp=tp, enable_sp=sharded)
    torch.manual_seed(0)
    layer = config.build()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    parallel = dims(tp, cp)
    layer.split_sequence(parallel.get_optional_mesh("cp"), parallel.get_mesh("tp") if sharded else None)
    if tp > 1:
        layer.parallelize(parallel)
    return layer


def errors(case):
    """Return the relative errors of output and gradients, and the bytes sent over CP in the forward pass."""
    from tests.compare import relative_error
    from titan_gdn.bench.recorder import BytesSent

    order, documents, (tp, cp, sp) = case
    whole, split = build(1, 1, False), build(tp, cp, sp)
    sequence, shards = layouts(documents, tp, cp, order)
    torch.manual_seed(1)
    x, d_out = torch.randn(2, 1, LENGTH, WIDTH)
    x.requires_grad_()
    expected = whole(x, attention_masks=None, sequence=sequence)
    expected.backward(d_out)

    mine = local(x, tp, cp, sp, order).requires_grad_()
    with BytesSent() as sent:
        out = split(mine, attention_masks=None, sequence=shards)
        # The output may still be in flight: an operation on it waits.
        out = out.to_local() * 1 if isinstance(out, DTensor) else out
    out.backward(local(d_out, tp, cp, sp, order))
    found = {
        "output": relative_error(out, local(expected, tp, cp, sp, order)),
        "input": relative_error(mine.grad, local(x.grad, tp, cp, sp, order)),
    }
    for (key, theirs), ours in zip(whole.named_parameters(), split.parameters(), strict=True):
        gradient = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad.clone()
        if cp > 1:  # as FSDP does
            dist.all_reduce(gradient, group=dims(tp, cp).get_mesh("cp").get_group())
        found[key] = relative_error(gradient, theirs.grad)
    crossed = sent.bytes[dims(tp, cp).get_mesh("cp").get_group().group_name] if cp > 1 else 0
    return found, crossed


def matrix():
    set_up()
    return {name(case): errors(case) for case in CASES}
