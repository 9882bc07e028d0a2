"""Counts the bytes that a rank sends over each process group by intercepting collectives."""

from collections import defaultdict
from types import TracebackType

from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

from titan_gdn.parallel.collectives import group_name


class BytesSent(TorchDispatchMode):
    """While active, counts the bytes that this rank sends and the collectives it calls, by group name.

    In an all-gather, a rank sends its shard to each of the `n - 1` other ranks. In an all-to-all and a
    reduce-scatter it sends all but its own part, in an all-reduce twice as much (a reduce-scatter and an
    all-gather).
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = defaultdict(int)
        self.calls: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        name = function.overloadpacket.__name__
        if function.namespace in ("_c10d_functional", "_dtensor") and name in _SENT:
            group = group_name(args)
            parts = distributed_c10d._get_group_size_by_name(group)
            self.bytes[group] += _SENT[name](args[0].numel() * args[0].element_size(), parts)
            self.calls[group] += 1
        return function(*args, **(kwargs or {}))

    def __enter__(self) -> "BytesSent":
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, value, trace)


def _all_but_own_part(size: int, parts: int) -> int:
    return size * (parts - 1) // parts


_SENT = {
    "all_gather_into_tensor": lambda size, parts: size * (parts - 1),
    "reduce_scatter_tensor": _all_but_own_part,
    "shard_dim_alltoall": _all_but_own_part,
    "all_to_all_single": _all_but_own_part,
    "all_reduce": lambda size, parts: 2 * _all_but_own_part(size, parts),
}
