"""Ctrl-C and SIGTERM end a run after a whole step, which is saved.

Until training begins, a signal ends the process at once: nothing is lost. Then the handler only remembers the
signal, and all ranks agree after each step whether to stop: a signal reaches ranks in different steps, or one
rank alone, and a rank that stops by itself leaves the others waiting in a collective. The agreement is an
all-reduce of one integer over gloo, which does not wait for a GPU's stream.

torchrun forwards the signals that it gets, to the workers of data loaders, too, and kills all of them after
30 seconds; `--shutdown-timeout` changes that. A rank whose launcher was killed gets a SIGTERM from the
kernel.
"""

import ctypes
import os
import shlex
import signal
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAME = 5.0
"""Seconds in which a signal that comes again is the same one: schedulers send it to all processes."""
_EARLY = "before the first step: nothing was trained, nothing is lost"
_BLOCKED = 2.0
"""Seconds after which a thread ends a rank that waits in C++, for other ranks to start, for example: Python
handles no signals there."""
_ORPHANED = 45.0
"""Seconds that a rank has to finish and save its step when its launcher was killed."""
_PR_SET_PDEATHSIG = 1


class Stopped(BaseException):
    """All ranks have agreed to stop after the step that was just taken.

    Not an `Exception`, so that no library takes it for an error.
    """


class Signals:
    """The signals that this process got.

    Attributes:
        number: The first signal, 0 if there was none.
        count: How many there were.
        command: The command that started this run.
        graceful: Whether the run finishes its step and saves it; until then, a signal ends the process.
    """

    def __init__(self) -> None:
        self.number = 0
        self.count = 0
        self.command = ""
        self.graceful = False
        self._when = 0.0
        self._group: Any = None

    def install(self) -> None:
        """Handle signals, and get one when the launcher dies. Call this first: imports take seconds."""
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self._handle)
        self.command = _command()  # as long as the launcher lives
        # A worker of a data loader dies of a signal, which would be an error of its rank.
        os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS))
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._end_blocked, args=[reader], daemon=True).start()
        if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
            launcher = os.getppid()
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != launcher:  # it died before the call
                os.kill(os.getpid(), signal.SIGTERM)
            threading.Thread(target=self._end_orphan, args=[launcher], daemon=True).start()

    def _end_blocked(self, reader: int) -> None:
        while True:
            numbers = [number for number in os.read(reader, 1) if number in _SIGNALS]
            if numbers:
                time.sleep(_BLOCKED)
                if not self.number and not self.graceful:
                    self.number = numbers[0]
                    self._leave(_EARLY)

    def _end_orphan(self, launcher: int) -> None:
        while os.getppid() == launcher:
            time.sleep(1)
        time.sleep(_ORPHANED)
        self.number = signal.SIGTERM
        self._leave(f"of a launcher that was killed: the step takes longer than {_ORPHANED:g} seconds")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        now = time.monotonic()
        if self.number and now - self._when < _SAME:
            return
        again, self.number, self._when = bool(self.number), self.number or number, now
        if again:
            self._leave("again, so the run ends at once. What was saved before is complete")
        if not self.graceful:
            self._leave(_EARLY)

    def _leave(self, why: str) -> NoReturn:
        if os.environ.get("RANK", "0") == "0" and not _peer_failed():
            with suppress(OSError):  # the terminal may be gone
                os.write(2, f"titan_gdn: {self.name} {why}\n".encode())
        os._exit(self.code)

    @property
    def name(self) -> str:
        """The name of the signal, such as "SIGTERM"."""
        return signal.Signals(self.number).name

    @property
    def code(self) -> int:
        """The exit code that a shell gives to a process which the signal ended."""
        return 128 + self.number

    def watch(self, trainer: "Trainer") -> None:
        """Make a trainer raise `Stopped` after a step, a save or a validation batch, on all ranks alike."""
        self.graceful = True
        if trainer.config.comm.mode == "fake_backend":  # one process stands for all ranks
            return
        import torch.distributed as dist

        # A rank may wait for the slowest one's step, however long that takes.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
        step, goes_on = trainer.train_step, trainer.should_continue_training

        def agree() -> None:
            if trainer.step < trainer.config.training.steps:  # behind the last step, the run ends as it would
                self._agree()

        def train_step(*args: Any, **kwargs: Any) -> None:
            step(*args, **kwargs)
            agree()

        def should_continue_training() -> bool:
            agree()  # the signal came in a save or a validation
            return goes_on()

        trainer.train_step = train_step
        trainer.should_continue_training = should_continue_training
        if trainer.config.validator.enable:
            validator: Any = trainer.validator
            prepare = validator.post_dataloading_process

            def post_dataloading_process(*args: Any, **kwargs: Any) -> Any:
                agree()
                return prepare(*args, **kwargs)

            validator.post_dataloading_process = post_dataloading_process

    def _agree(self) -> None:
        import torch
        import torch.distributed as dist

        number = torch.tensor(self.number, dtype=torch.int32)
        dist.all_reduce(number, dist.ReduceOp.MAX, self._group)
        if number:
            self.number = int(number)
            raise Stopped


def _peer_failed() -> bool:
    """Whether a rank of this machine has told torchrun of its error, and torchrun therefore ends this one."""
    told = Path(os.environ.get("TORCHELASTIC_ERROR_FILE") or "none")
    return any(told.parent.parent.glob(f"*/{told.name}"))


def _command() -> str:
    """The command that started this run."""
    own = shlex.join(["python", "-m", "titan_gdn.train", *sys.argv[1:]])
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return own
    try:
        with open(f"/proc/{os.getppid()}/cmdline") as file:
            words = file.read().split("\0")[:-1]
    except OSError:
        return own
    launchers = [i for i, word in enumerate(words) if os.path.basename(word) == "torchrun"]
    if launchers:
        return shlex.join(["torchrun", *words[launchers[0] + 1 :]])
    return shlex.join(words) if "titan_gdn.train" in words else own


SIGNALS = Signals()
