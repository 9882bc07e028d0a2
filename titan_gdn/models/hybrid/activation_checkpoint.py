"""TorchTitan's activation checkpointing for models with this package's operators and exchanges over CP."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch import nn
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy
from torchtitan.distributed import activation_checkpoint

import titan_gdn.ops.flops  # noqa: F401  (registers the FLOPs of operators, which a memory budget weighs)
from titan_gdn.models.hybrid.block import HybridBlock
from titan_gdn.parallel.collectives import group_name
from titan_gdn.parallel.exchange.base import Exchange
from titan_gdn.parallel.exchange.local import NoExchange
from titan_gdn.runtime import partitioner


class SelectiveAC(activation_checkpoint.SelectiveAC):
    """TorchTitan's selective policy that also saves the results of this package's operators and of exchanges.

    Rules, convolutions and document attention run once. Collectives over CP that a block's exchange lists in
    `Exchange.saved` run once. Gathered hidden states are not saved, because checkpointing is meant to free
    them. Gathered keys and values of full attention are not saved either, because they have the length of the
    whole sequence.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(activation_checkpoint.SelectiveAC.Config):
        save_exchange: bool = True
        """Save what the exchanges of linear attention receive over CP, so that the backward does not
        communicate again. Gathered hidden states are not saved but gathered again."""

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        wrapped: Any = super()._wrap_block(module, base_fqn=base_fqn)
        torchtitan_contexts = wrapped.checkpoint_fn.keywords["context_fn"]
        exchange: Exchange = NoExchange()
        block, config = cast(HybridBlock, module), cast(SelectiveAC.Config, self.config)
        if config.save_exchange and block.linear_attention is not None:
            exchange = block.linear_attention.exchange

        def contexts() -> tuple[Any, Any]:
            # TorchTitan's policy only sees operators, so it cannot tell over which group a collective runs.
            forward, recompute = torchtitan_contexts()
            forward.policy_fn = partial(_policy, exchange, forward.policy_fn)
            return forward, recompute

        wrapped.checkpoint_fn = partial(wrapped.checkpoint_fn, context_fn=contexts)
        return wrapped


class MemoryBudgetAC(activation_checkpoint.MemoryBudgetAC):
    """TorchTitan's memory budget, for blocks that take process groups as arguments."""

    @dataclass(kw_only=True, slots=True)
    class Config(activation_checkpoint.MemoryBudgetAC.Config):
        pass

    def apply(self, model: nn.Module) -> None:
        """Applies the budget after the partitioner is told to ignore process groups."""
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
    own = operator.namespace == "titan_gdn"
    if own or (operator in exchange.saved and group_name(args) == exchange.mesh.get_group().group_name):
        return CheckpointPolicy.MUST_SAVE
    return otherwise(context, operator, *args, **kwargs)
