"""A line on the terminal that says what a long step is doing: `step 12: micro-batch 1/4, backward, 35 s`."""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

_AFTER = 2.0
"""Seconds that a step takes before the line appears: shorter steps show that they live by themselves."""
_CLEAR = "\r\x1b[K"


@contextmanager
def shown(trainer: "Trainer") -> Iterator[None]:
    """Show what a trainer is doing while the context is open.

    Nothing is written where stderr is not a terminal, nor on ranks that do not log.
    """
    logger = logging.getLogger()
    if not sys.stderr.isatty() or not logger.isEnabledFor(logging.INFO):
        yield
        return
    step, line, end = _Step(trainer), _Line(sys.stderr), threading.Event()

    def draw() -> None:
        while not end.wait(0.5):
            line.show(step.text())

    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    try:
        with _above(line, logger):
            yield
    finally:
        end.set()
        thread.join()
        line.show("")


@contextmanager
def _above(line: "_Line", logger: logging.Logger) -> Iterator[None]:
    """Let what is logged, or written to stderr, clear the line first."""
    handlers = [handler for handler in logger.handlers if isinstance(handler, logging.StreamHandler)]
    streams = [handler.stream for handler in handlers]
    stderr = sys.stderr
    sys.stderr = cast(TextIO, _Above(stderr, line))
    for handler, stream in zip(handlers, streams, strict=True):
        handler.setStream(cast(TextIO, _Above(stream, line)))
    try:
        yield
    finally:
        sys.stderr = stderr
        for handler, stream in zip(handlers, streams, strict=True):
            handler.setStream(stream)


class _Line:
    """The last line of a terminal."""

    def __init__(self, terminal: TextIO) -> None:
        self.terminal = terminal
        self.text = ""
        self.lock = threading.RLock()

    def show(self, text: str) -> None:
        """Replace the line; "" removes it."""
        with self.lock:
            if text != self.text:
                width = os.get_terminal_size(self.terminal.fileno()).columns or 80  # 0 where nobody has said
                self.terminal.write(_CLEAR + text[: width - 1])
                self.terminal.flush()
                self.text = text


class _Above:
    """A stream to the terminal of a line; what is written clears the line first."""

    def __init__(self, stream: TextIO, line: _Line) -> None:
        self.stream, self.line = stream, line

    def write(self, text: str) -> int:
        with self.line.lock:
            self.line.show("")
            return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _Step:
    """What a trainer is doing: the step, its micro-batch, and which part of it runs."""

    def __init__(self, trainer: "Trainer") -> None:
        self.trainer = trainer
        self.begin, self.microbatch, self.doing = time.monotonic(), 0, "loading"
        for owner, name, doing in (
            (trainer, "train_step", "data"),
            (trainer, "forward_backward_step", "forward"),
            (trainer.optimizers, "step", "optimizer"),
            (trainer.checkpointer, "save", "checkpoint"),
            (getattr(trainer, "validator", None), "validate", "validation"),
        ):
            if owner is not None:
                self._announce(owner, name, doing)
        if not trainer.parallel_dims.pp_enabled:  # in a pipeline, forwards and backwards alternate
            trainer.model_parts[0].register_forward_hook(self._after_forward)

    def _announce(self, owner: Any, name: str, doing: str) -> None:
        call = getattr(owner, name)

        def announced(*args: Any, **kwargs: Any) -> Any:
            if doing == "data":
                self.begin, self.microbatch = time.monotonic(), 0
            self.microbatch += doing == "forward"
            self.doing = doing
            try:
                return call(*args, **kwargs)
            finally:
                if doing not in ("forward", "optimizer"):  # a part of a step, whose end is the step's
                    self.doing = ""

        setattr(owner, name, announced)

    def _after_forward(self, model: Any, args: Any, output: Any) -> None:
        if model.training:
            self.doing = "backward"

    def text(self) -> str:
        """The line; empty while a step is short, and between steps."""
        seconds = time.monotonic() - self.begin
        if seconds < _AFTER or not self.doing:
            return ""
        count = self.trainer.gradient_accumulation_steps
        part = f"micro-batch {self.microbatch}/{count}, " if self.doing in ("forward", "backward") else ""
        return f"step {self.trainer.step}: {part}{self.doing}, {seconds:.0f} s"
