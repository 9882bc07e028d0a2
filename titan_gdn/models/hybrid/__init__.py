"""What models of linear and full attention have in common, in the files where TorchTitan has it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from titan_gdn.layers.linear_attention import LinearAttentionConfig
from titan_gdn.models.hybrid.block import linear_layers
from titan_gdn.models.hybrid.builders import HybridArguments
from titan_gdn.models.hybrid.config_registry import RunDefaults
from titan_gdn.models.hybrid.parallelize import parallelize_hybrid


@dataclass(frozen=True, slots=True)
class Flavor:
    """A model of a family.

    Attributes:
        arguments: of the family's builder; `[model.overrides]` replaces some of them.
        run: what it is trained with by default.
    """

    arguments: HybridArguments
    run: RunDefaults = RunDefaults()


def model_spec(
    name: str,
    flavors: Mapping[str, Flavor],
    adapter: type[StateDictAdapter],
    flavor: str,
    *,
    linear_attention: LinearAttentionConfig | None = None,
    converters: list[QuantizationConverter.Config] | None = None,
    **overrides: object,
) -> ModelSpec:
    """The model of a flavor, as TorchTitan's trainer takes it.

    Args:
        name: of the family.
        flavors: its flavors.
        adapter: converts its state dicts from and to Hugging Face's.
        flavor: a name in `flavors`.
        linear_attention: how the linear attention layers are run.
        converters: what is quantized, and how; at most one for linears and one for experts.
        **overrides: arguments of the flavor that are replaced.

    Raises:
        ValueError: there is no such flavor, or the arguments contradict each other.
    """
    if flavor not in flavors:
        raise ValueError(f"unknown flavor {flavor!r}; the flavors of {name} are {', '.join(flavors)}")
    model = replace(flavors[flavor].arguments, **overrides).config()
    for layer in linear_layers(model.layers):
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
