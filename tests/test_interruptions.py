"""Runs that are killed, run out of disk or run out of data leave what the same command goes on from."""

import os
import queue
import random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from tests import hf, interruption_cases, ranks
from tests.interruption_cases import logged, main
from titan_gdn.checkpoint.model_directory import INDEX
from titan_gdn.checkpoint.steps import SaveError, complete_steps
from titan_gdn.config.load import ConfigError, load_config
from titan_gdn.models.hybrid.checkpoint_manager import HybridCheckpointManager

DENSE = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "num_experts": 0}
OVERRIDES = hf.overrides(hf._qwen3_next(**DENSE)[0])
WHOLE = {"enable": True, "interval": 1, "keep_latest_k": 2, "last_save_model_only": False}


def run_toml(folder, **sections):
    return ["--job.config_file", hf.toml(str(folder), OVERRIDES, **sections)]


@pytest.fixture
def manager(tmp_path, monkeypatch):
    """A manager that saves to `tmp_path`, on a single rank without a trainer."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    manager = HybridCheckpointManager.__new__(HybridCheckpointManager)
    manager.enable, manager.folder, manager.keep_latest_k = False, str(tmp_path), 2
    manager.sd_adapter, manager._source, manager._at = None, None, None
    manager.purge_queue = queue.Queue()
    return manager


def save(manager, step, value):
    return manager.dcp_save(
        {"x": torch.full((1000,), value)}, manager._create_checkpoint_id(step), "disabled"
    )


# --- which steps count ---


@pytest.fixture
def steps(tmp_path):
    """A function that makes folders, complete ones if their name ends with `+`."""

    def make(*names):
        for name in names:
            (folder := tmp_path / name.rstrip("+")).mkdir()
            (folder / "__0_0.distcp").touch()
            if name.endswith("+"):
                (folder / ".metadata").touch()

    return make


def purged(manager):
    manager._purge_stale_checkpoints()
    return [os.path.basename(manager.purge_queue.get()) for _ in range(manager.purge_queue.qsize())]


def test_a_purge_counts_complete_steps_only(manager, steps):
    steps("step-2+", "step-4+", "step-6", "step-8")
    assert purged(manager) == []
    steps("step-10+")
    assert purged(manager) == ["step-2"]


def test_a_purge_removes_incomplete_steps_that_are_older_than_those_it_keeps(manager, steps):
    steps("step-1", "step-2+", "step-3", "step-4+", "step-5", "step-6+")
    assert purged(manager) == ["step-1", "step-2", "step-3"]


def test_a_purge_spares_what_is_being_saved_and_what_is_no_step(manager, steps, tmp_path):
    steps("step-1.bak+", "old-step-2+", "step-03+", "step-4", "step-5+", "step-9+", "step-10+")
    manager._at = str(tmp_path / "step-4")
    assert purged(manager) == ["step-5"]
    assert complete_steps(str(tmp_path)) == [9, 10]  # what is being purged is not complete at once


def test_the_newest_step_is_a_complete_one_of_that_very_name(manager, steps, tmp_path):
    steps("step-3+", "step-5", "step-7.bak+", "old-step-9+", "step-011+")
    assert manager._find_load_step() == 3
    argv = run_toml(tmp_path, checkpoint={"enable": True, "folder": str(tmp_path), "load_step": 9})
    with pytest.raises(ConfigError, match=r"Possible: -1 \(the newest\), 3\."):
        load_config(argv, 1)


# --- a save over another ---


def test_a_step_that_is_saved_over_another_is_complete_only_at_its_end(manager, monkeypatch, tmp_path):
    save(manager, 2, 1.0)
    for name in ("__7_0.distcp", "__7_checksums.json"):  # of a run on more ranks
        (tmp_path / "step-2" / name).touch()
    (tmp_path / "step-2" / "note.txt").touch()
    with monkeypatch.context() as patch:
        patch.setattr(FileSystemWriter, "finish", killed)
        with pytest.raises(SaveError):
            save(manager, 2, 2.0)
    assert complete_steps(str(tmp_path)) == [] and manager._find_load_step() == -1
    save(manager, 2, 3.0)
    assert complete_steps(str(tmp_path)) == [2]
    saved = [".metadata", "__0_0.distcp", "__0_checksums.json", "note.txt", "source.json"]
    assert sorted(os.listdir(tmp_path / "step-2")) == saved
    dcp.load(state := {"x": torch.zeros(1000)}, checkpoint_id=tmp_path / "step-2", no_dist=True)
    assert (state["x"] == 3).all()


def killed(*args, **kwargs):
    raise KeyboardInterrupt


def test_an_export_over_a_step_leaves_the_step_until_it_is_complete(manager, monkeypatch, tmp_path):
    from titan_gdn.checkpoint import export as module

    save(manager, 2, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_write_index", killed)
        with pytest.raises(KeyboardInterrupt):
            module.export({"x": torch.ones(3)}, str(tmp_path / "step-2"), module.Beside({}))
    dcp.load(state := {"x": torch.zeros(1000)}, checkpoint_id=tmp_path / "step-2", no_dist=True)
    assert (state["x"] == 1).all()
    module.export({"x": torch.ones(3)}, str(tmp_path / "step-2"), module.Beside({}))
    names = os.listdir(tmp_path / "step-2")
    assert INDEX in names and not any(name.endswith((".metadata", ".distcp")) for name in names)


def test_a_save_that_fails_says_what_is_left(manager, monkeypatch, tmp_path):
    save(manager, 2, 1.0)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    said = 'saved to ".*step-4": OSError: .*No space left on device .*free on its disk.. The newest .* step-2'
    with pytest.raises(SaveError, match=said):
        save(manager, 4, 2.0)


# --- data that end ---


FINITE = {"infinite": False}


def test_data_that_end_before_the_last_step_are_told_and_the_last_step_is_saved(tmp_path):
    argv = run_toml(
        tmp_path,
        checkpoint=WHOLE | {"interval": 100},
        dataloader=FINITE,
        training={"steps": 50},
    )
    (first,) = ranks.run(main, 1, argv)
    own = str(tmp_path / "out/checkpoint")
    (last,) = complete_steps(own)
    assert last == len(first["losses"]) > 2 and first["code"] == 0
    assert f"Training ended after step {last} of training.steps = 50, because the data ended" in first["log"]
    assert "Training completed" not in first["log"]
    assert "dataloader.stream" in FileSystemReader(f"{own}/step-{last}").read_metadata().state_dict_metadata

    when = os.path.getmtime(f"{own}/step-{last}/.metadata")
    (again,) = ranks.run(main, 1, argv)  # takes no step, and saves nothing over the step it began with
    assert not again["losses"] and again["code"] == 0 and f"ended after step {last} of" in again["log"]
    assert os.path.getmtime(f"{own}/step-{last}/.metadata") == when

    more = [*argv, "--dataloader.infinite", "--training.steps", str(last + 2)]
    (more,) = ranks.run(main, 1, more)
    assert len(more["losses"]) == 2 and "Training completed" in more["log"]
    assert complete_steps(own) == [last, last + 2]


def test_data_that_end_in_the_very_last_step_are_exported_too(tmp_path):
    argv = run_toml(tmp_path, checkpoint={"enable": True}, dataloader=FINITE, training={"steps": 50})
    (whole,) = ranks.run(main, 1, argv)
    last = len(whole["losses"])
    export = ["--checkpoint.last_save_in_hf", "--checkpoint.last_save_model_only", "--checkpoint.interval"]
    words = [
        "--training.steps",
        str(last + 1),
        "--lr_scheduler.total_steps",
        "50",
        "--job.dump_folder",
        str(tmp_path / "b"),
        *export,
        str(last),
    ]
    (run,) = ranks.run(main, 1, [*argv, *words])
    assert run["losses"] == whole["losses"] and f"ended after step {last} of" in run["log"]
    names = os.listdir(tmp_path / "b/checkpoint" / f"step-{last}")
    # The export is beside the training state that the same step already had: with more data the run goes on.
    assert {INDEX, "config.json", ".metadata"} <= {*names}


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"local_batch_size": 1000}, "less than one batch of 1000 (training.local_batch_size)"),
        ({"local_batch_size": 1, "global_batch_size": 1000}, "the data end before the first step"),
    ],
)
def test_data_without_a_single_batch_are_an_error(tmp_path, sizes, says):
    argv = run_toml(tmp_path, dataloader=FINITE, training=sizes)
    (run,) = ranks.run(main, 1, argv)
    assert run["code"] == 1 and says in run["error"]


# --- a disk that fills ---


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_disk_that_fills_ends_the_run_and_leaves_the_last_complete_step(mode, tmp_path):
    """Of two ranks, one cannot write a file of more than 10 kB when step 3 is saved."""
    argv = run_toml(tmp_path, checkpoint=WHOLE | {"async_mode": mode}, training={"steps": 5})
    argv += ["--parallelism.tensor_parallel_degree", "2", "--job.dump_folder", str(tmp_path / "full")]
    runs = ranks.run(interruption_cases.with_a_full_disk, 2, argv, 3)
    assert [run["code"] for run in runs] == [1, 1]
    for run in runs:
        assert 'step-3": ' in run["error"] and "The newest complete one is step-2." in run["error"]
    assert complete_steps(str(tmp_path / "full/checkpoint")) == [1, 2]
    (run, _) = ranks.run(main, 2, argv)
    assert len(run["losses"]) == 3 and run["code"] == 0


def test_a_disk_that_fills_during_the_export_leaves_the_last_complete_step(tmp_path):
    argv = run_toml(tmp_path, checkpoint=WHOLE, training={"steps": 3})
    argv += ["--parallelism.tensor_parallel_degree", "2"]
    argv += ["--checkpoint.last_save_in_hf", "--checkpoint.last_save_model_only"]
    runs = ranks.run(interruption_cases.with_a_full_disk, 2, argv, 3)
    own = tmp_path / "out/checkpoint"
    assert [run["code"] for run in runs] == [1, 1] and complete_steps(str(own)) == [1, 2]
    assert 'step-3": ' in runs[0]["error"] and "The newest complete one is step-2." in runs[0]["error"]
    (run, _) = ranks.run(main, 2, argv)
    assert len(run["losses"]) == 1 and run["code"] == 0 and (own / "step-3" / INDEX).exists()


# --- kill -9 ---


def uninterrupted(tmp_path, argv, steps):
    ranks.run(main, 2, [*argv, "--job.dump_folder", str(tmp_path / "whole")], str(tmp_path / "whole.txt"))
    losses = logged(tmp_path / "whole.txt")
    assert [*losses] == list(range(1, steps + 1))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_run_that_is_killed_again_and_again_ends_with_the_losses_of_one_that_was_not(mode, tmp_path):
    """Each of two ranks is killed at random moments, and at three points inside a save."""
    steps, draw = 40, random.Random(mode)
    argv = run_toml(tmp_path, checkpoint=WHOLE | {"async_mode": mode}, training={"steps": steps})
    argv += ["--parallelism.tensor_parallel_degree", "2"]
    losses = uninterrupted(tmp_path, argv, steps)
    own, log = str(tmp_path / "out/checkpoint"), tmp_path / "log.txt"

    def whole_so_far():
        seen = logged(log)
        assert seen == {step: losses[step] for step in seen}
        return complete_steps(own)

    newest = 0
    for attempt in range(5):
        after, late = draw.randint(1, 3), draw.uniform(0, 0.5)
        when = interruption_cases.moment(log, after, late)
        ranks.run_and_kill(main, 2, argv, str(log), victim=attempt % 2, when=when)
        complete = whole_so_far()
        assert complete[-1] >= newest, "the last complete step was lost"
        newest = complete[-1]
    for victim, where in ((1, "write_data"), (0, "finish"), (0, "write_data")):
        ranks.run_and_kill(
            interruption_cases.dying_in_a_save,
            2,
            argv,
            str(log),
            (victim, where, newest + 3),
            victim=None,
            when=interruption_cases.until_one_is_dead,
        )
        complete = whole_so_far()
        assert complete[-1] == newest + 2, "an incomplete step counts, or a complete one is lost"
        newest = complete[-1]
    assert newest < steps - 1
    (last, _) = ranks.run(main, 2, argv, str(log))
    assert len(last["losses"]) == steps - newest
    assert logged(log) == losses


@pytest.mark.slow
def test_a_run_killed_while_it_saves_over_a_step_goes_on_from_the_step_it_was_told(tmp_path):
    argv = run_toml(tmp_path, checkpoint=WHOLE | {"keep_latest_k": 0}, training={"steps": 5})
    argv += ["--parallelism.tensor_parallel_degree", "2"]
    losses = uninterrupted(tmp_path, argv, 5)
    own, log = str(tmp_path / "whole/checkpoint"), tmp_path / "log.txt"
    argv += ["--job.dump_folder", str(tmp_path / "whole"), "--checkpoint.load_step", "2"]
    when = interruption_cases.until_one_is_dead
    dying = (1, "write_data", 3)
    ranks.run_and_kill(interruption_cases.dying_in_a_save, 2, argv, str(log), dying, victim=None, when=when)
    assert complete_steps(own) == [1, 2, 4, 5]
    ranks.run(main, 2, argv, str(log))
    assert logged(log) == {step: losses[step] for step in (3, 4, 5)} and complete_steps(own) == [
        1,
        2,
        3,
        4,
        5,
    ]


# --- SIGTERM ---


def test_a_run_that_a_signal_stopped_goes_on_with_the_losses_of_one_that_was_not_stopped(tmp_path):
    """One of two ranks gets it between accumulated gradients. In the last step, it changes nothing."""
    argv = run_toml(tmp_path, checkpoint=WHOLE | {"interval": 100}, training={"steps": 4})
    argv += ["--training.local_batch_size", "1", "--training.global_batch_size", "4"]
    losses = uninterrupted(tmp_path, argv, 4)
    own, log = str(tmp_path / "out/checkpoint"), tmp_path / "log.txt"
    runs = ranks.run(interruption_cases.with_a_signal, 2, argv, str(log), 1, 2)
    assert [run["code"] for run in runs] == [143, 143] and complete_steps(own) == [2]
    assert "SIGTERM: stopped after step 2 of training.steps = 4, which is saved" in runs[0]["error"]
    runs = ranks.run(interruption_cases.with_a_signal, 2, argv, str(log), 1, 4)
    assert [run["code"] for run in runs] == [0, 0] and "Training completed" in runs[0]["log"]
    assert logged(log) == losses and complete_steps(own) == [2, 4]
