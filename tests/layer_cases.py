"""Compares a linear attention layer on four ranks with the same layer on one rank.

The functions without a leading argument `tp` or `case` run on every rank of a pool (`tests.ranks.run`). A
case is `(exchange, order, documents, (tp, cp, sequence_parallel), R, V)`, with R value heads per key head.
"""

import itertools
import os

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

LENGTH, WIDTH, GROUPS, RANK = 128, 32, 4, 6
RAGGED = [0, 1, 3, 6, 31, 32, 33, 65, 66, 95, 100, 127, 128]
"""Documents of 1, 2 and 3 tokens at the edges of shards."""
EDGES = [0, 15, 16, 17, 19, 30, 32, 47, 48, 50, 64, 78, 80, 81, 94, 95, 96, 99, 111, 112, 113, 128]
"""Documents that start and end next to the edges of all segments."""
SPANNING = [0, 5, 120, 128]
"""A document of which every rank has a part, then one that starts inside the second segment of rank 0."""
MESHES = [
    (1, 1, False),
    (2, 1, False),
    (2, 1, True),
    (1, 2, False),
    (2, 2, False),
    (2, 2, True),
    (1, 4, False),
]
LAYERS = ("gated_delta_net", "kimi_delta_attention")
CASES = list(
    itertools.product(
        ("all_to_all", "all_gather", "state"),
        ("contiguous", "headtail"),
        ("one", "ragged"),
        MESHES,
        (1, 2, 4),
        (8, 12),
    )
)
# Two rows with documents of their own.
CASES += itertools.product(
    ("all_to_all", "all_gather", "state"), ("contiguous", "headtail"), ("rows",), MESHES, (2,), (12,)
)


def name(case):
    exchange, order, documents, (tp, cp, sp), R, V = case
    return f"{exchange}-{order}-{documents}-tp{tp}-cp{cp}-{'sp' if sp else 'no_sp'}-R{R}-V{V}"


def is_bitwise(layer, case):
    """Whether the output must be bitwise that of one rank.

    It is without TP, unless the matrix library switches to another kernel. It does for weights of fewer than
    16 rows (all_gather slices weights; a group has `2R` rows of `in_proj_ba` and `R` rows of `in_proj_b`),
    and if the rule runs on a single group, because its products are then not batched. The state exchange
    multiplies by the transitions of segments, which one rank does not do.
    """
    exchange, _, _, (tp, cp, _), R, _ = case
    groups, rows = GROUPS // cp, {"gated_delta_net": 2 * R, "kimi_delta_attention": R}[layer]
    whole = groups > 1 and (exchange == "all_to_all" or (exchange == "all_gather" and rows * groups >= 16))
    return tp == 1 and (cp == 1 or whole)


def set_up():
    from torchtitan.distributed.utils import set_spmd_backend

    dist.init_process_group("gloo")
    torch.autograd.set_multithreading_enabled(False)
    set_spmd_backend("partial_dtensor")


def dims(tp, cp, cache={}):  # noqa: B006 (one set of process groups a mesh)
    from torchtitan.distributed import ParallelDims

    if (tp, cp) not in cache:
        cache[tp, cp] = ParallelDims(
            dp_replicate=1,
            dp_shard=-1,
            cp=cp,
            tp=tp,
            pp=1,
            ep=1,
            world_size=4,
            spmd_backend="partial_dtensor",
        )
        cache[tp, cp].build_mesh()
    return cache[tp, cp]


def split_layer(layer, exchange, tp, cp, sp, R, V, regather=False):
    """Build a layer on one rank and the same layer on a mesh. Half of its heads decay slowly."""
    from titan_gdn.bench.layer import LayerOptions, build

    options = LayerOptions(
        layer=layer,
        dim=WIDTH,
        key_heads=GROUPS,
        value_heads=GROUPS * R,
        key_dim=8,
        value_dim=V,
        gate_rank=RANK,
        cp=1,
        tp=1,
        sequence_parallel=sp,
        regather=regather,
    )
    torch.manual_seed(R + V)
    whole, _ = build(options, exchange, dims(1, 1))
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
        rates = torch.tensor([0.01, 2.0]).repeat(GROUPS * R)[: GROUPS * R]  # g about -0.01 and -2
        whole.decay.A_log.copy_(rates.log())
    options.tp, options.cp = tp, cp
    split, _ = build(options, exchange, dims(tp, cp), whole.state_dict())
    return whole, split


