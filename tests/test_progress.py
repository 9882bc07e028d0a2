"""The line that says what a long step does: on a terminal, and nowhere else."""

import logging
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple, TextIO

import pytest
import torch

from titan_gdn.display import progress

CLEAR = "\r\x1b[K"


@pytest.fixture
def trainer():
    """What is watched of a trainer, with one linear as its model."""
    made = SimpleNamespace(
        step=12,
        gradient_accumulation_steps=4,
        parallel_dims=SimpleNamespace(pp_enabled=False),
        model_parts=[torch.nn.Linear(2, 2)],
        optimizers=SimpleNamespace(step=lambda: None),
        checkpointer=SimpleNamespace(save=lambda *args: time.sleep(1)),
    )

    def forward_backward_step():
        made.model_parts[0](torch.zeros(2)).sum().backward()
        time.sleep(1.2)

    def train_step(data):
        made.forward_backward_step()
        logging.getLogger().info("a line of the log")
        made.optimizers.step()

    made.forward_backward_step, made.train_step = forward_backward_step, train_step
    return made


class Terminal(NamedTuple):
    """A stream to a terminal, and a function that returns what was written to it."""

    stream: TextIO
    written: Callable[[], str]

    @contextmanager
    def shows(self, trainer):
        """The context of the line, with this terminal as stderr: pytest has one of its own in each test."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stderr", self.stream)
            try:
                with progress.shown(trainer):
                    yield
            finally:
                assert sys.stderr is self.stream
                assert logging.getLogger().handlers[0].stream is self.stream


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 40 columns, to which the log goes."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (20, 40))
    stream = os.fdopen(theirs, "w", buffering=1)
    logger = logging.getLogger()
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(stream)])
    level = logger.level
    logger.setLevel(logging.INFO)
    monkeypatch.setattr(progress, "_AFTER", 0.0)
    yield Terminal(stream, lambda: read(ours))
    logger.setLevel(level)
    stream.close()
    os.close(ours)


def read(terminal):
    """What was written to a terminal until now."""
    written = b""
    while select.select([terminal], [], [], 0.2)[0]:
        written += os.read(terminal, 1 << 16)
    return written.decode()


def lines(written):
    """What a person sees: the rows of the screen after the last character."""
    return [row.split(CLEAR)[-1] for row in written.replace("\r\n", "\n").split("\n")]


def test_a_long_step_says_what_it_does_below_what_is_logged(trainer, terminal):
    with terminal.shows(trainer):
        trainer.train_step(None)
        print("a warning", file=sys.stderr)
        trainer.checkpointer.save()
    written = terminal.written()
    assert "step 12: micro-batch 1/4, backward, 1 s" in written
    assert "step 12: checkpoint, 2 s" in written
    assert lines(written) == ["a line of the log", "a warning", ""]


def test_the_line_is_cut_at_the_edge_of_the_terminal(trainer, terminal):
    trainer.step = 10**30
    with terminal.shows(trainer):
        trainer.train_step(None)
    assert max(map(len, terminal.written().split(CLEAR))) == 39


def test_a_short_step_shows_nothing(trainer, terminal, monkeypatch):
    monkeypatch.setattr(progress, "_AFTER", 2.0)
    with terminal.shows(trainer):
        trainer.train_step(None)
    assert terminal.written() == "a line of the log\r\n"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_the_line_does_not_survive_an_exit(trainer, terminal, error):
    def stop():
        raise error

    trainer.optimizers.step = stop
    with pytest.raises(error), terminal.shows(trainer):
        trainer.train_step(None)
    written = terminal.written()
    assert "step 12" in written and lines(written) == ["a line of the log", ""]


def test_nothing_is_touched_without_a_terminal_or_on_a_rank_that_does_not_log(trainer, terminal):
    call = trainer.train_step
    with progress.shown(trainer):  # pytest's stderr is a file
        assert trainer.train_step is call
    logging.getLogger().setLevel(logging.ERROR)
    with terminal.shows(trainer):
        assert trainer.train_step is call


@pytest.mark.slow
@pytest.mark.parametrize("on_terminal", [True, False])
def test_a_run_shows_the_line_on_a_terminal_alone(tmp_path, on_terminal):
    ours, theirs = pty.openpty()
    argv = [
        sys.executable, "-m", "titan_gdn.train", "--job.config_file", "train_configs/qwen3_next_debug.toml",
        "--training.steps", "1", "--training.seq_len", "2048", "--training.global_batch_size", "8",
        "--training.local_batch_size", "4", "--job.dump_folder", str(tmp_path), "--checkpoint.no-enable",
    ]  # fmt: skip
    stderr = theirs if on_terminal else subprocess.PIPE
    environment = os.environ | {"MASTER_PORT": "29711"}
    run = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=stderr, env=environment)
    os.close(theirs)
    if not on_terminal:
        out, err = run.communicate(timeout=300)
        assert run.returncode == 0 and b"step 1: " not in err and b"\x1b[K" not in out + err
        return
    shown = b""
    try:
        while chunk := os.read(ours, 1 << 16):
            shown += chunk
    except OSError:  # the terminal's other end was closed
        pass
    out, _ = run.communicate(timeout=300)
    assert run.returncode == 0 and b"step:  1" in out.replace(b"\x1b[31m", b"")
    assert b"step 1: micro-batch 2/2, backward, " in shown and b" s\r" in shown
    assert lines(shown.decode())[-1] == ""
