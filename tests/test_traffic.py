"""The traffic and cost model against formulas written out here, and what "auto" makes of them."""

import logging
import math
import os
import re
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from torchtitan.distributed import activation_checkpoint
from torchtitan.distributed.activation_checkpoint import FullAC

from titan_gdn.config.load import ConfigError, load_config
from titan_gdn.models.hybrid.activation_checkpoint import MemoryBudgetAC, SelectiveAC
from titan_gdn.models.hybrid.block import linear_layers
from titan_gdn.models.hybrid.exchange_choice import recomputes, saved_exchanges
from titan_gdn.models.kimi_linear import KimiLinearArguments
from titan_gdn.models.qwen3_next import Qwen3NextArguments
from titan_gdn.ops import chunk_gated_delta_rule, chunk_kda
from titan_gdn.ops.rules import GATED_DELTA_RULE, KIMI_DELTA_RULE
from titan_gdn.parallel.cost import Choice, Cost, choose, cost
from titan_gdn.parallel.exchange.registry import EXCHANGES, impossible, traffic
from titan_gdn.parallel.machine import LINKS, Link, Machine
from titan_gdn.parallel.traffic import LayerShape, PassCost, ShardedBatch, Traffic

QWEN3_NEXT = LayerShape(
    width=2048,
    exchanged=16 * (2 * 128 + 2 * 128 + 2 * 2),
    output=4096,
    key_heads=16,
    value_heads=32,
    key_dim=128,
    value_dim=128,
    channels=8192,
    kernel_size=4,
    rule=GATED_DELTA_RULE,
)
KIMI_LINEAR = LayerShape(
    width=2304,
    exchanged=32 * (3 * 128 + 1),
    output=4096,
    low_rank=128,
    key_heads=32,
    value_heads=32,
    key_dim=128,
    value_dim=128,
    channels=12288,
    kernel_size=4,
    rule=KIMI_DELTA_RULE,
)
SHAPES = {"Qwen3-Next": QWEN3_NEXT, "Kimi Linear": KIMI_LINEAR}
MILLION = 1 << 20


def sharded(cp, tp=1, length=MILLION, order="headtail", **others) -> ShardedBatch:
    options = {"rows": 1, "sequence_parallel": True, "itemsize": 2} | others
    return ShardedBatch(length=length, cp=cp, tp=tp, order=order, **options)


def test_models_have_the_published_shapes():
    assert linear_layers(Qwen3NextArguments().config().layers)[0].shape() == QWEN3_NEXT
    assert linear_layers(KimiLinearArguments().config().layers)[0].shape() == KIMI_LINEAR
    assert QWEN3_NEXT.exchanged + QWEN3_NEXT.output == 12352


# --- Bytes ---


def over_cp(name: str, shape: LayerShape, where: ShardedBatch, way: str) -> int:
    """DESIGN section 4, in bytes."""
    T, B, cp, tp, item = where.length, where.rows, where.cp, where.tp, where.itemsize
    between = B * T / (cp * tp) if where.sequence_parallel else B * T / cp
    back = B * T / cp * shape.output / tp * (cp - 1) / cp
    if name == "all_to_all":
        crossing = B * T / cp * shape.exchanged / tp * (cp - 1) / cp
        return item * (crossing + between * shape.low_rank * (cp - 1) + back)
    if name == "all_gather":
        gathered = between * shape.width * (cp - 1)
        return item * (gathered + back + (gathered if way == "backward" and where.regather else 0))
    s, K, V = (2 if where.order == "headtail" else 1), shape.key_dim, shape.value_dim
    transitions = s * cp > 2 and (way == "forward" or where.regather)
    states = 4 * s * B * shape.value_heads / tp * K * (V + (K if transitions else 0)) * (cp - 1)
    return states + item * s * B * (shape.kernel_size - 1) * shape.channels / tp * (cp - 1)


def over_tp(name: str, shape: LayerShape, where: ShardedBatch, way: str) -> int:
    T, B, cp, tp, item, D = where.length, where.rows, where.cp, where.tp, where.itemsize, shape.width
    output = B * T / cp * D * (tp - 1) / tp
    if not where.sequence_parallel:
        return item * 2 * output
    gathered = (B * T if name == "all_gather" else B * T / cp) * D * (tp - 1) / tp
    low_rank = B * T * shape.low_rank * (tp - 1) / tp if name == "all_to_all" else 0
    again = gathered if name == "all_gather" and way == "backward" and where.regather else 0
    return item * (gathered + low_rank + output + again)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("regather", [False, True])
