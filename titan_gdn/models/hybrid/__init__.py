"""What models of linear and full attention share, in files that are named as in TorchTitan's models."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchtitan.components.optimizer import OptimizersContainer, register_moe_load_balancing_hook
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.state_dict_adapter import StateDictAdapter
from torchtitan.trainer import Trainer

from titan_gdn.layers.linear_attention import LinearAttentionConfig
from titan_gdn.models.hybrid.block import linear_layers
from titan_gdn.models.hybrid.builders import HybridArguments
from titan_gdn.models.hybrid.config_registry import RunDefaults, run_of
from titan_gdn.models.hybrid.mtp import mtp_of
from titan_gdn.models.hybrid.parallelize import parallelize_hybrid


@dataclass(frozen=True, slots=True)
class Flavor:
    """A model of a family.

    Attributes:
        arguments: the arguments that build the model. `[model.overrides]` replaces some of them.
        run: the settings that it is trained with by default.
        changes: arguments that differ on purpose from the published files which the flavor is trained from.
    """

    arguments: HybridArguments
    run: RunDefaults = RunDefaults()
    changes: tuple[str, ...] = ()


def model_spec(
    name: str,
    flavors: Mapping[str, Flavor],
    adapter: type[StateDictAdapter],
    flavor: str,
    *,
    arguments: HybridArguments | None = None,
    linear_attention: LinearAttentionConfig | None = None,
    converters: list[QuantizationConverter.Config] | None = None,
    **overrides: Any,
) -> ModelSpec:
    """Returns the specification of a model for TorchTitan's trainer.

    Args:
        name: name of the family.
        flavors: the flavors of the family, by name.
        adapter: converts the family's state dicts to and from the Hugging Face format.
        flavor: a name in `flavors`, or any name if `arguments` are given.
        arguments: the arguments that build the model; those of the flavor if None.
        linear_attention: how the linear attention layers are run; the defaults if None.
        converters: what is quantized, and how; at most one for linears and one for experts.
        **overrides: arguments that replace some of them.

    Raises:
        ValueError: there is no such flavor, or the arguments contradict each other.
    """
    if arguments is None:
        if flavor not in flavors:
            raise ValueError(f"unknown flavor {flavor!r}; the flavors of {name} are {', '.join(flavors)}")
        arguments = flavors[flavor].arguments
    model = arguments.overridden(**overrides).config()
    for layer in linear_layers(model.layers):
        layer.run = linear_attention or LinearAttentionConfig()
    model.converters = converters or []
    return ModelSpec(
        name=name,
        flavor=flavor,
        model=model,
        parallelize_fn=parallelize_hybrid,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=_balance_experts,
        state_dict_adapter=adapter,
    )


def trainer_config_of(
    flavors: Mapping[str, Flavor], model_registry: Callable[..., ModelSpec], flavor: str, **model: Any
) -> Trainer.Config:
    """Returns the training configuration of a flavor.

    Args:
        flavors: the flavors of the family, by name.
        model_registry: the family's `model_spec`, with its first arguments given.
        flavor: a name in `flavors`, or any name if `model` has `arguments`.
        **model: the further keyword arguments of `model_spec`.

    Raises:
        ValueError: there is no such flavor, or the arguments contradict each other.
    """
    run = flavors[flavor].run if flavor in flavors else RunDefaults()
    return run_of(model_registry(flavor, **model), run)


def _balance_experts(
    optimizers: OptimizersContainer, model_parts: list[nn.Module], parallel_dims: ParallelDims
) -> None:
    """Balances the experts of all layers, with those of multi-token prediction."""
    parts = [*model_parts, *(mtp for part in model_parts for mtp in mtp_of(part))]
    register_moe_load_balancing_hook(optimizers, parts, parallel_dims)
