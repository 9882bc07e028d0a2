"""What models of linear and full attention have in common, in the files where TorchTitan has it."""

from collections.abc import Callable

from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from titan_gdn.layers.linear_attention import LinearAttentionConfig
from titan_gdn.models.hybrid.model import HybridModel
from titan_gdn.models.hybrid.parallelize import parallelize_hybrid

Flavors = dict[str, Callable[..., HybridModel.Config]]
"""Builders of a model by the names of its flavours."""


def model_spec(
    name: str,
    flavors: Flavors,
    adapter: type[StateDictAdapter],
    flavor: str,
    *,
    linear_attention: LinearAttentionConfig | None = None,
    converters: list[QuantizationConverter.Config] | None = None,
    **overrides: object,
) -> ModelSpec:
    """The model of a flavour, as TorchTitan's trainer takes it.

    Args:
        name: of the model.
        flavors: its flavours.
        adapter: converts its state dicts.
        flavor: a name in `flavors`.
        linear_attention: how its linear attention is run.
        converters: what of it is quantized, and how; at most one for linears and one for experts.
        **overrides: keyword arguments of the flavour's builder.

    Raises:
        ValueError: no such flavour.
    """
    if flavor not in flavors:
        raise ValueError(f"unknown flavor {flavor!r}; the flavours of {name} are {', '.join(flavors)}")
    model = flavors[flavor](**overrides)
    for layer in model.linear_layers():
        layer.run = linear_attention or LinearAttentionConfig()
    model.converters = converters or []
    return ModelSpec(
        name=name,
        flavor=flavor,
        model=model,
        parallelize_fn=parallelize_hybrid,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=register_moe_load_balancing_hook,
        state_dict_adapter=adapter,
    )
