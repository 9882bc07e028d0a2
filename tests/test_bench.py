"""The benchmark of the rule, and what it says of memory."""

import json
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from titan_gdn.bench.options import RuleOptions
from titan_gdn.bench.rule import _contenders, _inputs, peak_memory, run
from titan_gdn.ops.flops import chunked_rule_flops
from titan_gdn.ops.gated_delta_rule.torch_backend import rule_backward, rule_forward


def peaks(name, lengths, **options):
    options = RuleOptions(**options)
    return [peak_memory(_contenders(options)[name], _inputs(options, tokens)) for tokens in lengths]


def test_memory_of_the_rule_is_linear_in_the_sequence_and_a_third_of_transformers():
    shape = {"key_heads": 4, "value_heads": 8, "key_dim": 32, "value_dim": 32}
    short, middle, long = peaks("titan_gdn, torch", (4096, 8192, 16384), backends=("torch",), **shape)
    assert long - middle == pytest.approx(2 * (middle - short), rel=0.02)
    (theirs,) = peaks("transformers", (8192,), peer="transformers", **shape)
    assert middle <= theirs / 3


def test_flops_are_those_of_the_products_that_run():
    q, k, v, g, beta = (x.detach() for x in _inputs(RuleOptions(key_heads=2, key_dim=32, value_dim=16), 256))
    # torch has no formula for products added in place, nor for triangular solves.
    formulas = {torch.ops.aten.baddbmm_: lambda c, a, b, **_: 2 * math.prod(a) * b[-1]}
    solves = 256 * 8 * 64**2
    with FlopCounterMode(display=False, custom_mapping=formulas) as forward:
        out, _, received = rule_forward._init_fn(q, k, v, g, beta, 1.0, None, None, True)
    with FlopCounterMode(display=False, custom_mapping=formulas) as backward:
        rule_backward._init_fn(q, k, v, g, beta, 1.0, None, None, True, received, torch.ones_like(out), None)
    counted = [count.get_total_flops() + solves for count in (forward, backward)]
    assert counted == list(chunked_rule_flops(256, 2, 8, 32, 16))
    with FlopCounterMode(display=False) as registered:
        rule_forward(q, k, v, g, beta, 1.0, None, None, True)
    assert registered.get_total_flops() == counted[0]


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
