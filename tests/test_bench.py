"""The benchmark of the rule, and what it says of memory."""

import importlib
import json
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.compare import RULES, rule_inputs
from tests.draw import in_sets
from titan_gdn.bench import layer
from titan_gdn.bench.options import LayerOptions, RuleOptions
from titan_gdn.bench.rule import _contenders, _inputs, peak_memory, run
from titan_gdn.ops.flops import chunked_rule_flops


def peaks(name, lengths, **options):
    options = RuleOptions(**options)
    return [peak_memory(_contenders(options)[name], _inputs(options, tokens)) for tokens in lengths]


@pytest.mark.parametrize("rule", in_sets(RULES, fast=["chunk_kda"]))
def test_memory_of_the_rule_is_linear_in_the_sequence_and_a_third_of_transformers(rule):
    lengths = (4096, 8192, 16384) if rule == "chunk_gated_delta_rule" else (1024, 2048, 4096)
    shape = {"rule": rule, "key_heads": 8, "value_heads": 8, "key_dim": 32, "value_dim": 32}
    short, middle, long = peaks("titan_gdn, torch", lengths, backends=("torch",), **shape)
    assert long - middle == pytest.approx(2 * (middle - short), rel=0.02)
    (theirs,) = peaks("transformers", (lengths[1],), peer="transformers", **shape)
    assert middle <= theirs / 3


@pytest.mark.parametrize("rule", RULES)
def test_flops_are_those_of_the_products_that_run(rule):
    inputs = rule_inputs(256, H=2, R=4, K=32, V=16, rule=rule)
    backend = importlib.import_module(f"titan_gdn.ops.{rule.removeprefix('chunk_')}.torch_backend")
    # torch has no formula for products added in place, nor for triangular solves.
    formulas = {torch.ops.aten.baddbmm_: lambda c, a, b, **_: 2 * math.prod(a) * b[-1]}
    solves = 256 * 8 * 64**2
    args = (*inputs, 1.0, None, None, True)
    with FlopCounterMode(display=False, custom_mapping=formulas) as forward:
        out, _, received = backend.rule_forward._init_fn(*args)
    gradients = (received, torch.ones_like(out), None)
    with FlopCounterMode(display=False, custom_mapping=formulas) as backward:
        backend.rule_backward._init_fn(*args, *gradients)
    counted = [count.get_total_flops() + solves for count in (forward, backward)]
    assert counted == list(chunked_rule_flops(256, 2, 8, 32, 16, per_channel=rule == "chunk_kda"))
    with FlopCounterMode(display=False) as registered:
        backend.rule_forward(*args)
        backend.rule_backward(*args, *gradients)
    assert registered.get_total_flops() == sum(counted)


def test_bench_prints_writes_and_draws(tmp_path, capsys):
    options = RuleOptions(
        tokens=(64, 128), key_heads=1, value_heads=2, key_dim=16, value_dim=16, repeats=2,
        peer="transformers", json=str(tmp_path / "rule.json"), plot=str(tmp_path / "rule.png"),
    )  # fmt: skip
    rows = run(options)
    written = json.loads((tmp_path / "rule.json").read_text())
    assert written["figures"] == rows and len(rows) == 4
    assert written["options"]["tokens"] == [64, 128]
    assert (tmp_path / "rule.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "transformers" in printed and "GFLOP/s" in printed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (RuleOptions(tokens=()), "--tokens"),
        (RuleOptions(tokens=(64, 0)), "--tokens"),
        (RuleOptions(repeats=0), "--repeats 0"),
        (RuleOptions(threads=-1), "--threads -1"),
        (RuleOptions(key_heads=2, value_heads=3), "--value-heads 3 is not divisible by --key-heads 2"),
        (RuleOptions(json="nowhere/x.json"), "--json nowhere/x.json"),
        (RuleOptions(plot="x.foo"), "--plot x.foo"),
        (
            RuleOptions(rule="chunk_kda", peer="transformers", value_heads=16),
            "does not support several value heads",
        ),
        (LayerOptions(cp=0), "--cp 0"),
        (
            LayerOptions(exchanges=("state", "stat")),
            "--exchanges stat: expected some of all_to_all, all_gather",
        ),
        (LayerOptions(tokens=95), "--tokens 95"),
        (LayerOptions(json="/"), "--json /"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(options, words):
    with pytest.raises(ValueError, match=words):
        options.check()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            LayerOptions(cp=16),
            "--exchanges all_to_all: the 8 key heads are not divisible by .* cp may be 1, 2",
        ),
        (LayerOptions(tp=16, exchanges=("state",)), "--exchanges state: .*tensor_parallel_degree = 16"),
        (LayerOptions(cp=4, tokens=16, exchanges=("state",)), "--exchanges state: segments of 2 tokens"),
    ],
)
def test_an_exchange_that_cannot_run_the_layer_is_refused_before_a_rank_starts(options, words):
    options.check()
    with pytest.raises(ValueError, match=words):
        layer.run(options)
