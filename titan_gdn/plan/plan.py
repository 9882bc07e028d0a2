"""The figures of a plan: the cost of each exchange, the choice, the model and its memory."""

import copy
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.module import Module
from torchtitan.tools.utils import set_default_dtype

from titan_gdn.config.run_checks import check_run
from titan_gdn.config.sections import POLICIES
from titan_gdn.config.source import ConfigError
from titan_gdn.layers.document_attention import inner_attention
from titan_gdn.layers.linear_attention import LinearAttention
from titan_gdn.models.hybrid.activation_checkpoint import SelectiveAC
from titan_gdn.models.hybrid.block import linear_kinds, linear_layers, names_of
from titan_gdn.models.hybrid.exchange_choice import (
    batch_of,
    choice_of,
    recomputes,
    saved_exchanges,
    saves_exchange,
)
from titan_gdn.models.hybrid.model import HybridModel
from titan_gdn.models.hybrid.mtp import mtp_of
from titan_gdn.parallel.cost import Choice, Cost, cost
from titan_gdn.parallel.exchange.registry import EXCHANGES, impossible, traffic
from titan_gdn.parallel.machine import Machine
from titan_gdn.parallel.traffic import LayerShape, ShardedBatch, Traffic
from titan_gdn.plan.memory import Added, Memory, estimate
from titan_gdn.plan.options import SWEPT

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Exchanges:
    """A kind of linear attention under each exchange.

    Attributes:
        kind: the title of the layer.
        layers: the number of layers of this kind.
        named: what the configuration names, "auto" or an exchange.
        batch: the batch and the mesh.
        machine: the machine that the run is planned for.
        recompute: whether the backward repeats the forward's exchange.
        choice: what "auto" takes.
        traffic: what a layer sends, computes and holds under each exchange that heads and tokens allow.
        costs: the time of each of them.
        way_in: the ratio of bytes that "all_to_all" and "all_gather" send over CP before the rule, and the
            same ratio if the full gates of decay and output were sent too, as in the comparison that was
            published for rules that decay per channel; None for other rules. None if one of the two exchanges
            is impossible.
    """

    kind: str
    layers: int
    named: str
    batch: ShardedBatch
    machine: Machine
    recompute: bool
    choice: Choice
    traffic: dict[str, Traffic]
    costs: dict[str, Cost]
    way_in: tuple[float, float | None] | None

    @property
    def taken(self) -> str:
        """The exchange that the run will use."""
        return self.choice.name if self.named == "auto" else self.named

    def as_json(self) -> dict[str, Any]:
        """All figures of one layer, in bytes, seconds and FLOPs."""
        return {
            "kind": self.kind,
            "layers": self.layers,
            "named": self.named,
            "taken": self.taken,
            "auto": self.choice.name,
            "reason": self.choice.reason,
            "impossible": self.choice.impossible,
            "batch": asdict(self.batch),
            "way_in": self.way_in,
            "exchanges": {
                name: asdict(sent) | {"time": asdict(cost) | {"total": cost.total}}
                for (name, sent), cost in zip(self.traffic.items(), self.costs.values(), strict=True)
            },
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run needs, for one rank.

    Attributes:
        dims: the degrees of the mesh.
        checkpointing: the mode of activation checkpointing.
        exchanges: the exchanges of each kind of linear attention.
        parameters: the number of parameters of the model.
        active: how many of them a token uses.
        flops: FLOPs per token, forward and backward.
        memory: the memory of a rank.
    """

    dims: ParallelDims
    checkpointing: str
    exchanges: list[Exchanges]
    parameters: int
    active: int
    flops: int
    memory: Memory

    @property
    def machine(self) -> Machine:
        """The machine that the run is planned for."""
        return self.exchanges[0].machine

    @property
    def fits(self) -> bool:
        """Whether the device has the memory that a rank needs."""
        return self.memory.total <= self.machine.memory * 2**30

    def as_json(self) -> dict[str, Any]:
        """All figures, in bytes, seconds and FLOPs."""
        names = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "world_size")
        return {
            "degrees": {name: getattr(self.dims, name) for name in names},
            "checkpointing": self.checkpointing,
            "machine": asdict(self.machine),
            "linear_attention": [exchanges.as_json() for exchanges in self.exchanges],
            "parameters": self.parameters,
            "active_parameters": self.active,
            "flops_per_token": self.flops,
            "memory": asdict(self.memory) | {"total": self.memory.total},
            "fits": self.fits,
        }


def make_plan(config: "Trainer.Config", world_size: int) -> Plan:
    """Plan a run on GPUs.

    Args:
        config: the run, as `load_config` returns it.
        world_size: number of ranks.

    Raises:
        ConfigError: the run is impossible; says why.
    """
    exchanges = plan_exchanges(config, world_size)
    model = _copy_of_model(config)
    # Blocks run with fake tensors, on which FlexAttention does not run. This one keeps the same tensors.
    _set_attention(model, inner_attention("cpu"))
    for layer in linear_layers(model.layers):
        if layer.run.kernel == "fla":  # the planned machine has to support it, not this one
            layer.run = replace(layer.run, kernel="auto")
    # `check_run` has checked the converters. TorchTitan builds none without the hardware for them.
    model.converters = []
    model.update_from_config(config=config)
    with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
        whole = model.build()
    parameters, flops = model.get_nparams_and_flops(whole, config.training.seq_len)
    active = parameters - _idle(model, whole)
    dims = ParallelDims.from_config(config.parallelism, world_size)
    policy = config.activation_checkpoint
    return Plan(
        dims=dims,
        checkpointing=next(mode for mode, kind in POLICIES.items() if isinstance(policy, kind)),
        exchanges=exchanges,
        parameters=parameters,
        active=active,
        flops=flops,
        memory=estimate(whole, config, dims, exchanges[0].batch, _added(model, exchanges, config)),
    )


def _added(
    model: HybridModel.Config, exchanges: list[Exchanges], config: "Trainer.Config"
) -> dict[str, Added]:
    """The memory that the exchange of each linear attention layer adds, by the layer's name."""
    added = {}
    for kind, x in zip(linear_kinds(model.layers), exchanges, strict=True):
        sent = x.traffic[x.taken]
        kept, transient = sent.kept, sent.transient
        if recomputes(config):
            # Selective checkpointing keeps the results of operators, and may keep those of collectives.
            kept = sent.computed if isinstance(config.activation_checkpoint, SelectiveAC.Config) else 0
            kept += sent.collected if saves_exchange(config) else 0
            transient += sent.kept
        added |= dict.fromkeys(names_of(model.layers, kind), Added(kept, transient))
    return added


def plan_exchanges(config: "Trainer.Config", world_size: int) -> list[Exchanges]:
    """The cost of each exchange for each kind of linear attention.

    Args:
        config: the run, as `load_config` returns it.
        world_size: number of ranks.

    Raises:
        ConfigError: the run is impossible; says why.
    """
    model = _copy_of_model(config)
    if not linear_layers(model.layers):
        raise ConfigError("the model has no linear attention layers, so there are no exchanges to plan")
    # FlexAttention, so that `check_run` checks that its blocks divide the length.
    _set_attention(model, inner_attention("cuda"))
    check_run(_with_model(config, model), world_size)
    return [_exchanges(model, kind, config) for kind in linear_kinds(model.layers)]


def _copy_of_model(config: "Trainer.Config") -> HybridModel.Config:
    spec: Any = config.model_spec
    return copy.deepcopy(spec.model)


def _with_model(config: "Trainer.Config", model: HybridModel.Config) -> "Trainer.Config":
    spec: Any = config.model_spec
    return replace(config, model_spec=replace(spec, model=model))


def _set_attention(model: HybridModel.Config, inner: Module.Config) -> None:
    for layer in model.blocks:
        attention: Any = layer.attention
        if attention is not None:
            attention.inner_attention = inner


def _exchanges(
    model: HybridModel.Config, layer: LinearAttention.Config, config: "Trainer.Config"
) -> Exchanges:
    batch, shape, machine = batch_of(layer, config), layer.shape(), layer.run.machine
    try:
        choice = choice_of(model, layer, config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    possible = [name for name in EXCHANGES if impossible(name, shape, batch) is None]
    sent = {name: traffic(name, shape, batch) for name in possible}
    return Exchanges(
        kind=layer.layer_class.title,
        layers=len(names_of(model.layers, layer)),
        named=layer.run.exchange,
        batch=batch,
        machine=machine,
        recompute=recomputes(config),
        choice=choice,
        traffic=sent,
        costs={
            name: cost(sent[name], batch, machine, recomputes(config), name in saved_exchanges(config))
            for name in possible
        },
        way_in=_way_in(shape, batch)
        if batch.cp > 1 and {"all_to_all", "all_gather"} <= set(possible)
        else None,
    )


def _way_in(shape: LayerShape, batch: ShardedBatch) -> tuple[float, float | None]:
    """The ratios of `Exchanges.way_in`: what is sent before the rule is all but the way out."""

    def way_in(name: str, shape: LayerShape) -> int:
        way_out = traffic("all_to_all", replace(shape, exchanged=0, low_rank=0), batch)
        return traffic(name, shape, batch).forward.cp_bytes - way_out.forward.cp_bytes

    gathered = way_in("all_gather", shape)
    ratio = way_in("all_to_all", shape) / gathered
    if not shape.rule.per_channel:
        return ratio, None
    gates = shape.output + shape.value_heads * shape.key_dim
    with_gates = replace(shape, exchanged=shape.exchanged + gates, low_rank=0)
    return ratio, way_in("all_to_all", with_gates) / gathered


def _idle(model: HybridModel.Config, whole: HybridModel) -> int:
    """The number of parameters of the experts that a token is not routed to."""
    idle = 0
    blocks: list[Any] = [block for part in (whole, *mtp_of(whole)) for block in part.layers.values()]
    for layer, block in zip(model.blocks, blocks, strict=True):
        if layer.moe is not None:
            experts = sum(x.numel() for x in block.moe.routed_experts.parameters())
            idle += experts - experts * layer.moe.router.top_k // layer.moe.num_experts
    return idle


def sweep(
    config: "Trainer.Config", world_size: int, key: str, values: list[int]
) -> dict[int, list[Exchanges] | str]:
    """The exchanges of a run for several values of one key, or why a value is impossible.

    "auto" chooses the exchange, and data parallelism takes the remaining ranks.

    Args:
        config: the run, as `load_config` returns it.
        world_size: number of ranks.
        key: the key, one of `SWEPT`.
        values: its values.
    """
    model = _copy_of_model(config)
    for layer in linear_layers(model.layers):
        layer.run = replace(layer.run, exchange="auto")
    config = _with_model(config, model)
    section, field = SWEPT[key]
    left = {"data_parallel_shard_degree": -1} if section == "parallelism" else {}
    swept: dict[int, list[Exchanges] | str] = {}
    for value in values:
        changed = replace(getattr(config, section), **{field: value}, **left)
        try:
            swept[value] = plan_exchanges(replace(config, **{section: changed}), world_size)
        except ConfigError as error:
            swept[value] = str(error)
    return swept


def crossovers(swept: dict[int, Exchanges]) -> list[tuple[int, int]]:
    """Consecutive values of a sweep between which "auto" changes from one exchange to another."""
    taken = {value: x.taken for value, x in swept.items() if x.batch.cp > 1}
    return [(a, b) for a, b in pairwise(taken) if taken[a] != taken[b]]


def by_kind(swept: dict[int, list[Exchanges] | str]) -> list[dict[int, Exchanges]]:
    """A sweep for each kind of linear attention, without impossible values."""
    possible = {value: kinds for value, kinds in swept.items() if not isinstance(kinds, str)}
    return [dict(zip(possible, column, strict=True)) for column in zip(*possible.values(), strict=True)]
