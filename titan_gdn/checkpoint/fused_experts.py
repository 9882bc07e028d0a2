"""Treats a tensor that holds all experts of a layer as one tensor per expert.

Files of Qwen3.5 as published hold `experts.gate_up_proj` `[E, 2F, D]`, in each expert the gate first, and
`experts.down_proj` `[E, D, F]`. Each expert's matrix is a contiguous range of bytes: reading takes that
range, and writing puts the matrices one after the other. Nothing is transposed or copied whole.
(transformers, `models/qwen3_5_moe/modeling_qwen3_5_moe.py`, `Qwen3_5MoeExperts`.)
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import NamedTuple

_FUSED = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")
_ONE = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_MATRICES = {"gate_up": ("gate", "up"), "down": ("down",)}


class Matrix(NamedTuple):
    """One expert's matrix in a fused tensor.

    Attributes:
        name: its name in files with a tensor for each expert.
        begin: its first byte, counted from that of the fused tensor.
        end: the byte after its last.
        shape: its shape.
    """

    name: str
    begin: int
    end: int
    shape: tuple[int, int]


def matrices(name: str, shape: tuple[int, ...], n_bytes: int) -> list[Matrix]:
    """Returns the matrices in a fused tensor in the order of their bytes; none of any other tensor."""
    found = _FUSED.fullmatch(name)
    if found is None or len(shape) != 3 or not shape[0]:
        return []
    parts = _MATRICES[found[2]]
    if shape[1] % len(parts):
        return []
    size = n_bytes // (shape[0] * len(parts))
    names = [f"{found[1]}.{i}.{part}_proj.weight" for i in range(shape[0]) for part in parts]
    rows = shape[1] // len(parts)
    return [Matrix(one, i * size, (i + 1) * size, (rows, shape[2])) for i, one in enumerate(names)]


def holds_all_experts(name: str) -> bool:
    """Whether a tensor of this name holds the matrices of all experts."""
    return _FUSED.fullmatch(name) is not None


def fused_name(name: str) -> str | None:
    """Returns the name of the fused tensor that holds an expert's matrix; None for any other tensor."""
    found = _ONE.fullmatch(name)
    if found is None:
        return None
    return f"{found[1]}.{'down' if found[3] == 'down' else 'gate_up'}_proj"


def fused_groups(names: list[str], fused: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    """Groups tensors by the tensor that a file stores them in.

    Args:
        names: names of tensors, with one per expert.
        fused: names of the tensors in the file that hold all experts.

    Yields:
        The name of a tensor in the file, and the names of the tensors that it holds, in the order of its
        bytes. A tensor that is not part of a fused one is alone.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        whole = fused_name(name)
        groups[name if whole is None or whole not in fused else whole].append(name)
    for whole, members in groups.items():
        yield whole, sorted(members, key=_place)


def _place(name: str) -> tuple[int, str]:
    """The place of a matrix in its fused tensor: experts by number, the gate before up."""
    found = _ONE.fullmatch(name)
    return (int(found[2]), found[3]) if found else (0, "")


def fused_shape(shape: tuple[int, ...], members: list[str]) -> tuple[int, ...]:
    """Returns the shape of the fused tensor of `members`, which all have the shape `shape`."""
    n_experts = len({_place(name)[0] for name in members})
    return (n_experts, len(members) // n_experts * shape[0], shape[1])
