"""Lets TorchTitan 0.3 read the state of a data loader without running what it says.

TorchTitan pickles the states of its own data loaders, and unpickles what a checkpoint holds: one from
elsewhere may call any function. The states are numbers, texts, and lists and dicts of these.
"""

import io
import pickle
from types import SimpleNamespace
from typing import Any

from torchtitan.components import dataloader


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(
            f"the state of the data loader refers to {module}.{name}, as no state does: do not trust this "
            'checkpoint, or start with the first row: checkpoint.exclude_from_loading = ["dataloader"]'
        )


def patch() -> None:
    """Make TorchTitan's data loaders unpickle plain values alone."""
    loads = lambda state: _Unpickler(io.BytesIO(state)).load()  # noqa: E731
    dataloader.pickle = SimpleNamespace(dumps=pickle.dumps, loads=loads)  # pyright: ignore
