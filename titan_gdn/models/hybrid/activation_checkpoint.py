"""TorchTitan's activation checkpointing, extended by our operators and the exchanges between CP ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy
from torchtitan.distributed import activation_checkpoint

import titan_gdn.ops.flops  # noqa: F401  (a memory budget weighs operators by their registered FLOPs)
from titan_gdn.parallel.collectives import group_name
from titan_gdn.parallel.exchange.base import Exchange
from titan_gdn.parallel.exchange.local import NoExchange
from titan_gdn.runtime import partitioner


class SelectiveAC(activation_checkpoint.SelectiveAC):
    """TorchTitan's selective policy, which also saves the results of our operators and of exchanges.

    Rules, convolutions and document attention run once. Of the collectives over CP, those that the exchange
    of a block names in `Exchange.saved` run once. Gathered hidden states, over CP or TP, are not saved,
    because they are what checkpointing is meant to free. Gathered keys and values of full attention are not
    saved either, because they have the length of the whole sequence.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(activation_checkpoint.SelectiveAC.Config):
        save_exchange: bool = True
        """Save what exchanges of linear attention send over CP instead of sending it again in the backward.
        Gathered hidden states are not saved but gathered again."""

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        wrapped = super()._wrap_block(module, base_fqn=base_fqn)
        torchtitans = wrapped.checkpoint_fn.keywords["context_fn"]
        exchange = NoExchange()
        if self.config.save_exchange and module.linear_attention is not None:
            exchange = module.linear_attention.exchange

        def contexts() -> tuple[Any, Any]:
            # TorchTitan's list names operators, so it cannot tell over which group a collective runs.
            forward, recompute = torchtitans()
            forward.policy_fn = partial(_policy, exchange, forward.policy_fn)
            return forward, recompute

        wrapped.checkpoint_fn = partial(wrapped.checkpoint_fn, context_fn=contexts)
        return wrapped


class MemoryBudgetAC(activation_checkpoint.MemoryBudgetAC):
    """TorchTitan's memory budget for blocks that take process groups as arguments."""

    @dataclass(kw_only=True, slots=True)
    class Config(activation_checkpoint.MemoryBudgetAC.Config):
        pass

    def apply(self, model: nn.Module) -> None:
        """Apply the budget as TorchTitan does."""
        partitioner.ignore_process_groups()
        super().apply(model)


def _policy(
    exchange: Exchange,
    otherwise: Callable[..., CheckpointPolicy],
    context: Any,
    operator: OpOverload,
    *args: Any,
    **kwargs: Any,
) -> CheckpointPolicy:
    ours = operator.namespace == "titan_gdn"
    if ours or (operator in exchange.saved and group_name(args) == exchange.mesh.get_group().group_name):
        return CheckpointPolicy.MUST_SAVE
    return otherwise(context, operator, *args, **kwargs)
