"""An error is one line on the screen, first and last; its traceback is in a file.

The exceptions of this package hold a sentence for the user. Others are programming errors or those of
libraries: the line has their first line and names the file of the traceback.
"""

import atexit
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from titan_gdn.endings.signals import SIGNALS

_OF_PEERS = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|closed by peer|[Tt]imed out|NCCL|TCPStore|Socket"
    r"|store->get|failed to (recv|send)|DistNetworkError|DistBackendError|ProcessGroup.*abort"
)
"""What an error says that only follows from the end of another rank."""

TURN = 3.0
"""Seconds in which rank 0 prints and its launcher ends the others, which have the same error."""
_AFTER_PEERS = 8.0
"""Seconds in which another rank tells the cause of an error that follows from its end."""


class Reporter:
    """Reports the error that ends this process.

    Attributes:
        folder: The folder of tracebacks. Until the run's is known, that of the system's temporary files.
        traceback: Whether tracebacks are printed, too.
    """

    def __init__(self) -> None:
        self.folder = os.path.join(tempfile.gettempdir(), "titan_gdn")
        self.traceback = False

    def report(self, error: BaseException) -> int:
        """Print an error in one line. Return the exit code.

        Rank 0 prints at once, other ranks later: if all of them have the error, torchrun ends them before.
        """
        # TorchTitan has written a traceback for torchrun's summary.
        if told := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            with suppress(OSError):
                os.remove(told)
        cause = _cause(error)
        own = type(cause).__module__.startswith("titan_gdn.")
        line = _text(cause) if own else self._first_line(cause, error)
        follows = not own and _OF_PEERS.search(f"{type(cause).__name__}: {cause}") is not None
        if follows and SIGNALS.number:  # the launcher ends this rank, because another one has failed
            return SIGNALS.code
        if _ended_within((_rank() != 0) * TURN + follows * _AFTER_PEERS):
            return SIGNALS.code
        if self.traceback:
            traceback.print_exception(error)
        tell(line)
        return 1

    def _first_line(self, cause: BaseException, error: BaseException) -> str:
        first = (_text(cause) or repr(cause)).splitlines()[0].rstrip(".")
        try:
            os.makedirs(self.folder, exist_ok=True)
            path = os.path.join(self.folder, f"rank_{_rank()}.txt")
            with open(path, "w") as file:
                traceback.print_exception(error, file=file)
            where = f"traceback: {path}; debug.traceback = true prints it"
        except OSError as failed:
            where = f"its traceback could not be written to {self.folder}: {failed.strerror}"
        return f"rank {_rank()}: {type(cause).__name__}: {first} ({where})"


REPORTER = Reporter()


def tell(line: str) -> None:
    """Print a line, and give it to torchrun, whose summary ends with it."""
    line = f"titan_gdn: {line}"
    with suppress(OSError):  # the terminal may be gone
        print(line, file=sys.stderr, flush=True)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError), open(file, "w") as stream:
            json.dump({"message": message}, stream)


def run(main: Callable[[], None]) -> NoReturn:
    """Call the main function of a process and end the process with its exit code.

    The interpreter is not torn down: threads of gloo that outlive their process group would then abort a
    process that has finished and saved ("terminate called without an active exception").
    """
    code = code_of(main)
    for worker in multiprocessing.active_children():  # of a data loader; they leave SIGTERM to this process
        worker.kill()
    atexit._run_exitfuncs()  # pyright: ignore  # what libraries still have to write
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def code_of(main: Callable[[], None]) -> int:
    """Call the main function of a process, report its error, and return the exit code."""
    error = None
    try:
        main()
    except BaseException as raised:
        error = raised
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # in which data loaders raise when a worker ends
    if error is None:
        return 0
    if not isinstance(error, SystemExit):
        return REPORTER.report(error)
    if isinstance(error.code, str):
        tell(error.code)
    return error.code if isinstance(error.code, int) else int(error.code is not None)


def _cause(error: BaseException) -> BaseException:
    """The error that explains another: that of the rank which failed first in a distributed checkpoint."""
    failures = getattr(error, "failures", None)  # of a CheckpointException
    if isinstance(failures, dict) and failures:
        first = next(iter(failures.values()))
        return first[0] if isinstance(first, tuple) else first
    return error


def _ended_within(seconds: float) -> bool:
    """Wait; whether the launcher ends this rank meanwhile, because another one has told its error."""
    before, end = SIGNALS.count, time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.05)
        if SIGNALS.count > before:
            return True
    return False


def _text(error: BaseException) -> str:
    """What an error says. A data loader puts the traceback of its worker before it."""
    text = str(error).strip()
    if text.startswith("Caught ") and "Original Traceback" in text:
        text = text.splitlines()[-1]
        return text.partition(": ")[2] or text
    return text


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
