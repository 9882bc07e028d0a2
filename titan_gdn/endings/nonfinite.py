"""Stops a run before its weights become NaN, and names the first tensor of the step that is not finite.

TorchTitan 0.3 looks at the loss alone, only in steps that it logs, and after the optimizer has applied the
gradients; in between, checkpoints of NaN weights replace good ones. The norm of all gradients is equal on all
ranks, so all ranks stop in the same step.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torchtitan.distributed import utils as dist_utils

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


class NonfiniteError(RuntimeError):
    """The gradients of a step are not finite."""


class _Seen(NamedTuple):
    """A tensor of a step.

    Attributes:
        phase: what it is, in the order in which a step computes them.
        name: the qualified name of the module or parameter.
        finite: whether all its elements are finite, a tensor on its device.
    """

    phase: int
    name: str
    finite: Tensor


_PHASES = ("the parameter", "the output of", "the gradient of the output of", "the gradient of the parameter")
_PARAMETER, _OUTPUT, _GRADIENT, _PARAMETER_GRADIENT = range(4)


def watch(trainer: "Trainer") -> None:
    """Make a step whose gradients are not finite raise `NonfiniteError` before the optimizer applies them.

    With `debug.name_nonfinite = true`, hooks look at every output and gradient of every module, and the error
    names the first tensor that is not finite. A dry run computes nothing and is not watched.
    """
    if trainer.config.comm.mode == "fake_backend":
        return
    record = _Record(trainer) if getattr(trainer.config.debug, "name_nonfinite", False) else None
    clip = dist_utils.clip_grad_norm_

    def clip_and_check(parameters: list[nn.Parameter], *args: Any, **kwargs: Any) -> Tensor:
        if record is not None:
            record.gradients_of_parameters()
        norm = clip(parameters, *args, **kwargs)
        if not norm.isfinite():  # the host waits; it does so in every forward, for the offsets of documents
            raise NonfiniteError(_message(trainer.step, norm.item(), record))
        if record is not None:
            record.seen.clear()
        return norm

    dist_utils.clip_grad_norm_ = clip_and_check


def _message(step: int, norm: float, record: "_Record | None") -> str:
    told = f"step {step}: the norm of all gradients is {norm}, and so the loss or a gradient is not finite"
    weights = f"The weights are those of step {step - 1}, to which nothing was applied"
    if record is None:
        return f"{told}. {weights}. debug.name_nonfinite = true names the step's first such tensor"
    return f"{told}. The first such tensor is {record.first()}. {weights}"


class _Record:
    """Whether the tensors of a step are finite, in the order in which this rank computes them.

    Flags stay on the device: the host reads them only for an error.
    """

    def __init__(self, trainer: "Trainer") -> None:
        self.seen: list[_Seen] = []
        self.trainer = trainer
        for name, module in _named(part.named_modules() for part in trainer.model_parts):
            module.register_forward_hook(self._hook(name or "the model"))

    def _hook(self, name: str) -> Callable[..., None]:
        def watch_output(module: nn.Module, args: Any, output: Any) -> None:
            for x in tree_leaves(output) if module.training else ():
                if isinstance(x, Tensor) and x.is_floating_point():
                    self._add(_OUTPUT, name, x)
                    if x.requires_grad:
                        x.register_hook(lambda gradient: self._add(_GRADIENT, name, gradient))

        return watch_output

    def _add(self, phase: int, name: str, x: Tensor) -> None:
        with torch.no_grad():
            local = x.to_local() if isinstance(x, DTensor) else x
            self.seen.append(_Seen(phase, name, local.detach().isfinite().all()))

    def gradients_of_parameters(self) -> None:
        """Add what the backward accumulated; later layers are first."""
        for name, parameter in reversed(self._parameters()):
            if parameter.grad is not None:
                self._add(_PARAMETER_GRADIENT, name, parameter.grad)

    def _parameters(self) -> list[tuple[str, Any]]:
        return list(_named(part.named_parameters() for part in self.trainer.model_parts))

    def first(self) -> str:
        """The first tensor of all ranks that is not finite. All ranks call this together."""
        found = []
        before, self.seen = self.seen, []
        for name, parameter in self._parameters():
            self._add(_PARAMETER, name, parameter)
        dims = self.trainer.parallel_dims
        stage = dims.get_mesh("pp").get_local_rank() if dims.pp_enabled else 0
        for i, one in enumerate([*self.seen, *before]):
            if not one.finite:
                # Outputs go from the first pipeline stage to the last, gradients back.
                turn = -stage if one.phase >= _GRADIENT else stage
                found.append((one.phase, turn, i, dist.get_rank(), one.name))
        firsts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(firsts, min(found, default=None))
        possible = [first for first in firsts if first is not None]
        if not possible:
            return "none of a module: only their norm is beyond float32"
        phase, _, _, rank, name = min(possible)
        return f"{_PHASES[phase]} {name} (rank {rank})"


def _named(parts: Iterator[Iterator[tuple[str, Any]]]) -> Iterator[tuple[str, Any]]:
    """Modules or parameters of all parts with their names in the model, without those of wrappers."""
    for part in parts:
        for name, one in part:
            for wrapper in _WRAPPERS:
                name = name.replace(wrapper, "")
            yield name, one
