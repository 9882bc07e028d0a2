"""TorchTitan's activation checkpointing, made to know our operators and what crosses between CP ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy
from torchtitan.distributed import activation_checkpoint

import titan_gdn.ops.flops  # noqa: F401  (a memory budget is spent by what operators cost)
from titan_gdn.parallel.collectives import group_name
from titan_gdn.parallel.exchange import Exchange, NoExchange
from titan_gdn.runtime import partitioner


class SelectiveAC(activation_checkpoint.SelectiveAC):
    """TorchTitan's, which also saves the results of our operators and of exchanges.

    Rules, convolutions and document attention run once. Of communication, what the exchange of a block says
    is saved (`Exchange.saved`). What is gathered of hidden states is not, be it over CP or over TP, for that
    is what checkpointing is to free; neither are the keys and values of full attention, of the whole length
    too.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(activation_checkpoint.SelectiveAC.Config):
        save_exchange: bool = True
        """Save what the exchanges "all_to_all" and "state" send, and what "all_gather" sends back, instead
        of sending it again in the backward. Hidden states that were gathered are gathered again."""

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        wrapped = super()._wrap_block(module, base_fqn=base_fqn)
        torchtitans = wrapped.checkpoint_fn.keywords["context_fn"]
        exchange = NoExchange()
        if self.config.save_exchange and module.linear_attention is not None:
            exchange = module.linear_attention.exchange

        def contexts() -> tuple[Any, Any]:
            # TorchTitan's list is of operators: it cannot tell the group that a collective runs over.
            forward, recompute = torchtitans()
            forward.policy_fn = partial(_policy, exchange, forward.policy_fn)
            return forward, recompute

        wrapped.checkpoint_fn = partial(wrapped.checkpoint_fn, context_fn=contexts)
        return wrapped


class MemoryBudgetAC(activation_checkpoint.MemoryBudgetAC):
    """TorchTitan's policy, for blocks that take process groups as arguments."""

    @dataclass(kw_only=True, slots=True)
    class Config(activation_checkpoint.MemoryBudgetAC.Config):
        pass

    def apply(self, model: nn.Module) -> None:
        """Set the memory budget of all compiled blocks of the model."""
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
