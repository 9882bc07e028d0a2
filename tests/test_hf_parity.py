"""The model against transformers: logits, gradients, and files in both directions."""

import os

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests import hf, ranks
from tests.compare import relative_error
from tests.draw import in_sets
from titan_gdn.models.kimi_linear import KimiLinearArguments, KimiLinearStateDictAdapter
from titan_gdn.models.kimi_linear.state_dict_adapter import published
from titan_gdn.models.qwen3_5 import Qwen3_5Arguments, Qwen3_5StateDictAdapter
from titan_gdn.models.qwen3_next import Qwen3NextArguments, Qwen3NextStateDictAdapter

FAMILIES = {
    "qwen3_5": (Qwen3_5Arguments, Qwen3_5StateDictAdapter),
    "qwen3_next": (Qwen3NextArguments, Qwen3NextStateDictAdapter),
    "kimi_linear": (KimiLinearArguments, KimiLinearStateDictAdapter),
}
QWEN3_NEXT = {
    "as published, small": {},
    "dense": {"num_experts": 0},
    "value heads not grouped, K and V unequal": {"linear_num_value_heads": 4, "linear_value_head_dim": 24},
    "four value heads a key head": {"linear_num_key_heads": 2, "linear_num_value_heads": 8},
    "every second layer sparse": {"decoder_sparse_step": 2, "linear_key_head_dim": 8},
    "some layers dense": {"mlp_only_layers": [0, 2]},
    "scores not normalized": {"norm_topk_prob": False, "num_experts_per_tok": 3},
    "tied embeddings": {"tie_word_embeddings": True},
    "another order of layers": {
        "layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"]
    },
    "only linear layers": {"layer_types": ["linear_attention"] * 4, "num_experts": 0},
    "yarn": {"yarn_factor": 4.0},
    "one key-value head, short kernel, other epsilon": {
        "num_key_value_heads": 1,
        "linear_conv_kernel_dim": 2,
        "rms_norm_eps": 1e-3,
    },
}
QWEN3_5 = {
    "sparse, small": {},
    "dense": {"num_experts": 0},
    "dense, tied embeddings": {"num_experts": 0, "tie_word_embeddings": True},
    "dense, odd vocabulary": {"num_experts": 0, "vocab_size": 265},
    "one value head a key head, K unlike V": {"linear_num_value_heads": 4, "linear_value_head_dim": 24},
    "four value heads a key head": {"num_experts": 0, "linear_num_key_heads": 2},
    "keys narrower than values": {"linear_key_head_dim": 8},
    "half of a head rotated": {"partial_rotary_factor": 0.5},
    "first layer full": {"num_experts": 0, "layer_types": ["full_attention"] + ["linear_attention"] * 3},
    "three of six experts": {"num_experts": 6, "num_experts_per_tok": 3},
    "one key-value head, short kernel, other epsilon": {
        "num_experts": 0,
        "num_key_value_heads": 1,
        "linear_conv_kernel_dim": 2,
        "rms_norm_eps": 1e-3,
    },
}
KIMI_LINEAR = {
    "as published, small": {},
    "dense": {"mlp_layer_types": ["dense"] * 4},
    "every layer sparse": {"mlp_layer_types": ["sparse"] * 4},
    "scores neither normalized nor scaled": {"norm_topk_prob": False, "routed_scaling_factor": 1.0},
    "two shared experts, three of eight": {"n_shared_experts": 2, "num_experts_per_tok": 3},
    "another order of layers": {
        "layer_types": ["full_attention"] * 2 + ["linear_attention"] * 2,
    },
    "only linear layers": {"layer_types": ["linear_attention"] * 4},
    "only full layers": {"layer_types": ["full_attention"] * 4},
    "value heads wider than keys": {"v_head_dim": 32, "qk_nope_head_dim": 8},
    "more linear heads, wider, short kernel, other epsilon": {
        "linear_attn_config": {
            "full_attn_layers": [2, 4],
            "kda_layers": [1, 3],
            "num_heads": 8,
            "head_dim": 24,
            "short_conv_kernel_size": 2,
        },
        "rms_norm_eps": 1e-3,
    },
}
SHAPES = {"qwen3_next": QWEN3_NEXT, "qwen3_5": QWEN3_5, "kimi_linear": KIMI_LINEAR}
CASES = [(family, name) for family, shapes in SHAPES.items() for name in shapes]
every_configuration = pytest.mark.parametrize(("family", "name"), CASES)


def theirs_of(family, name):
    return hf.model(family, **SHAPES[family][name])


def saved(model, folder):
    """What `save_pretrained` writes, by the published names."""
    model.save_pretrained(folder)
    return {published(key): x for key, x in load_file(folder / "model.safetensors").items()}


def ours(family, overrides, hf_state):
    arguments, adapt = FAMILIES[family]
    config = arguments(**overrides).config()
    model = config.build()
    model.init_states()
    adapter = adapt(config, None)
    missing, unexpected = model.load_state_dict(adapter.from_hf(hf_state), strict=False)
    assert not missing and not unexpected
    return model, adapter


def numbers(arguments):
    """Every number of the model that arguments build, which several arguments may say."""
    return {name: value for name, value in arguments.config().to_dict().items() if name != "arguments"}


