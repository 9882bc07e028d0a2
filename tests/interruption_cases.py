"""Runs that end in all ways, as functions for `tests.ranks`."""

import contextlib
import io
import os
import resource
import signal
import time

from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.filesystem import FileSystemWriter


def main(argv, log=None):
    """Train as the command does. Return its exit code, its losses, its log and what it says on stderr.

    Args:
        argv: The command line.
        log: A file to which rank 0 appends each step and its loss at once.
    """
    import torchtitan.trainer
    from torchtitan.components.metrics import MetricsProcessor

    from titan_gdn import train
    from titan_gdn.endings import errors

    torchtitan.trainer.time.sleep = lambda seconds: None
    losses, lines, error = [], io.StringIO(), io.StringIO()

    def log_step(self, step, loss, *args, **kwargs):
        losses.append(loss)
        if log is not None and os.environ["RANK"] == "0":
            with open(log, "a") as file:
                file.write(f"{step} {loss!r}\n")

    MetricsProcessor.log = log_step
    with contextlib.redirect_stdout(lines), contextlib.redirect_stderr(error):
        code = errors.code_of(lambda: train.main(argv))
    return {"code": code, "losses": losses, "log": lines.getvalue(), "error": error.getvalue()}


def logged(path):
    """The losses in a log by step. A step that was taken several times had the same loss each time."""
    losses = {}
    lines = open(path).read().splitlines() if os.path.exists(path) else []
    for line in lines:
        step, loss = line.split()
        assert losses.setdefault(int(step), float(loss)) == float(loss), f"step {step} had another loss"
    return losses


def with_a_full_disk(argv, step):
    """Train, but rank 1 cannot write large files when `step` is saved."""

    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))

    _in_a_save(1, "write_data", step, fill)
    return main(argv)


def dying_in_a_save(argv, log, where):
    """Train, but one rank kills itself. `where` is the rank, the method of the writer, and the step."""
    _in_a_save(*where, lambda: os.kill(os.getpid(), signal.SIGKILL), halfway=True)
    return main(argv, log)


def _in_a_save(rank, method, step, do, halfway=False):
    """Call `do` on a rank in a method of DCP's writer, if the step is saved.

    With `halfway`, the other files of the rank are written, and half of the first one.
    """
    if os.environ["RANK"] != str(rank):
        return
    for writer in (FileSystemWriter, HuggingFaceStorageWriter):
        _patch(writer, method, rank, step, do, halfway)


def _patch(writer, method, rank, step, do, halfway):
    original = getattr(writer, method)

    def patched(self, *args, **kwargs):
        if f"step-{step}" not in str(self.path).split(os.sep):
            return original(self, *args, **kwargs)
        if halfway and method == "write_data":
            original(self, *args, **kwargs)
            for name in os.listdir(self.path):
                if name.startswith(f"__{rank}_"):
                    path = os.path.join(self.path, name)
                    os.truncate(path, os.path.getsize(path) // 2)
        do()
        return original(self, *args, **kwargs)

    setattr(writer, method, patched)


def moment(log, steps, seconds):
    """A function that returns `seconds` after a run has taken so many more steps."""

    def wait(alive):
        before = _lines(log)
        end = time.monotonic() + 100
        while _lines(log) < before + steps:
            assert alive() and time.monotonic() < end, "the run has ended"
            time.sleep(0.005)
        time.sleep(seconds)

    return wait


def until_one_is_dead(alive):
    """Return when a rank has killed itself."""
    end = time.monotonic() + 100
    while alive():
        assert time.monotonic() < end, "no rank has died"
        time.sleep(0.01)


def _lines(path):
    return open(path).read().count("\n") if os.path.exists(path) else 0


def with_a_signal(argv, log, rank, step):
    """Train, but one rank alone gets a SIGTERM in the middle of a step, between two accumulated gradients."""
    from torchtitan.trainer import Trainer

    if os.environ["RANK"] == str(rank):
        original = Trainer.forward_backward_step

        def forward_backward_step(self, **kwargs):
            if self.step == step:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(self, **kwargs)

        Trainer.forward_backward_step = forward_backward_step
    return main(argv, log)
