"""Activation checkpointing: the same numbers in every mode, what is repeated, and what memory it takes."""

import functools
import itertools
import os
import types

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from tests import checkpointing_cases, ranks
from tests.draw import in_sets
from titan_gdn.config.load import ConfigError, load_config
from titan_gdn.models.hybrid import activation_checkpoint
from titan_gdn.parallel.collectives import ALL_GATHER, ALL_TO_ALL
from titan_gdn.parallel.exchange.all_gather import AllGather
from titan_gdn.parallel.exchange.all_to_all import AllToAll
from titan_gdn.parallel.exchange.local import NoExchange
from titan_gdn.parallel.exchange.registry import EXCHANGES
from titan_gdn.parallel.exchange.state import StatePassing

FAMILIES = ("qwen3_next", "kimi_linear")
MODES = {
    "none": ("none",),
    "full": ("full",),
    "selective": ("selective",),
    "selective, exchanges repeated": ("selective", "--activation_checkpoint.no-save_exchange"),
}
COMPILED = {
    "compiled none": ("none",),
    "compiled selective": ("selective",),
    "memory budget": ("memory_budget", "--activation_checkpoint.memory_budget", "0.3"),
}


def argv(exchange, mode):
    one_layer = ("--model.overrides.n_layers", "1")  # what is compiled takes its time
    compiled = ("--compile.enable", "--compile.backend", "aot_eager", *one_layer) if mode in COMPILED else ()
    words = (MODES | COMPILED)[mode]
    return ["--linear_attention.exchange", exchange, "--activation_checkpoint.mode", *words, *compiled]


@functools.cache
def records_of(family, exchange, modes):
    """For each mode, what each of two ranks saw; all modes run in one pool."""
    words = [argv(exchange, mode) for mode in modes]
    by_rank = ranks.run(checkpointing_cases.train_modes, 2, family, words, timeout=400)
    return dict(zip(modes, zip(*by_rank, strict=True), strict=True))


RUNS = list(itertools.product(FAMILIES, EXCHANGES))


@pytest.fixture(scope="module", params=in_sets(RUNS, fast=[("qwen3_next", "state")], name="-".join))
def records(request):
    """A family, an exchange, and their records by mode."""
    return *request.param, records_of(*request.param, tuple(MODES))


def test_losses_and_gradient_norms_are_bitwise_those_without_checkpointing(records):
    *_, by_mode = records
    for mode in MODES:
        for record, plain in zip(by_mode[mode], by_mode["none"], strict=True):
            assert record["loss"] == plain["loss"] and record["norms"] == plain["norms"], mode
    losses = by_mode["none"][0]["loss"]
    assert losses[0] != losses[1], "the second step proves nothing"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_memory_budget_gives_bitwise_what_compilation_without_one_does(family):
    by_mode = records_of(family, "state", tuple(COMPILED))
    for mode in COMPILED:
        for record, plain in zip(by_mode[mode], by_mode["compiled none"], strict=True):
            assert record["loss"] == plain["loss"] and record["norms"] == plain["norms"], mode


def test_collectives_are_repeated_in_full_mode_and_in_selective_only_those_of_hidden_states(records):
    family, exchange, by_mode = records
    calls = {mode: by_mode[mode][0]["calls"] for mode in MODES}
    low_rank = 1 if family == "kimi_linear" and exchange == "all_to_all" else 0  # gathered before the heads
    attention = {"qwen3_next": 2, "kimi_linear": 1}[family]  # keys and values, or what they are made of
    # Each of three layers of linear attention sends twice in the forward and twice in the backward.
    once = 3 * (2 + low_rank)
    outside = calls["none"] - 2 * once - 2 * attention  # of the layout, once a forward
    of_states = records_of(family, "state", tuple(MODES))["none"][0]["calls"]
    assert outside == of_states - 12 - 2 * attention >= 0
    assert calls["full"] - calls["none"] == once + attention
    assert calls["selective, exchanges repeated"] - calls["none"] == once + attention
    hidden_states = 3 if exchange == "all_gather" else 0
    assert calls["selective"] - calls["none"] == hidden_states + attention


def test_peak_memory_falls_from_none_to_selective_to_full(records):
    *_, by_mode = records
    none, selective, full = (by_mode[mode][0]["peak"] for mode in ("none", "selective", "full"))
    assert none > 1.2 * selective and selective > 1.2 * full


def test_of_communication_only_an_exchanges_collectives_over_cp_are_saved():
    """Under sequence parallelism hidden states are gathered over TP by the operator that gathers halos."""
    group = types.SimpleNamespace(group_name="cp")
    mesh = types.SimpleNamespace(get_group=lambda: group)

    def saves(exchange, operator, group):
        recompute = CheckpointPolicy.PREFER_RECOMPUTE
        chosen = activation_checkpoint._policy(exchange, lambda *_: recompute, None, operator, None, 2, group)
        return chosen == CheckpointPolicy.MUST_SAVE

    state, gather = StatePassing(mesh, None, False), AllGather(mesh, None, False)
    assert saves(state, ALL_GATHER, "cp") and saves(state, ALL_GATHER, group)
    assert not saves(state, ALL_GATHER, "tp")
    assert saves(gather, ALL_TO_ALL, "cp") and not saves(gather, ALL_GATHER, "cp")
    assert saves(AllToAll(mesh, None), ALL_GATHER, "cp") and not saves(NoExchange(), ALL_GATHER, "cp")
    assert saves(NoExchange(), torch.ops.titan_gdn.chunk_kda.default, None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "requires the model to be compiled: set --compile.enable"),
        (
            ["--compile.enable", "--activation_checkpoint.memory_budget", "1.5"],
            "memory_budget = 1.5: expected a number from 0 to 1",
        ),
    ],
)
def test_a_memory_budget_that_cannot_be_is_refused_in_a_sentence(words, said):
    path = os.path.join(os.path.dirname(__file__), "..", "train_configs", "qwen3_next_debug.toml")
    with pytest.raises(ConfigError, match=said):
        load_config(["--job.config_file", path, "--activation_checkpoint.mode", "memory_budget", *words], 1)
