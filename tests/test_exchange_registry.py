"""A fourth exchange, defined here and added to the registry, is known wherever exchanges are."""

import json
import types
from abc import abstractmethod

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy
from torchtitan.distributed import activation_checkpoint as torchtitans
from torchtitan.tools.logging import logger

from tests import ranks
from tests.quantize_cases import configured, emulated
from titan_gdn.bench.options import LayerOptions
from titan_gdn.config.load import ConfigError, load_config
from titan_gdn.models.hybrid import activation_checkpoint
from titan_gdn.models.hybrid.block import linear_layers
from titan_gdn.models.hybrid.exchange_choice import choice_of, saved_exchanges
from titan_gdn.parallel.collectives import ALL_GATHER, ALL_TO_ALL
from titan_gdn.parallel.exchange import registry
from titan_gdn.parallel.exchange.all_to_all import AllToAll
from titan_gdn.parallel.exchange.base import Projections
from titan_gdn.parallel.traffic import PassCost, Traffic
from titan_gdn.plan.__main__ import main

FILE = "train_configs/qwen3_next_debug_cp2.toml"
ARGV = ["--job.config_file", FILE, "--linear_attention.exchange"]


class Twice(AllToAll):
    """`all_to_all` that sends all projections twice, the second time for nothing."""

    name = "mine"
    saved = (ALL_TO_ALL,)

    def to_heads(self, x, project, project_low_rank, groups, sequence):
        def padded(x, groups):
            y = project(x, groups)
            return torch.cat([y, y], -1)

        y, low_rank, x_local = super().to_heads(x, padded, project_low_rank, groups, sequence)
        return Projections(y.chunk(2, -1)[0], low_rank, x_local)

    @staticmethod
    def traffic(shape, batch):
        once = AllToAll.traffic(shape, batch)
        # The projections of T / cp tokens, of which 1 / cp stays here.
        own = batch.rows * batch.length // batch.cp
        projections = PassCost(
            batch.itemsize * own * shape.exchanged * (batch.cp - 1) // batch.cp // batch.tp
        )
        return Traffic(once.forward + projections, once.backward + projections, once.transient, once.kept)


@pytest.fixture(autouse=True)
def mine(monkeypatch):
    """The class, registered for one test."""
    monkeypatch.setitem(registry.EXCHANGES, "mine", Twice)
    return Twice


@pytest.fixture(autouse=True)
def log_level():
    """The planner silences TorchTitan's log, which other tests read."""
    level, logger.propagate = logger.level, True
    yield
    logger.setLevel(level)
    logger.propagate = False


def load(exchange, *argv):
    return load_config([*ARGV, exchange, *argv], 2)


def test_the_configuration_accepts_it_and_lists_it(monkeypatch):
    (name,) = {layer.run.exchange for layer in linear_layers(load("mine").model_spec.model.layers)}
    assert name == "mine"
    with pytest.raises(ConfigError) as error:
        load("min")
    assert 'expected "auto" or "all_to_all" or "all_gather" or "state" or "mine"' in str(error.value)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match='exchange mine: expected .* or "all_gather" or "state"[.]$'):
        load("mine")


def test_the_configuration_asks_it_whether_it_can_run(mine, monkeypatch):
    monkeypatch.setattr(mine, "impossible", staticmethod(lambda shape, batch: f"cp is {batch.cp}"))
    with pytest.raises(ConfigError, match='linear_attention.exchange = "mine" of Gated DeltaNet: cp is 2'):
        load("mine")
    load("auto")


def planned(capsys, *argv):
    main([*ARGV, *argv, "--world-size", "2"])
    return " ".join(capsys.readouterr().out.split())


def test_the_planner_plans_it(mine, capsys, monkeypatch):
    found = json.loads(planned(capsys, "mine", "--json"))["linear_attention"][0]
    assert found["taken"] == "mine"
    sent, once = (found["exchanges"][name]["forward"] for name in ("mine", "all_to_all"))
    assert once["cp_bytes"] < sent["cp_bytes"] < 2 * once["cp_bytes"]

    printed = planned(capsys, "mine", "--sweep", "cp=1,2")
    assert f" mine {sent['cp_bytes'] / 1e6:,.1f} " in printed
    assert "The configuration names mine; auto would take" in printed
    assert " all_gather state mine cp MB over CP" in printed  # the heads of the sweep's columns
    in_a_step = found["exchanges"]["mine"]["time"]["done"]["cp_bytes"]
    assert f" {in_a_step / 1e6:,.1f} " in printed.split("MB over CP")[-1]

    monkeypatch.setattr(mine, "impossible", staticmethod(lambda shape, batch: "it is Sunday"))
    assert "mine is impossible because it is Sunday" in planned(capsys, "auto")