def local(x, tp, cp, sp, order):
    """Return this rank's tokens of `[B, T, ...]`."""
    from titan_gdn.parallel.segments import shard_order

    parallel = dims(tp, cp)
    if cp > 1:
        x = x[:, shard_order(x.shape[1], cp, order).view(cp, -1)[parallel.get_mesh("cp").get_local_rank()]]
    if tp > 1 and sp:
        x = x.chunk(tp, 1)[parallel.get_mesh("tp").get_local_rank()]
    return x.detach().clone()


def positions_of(documents):
    rows = {"one": [[0, LENGTH]], "ragged": [RAGGED], "rows": [EDGES, SPANNING]}[documents]
    return torch.stack(
        [torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(offsets)]) for offsets in rows]
    )


def layouts(documents, tp, cp, order):
    """Return the layout of the full sequence and that of this rank's shard."""
    from titan_gdn.parallel.sequence import ContextParallel, SequenceLayout

    positions = positions_of(documents)
    whole = SequenceLayout.from_positions(positions)
    if cp == 1:
        return whole, whole
    mesh = dims(tp, cp).get_mesh("cp")
    shards = local(positions, tp, cp, False, order)
    return whole, SequenceLayout.from_positions(shards, ContextParallel(mesh, order, mesh))


def errors(layer, case, regather=False):
    """Return the relative errors of output and gradients, and whether the output is bitwise equal."""
    exchange, _, _, (tp, cp, sp), R, V = case
    return compared(*split_layer(layer, exchange, tp, cp, sp, R, V, regather), case)


def compared(whole, split, case, gradient=lambda d_out: d_out):
    """See `errors`, for these two layers. `gradient` changes the random gradient of the output."""
    from tests.compare import relative_error

    _, order, documents, (tp, cp, sp), _, _ = case
    sequence, shards = layouts(documents, tp, cp, order)
    torch.manual_seed(1)
    x, d_out = torch.randn(2, *positions_of(documents).shape, whole.out_proj.out_features)
    x.requires_grad_()
    d_out = gradient(d_out)
    expected = whole(x, *whole.decay(), sequence=sequence)
    expected.backward(d_out)

    mine = local(x, tp, cp, sp, order).requires_grad_()
    out = split(mine, *split.decay(), sequence=shards)
    # The output may still be in flight: an operation on it waits.
    out = out.to_local() * 1 if isinstance(out, DTensor) else out
    out.backward(local(d_out, tp, cp, sp, order))
    found = {
        "output": relative_error(out, local(expected, tp, cp, sp, order)),
        "input": relative_error(mine.grad, local(x.grad, tp, cp, sp, order)),
    }
    bitwise = torch.equal(out, local(expected, tp, cp, sp, order))
    for (key, theirs), ours in zip(whole.named_parameters(), split.parameters(), strict=True):
        gradient = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad.clone()
        if cp > 1:  # as FSDP does
            dist.all_reduce(gradient, group=dims(tp, cp).get_mesh("cp").get_group())
        found[key] = relative_error(gradient, theirs.grad)
    return found, bitwise


def matrix(layer, cases):
    set_up()
    return {name(case): errors(layer, case) for case in cases}


