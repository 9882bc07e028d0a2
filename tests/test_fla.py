"""FLA's kernels behind our operators, without a GPU: Triton's interpreter runs them in child processes.

`TRITON_INTERPRET` must be set before triton is imported, and no other test may see it.
"""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch

from tests import fla_cases, fla_interpreter
from tests.compare import RULES, rule_inputs
from tests.draw import in_sets, selected
from titan_gdn import ops
from titan_gdn.ops import backends, delta_rule

TOLERANCE = (
    dict.fromkeys(fla_cases.EXACT, 0.0)
    | dict.fromkeys(fla_cases.FLOAT32, 8e-6)
    | dict.fromkeys(fla_cases.STRONG_DECAY, 3e-5)
    | dict.fromkeys(fla_cases.BFLOAT16, 2e-2)
)

# Importing FLA takes most of a child's time. These take little more, and every kernel runs.
FAST = {
    *fla_cases.EXACT,
    *fla_cases.BFLOAT16.keys() - {"gdn in bfloat16"},
    "gdn R=2 in ragged documents",
    "gdn of empty documents",
    "kda R=1 in ragged documents",
    "kda of empty documents",
    "kda without passes opcheck",
    "kda at the bound of safe_gate",
    "convolution in ragged documents",
    "convolution of rows",
    "one gradient alone",
    "selective checkpointing names the rule",
}
CHILDREN = 2
"""Processes that share the cases."""


@pytest.fixture(scope="module")
def records(request, tmp_path_factory):
    """For each selected case its errors, or the traceback that it ended in."""
    names = selected(request, "test_fla", "case")
    if reason := fla_interpreter.why_not():
        pytest.skip(reason)
    paths = [tmp_path_factory.mktemp("fla") / "records.json" for _ in range(CHILDREN)]
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.fla_cases", path, *names[child::CHILDREN]],
            cwd=os.path.dirname(os.path.dirname(__file__)),
            env=os.environ | {"TRITON_INTERPRET": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for child, path in enumerate(paths)
    ]
    try:
        for child in children:
            _, said = child.communicate(timeout=500)
            assert child.returncode == 0, said
    finally:
        for child in children:
            child.kill()
    return {name: record for path in paths for name, record in json.loads(path.read_text()).items()}


@pytest.mark.parametrize("case", in_sets(TOLERANCE, fast=FAST))
def test_fla(records, case):
    errors, traceback = records[case]["errors"], records[case]["traceback"]
    assert traceback is None, traceback
    assert all(error <= TOLERANCE[case] for error in errors.values()), errors


RUNS = {"gpu": True, "hopper": False, "fla": "0.6.0", "triton": "3.8.0", "tilelang": False}


@pytest.mark.parametrize(
    "machine",
    [
        {},
        {"hopper": True},
        {"hopper": True, "triton": "3.3.1"},
        {"hopper": True, "triton": "3.7.1"},
        {"hopper": True, "triton": "3.6.0", "tilelang": True},
        {"triton": "3.6.0"},
        {"fla": "0.10.0"},
    ],
)
def test_preflight_lets_fla_run(machine):
    assert backends.reason_against_fla(**RUNS | machine) is None


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        ({"hopper": True, "triton": "3.4.0"}, "Triton 3.4.0 computes wrong gradients"),
        ({"hopper": True, "triton": "3.7.0"}, "Triton 3.7.0 computes wrong gradients"),
        ({"fla": None}, "FLA is not installed"),
        ({"fla": "0.5.1"}, "FLA 0.5.1 is too old"),
        ({"triton": None}, "needs triton"),
        ({"gpu": False}, "needs a GPU"),
    ],
)
def test_preflight_says_why_fla_cannot_run(machine, words):
    assert words in backends.reason_against_fla(**RUNS | machine)


def test_auto_does_without_fla_and_says_why_once(monkeypatch):
    monkeypatch.setattr(backends, "why_not_fla", lambda device: "It is a test.")
    backends._warn_once.cache_clear()
    with pytest.warns(
        UserWarning, match="It is a test. The PyTorch backend, which is slower, runs instead"
    ) as told:
        assert [backends.resolve("auto", torch.device("cuda")) for _ in range(2)] == ["torch", "torch"]
    assert len(told) == 1
    with pytest.raises(ValueError, match="backend = 'fla': It is a test."):
        backends.resolve("fla", torch.device("cuda"))


def test_auto_takes_fla_on_a_gpu_and_pytorch_elsewhere(monkeypatch):
    monkeypatch.setattr(backends, "why_not_fla", lambda device: None)
    chosen = [backends.resolve("auto", torch.device(kind)) for kind in ("cuda", "cpu", "meta")]
    assert chosen == ["fla", "torch", "torch"]


@pytest.mark.parametrize("rule", RULES)
def test_keys_too_wide_for_fla_run_in_pytorch_on_a_gpu(rule, monkeypatch):
    """The tensors pretend to be on one. "fla" alone is refused."""
    monkeypatch.setattr(backends, "why_not_fla", lambda device: None)
    chosen = []

    def on_a_gpu(backend, _, unfit):
        chosen.append(backends.resolve(backend, torch.device("cuda"), unfit))
        return "torch"

    monkeypatch.setattr(delta_rule, "resolve", on_a_gpu)
    backends._warn_once.cache_clear()
    inputs, function = rule_inputs(5, K=257, rule=rule), getattr(ops, rule)
    with pytest.warns(UserWarning, match="at most 256, not 257. The PyTorch backend, which is slower"):
        function(*inputs)
    with pytest.raises(ValueError, match="backend = 'fla': .* at most 256, not 257. Possible are 'auto'"):
        function(*inputs, backend="fla")
    function(*rule_inputs(5, K=256, rule=rule))
    assert chosen == ["torch", "fla"]


def test_a_run_with_keys_too_wide_for_fla_is_refused_before_it_begins(monkeypatch):
    from titan_gdn.models.hybrid import checks
    from titan_gdn.models.qwen3_next import Qwen3NextArguments

    monkeypatch.setattr(checks, "why_not_fla", lambda device: None)
    for width, kernel, says in (
        (256, "fla", None),
        (264, "auto", None),
        (264, "fla", "at most 256, not 264"),
    ):
        model = Qwen3NextArguments(linear_key_head_dim=width, n_experts=0).config()
        layer = next(x.linear_attention for x in model.layers if x.linear_attention is not None)
        for x in model.layers:
            if x.linear_attention is not None:
                x.linear_attention.run = dataclasses.replace(layer.run, kernel=kernel)
        assert layer.shape().fla == (width == 256)
        if says is None:
            checks.check_device(model, [])
        else:
            with pytest.raises(
                ValueError, match=f"linear_attention.kernel = 'fla': .* {says}. Possible here"
            ):
                checks.check_device(model, [])


def test_without_a_gpu_fla_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match="backend = 'fla': FLA needs a GPU"):
        backends.resolve("fla", torch.device("cpu"))


def test_choosing_a_backend_imports_neither_triton_nor_the_compiler():
    code = (
        "import sys, torch, titan_gdn.ops.backends as backends\n"
        "backends.why_not_fla(torch.device('cpu'))\n"
        "print([m for m in ('triton', 'fla', 'torch._dynamo') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
