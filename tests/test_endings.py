"""How a run ends: a signal saves a step that goes on exactly, an error is one line, a finished run is 0."""

import os
import re
import signal
import time

import pytest

from tests import endings, hf, interruption_cases, ranks, test_hard_days
from titan_gdn.checkpoint.steps import complete_steps
from titan_gdn.endings import errors

OVERRIDES = hf.overrides(hf._qwen3_next(**test_hard_days.DENSE)[0])
WHOLE = {"enable": True, "interval": 100, "last_save_model_only": False}


def run_toml(folder, **sections):
    return ["--job.config_file", hf.toml(str(folder), OVERRIDES, **{"checkpoint": WHOLE, **sections})]


def own(folder):
    return str(folder / "out" / "checkpoint")


# --- signals ---


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_run_that_was_stopped_goes_on_exactly(tmp_path, accumulation):
    training = {"steps": 8, "global_batch_size": 8 * accumulation}
    argv = run_toml(tmp_path, training=training)
    whole = ranks.run(interruption_cases.main, 2, [*argv, "--job.dump_folder", str(tmp_path / "whole")])[0]
    stopped = endings.run(argv, act=endings.after("step: *3", endings.send(signal.SIGTERM)))
    assert stopped.code == 128 + signal.SIGTERM, stopped.screen
    (step,) = complete_steps(own(tmp_path))
    assert 3 <= step < 8
    resumed = ranks.run(interruption_cases.main, 2, argv)[0]
    assert resumed["losses"] == whole["losses"][step:]


def test_a_key_turns_off_the_save_of_a_stopped_run(tmp_path):
    argv = run_toml(tmp_path, checkpoint=WHOLE | {"save_on_signal": False}, training={"steps": 500})
    ending = endings.run(argv, 1, act=endings.after("step: *2", endings.send(signal.SIGINT)))
    assert ending.codes == [130] and complete_steps(own(tmp_path)) == []
    assert "is not saved (checkpoint.save_on_signal = false)" in ending.screen


def test_a_signal_before_the_first_step_ends_the_run_at_once(tmp_path):
    argv = run_toml(tmp_path, training={"steps": 500})
    ending = endings.run(argv, act=endings.after("Building device mesh", endings.send(signal.SIGTERM)))
    assert ending.codes == [143, 143]
    assert ending.screen.count("SIGTERM before the first step: nothing was trained") == 1


def send_twice(processes):
    endings.send(signal.SIGINT)(processes)
    time.sleep(0.3)  # a scheduler and torchrun send it both: this is the same signal
    endings.send(signal.SIGINT)(processes)


def test_a_signal_that_comes_twice_at_once_is_one(tmp_path):
    argv = run_toml(tmp_path, training={"steps": 500})
    ending = endings.run(argv, prepare=slow_steps, act=endings.after("step: *2", send_twice))
    assert ending.codes == [130, 130] and len(complete_steps(own(tmp_path))) == 1, ending.screen


def slow_steps():
    from torchtitan.trainer import Trainer

    original = Trainer.train_step

    def step(self, *args, **kwargs):
        time.sleep(1)
        return original(self, *args, **kwargs)

    Trainer.train_step = step


# --- errors ---


@pytest.mark.parametrize("shown", [False, True])
def test_a_traceback_is_in_a_file_and_on_the_screen_if_asked_for(tmp_path, shown):
    argv = run_toml(tmp_path, training={"steps": 9}, debug={"traceback": shown})
    ending = endings.run(argv, prepare=test_hard_days.break_a_step)
    path = re.search(r"titan_gdn: rank 1: RuntimeError: .*\(traceback: (\S+);", ending.screen)[1]
    assert "this is the second line" in open(path).read()
    assert ("Traceback" in ending.screen) == shown
    assert os.path.dirname(path) == str(tmp_path / "out" / "errors")


def test_the_last_line_of_torchrun_is_ours(tmp_path, monkeypatch, capsys):
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    errors.tell("optimizer.lr = inf: expected a finite number")
    failure = ProcessFailure(0, 1234, 2, str(tmp_path / "error.json"))
    *_, line, border = str(ChildFailedError("titan_gdn.train", {0: failure})).splitlines()
    assert line.endswith("titan_gdn: optimizer.lr = inf: expected a finite number") and set(border) == {"="}


# --- the end of a finished run ---


@pytest.mark.slow
def test_runs_that_have_finished_end_with_0(tmp_path):
    argv = [
        "--job.config_file",
        "train_configs/qwen3_next_debug_moe.toml",
        "--job.dump_folder",
        str(tmp_path),
    ]
    argv += "--parallelism.context_parallel_degree 2 --training.mixed_precision_param bfloat16".split()
    argv += "--training.steps 2 --training.seq_len 64 --lr_scheduler.warmup_steps 1".split()
    for _ in range(5):
        ending = endings.run(argv, timeout=120)
        assert ending.codes == [0, 0] and "terminate called" not in ending.screen, ending.screen