@pytest.mark.parametrize("order", ["contiguous", "headtail"])
def test_bytes_are_those_of_the_formulas(shape, name, regather, order):
    for cp, tp, sp, batch, item in [
        (2, 1, True, 1, 2),
        (2, 8, True, 1, 2),
        (2, 8, False, 1, 2),
        (4, 1, False, 3, 4),
        (8, 2, True, 2, 2),
        (16, 1, True, 1, 2),
    ]:
        where = ShardedBatch(batch, MILLION, cp, tp, sp, order, item, regather)
        found = traffic(name, shape, where)
        for way, sent in (("forward", found.forward), ("backward", found.backward)):
            assert sent.cp_bytes == over_cp(name, shape, where, way)
            assert sent.tp_bytes == over_tp(name, shape, where, way)


def test_some_bytes_are_these():
    """Worked out on paper: Qwen3-Next's 1M tokens at TP 8, CP 2, the published run."""
    sent = {name: traffic(name, QWEN3_NEXT, sharded(2, 8)) for name in EXCHANGES}
    assert sent["all_to_all"].forward.cp_bytes == 2 * 524288 * (1032 + 512) // 2 == 809_500_672
    assert sent["all_gather"].forward.cp_bytes == 2 * (65536 * 2048 + 524288 * 512 // 2) == 536_870_912
    assert sent["state"].forward.cp_bytes == 4 * 2 * 4 * 128 * 256 + 2 * 2 * 3 * 1024 == 1_060_864
    assert sent["state"].backward.cp_bytes == 4 * 2 * 4 * 128 * 128 + 2 * 2 * 3 * 1024 == 536_576


def test_published_widths_of_kda_give_the_published_ratio():
    """GLM-5.3-Flash, D 4096 and 64 heads of 128, at CP 2: all-to-all over all-gather, in, and in and out."""

    def ratios(exchanged, low_rank=0):
        shape = replace(
            KIMI_LINEAR,
            width=4096,
            exchanged=exchanged,
            output=64 * 128,
            low_rank=low_rank,
            key_heads=64,
            value_heads=64,
        )
        sent = [
            traffic(name, shape, sharded(2, length=1024)).forward.cp_bytes
            for name in ("all_to_all", "all_gather")
        ]
        out = 2 * 512 * 64 * 128 // 2
        return (sent[0] - out) / (sent[1] - out), sent[0] / sent[1]

    everything = 64 * (3 * 128 + 2 * 128) + 64  # q, k, the decay gate, v, the output gate, beta
    assert ratios(everything) == pytest.approx((5.0, 3.0), abs=0.01)
    ours = 64 * (2 * 128 + 128) + 64  # both gates stay, but for the low_rank of one
    assert ratios(ours, low_rank=128) == pytest.approx((3.04, 2.02), abs=0.01)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_bytes_over_cp_grow_with_the_sequence_but_for_states(shape):
    for name in EXCHANGES:
        short, long = (traffic(name, shape, sharded(4, length=length)) for length in (4096, MILLION))
        for way in ("forward", "backward"):
            ratio = getattr(long, way).cp_bytes / getattr(short, way).cp_bytes
            assert ratio == (1 if name == "state" else 256)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("sp", [False, True])
def test_without_cp_nothing_crosses_it_and_exchanges_are_alike(shape, sp):
    alone, *others = (traffic(name, shape, sharded(1, 8, sequence_parallel=sp)) for name in EXCHANGES)
    assert all(other == alone for other in others)
    assert alone.forward == alone.backward
    assert (alone.forward.cp_bytes, alone.forward.cp_messages, alone.forward.flops) == (0, 0, 0)
    assert alone.forward.tp_bytes == 2 * 2 * MILLION * shape.width * 7 // 8
    assert (alone.transient, alone.kept) == (0, 0)


@pytest.mark.parametrize("regather", [False, True])
def test_collectives_are_counted(regather):
    """Over CP and TP, forward and backward: at TP 1, with and without sequence parallelism."""
    again = int(regather)
    expected = {
        ("all_to_all", "Qwen3-Next"): ((2, 2), (2, 2)),
        ("all_to_all", "Kimi Linear"): ((3, 3), (3, 3)),  # its low_rank
        ("all_gather", "Qwen3-Next"): ((2, 2 + again), (2, 2 + again)),
        ("all_gather", "Kimi Linear"): ((2, 2 + again), (2, 2 + again)),
        ("state", "Qwen3-Next"): ((2, 2), (2, 2)),
        ("state", "Kimi Linear"): ((2, 2), (2, 2)),
    }
    for (name, layer), (cp, tp) in expected.items():
        for degree, sp, messages in ((1, True, (0, 0)), (8, False, (1, 1)), (8, True, tp)):
            where = sharded(4, degree, sequence_parallel=sp, regather=regather)
            found = traffic(name, SHAPES[layer], where)
            assert (found.forward.cp_messages, found.backward.cp_messages) == cp
            assert (found.forward.tp_messages, found.backward.tp_messages) == messages


def test_a_convolution_of_one_token_has_no_halo():
    sent = traffic("state", replace(QWEN3_NEXT, kernel_size=1), sharded(4))
    assert sent.forward.cp_messages == 1
    assert sent.forward.cp_bytes == 4 * 2 * 32 * 128 * 256 * 3


# --- FLOPs and memory ---


@pytest.mark.parametrize("layer", SHAPES)
@pytest.mark.parametrize(
    ("cp", "order", "inner"), [(2, "contiguous", 0), (2, "headtail", 2), (4, "contiguous", 2)]
)
def test_the_second_pass_of_states_costs_what_the_counter_counts(layer, cp, order, inner):
    shape, tp, T = SHAPES[layer], 2, 4096
    G, N, K, V = shape.key_heads // tp, shape.value_heads // tp, shape.key_dim, shape.value_dim
    rule, channels = (chunk_kda, (K,)) if shape.rule.per_channel else (chunk_gated_delta_rule, ())
    counted = []
    with FakeTensorMode():
        q, k = torch.empty(2, 1, T // cp, G, K, requires_grad=True)
        v = torch.empty(1, T // cp, N, V + (K if inner else 0), requires_grad=True)
        g, beta = torch.empty(1, T // cp, N, *channels), torch.empty(1, T // cp, N)
        with FlopCounterMode(display=False) as counter:
            _, state = rule(q, k, v, g, beta, output_final_state=True, backend="torch")
        counted.append(counter.get_total_flops())
        with FlopCounterMode(display=False) as counter:
            state.sum().backward()
        counted.append(counter.get_total_flops())
    found = traffic("state", shape, sharded(cp, tp, length=T, order=order))
    product = 2 * K * K * V * N
    own = 0 if not inner else (2 if order == "headtail" else 1)
    assert found.forward.flops == counted[0] + inner * product
    assert found.backward.flops == counted[1] + (inner + own) * product
    assert all(counted)


def test_head_exchanges_compute_a_low_rank_product_more_or_less_often():
    for name in ("all_to_all", "all_gather"):
        assert traffic(name, QWEN3_NEXT, sharded(4, 8)).backward.flops == 0
    product = 2 * 2304 * 128  # of a token
    own = MILLION // 4
    gathered = traffic("all_gather", KIMI_LINEAR, sharded(4, 8))
    assert gathered.forward.flops == product * (MILLION - own) == gathered.backward.flops // 2
    exchanged = traffic("all_to_all", KIMI_LINEAR, sharded(4, 8))
    assert exchanged.forward.flops == product * (own // 8 - own) == exchanged.backward.flops // 2
    exchanged = traffic("all_to_all", KIMI_LINEAR, sharded(4, 8, sequence_parallel=False))
    assert exchanged.forward.flops == exchanged.backward.flops == 0


def test_gathering_again_projects_again():
    kept, again = (traffic("all_gather", QWEN3_NEXT, sharded(2, 4, regather=x)) for x in (False, True))
    assert again.backward.flops - kept.backward.flops == 2 * (MILLION // 2) * 2048 * QWEN3_NEXT.exchanged // 4
    assert again.forward == kept.forward


def test_memory_is_that_of_the_tensors():
    """Qwen3-Next's million tokens at CP 4, and TP 2, in bfloat16; states and gates in float32."""
    sent = {name: traffic(name, QWEN3_NEXT, sharded(4, 2)) for name in EXCHANGES}
    assert (sent["all_gather"].transient, sent["all_gather"].kept) == (MILLION * 2048 * 2,) * 2
    assert (sent["all_to_all"].transient, sent["all_to_all"].kept) == (MILLION // 4 * 8256 // 2 * 2, 0)
    tokens = MILLION // 4
    copies = tokens * (2 * 8 * 128 + 2 * 16 * 256 + 4 * 16 + 4 * 16)  # k, [v | 0], g, beta
    assert sent["state"].transient == copies + tokens * 2 * 16 * 256 + 8 * 16 * 128 * 256 * 4
    received, transitions = 2 * 16 * 128 * 128 * 4, 6 * 16 * 128 * 128 * 4  # all but the outer segments'
    rows = tokens * 2 * 16 * 64  # of FLA's kernels, of each chunk's inverse
    assert sent["state"].kept == copies + received + transitions + rows
    again = {name: traffic(name, QWEN3_NEXT, sharded(4, 2, regather=True)) for name in EXCHANGES}
    assert again["all_gather"].kept == 0 and again["all_to_all"] == sent["all_to_all"]
    assert again["state"].kept == copies + received + transitions // 3 + rows  # its own two of six

    by_torch = traffic("state", replace(QWEN3_NEXT, fla=False), sharded(4, 2))
    assert by_torch.kept == copies + received + transitions

    # What selective checkpointing keeps: of collectives, and of the second pass.
    assert sent["all_gather"].collected == tokens * 2048 * 2 and sent["all_gather"].computed == 0
    assert (
        sent["all_to_all"].collected == tokens * (8256 + 4096) // 2 * 2 and sent["all_to_all"].computed == 0
    )
    halo = 8 * 3 * 8192 // 2 * 2
    assert sent["state"].collected == 8 * 16 * 128 * 256 * 4 + halo
    assert sent["state"].computed == tokens * 2 * 16 * 256 + rows


def test_low_rank_products_of_all_tokens_are_kept_by_exchanges_of_heads():
    more = (MILLION - MILLION // 4) * 128 * 2
    assert traffic("all_to_all", KIMI_LINEAR, sharded(4)).kept == more
    assert traffic("all_gather", KIMI_LINEAR, sharded(4, regather=True)).kept == more
    results = MILLION // 4 * (32 * (3 * 128 + 1) + 4096) * 2 + MILLION * 128 * 2
    assert traffic("all_to_all", KIMI_LINEAR, sharded(4)).collected == results
    # The second pass's outputs, and of FLA's kernels two rows of 64.
    assert traffic("state", KIMI_LINEAR, sharded(4)).computed == MILLION // 4 * 32 * (256 + 2 * 64) * 2


# --- Time ---


def test_an_axis_has_the_link_that_its_ranks_need():
    machine = Machine(inside="nvlink", across="efa")
    assert machine.link(1, 8) == LINKS["nvlink"] and machine.link(1, 16) == LINKS["efa"]
    assert machine.link(8, 2) == LINKS["efa"]  # TP 8 puts CP across nodes
    assert machine.link(4, 2) == LINKS["nvlink"]
    assert replace(machine, gpus_per_node=72).link(8, 2) == LINKS["nvlink"]
    given = Machine(inside_bandwidth=100, inside_latency=3, across_bandwidth=7.5, across_latency=40)
    assert given.link(1, 8) == Link(100e9, pytest.approx(3e-6))
    assert given.link(1, 9) == Link(7.5e9, pytest.approx(40e-6))


def test_slower_names_are_slower_links():
    links = [LINKS[name] for name in ("nvlink", "infiniband", "efa", "tcp")]
    assert links == sorted(links, key=lambda link: -link.bandwidth) == sorted(links, key=lambda x: x.latency)


@pytest.mark.parametrize("name", ["gpus_per_node", "across_bandwidth", "inside_latency", "tflops", "memory"])
@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan])
def test_a_machine_has_positive_numbers(name, value):
    with pytest.raises(ValueError, match=f"{name} = {value}: expected a positive number"):
        Machine(**{name: value})


def test_time_is_bytes_messages_and_flops_of_every_pass():
    sent = Traffic(
        forward=PassCost(cp_bytes=10**9, tp_bytes=2 * 10**9, cp_messages=2, tp_messages=1, flops=10**12),
        backward=PassCost(cp_bytes=3 * 10**9, tp_bytes=0, cp_messages=5, tp_messages=0, flops=4 * 10**12),
        transient=0,
        kept=0,
    )
    machine = Machine(
        inside_bandwidth=4, inside_latency=1e3, across_bandwidth=0.5, across_latency=1e4, tflops=8
    )
    once = cost(sent, sharded(2, 8), machine, recompute=False)
    assert once.forward == pytest.approx(2 + 0.02 + 0.5 + 0.001 + 0.125)
    assert (once.recompute, once.backward) == (0, pytest.approx(6 + 0.05 + 0.5))
    assert (once.over_cp, once.over_tp, once.compute) == pytest.approx((8.07, 0.501, 0.625))
    assert once.total == pytest.approx(once.over_cp + once.over_tp + once.compute)
    twice = cost(sent, sharded(2, 8), machine, recompute=True)
    assert twice.recompute == twice.forward == once.forward and twice.backward == once.backward
    assert twice.total == pytest.approx(once.total + once.forward)
    assert twice.over_cp + twice.over_tp + twice.compute == pytest.approx(twice.total)
    assert twice.done == PassCost(5 * 10**9, 4 * 10**9, 9, 2, 6 * 10**12)
    kept = cost(sent, sharded(2, 8), machine, recompute=True, saved=True)
    assert kept.recompute == pytest.approx(0.5 + 0.001)
    assert kept.done == PassCost(4 * 10**9, 4 * 10**9, 7, 2, 5 * 10**12)


# --- Choosing ---

FLOAT = r"(-?[\d.]+)"
TOLD = re.compile(
    rf"(\w+) {FLOAT} ms = over CP {FLOAT} \({FLOAT} MB, (\d+) messages\) \+ "
    rf"over TP {FLOAT} \({FLOAT} MB, (\d+) messages\) \+ compute {FLOAT}"
)
GIVEN = re.compile(
    rf"CP {FLOAT} GB/s and {FLOAT} us per message, TP {FLOAT} GB/s and {FLOAT} us per message, "
    rf"{FLOAT} TFLOP/s"
)


def told(choice: Choice) -> dict[str, dict[str, float]]:
    """The numbers of a reason, which must follow from each other and be those of the costs."""
    assert "\n" not in choice.reason
    cp_speed, cp_latency, tp_speed, tp_latency, tflops = map(float, GIVEN.search(choice.reason).groups())
    found = {}
    for name, *numbers in TOLD.findall(choice.reason):
        keys = ("total", "cp", "cp MB", "cp messages", "tp", "tp MB", "tp messages", "compute")
        row = found[name] = dict(zip(keys, map(float, numbers), strict=True))
        near = lambda value: pytest.approx(value, rel=1e-3, abs=2e-3)  # noqa: E731
        assert row["total"] == near(row["cp"] + row["tp"] + row["compute"])
        assert row["cp"] == near(row["cp MB"] / cp_speed + row["cp messages"] * cp_latency / 1e3)
        assert row["tp"] == near(row["tp MB"] / tp_speed + row["tp messages"] * tp_latency / 1e3)
        cost: Cost = choice.costs[name]
        assert row["total"] == near(cost.total * 1e3)
        assert row["compute"] == near(cost.done.flops / tflops / 1e9)
    assert list(found) == sorted(choice.costs, key=lambda name: choice.costs[name].total)
    assert not found.keys() & choice.impossible.keys()
    assert found.keys() | choice.impossible.keys() == set(EXCHANGES)
    assert all(f"{reason}" in choice.reason for reason in choice.impossible.values())
    return found


def test_auto_takes_all_gather_for_two_ranks_on_nvlink():
    """Its bytes are fewer than all-to-all's, and states compute too much for what they save."""
    choice = choose(QWEN3_NEXT, sharded(2), Machine(), recompute=True)
    row = told(choice)
    assert choice.name == "all_gather" == min(row, key=lambda name: row[name]["total"])
    by_hand = 3 * 2 * (MILLION // 2 * 2048 + MILLION // 4 * 4096) / 1e6
    assert row["all_gather"]["cp MB"] == pytest.approx(by_hand, abs=1e-3)
    assert row["all_gather"]["cp MB"] < row["all_to_all"]["cp MB"]
    assert row["state"]["cp"] < 1 and row["state"]["compute"] > row["all_to_all"]["total"]


def test_auto_takes_all_to_all_for_eight_ranks_on_nvlink():
    choice = choose(QWEN3_NEXT, sharded(8), Machine(), recompute=True)
    row = told(choice)
    assert choice.name == "all_to_all" == min(row, key=lambda name: row[name]["total"])
    assert row["all_to_all"]["cp MB"] < row["all_gather"]["cp MB"]
    assert row["state"]["compute"] > row["all_to_all"]["total"]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("link", ["infiniband", "efa", "tcp"])
def test_auto_takes_states_between_nodes(shape, link):
    """The published run, TP 8 and CP 2: what states save over CP is more than what they compute."""
    choice = choose(shape, sharded(2, 8), Machine(across=link), recompute=True)
    row = told(choice)
    assert choice.name == "state" == min(row, key=lambda name: row[name]["total"])
    for other in ("all_to_all", "all_gather"):
        assert row[other]["cp"] - row["state"]["cp"] > row["state"]["compute"]
        assert row[other]["cp MB"] > 500 * row["state"]["cp MB"]


def test_states_lose_a_short_sequence_to_fewer_bytes():
    """What states send does not shrink with the sequence, what the others send does."""
    long, short = (
        choose(QWEN3_NEXT, sharded(16, length=x), Machine(), recompute=True) for x in (MILLION, 2048)
    )
    assert (long.name, short.name) == ("state", "all_to_all")
    assert told(short)["state"]["cp MB"] == told(long)["state"]["cp MB"]
    assert told(short)["state"]["cp MB"] > 10 * told(short)["all_to_all"]["cp MB"]


def test_latency_decides_where_there_are_few_bytes():
    """Kimi Linear's all-to-all sends fewer bytes than its all-gather at CP 8, but in a message more."""
    where = sharded(8, length=1024)
    quick, slow = (
        choose(KIMI_LINEAR, where, Machine(inside_latency=latency, tflops=1e5), recompute=True)
        for latency in (1e-3, 1e4)
    )
    assert (quick.name, slow.name) == ("all_to_all", "all_gather")
    row = told(slow)
    assert row["all_to_all"]["cp MB"] < row["all_gather"]["cp MB"]
    assert row["all_to_all"]["cp messages"] == 9 > 6 == row["all_gather"]["cp messages"]


def test_bytes_over_tp_decide_where_tp_is_slow():
    machine = Machine(inside="tcp", across="tcp", tflops=0.01)
    row = told(choice := choose(QWEN3_NEXT, sharded(2, 8), machine, recompute=True))
    assert choice.name == "all_to_all"
    assert row["all_to_all"]["cp"] > row["all_gather"]["cp"]
    assert (
        row["all_gather"]["tp"] - row["all_to_all"]["tp"] > row["all_to_all"]["cp"] - row["all_gather"]["cp"]
    )


@pytest.mark.parametrize(("cp", "tp"), [(32, 1), (3, 1), (4, 8), (64, 4)])
def test_where_heads_do_not_divide_auto_takes_states(cp, tp):
    choice = choose(QWEN3_NEXT, sharded(cp, tp, length=2 * cp * tp * 128), Machine(), recompute=False)
    assert choice.name == "state" and set(choice.impossible) == {"all_to_all", "all_gather"}
    told(choice)
    possible = ", ".join(str(x) for x in (1, 2, 4, 8, 16) if 16 % (tp * x) == 0)
    for reason in choice.impossible.values():
        assert f"16 key heads are not divisible by parallelism.tensor_parallel_degree = {tp} times" in reason
        assert f"parallelism.context_parallel_degree = {cp}; with this tp, cp may be {possible}, or" in reason
        assert 'exchange = "state", which only needs heads that are divisible by tp' in reason


def test_segments_shorter_than_the_convolution_looks_back_cannot_hand_on():
    assert impossible("state", QWEN3_NEXT, sharded(4, length=24)) is None
    reason = impossible("state", QWEN3_NEXT, sharded(4, length=16))
    assert "segments of 2 tokens (training.seq_len = 16 over 8) are shorter than the 3 tokens" in reason
    assert impossible("state", QWEN3_NEXT, sharded(4, length=16, order="contiguous")) is None
    assert impossible("state", QWEN3_NEXT, sharded(1, length=2)) is None
    with pytest.raises(
        ValueError, match="no exchange is possible: all_to_all and all_gather, because the 16 key"
    ):
        choose(QWEN3_NEXT, sharded(32, length=64), Machine(), recompute=True)


def test_memory_rules_out_what_would_be_cheapest():
    """All-gather's hidden states of a million tokens, kept by each of 36 layers: 4 GiB a layer."""
    few, many = (
        choose(QWEN3_NEXT, sharded(2), Machine(), recompute=False, layers=layers) for layers in (1, 36)
    )
    assert few.name == "all_gather" and many.name == "all_to_all"
    assert set(many.impossible) == {"all_gather", "state"}
    assert (
        "its buffers take 148 GiB, 144 GiB of them from forward to backward, and the device has 80 GiB"
        in (many.impossible["all_gather"])
    )
    told(many)
    assert choose(QWEN3_NEXT, sharded(2), Machine(), recompute=True, layers=36).name == "all_gather"
    assert choose(QWEN3_NEXT, sharded(2), Machine(memory=200), False, layers=36).name == "all_gather"
    with pytest.raises(ValueError, match="no exchange is possible: .*linear_attention.machine.memory"):
        choose(QWEN3_NEXT, sharded(2), Machine(memory=1), recompute=True)


def test_of_costs_within_a_hundredth_the_smaller_buffers_win():
    """DESIGN section 4: at CP 4 Qwen3-Next's all-gather saves under 1%."""
    choice = choose(QWEN3_NEXT, sharded(4), Machine(), recompute=True)
    row = told(choice)
    assert choice.name == "all_to_all" and 0.99 < row["all_gather"]["total"] / row["all_to_all"]["total"] < 1
    assert "all_to_all is within 1% of all_gather and its buffers take 4.031 GiB, not 8 GiB" in choice.reason


def test_auto_takes_the_cheapest_everywhere():
    seen = set()
    for shape in SHAPES.values():
        for cp, tp, link, length in [
            (cp, tp, link, length)
            for cp in (2, 4, 8, 16)
            for tp in (1, 2, 8)
            for link in LINKS
            for length in (8192, MILLION)
        ]:
            where, machine = sharded(cp, tp, length=length), Machine(inside=link, across=link)
            choice = choose(shape, where, machine, recompute=True)
            totals = {
                name: cost(traffic(name, shape, where), where, machine, True).total
                for name in EXCHANGES
                if name == "state" or shape.key_heads % (cp * tp) == 0
            }
            assert set(choice.costs) == set(totals)
            assert totals[choice.name] <= 1.01 * min(totals.values())
            seen.add(choice.name)
    assert seen == set(EXCHANGES)


# --- The configuration ---

TOML = os.path.join(os.path.dirname(__file__), "..", "train_configs", "qwen3_next_debug.toml")
CP, TP = "--parallelism.context_parallel_degree", "--parallelism.tensor_parallel_degree"
MACHINE = "--linear_attention.machine"


def load(*argv, world_size=2):
    return load_config(["--job.config_file", TOML, *argv], world_size)


def refused(*argv, world_size=2):
    with pytest.raises(ConfigError) as error:
        load(*argv, world_size=world_size)
    return str(error.value)


def chosen(config, caplog) -> tuple[str, list[str]]:
    """The exchange after the model was configured, and the lines that say so."""
    caplog.clear()
    with caplog.at_level(logging.INFO):
        config.model_spec.model.update_from_config(config=config)
    (name,) = {layer.run.exchange for layer in linear_layers(config.model_spec.model.layers)}
    return name, [record.getMessage() for record in caplog.records if "Exchange of" in record.getMessage()]


@pytest.fixture(autouse=True)
def heard():
    """TorchTitan's logger reaches pytest's handler."""
    from torchtitan.tools.logging import logger

    before, logger.propagate = logger.propagate, True
    yield
    logger.propagate = before


def test_the_machine_is_configured(tmp_path):
    run = load(f"{MACHINE}.across", "tcp", f"{MACHINE}.inside_bandwidth", "300").model_spec.model
    machine = linear_layers(run.layers)[0].run.machine
    assert machine == Machine(across="tcp", inside_bandwidth=300)
    file = tmp_path / "run.toml"
    file.write_text(open(TOML).read() + '\n[linear_attention.machine]\ninside = "efa"\nmemory = 141\n')
    machine = linear_layers(load_config(["--job.config_file", str(file)], 1).model_spec.model.layers)[
        0
    ].run.machine
    assert machine == Machine(inside="efa", memory=141)
    said = refused(f"{MACHINE}.gpus_per_node", "0")
    assert "linear_attention.machine.gpus_per_node = 0: expected a positive number" in said
    assert '"nvlink" or "infiniband" or "efa" or "tcp"' in refused(f"{MACHINE}.inside", "nvlnk")


def test_a_model_is_told_once_what_auto_took_and_why(caplog):
    fast = (f"{MACHINE}.inside_bandwidth", "1", f"{MACHINE}.tflops", "0.001")
    name, lines = chosen(load(CP, "2", *fast), caplog)
    assert name == "all_gather" and len(lines) == 1
    assert "Exchange of Gated DeltaNet at CP 2, TP 1: all_gather (" in lines[0]
    assert "all_to_all" in lines[0] and "state" in lines[0]
    config = load(CP, "2", "--training.seq_len", "8192", f"{MACHINE}.inside", "tcp")
    assert chosen(config, caplog)[0] == "state"


def test_without_cp_and_with_a_named_exchange_nothing_is_chosen(caplog):
    assert chosen(load(world_size=1), caplog) == ("auto", [])
    for name in EXCHANGES:
        assert chosen(load(CP, "2", "--linear_attention.exchange", name), caplog) == (name, [])


def test_heads_that_do_not_divide_are_refused_of_head_exchanges_and_left_to_states(caplog):
    mesh = (CP, "2", TP, "4")
    for name in ("all_to_all", "all_gather"):
        said = refused(*mesh, "--linear_attention.exchange", name, world_size=8)
        assert (
            f'linear_attention.exchange = "{name}" of Gated DeltaNet: the 4 key heads are not divisible'
            in said
        )
        assert "tensor_parallel_degree = 4 times parallelism.context_parallel_degree = 2" in said
        assert 'or any number with linear_attention.exchange = "state"' in said
    assert chosen(load(*mesh, "--linear_attention.exchange", "state", world_size=8), caplog)[0] == "state"
    name, (line,) = chosen(load(*mesh, world_size=8), caplog)
    assert name == "state" and "impossible: all_to_all, all_gather)" in line


def test_segments_that_are_too_short_are_refused():
    kernel = ("--model.overrides.linear_conv_kernel", "8")
    short = (*kernel, CP, "4", "--training.seq_len", "32", "--linear_attention.exchange")
    assert "segments of 4 tokens" in refused(*short, "state", world_size=4)
    load(*short, "all_to_all", world_size=4)
    load(*short, "auto", world_size=4)
    said = refused(*kernel, CP, "8", "--training.seq_len", "64", world_size=8)
    assert "no exchange is possible" in said and "segments of 4 tokens" in said and "4 key heads" in said


def test_the_model_reads_its_numbers_off_the_run(monkeypatch):
    """Dtype, batch, order, checkpointing, the number of layers and the machine."""
    from titan_gdn.models.hybrid import exchange_choice as module

    given = []
    monkeypatch.setattr(module, "choose", lambda *args: given.append(args) or choose(*args))
    argv = (CP, "2", "--linear_attention.regather", "--training.local_batch_size", "3")
    load(*argv, "--training.mixed_precision_param", "bfloat16", "--activation_checkpoint.mode", "full")
    load(*argv, "--parallelism.context_parallel_load_balancer", "none", "--training.seq_len", "1024")
    load(*argv, f"{MACHINE}.memory", "3", "--activation_checkpoint.mode", "selective")
    assert [machine for _, _, machine, *_ in given[:: len(given) - 1]] == [Machine(), Machine(memory=3)]
    assert given[-1][3:] == (True, 3, ("all_to_all", "state"))
    (_, first, _, *options), (_, second, _, *others) = given[0], given[-2]
    assert first == ShardedBatch(3, 512, 2, 1, True, "headtail", 2, regather=True) and options == [
        True,
        3,
        (),
    ]
    assert second == ShardedBatch(3, 1024, 2, 1, True, "contiguous", 4, regather=True) and others == [
        False,
        3,
        (),
    ]
    # In a pipeline, of a micro-batch: two of the first stage's layers, each with two of them on their way.
    pipeline = "--parallelism.pipeline_parallel"
    load(CP, "2", f"{pipeline}_degree", "2", f"{pipeline}_schedule", "1F1B", world_size=4)
    (_, pipelined, _, *options) = given[-1]
    assert pipelined.rows == 1 and options == [False, 4, ()]


@pytest.mark.parametrize(
    ("policy", "repeats", "saved"),
    [
        (None, False, ()),
        (FullAC.Config(), True, ()),
        (SelectiveAC.Config(), True, ("all_to_all", "state")),
        (SelectiveAC.Config(save_exchange=False), True, ()),
        (activation_checkpoint.SelectiveAC.Config(), True, ()),  # its list has none of the exchanges'
        (MemoryBudgetAC.Config(), False, ()),
    ],
)
def test_checkpointing_repeats_the_exchanges_whose_results_it_does_not_save(policy, repeats, saved):
    config = replace(load(CP, "2", "--compile.enable"), activation_checkpoint=policy)
    assert recomputes(config) is repeats and saved_exchanges(config) == saved


def test_an_exchange_whose_results_are_saved_is_not_charged_for_them_twice():
    full = choose(QWEN3_NEXT, sharded(2), Machine(), recompute=True)
    selective = choose(QWEN3_NEXT, sharded(2), Machine(), recompute=True, saved=("all_to_all", "state"))
    for name in EXCHANGES:
        again = selective.costs[name].recompute
        assert again == (full.costs[name].recompute if name == "all_gather" else 0)
    assert "forward, recompute and backward" in selective.reason