def test_auto_takes_it_when_it_is_the_cheapest(mine, monkeypatch, caplog):
    config = load("auto")
    config.model_spec.model.update_from_config(config=config)
    assert all(layer.run.exchange != "mine" for layer in linear_layers(config.model_spec.model.layers))

    nothing = Traffic(PassCost(), PassCost(), transient=0, kept=0)
    monkeypatch.setattr(mine, "traffic", staticmethod(lambda shape, batch: nothing))
    config = load("auto")
    with caplog.at_level("INFO"):
        config.model_spec.model.update_from_config(config=config)
    assert all(layer.run.exchange == "mine" for layer in linear_layers(config.model_spec.model.layers))
    assert "Exchange of Gated DeltaNet at CP 2, TP 1: mine (" in caplog.text


OPTIONS = LayerOptions(
    dim=32, key_heads=4, value_heads=8, key_dim=8, value_dim=12, tokens=64, batch=2, repeats=1, cp=2
)


def on_a_rank():
    """The bench's figures, and outputs of this exchange and of the one that sends once."""
    from tests import layer_cases
    from titan_gdn.bench.layer import measure, mesh_of, prepare

    registry.EXCHANGES["mine"] = Twice
    layer_cases.set_up()
    outputs = []
    for name in ("mine", "all_to_all"):
        torch.manual_seed(0)
        outputs.append(prepare(OPTIONS, name, True, mesh_of(OPTIONS)).forward().detach())
    return [measure(OPTIONS, "mine", computes) for computes in (True, False)], outputs


def test_the_bench_runs_it_and_records_the_bytes_of_its_formula():
    assert LayerOptions().exchanges == ("all_to_all", "all_gather", "state", "mine")
    LayerOptions(exchanges=("mine",)).check()
    with pytest.raises(ValueError, match="--exchanges other: expected some of .*, mine"):
        LayerOptions(exchanges=("mine", "other")).check()
    # 2 rows of 32 tokens, 4 groups: q, k, 2 value heads, beta and decay of each in; the value heads out.
    by_hand = 4 * (2 * 32) * 4 * (2 * (2 * 8 + 2 * 12 + 2 * 2) + 2 * 12) // 2
    for figures, (output, expected) in ranks.run(on_a_rank, 2):
        for row in figures:
            for way in ("forward", "backward"):
                assert row[f"cp {way} (bytes)"] == row[f"cp {way}, formula"] == by_hand
        assert torch.equal(output, expected) and output.abs().max() > 0


def test_quantization_follows_whether_it_slices_weights(mine, monkeypatch):
    """112 rows of `in_proj_qkv`, a multiple of 16; half of them is none."""
    heads = {"n_linear_key_heads": 4, "n_linear_value_heads": 4}
    widths = {"dim": 64, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
    for slices in (False, True):
        monkeypatch.setattr(mine, "slices_weights", slices)
        model = configured("qwen3_next", "debug", [emulated()], 1, 2, "mine", **heads, **widths)
        quantized = type(model.layers[0].linear_attention.in_proj_qkv).__qualname__
        assert quantized.startswith("Float8Linear") != slices


def test_selective_checkpointing_follows_what_it_saves(mine, monkeypatch):
    group = types.SimpleNamespace(group_name="cp")
    mesh = types.SimpleNamespace(get_group=lambda: group)

    def saves(operator):
        recompute = CheckpointPolicy.PREFER_RECOMPUTE
        args = (mine(mesh), lambda *_: recompute, None, operator, None, 2, "cp")
        return activation_checkpoint._policy(*args) == CheckpointPolicy.MUST_SAVE

    assert saves(ALL_TO_ALL) and not saves(ALL_GATHER)

    for again in (False, True):
        monkeypatch.setattr(mine, "sends_again", again)
        config = load("mine", "--activation_checkpoint.mode", "selective")
        assert ("mine" in saved_exchanges(config)) != again
        model = config.model_spec.model
        recomputed = choice_of(model, linear_layers(model.layers)[0], config).costs["mine"].recompute
        assert (recomputed > 0) == again
    config.activation_checkpoint = torchtitans.SelectiveAC.Config()
    assert saved_exchanges(config) == ()


def test_an_exchange_that_is_not_complete_is_not_registered():
    class Unfinished(AllToAll):
        groups = abstractmethod(AllToAll.groups)
        name = "unfinished"

    class Auto(AllToAll):
        name = "auto"

    for kinds, message in (
        ([Unfinished], "Unfinished does not implement groups"),
        ([Auto], "the name 'auto' is reserved or taken"),
        ([AllToAll, AllToAll], "the name 'all_to_all' is reserved or taken"),
    ):
        with pytest.raises(ValueError, match=message):
            registry.by_name(*kinds)
