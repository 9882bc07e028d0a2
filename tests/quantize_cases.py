"""Quantized models as configurations, and a quantized layer on four ranks against the plain layer on one."""

import itertools
from dataclasses import replace

import torch

from tests import layer_cases

MODELS = {"gated_delta_net": "qwen3_next", "kimi_delta_attention": "kimi_linear"}
WIDE = {
    "dim": 64,
    "n_linear_key_heads": layer_cases.GROUPS,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
"""Whatever the slice at TP 2 and CP 2, it is a multiple of 16."""
CASES = [
    ("all_to_all", "contiguous", "ragged", (1, 1, False), 2, 16),
    ("all_gather", "headtail", "ragged", (1, 2, False), 2, 16),
    ("all_gather", "headtail", "ragged", (2, 2, True), 2, 16),
]


def configured(model, flavor="debug", converters=(), tp=1, cp=1, exchange="auto", run=None, **overrides):
    """Return a model's configuration as the trainer builds it, with the changes of `run` to its sections."""
    import importlib

    from titan_gdn.layers.linear_attention import LinearAttentionConfig

    registry = importlib.import_module(f"titan_gdn.models.{model}.config_registry")
    config = registry.trainer_config(
        flavor,
        linear_attention=LinearAttentionConfig(exchange=exchange),
        converters=list(converters),
        **overrides,
    )
    config.parallelism = replace(config.parallelism, tensor_parallel_degree=tp, context_parallel_degree=cp)
    for section, changes in (run or {}).items():
        setattr(config, section, replace(getattr(config, section), **changes))
    config.model_spec.model.update_from_config(config=config)
    return config.model_spec.model


def emulated(**options):
    """Return the configuration of emulated float8, which runs on any device."""
    from torchtitan.components.quantization import Float8LinearConverter

    return Float8LinearConverter.Config(emulate=True, **options)


def pair(layer, converter, run=None, **shape):
    """Build a layer, and the same layer converted by `converter`.

    The emulated recipe rounds gradients to two bits of mantissa: a product in the forward is 4% off, one in
    the backward 6%, and a layer has several in a row. Weights that are signed powers of two, and an output's
    gradient of signs, are exact in float8: what is measured is the rounding of tokens and inner gradients.
    They are small, so that no activation function is steep enough to multiply it.
    """
    own = {"linear_gate_rank": WIDE["linear_key_head_dim"], "n_dense_layers": 1}
    shape = {"n_layers": 1, "layer_types": ["linear_attention"], **WIDE} | shape
    shape |= own if layer == "kimi_delta_attention" else {}
    plain, quantized = (
        configured(MODELS[layer], **options, **shape).layers[0].linear_attention.build()
        for options in ({}, {"converters": [converter], **(run or {})})
    )
    torch.manual_seed(0)
    plain.init_states()
    with torch.no_grad():
        for linear in plain.modules():
            if isinstance(linear, torch.nn.Linear):
                powers = 2.0 ** torch.randint(-8, -5, linear.weight.shape)
                linear.weight.copy_(torch.randn(powers.shape).sign() * powers)
    quantized.load_state_dict(plain.state_dict())
    return plain, quantized


def layers(layer, case):
    """Build a layer on one rank, and the same layer in emulated float8 on a mesh."""
    exchange, _, _, (tp, cp, sp), R, _ = case
    sections = {"parallelism": {"enable_sequence_parallel": sp}, "training": {"seq_len": layer_cases.LENGTH}}
    run = {"tp": tp, "cp": cp, "exchange": exchange, "run": sections}
    whole, split = pair(layer, emulated(), run, n_linear_value_heads=layer_cases.GROUPS * R)
    parallel = layer_cases.dims(tp, cp)
    split.split_sequence(parallel.get_optional_mesh("cp"), parallel.get_mesh("tp") if sp else None)
    if tp > 1:
        split.parallelize(parallel)
    return whole, split


def errors():
    """Return the relative errors of each layer and case, and the number of rows that float8 multiplied."""
    from torchtitan.components.quantization import Float8Linear

    layer_cases.set_up()
    found = {}
    for layer, case in itertools.product(MODELS, CASES):
        whole, split = layers(layer, case)
        rows = {}
        for name, module in split.named_modules():
            if isinstance(module, Float8Linear):

                def note(module, args, output, name=name, rows=rows):
                    rows[name] = output.shape[-1]

                module.register_forward_hook(note)
        found[layer, case] = layer_cases.compared(whole, split, case, torch.sign)[0], rows
    return found
