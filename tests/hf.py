"""Small random models of transformers, whose PyTorch code is the oracle, and TOML files that train them."""

import importlib
import re

import torch

_KERNELS = {
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
    "causal_conv1d_fn",
    "causal_conv1d_update",
}


def model(family="qwen3_next", **changes):
    """Return a random `ForCausalLM` of transformers and the arguments of our builder for the same model."""
    of_family = {"qwen3_next": _qwen3_next, "qwen3_5": _qwen3_5, "kimi_linear": _kimi_linear}
    config, overrides = of_family[family](**changes)
    return _random(config), overrides


def of_file(content):
    """Return a random `ForCausalLM` of the content of a `config.json`."""
    import copy

    from transformers import AutoConfig

    config = type(AutoConfig.for_model(content["model_type"])).from_dict(copy.deepcopy(content))
    config._attn_implementation = "eager"
    return _random(config)


def _random(config):
    family = config.model_type.removesuffix("_text")
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    # If FLA is installed, transformers calls its Triton kernels even for CPU tensors: unwrap the PyTorch
    # code.
    for name in _KERNELS & vars(modeling).keys():
        function = getattr(modeling, name)
        setattr(modeling, name, getattr(function, "__wrapped__", function))
    torch.manual_seed(0)
    hf = getattr(modeling, re.sub("(Text)?Config$", "ForCausalLM", type(config).__name__))(config)
    with torch.no_grad():
        for name, x in (*hf.named_parameters(), *hf.named_buffers()):
            if x.is_floating_point() and not name.endswith("inv_freq"):
                x.add_(torch.randn_like(x), alpha=0.05)
            if name.endswith("A_log"):
                # With the strongest initial decays the gradient of A_log is the small rest of a cancellation.
                # transformers computes it in float32, and more than 1e-3 of it would be rounding.
                x.sub_(2)
    return hf


def without_experts(family):
    """Return the changes for `model` that make every layer of a family dense."""
    return {"mlp_layer_types": ["dense"] * 4} if family == "kimi_linear" else {"num_experts": 0}


_SMALL = {
    "vocab_size": 264,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "attn_implementation": "eager",
}


_GATED = _SMALL | {
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 4,
    "shared_expert_intermediate_size": 48,
}