def round_trip_of_tokens():
    """Send token numbers through each exchange and back, and return the cases with a token out of place."""
    set_up()
    wrong = []
    cases = [case for case in CASES if case[0] != "state" and case[2] == "ragged" and case[4:] == (2, 8)]
    for exchange, order, _, (tp, cp, sp), R, V in cases:
        _, split = split_layer("gated_delta_net", exchange, tp, cp, sp, R, V)
        _, shards = layouts("ragged", tp, cp, order)
        numbers = (
            torch.arange(LENGTH, dtype=torch.float64)[None, :, None].expand(2, -1, 3)
            + 1000 * torch.arange(2.0)[:, None, None]
        )
        mine = local(numbers, tp, cp, sp, order)
        run = split.exchange.groups(GROUPS // tp)

        def project(x, groups):
            return x[:, :, None, :1] + torch.arange(groups.start, groups.stop)[:, None] * 10000

        y, low_rank, x_local = split.exchange.to_heads(mine, project, lambda x: x, GROUPS // tp, shards)
        expected = numbers[:, :, None, :1] + torch.arange(run.start, run.stop)[:, None] * 10000
        here = local(numbers, tp, cp, False, order)
        back = split.exchange.to_tokens(y, shards)
        whole = here[:, :, None, :1] + torch.arange(GROUPS // tp)[:, None] * 10000
        pairs = ((y, expected), (low_rank, numbers), (x_local, here), (back, whole))
        if not all(torch.equal(*pair) for pair in pairs):
            wrong.append((exchange, order, tp, cp, sp))
    return wrong


def wrong_orders():
    """Return the errors of this rank if tokens arrive in another order than declared."""
    from titan_gdn.parallel.sequence import ContextParallel, SequenceLayout

    set_up()
    said = []
    mesh = dims(1, 4).get_mesh("cp")
    for declared, real in (("contiguous", "headtail"), ("headtail", "contiguous")):
        for documents in ("one", "ragged"):
            try:
                SequenceLayout.from_positions(
                    local(positions_of(documents), 1, 4, False, real), ContextParallel(mesh, declared, mesh)
                )
                said.append("nothing")
            except ValueError as error:
                said.append(str(error))
    return said


def short_segments():
    """Return what this rank says of segments that are shorter than the convolution, or unequal."""
    from titan_gdn.bench.layer import LayerOptions, measure
    from titan_gdn.parallel.sequence import ContextParallel, SequenceLayout

    set_up()
    mesh = dims(1, 4).get_mesh("cp")
    _, split = split_layer("gated_delta_net", "state", 1, 4, False, 2, 12)
    options = LayerOptions(
        dim=WIDTH, key_heads=GROUPS, value_heads=GROUPS, key_dim=8, value_dim=8, tokens=16, cp=4, repeats=1
    )

    def forward(tokens, order):
        mine = torch.arange(tokens * 4)[None]
        if tokens % 2 == 0:
            mine = local(mine, 1, 4, False, order)
        sequence = SequenceLayout.from_positions(mine[:, :tokens], ContextParallel(mesh, order, mesh))
        split(torch.randn(1, tokens, WIDTH), *split.decay(), sequence=sequence)

    said = []
    for run in (
        lambda: forward(4, "headtail"),
        lambda: forward(2, "contiguous"),
        lambda: measure(options, "state", True),
        lambda: measure(options, "state", False),
        lambda: forward(3, "headtail"),
        lambda: forward(3, "contiguous"),
    ):
        try:
            run()
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    return said


def traffic(layer):
    """Return the options and the recorded bytes over CP and TP of each run."""
    from titan_gdn.bench.layer import LayerOptions, measure

    set_up()
    rows = []
    meshes = [mesh for mesh in MESHES if mesh[0] * mesh[1] == int(os.environ["WORLD_SIZE"])]
    without_tp = [mesh for mesh in meshes if mesh[0] == 1]
    orders = ("contiguous", "headtail")
    runs = [
        *itertools.product(("all_to_all", "all_gather"), ("headtail",), (LENGTH,), meshes, (False,)),
        *itertools.product(("state",), orders, (256,), meshes, (False,)),
        *itertools.product(("state",), orders, (4096,), without_tp, (False,)),
        *itertools.product(("all_gather", "state"), orders, (256,), without_tp, (True,)),
    ]
    for exchange, order, tokens, (tp, cp, sp), regather in runs:
        options = LayerOptions(
            layer=layer,
            dim=WIDTH,
            key_heads=GROUPS,
            value_heads=GROUPS * 2,
            key_dim=8,
            value_dim=12,
            gate_rank=RANK,
            tokens=tokens,
            batch=2,
            order=order,
            regather=regather,
            cp=cp,
            tp=tp,
            sequence_parallel=sp,
            repeats=1,
        )
        rows.append((options, measure(options, exchange, True)))
    return rows


def powers(layer):
    """Show that the cases would detect a wrong transition.

    Returns the smallest 2-norm of each segment's transition among the heads that decay slowly, by position
    and number of segments, and the largest error with each kind of wrong transition.
    """
    from titan_gdn.parallel.exchange import state

    set_up()
    link, norms, case = state._Link, {}, ("state", "headtail", "one", (1, 4, False), 2, 12)

    class Link(link):
        """Records the transitions, or changes them."""

        change = None

        @staticmethod
        def forward(ctx, summary, width, mesh, regather, gathered, goes_on, *rest):
            b, M = summary.tensor_split([width], -1)
            if Link.change is None:
                for p, slow in zip(rest[-1].tolist(), torch.linalg.matrix_norm(M[:, ::2], 2), strict=True):
                    norms[p, len(goes_on)] = slow.min().item()
            elif Link.change != "untransposed in the backward":
                M = {"transposed": M.mT, "zero": 0 * M, "identity": 0 * M + torch.eye(M.shape[-1])}[
                    Link.change
                ]
            received = link.forward(
                ctx, torch.cat([b, M], -1), width, mesh, regather, gathered, goes_on, *rest
            )
            if Link.change == "untransposed in the backward":
                ctx.to_save = (ctx.to_save[0].mT, *ctx.to_save[1:])
            return received

    state._Link = Link
    errors(layer, case)
    errors(layer, (case[0], "contiguous", *case[2:]))
    worst = {}
    for Link.change in ("transposed", "zero", "identity", "untransposed in the backward"):
        worst[Link.change] = max(errors(layer, case)[0].values())
    return norms, worst


def neighbors(layer):
    """Change one document, or make it NaN. Return where others change, or some of its own tokens do not."""
    set_up()
    wrong = []
    positions = positions_of("rows")
    documents = (positions == 0).flatten().cumsum(0).view_as(positions)
    for exchange, order in itertools.product(
        ("all_to_all", "all_gather", "state"), ("contiguous", "headtail")
    ):
        _, split = split_layer(layer, exchange, 1, 4, False, 2, 12)
        _, shards = layouts("rows", 1, 4, order)
        torch.manual_seed(2)
        x, d_out = torch.randn(2, *positions.shape, WIDTH)
        mine = local(documents, 1, 4, False, order)

        def results(x, d_out):
            x = local(x, 1, 4, False, order).requires_grad_()  # noqa: B023
            out = split(x, *split.decay(), sequence=shards)  # noqa: B023
            out.backward(local(d_out, 1, 4, False, order))  # noqa: B023
            return torch.cat([out.detach(), x.grad], -1)

        plain = results(x, d_out)
        for changed, by in itertools.product(documents[1].unique().tolist() + [9], (3.0, torch.nan)):
            here = (documents == changed)[..., None]
            others = results(torch.where(here, x + by, x), torch.where(here, d_out + by, d_out))
            differs = (others != plain).any(-1)
            if differs[mine != changed].any() or not differs[mine == changed].all():
                wrong.append((exchange, order, changed, by))
    return wrong


def regathered():
    """Return the error and the number of gathered tensors that autograd keeps, with and without regather."""
    set_up()
    found = {}
    for again in (False, True):
        kept = []

        def keep(x, kept=kept):
            kept.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            worst, _ = errors(
                "gated_delta_net", ("all_gather", "headtail", "ragged", (1, 4, False), 2, 8), again
            )
        found[again] = (max(worst.values()), sum(n == LENGTH * WIDTH for n in kept))
    return found