@every_configuration
def test_logits_and_gradients_are_those_of_transformers(family, name, tmp_path):
    theirs, overrides = theirs_of(family, name)
    model, adapter = ours(family, overrides, saved(theirs, tmp_path))

    tokens, labels = torch.randint(0, 264, (2, 2, 200))
    logits, expected = model(tokens), theirs(tokens, use_cache=False).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    for x in (logits, expected):
        F.cross_entropy(x.flatten(0, 1), labels.flatten()).backward()
    # transformers keeps experts together in memory, files do not: look at its gradients as files have them.
    for parameter in theirs.parameters():
        parameter.data = parameter.grad
    gradients = adapter.to_hf({name: parameter.grad for name, parameter in model.named_parameters()})
    for key, gradient in saved(theirs, tmp_path / "gradients").items():
        if not key.endswith("e_score_correction_bias"):  # a buffer
            assert relative_error(gradients[key], gradient) < 1e-3, key


@every_configuration
def test_exported_weights_are_the_files_they_came_from(family, name, tmp_path):
    theirs, overrides = theirs_of(family, name)
    files = saved(theirs, tmp_path)
    model, adapter = ours(family, overrides, files)
    exported = adapter.to_hf(model.state_dict())
    assert exported.keys() == files.keys()
    assert all(torch.equal(exported[key], files[key]) for key in files)


def test_the_published_configuration_has_every_number_and_parameter():
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    # transformers' defaults are the 80B-A3B but for these (its `config.json`).
    rope = {"rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 0.25}
    published = Qwen3NextConfig(intermediate_size=5120, max_position_embeddings=262144, rope_parameters=rope)
    assert numbers(Qwen3NextArguments()) == numbers(Qwen3NextArguments(**hf.overrides(published)))
    ours = Qwen3NextArguments().config()
    with torch.device("meta"):
        model, reference = ours.build(), Qwen3NextForCausalLM(published)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in reference.parameters())
    nparams, _ = ours.get_nparams_and_flops(model, 4096)
    assert nparams == 79_674_391_296


def test_the_published_kimi_linear_has_every_number_and_parameter():
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    # transformers' defaults are the 48B-A3B but for the order of its layers (`config.json`).
    full = [4, 8, 12, 16, 20, 24, 27]
    kda = [i for i in range(1, 28) if i not in full]
    published = KimiLinearConfig(linear_attn_config={"full_attn_layers": full, "kda_layers": kda})
    assert numbers(KimiLinearArguments()) == numbers(KimiLinearArguments(**hf.kimi_overrides(published)))
    ours = KimiLinearArguments().config()
    with torch.device("meta"):
        model, reference = ours.build(), KimiLinearForCausalLM(published)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in reference.parameters())
    nparams, _ = ours.get_nparams_and_flops(model, 4096)
    assert nparams == 49_122_675_072


def test_flops_of_linear_layers_do_not_grow_with_the_sequence():
    linear = Qwen3NextArguments(
        **hf.overrides(hf.model(layer_types=["linear_attention"] * 4)[0].config)
    ).config()
    mixed = Qwen3NextArguments(**hf.overrides(hf.model()[0].config)).config()
    flops = {}
    for config in (linear, mixed):
        model = config.build()
        flops[id(config)] = [config.get_nparams_and_flops(model, length)[1] for length in (1024, 2048)]
    assert flops[id(linear)][0] == flops[id(linear)][1]
    # 6 for forward and backward of two products, 4 heads of 32 for q.k and for p.v, 1024 tokens more.
    assert flops[id(mixed)][1] - flops[id(mixed)][0] == 6 * 4 * (32 + 32) * 1024


def test_flops_of_latent_attention_are_those_of_its_two_widths():
    config = KimiLinearArguments(**hf.model("kimi_linear")[1]).config()
    model = config.build()
    short, long = (config.get_nparams_and_flops(model, length)[1] for length in (1024, 2048))
    assert long - short == 6 * 4 * (16 + 8 + 12) * 1024  # as above, scores of 24 and values of 12


@pytest.mark.parametrize("family", in_sets(FAMILIES, fast=["kimi_linear"]))
def test_a_run_loads_and_exports_hugging_face_files(family, tmp_path):
    """Trained one step at TP 2 x FSDP 2 and exported; transformers loads it and gives the logits of ours."""
    theirs, overrides = hf.model(family)
    theirs.save_pretrained(tmp_path)
    extra = load_file(tmp_path / "model.safetensors") | {"mtp.fc.weight": torch.zeros(2, 2)}
    save_file(extra, tmp_path / "model.safetensors", {"format": "pt"})
    checkpoint = {
        "enable": True,
        "initial_load_in_hf": True,
        "initial_load_path": str(tmp_path),
        "last_save_model_only": True,
        "last_save_in_hf": True,
    }
    path = hf.toml(
        str(tmp_path),
        overrides,
        model={"name": family},
        checkpoint=checkpoint,
        training={"steps": 1, "local_batch_size": 2},
    )
    argv = ["--job.config_file", path, "--parallelism.tensor_parallel_degree", "2"]
    told = ranks.run(train_and_tell, 4, argv)
    (kept,) = (line for line in told[0] if "mtp.*" in line)
    assert kept.endswith("the model has no such layer: 1 (mtp.*; 16 bytes)")

    exported = tmp_path / "out" / "checkpoint" / "step-1"
    reloaded, info = type(theirs).from_pretrained(exported, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert set(info["unexpected_keys"]) <= {"mtp.fc.weight"}
    files = {}
    for name in os.listdir(exported):
        files |= load_file(exported / name) if name.endswith(".safetensors") else {}
    model, _ = ours(family, overrides, files)
    tokens = torch.randint(0, 264, (2, 100))
    torch.testing.assert_close(model(tokens), reloaded(tokens).logits, atol=1e-4, rtol=1e-4)
    assert not torch.equal(files["lm_head.weight"], theirs.lm_head.weight)


def train_and_tell(argv):
    """Train; the lines that were logged."""
    import logging

    from tests.training import train

    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)
    train(argv)
    return lines
