"""Runs a function on several ranks, each a process forked from a server that has imported TorchTitan.

`run(function, world_size, *args)` calls `function(*args)` on every rank, with the environment variables of
torchrun, and returns the list of results. The imports (10 s) happen once, in `tests.preload`, so a call costs
about a second. After `timeout` seconds the ranks are killed, and the error shows the stack of each.
"""

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import random
import socket
import tempfile
import time
import traceback

import torch

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["tests.preload"])


def run(function, world_size, *args, timeout=120):
    """Call `function(*args)` on `world_size` ranks and return the list of their results."""
    with tempfile.TemporaryDirectory() as folder:
        failed = _wait(_start(function, world_size, args, folder, timeout), timeout + 10)
        reports = [_read(os.path.join(folder, f"{rank}.txt")) for rank in range(world_size)]
        if failed:
            told = "\n".join(
                f"--- rank {rank}: {report or 'no report'}" for rank, report in enumerate(reports)
            )
            raise AssertionError(f"{failed} of {world_size} ranks\n{told}")
        return [
            torch.load(os.path.join(folder, f"{rank}.pt"), weights_only=False) for rank in range(world_size)
        ]


def _free_port():
    """A port for the ranks' store, outside the range from which the system takes ports of its own.

    A port of that range may be taken by any connection between now and the moment when rank 0 listens.
    """
    while True:
        port = random.SystemRandom().randrange(10000, 30000)
        with socket.socket() as attempt, contextlib.suppress(OSError):
            attempt.bind(("127.0.0.1", port))
            return port


def run_and_kill(function, world_size, *args, victim, when, timeout=120):
    """Call `function(*args)` on the ranks, kill one of them with SIGKILL, then all others as torchrun does.

    Args:
        victim: The rank to kill; None if one of them kills itself.
        when: A function that returns once the moment has come. It is called with a function that says
            whether all ranks are still running.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = _start(function, world_size, args, folder, timeout)
        when(lambda: all(process.is_alive() for process in ranks))
        if victim is not None:
            ranks[victim].kill()
            ranks[victim].join()
        _wait(ranks, timeout)
        reports = [_read(os.path.join(folder, f"{rank}.txt")) for rank in range(world_size)]
        assert any(process.exitcode == -9 for process in ranks), reports


def _start(function, world_size, args, folder, timeout):
    port = _free_port()
    ranks = [
        _server.Process(
            target=_rank, args=(function, args, rank, world_size, port, folder, timeout), daemon=True
        )
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    return ranks


def _wait(ranks, timeout):
    """Wait for the ranks and kill those that remain. Return what went wrong, or None."""
    end = time.monotonic() + timeout
    while (alive := [process for process in ranks if process.is_alive()]) and time.monotonic() < end:
        multiprocessing.connection.wait([process.sentinel for process in alive], end - time.monotonic())
        if any(process.exitcode for process in ranks):
            time.sleep(1)  # other ranks may be about to fail with a clearer message
            break
    hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for process in ranks:
        process.kill()
        process.join()
    codes = {rank: process.exitcode for rank, process in enumerate(ranks) if process.exitcode not in (0, -9)}
    if codes:
        return f"exit codes {codes}"
    return f"time-out: {hung}" if hung else None


def _rank(function, args, rank, world_size, port, folder, timeout):
    with open(os.path.join(folder, f"{rank}.txt"), "w") as report:
        faulthandler.dump_traceback_later(timeout, exit=True, file=report)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        torch.set_num_threads(1)
        try:
            result = function(*args)
            torch.save(result, os.path.join(folder, f"{rank}.pt"))
        except BaseException:
            report.write(traceback.format_exc())
            report.flush()
            os._exit(1)
        os._exit(0)  # skips destructors: some of torch's wait for other ranks


def _read(path):
    try:
        with open(path) as file:
            return file.read()
    except FileNotFoundError:
        return None