def _qwen3_next(**changes):
    from transformers import Qwen3NextConfig

    rope = {"rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 0.25}
    yarn = changes.pop("yarn_factor", 1.0)
    if yarn > 1:
        rope |= {"rope_type": "yarn", "factor": yarn, "original_max_position_embeddings": 256}
    positions = {"max_position_embeddings": int(256 * yarn), "rope_parameters": rope}
    config = Qwen3NextConfig(**_GATED | positions | changes)
    return config, overrides(config, yarn)


def _qwen3_5(**changes):
    from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig

    factor = changes.pop("partial_rotary_factor", 0.25)
    sections = [int(16 * factor) - 2, 1, 1]  # pairs of channels of time, height and width
    rope = {"rope_theta": 1e7, "rope_type": "default", "mrope_section": sections, "mrope_interleaved": True}
    rope["partial_rotary_factor"] = factor
    given = _GATED | {"max_position_embeddings": 256, "rope_parameters": rope} | changes
    if given["num_experts"]:
        kind, without = Qwen3_5MoeTextConfig, ["intermediate_size"]
    else:
        kind, without = Qwen3_5TextConfig, [name for name in _GATED if "expert" in name or "moe" in name]
    config = kind(**{name: value for name, value in given.items() if name not in without})
    return config, gated_overrides(config)


def _kimi_linear(**changes):
    from transformers import KimiLinearConfig

    small = _SMALL | {
        "num_key_value_heads": 4,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "kv_lora_rank": 24,
        "num_local_experts": 8,
        "pad_token_id": None,
        "linear_attn_config": {
            "full_attn_layers": [4],
            "kda_layers": [1, 2, 3],
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
    }
    if "layer_types" in changes:  # which the lists of layers would contradict
        for name in ("full_attn_layers", "kda_layers"):
            del small["linear_attn_config"][name]
    config = KimiLinearConfig(**small | changes)
    return config, kimi_overrides(config)


def kimi_overrides(config):
    """Return the `[model.overrides]` of a `KimiLinearConfig`."""
    heads, width = config.linear_num_heads, config.linear_head_dim
    return {
        "vocab_size": config.vocab_size,
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "layer_types": config.layer_types,
        "norm_eps": config.rms_norm_eps,
        "n_heads": config.num_attention_heads,
        "key_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "value_head_dim": config.v_head_dim,
        "kv_lora_rank": config.kv_lora_rank,
        "n_linear_key_heads": heads,
        "n_linear_value_heads": heads,
        "linear_key_head_dim": width,
        "linear_value_head_dim": width,
        "linear_gate_rank": width,
        "linear_conv_kernel": config.linear_conv_kernel_dim,
        "hidden_dim": config.intermediate_size,
        "n_dense_layers": config.mlp_layer_types.count("dense"),
        "n_experts": config.num_local_experts,
        "n_experts_per_token": config.num_experts_per_tok,
        "expert_hidden_dim": config.moe_intermediate_size,
        "shared_expert_hidden_dim": config.moe_intermediate_size * config.n_shared_experts,
        "route_norm": config.norm_topk_prob,
        "route_scale": config.routed_scaling_factor,
    }


def overrides(config, yarn_factor=1.0):
    """Return the `[model.overrides]` of a `Qwen3NextConfig`."""
    return gated_overrides(config, yarn_factor) | {
        "norm_topk_prob": config.norm_topk_prob,
        "decoder_sparse_step": config.decoder_sparse_step,
        "mlp_only_layers": list(config.mlp_only_layers),
    }


def gated_overrides(config, yarn_factor=1.0):
    """Return the `[model.overrides]` that Qwen3-Next and Qwen3.5 share."""
    overrides = {
        "vocab_size": config.vocab_size,
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "layer_types": config.layer_types,
        "norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "n_heads": config.num_attention_heads,
        "n_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "partial_rotary_factor": config.rope_parameters["partial_rotary_factor"],
        "rope_theta": float(config.rope_parameters["rope_theta"]),
        "context_length": int(config.max_position_embeddings / yarn_factor),
        "yarn_factor": float(yarn_factor),
        "n_linear_key_heads": config.linear_num_key_heads,
        "n_linear_value_heads": config.linear_num_value_heads,
        "linear_key_head_dim": config.linear_key_head_dim,
        "linear_value_head_dim": config.linear_value_head_dim,
        "linear_conv_kernel": config.linear_conv_kernel_dim,
        "n_experts": getattr(config, "num_experts", 0),
    }
    if hasattr(config, "intermediate_size"):
        overrides["hidden_dim"] = config.intermediate_size
    if hasattr(config, "num_experts"):
        overrides["n_experts_per_token"] = config.num_experts_per_tok
        overrides["expert_hidden_dim"] = config.moe_intermediate_size
        overrides["shared_expert_hidden_dim"] = config.shared_expert_intermediate_size
    return overrides


def weights_of(folder):
    """Return the `[checkpoint]` section of a run that loads the files in `folder` and saves nothing."""
    return {"enable": True, "initial_load_in_hf": True, "initial_load_path": str(folder), "load_only": True}


def toml(folder, overrides, **sections):
    """Write a TOML file that trains this model in float32 on text files in `folder`; return its path."""
    import json
    import os

    text = os.path.join(folder, "text")
    if not os.path.isdir(text):
        os.makedirs(text)
        # Files of 3 to 118 bytes, more varied than prose: every row of a batch holds parts of several.
        for i in range(24):
            with open(os.path.join(text, f"{i}.txt"), "w") as file:
                file.write("".join(chr(33 + (j * j * (i + 3) + j) % 90) for j in range(3 + 5 * i)))
    content = {
        "job": {"dump_folder": os.path.join(folder, "out")},
        "model": {"name": "qwen3_next", "flavor": "debug_moe"},
        "model.overrides": overrides,
        "dataloader": {"dataset": "text_files", "dataset_path": text},
        "training": {
            "steps": 3,
            "local_batch_size": 4,
            "seq_len": 64,
            "mixed_precision_param": "float32",
            "max_norm": 1e9,
        },
        "lr_scheduler": {"warmup_steps": 0},
        "metrics": {"log_freq": 1},
        "debug": {"seed": 1, "enable_structured_logging": False},
    }
    for name, values in sections.items():
        content[name] = content.get(name, {}) | values
    path = os.path.join(folder, "run.toml")
    with open(path, "w") as file:
        for name, values in content.items():
            file.write(f"[{name}]\n" + "".join(f"{key} = {json.dumps(v)}\n" for key, v in values.items()))
    return path


_FULL = [4, 8, 12, 16, 20, 24, 27]
PUBLISHED = {
    "qwen3_next": {  # Qwen/Qwen3-Next-80B-A3B-Instruct
        "architectures": ["Qwen3NextForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 5120,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_next",
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "output_router_logits": False,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.57.0.dev0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "kimi_linear": {  # moonshotai/Kimi-Linear-48B-A3B-Instruct
        "architectures": ["KimiLinearForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_kimi.KimiLinearConfig"},
        "bos_token_id": 163584,
        "dtype": "bfloat16",
        "eos_token_id": 163586,
        "first_k_dense_replace": 1,
        "head_dim": 72,
        "hidden_act": "silu",
        "hidden_size": 2304,
        "initializer_range": 0.02,
        "intermediate_size": 9216,
        "kv_lora_rank": 512,
        "linear_attn_config": {
            "full_attn_layers": _FULL,
            "head_dim": 128,
            "kda_layers": [i for i in range(1, 28) if i not in _FULL],
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
        "mla_use_nope": True,
        "model_max_length": 1048576,
        "model_type": "kimi_linear",
        "moe_intermediate_size": 1024,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": 32,
        "num_expert_group": 1,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_hidden_layers": 27,
        "num_key_value_heads": 32,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 1,
        "pad_token_id": 163839,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 2.446,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "transformers_version": "4.57.1",
        "use_cache": True,
        "use_grouped_topk": True,
        "v_head_dim": 128,
        "vocab_size": 163840,
    },
}
"""The `config.json` of the published models."""
