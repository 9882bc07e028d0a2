"""Runs of the command on several ranks: what a terminal shows, and how they end.

`run(argv, world_size)` forks ranks from the server of `tests.ranks` and does what torchrun does: it waits for
all ranks, ends the others with SIGTERM when one has failed, and kills them after `GRACE` seconds. A run costs
seconds, not the half minute of a torchrun that imports everything again.
"""

import contextlib
import multiprocessing.connection
import os
import re
import signal
import tempfile
import time
from dataclasses import dataclass

import torch

from tests import ranks

GRACE = 10
"""Seconds that ranks have to end after SIGTERM. torchrun gives them 30."""


@dataclass
class Ending:
    """How a run ended.

    Attributes:
        code: The code of the run: that of the rank that failed first, 0 if none did. Negative for a signal.
        codes: The exit code of each rank.
        screen: What all ranks wrote to stdout and stderr.
        seconds: How long the run took.
        killed: The ranks that did not end by themselves.
    """

    code: int
    codes: list[int]
    screen: str
    seconds: float
    killed: list[int]


def run(argv, world_size=2, *, prepare=None, act=None, timeout=60):
    """Run `titan_gdn.train` and return its `Ending`.

    Args:
        argv: The command line without the program's name.
        world_size: Number of ranks.
        prepare: A function that each rank calls first.
        act: A function that is called once the ranks run, with their processes and a function that returns
            the screen so far (see `after`). It may send signals.
        timeout: Seconds after which the run hangs.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "screen")
        open(path, "w").close()
        port = ranks._free_port()
        started = time.monotonic()
        processes = [
            ranks._server.Process(target=_rank, args=(argv, prepare, rank, world_size, port, path))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            if act is not None:
                act(processes, lambda: _read(path))
            code, killed = _wait(processes, started + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
        seconds = time.monotonic() - started
        return Ending(code, [process.exitcode for process in processes], _read(path), seconds, killed)


def after(pattern, do, timeout=60):
    """An `act` that waits until the screen shows a pattern, then calls `do` with the processes."""

    def act(processes, screen):
        end = time.monotonic() + timeout
        while not re.search(pattern, screen()):
            assert time.monotonic() < end and all(p.is_alive() for p in processes), screen()
            time.sleep(0.005)
        do(processes)

    return act


def send(number, *to):
    """A function that sends a signal to some ranks, by default to all."""

    def do(processes):
        for rank in to or range(len(processes)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(processes[rank].pid, number)

    return do


def _wait(processes, end):
    """Wait for all ranks as torchrun does. Return the first code that is not 0, and who had to be killed."""
    code = 0
    while (alive := _alive(processes)) and time.monotonic() < end:
        multiprocessing.connection.wait([p.sentinel for p in alive], max(0, end - time.monotonic()))
        if code := next((p.exitcode for p in processes if p.exitcode), 0):
            send(signal.SIGTERM)(_alive(processes))
            grace = time.monotonic() + GRACE
            while _alive(processes) and time.monotonic() < grace:
                time.sleep(0.02)
            break
    return code, [rank for rank, p in enumerate(processes) if p.is_alive()]


def _alive(processes):
    return [process for process in processes if process.is_alive()]


def _rank(argv, prepare, rank, world_size, port, path):
    screen = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.dup2(screen, 1)
    os.dup2(screen, 2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    import torchtitan.trainer

    from titan_gdn import train
    from titan_gdn.endings import errors

    torchtitan.trainer.time.sleep = _no_pause(torchtitan.trainer.time.sleep)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # As on a terminal: a suite in the background of a shell inherits that SIGINT is ignored.
        signal.signal(number, signal.SIG_DFL)
    if prepare is not None:
        prepare()
    errors.run(lambda: train.main(argv))


def _no_pause(sleep):
    """Sleep, but not for the seconds in which TorchTitan's trainer lets other ranks finish printing."""
    return lambda seconds: None if seconds == 2 else sleep(seconds)


def _read(path):
    with open(path, errors="replace") as file:
        return re.sub(r"\x1b\[[0-9;]*m", "", file.read())
