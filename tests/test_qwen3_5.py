"""Qwen3.5: files of the whole model with its vision tower, sizes, and the debug models on a mesh."""

import copy
import importlib
import json
import os

import pytest
import torch
from safetensors.torch import load_file

from tests import hf, ranks
from tests.test_export import assert_same, read, scale_rows, unchanged, write
from tests.test_hf_parity import numbers
from tests.training import assert_same_numbers, dry_run, train
from titan_gdn.assets import BYTE_TOKENIZER
from titan_gdn.checkpoint.fused_experts import fused_name
from titan_gdn.config.load import load_config
from titan_gdn.models.qwen3_5 import Qwen3_5Arguments, config_json, flavors

CONFIGS = os.path.join(os.path.dirname(__file__), "..", "train_configs")
TP, CP, EP = (f"--parallelism.{name}_parallel_degree" for name in ("tensor", "context", "expert"))
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


def whole_model(folder, num_experts, files=3):
    """Write a random model for images and text as transformers does, with `mtp.*`; return its overrides.

    The scale of each row of each tensor is another one, so that no two heads, experts or halves of a tensor
    could change places unseen.
    """
    text, overrides = hf._qwen3_5(num_experts=num_experts)
    kind = "qwen3_5_moe" if num_experts else "qwen3_5"
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    name = "Qwen3_5Moe" if num_experts else "Qwen3_5"
    config = getattr(module, f"{name}Config")(
        text_config=text.to_dict(), vision_config=VISION, tie_word_embeddings=False
    )
    torch.manual_seed(0)
    model = getattr(module, f"{name}ForConditionalGeneration")(config)
    with torch.no_grad():
        for x in model.parameters():
            x.add_(torch.randn_like(x), alpha=0.05)
    scale_rows(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    os.remove(folder / "model.safetensors")
    shape = (num_experts, 64, 64) if num_experts else (3, 64, 64)
    tensors["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.randn(shape).bfloat16()
    tensors["mtp.norm.weight"] = torch.randn(64)
    write(folder, tensors, files)
    return overrides


def fuse(folder):
    """Rewrite a directory with one tensor for all experts of a layer, as the published files have them."""
    tensors = read(folder)
    groups = {}
    for key in [key for key in tensors if fused_name(key)]:
        layer, number, matrix, _ = key.rsplit(".", 3)
        groups.setdefault(layer, {})[int(number), matrix] = tensors.pop(key)
    for layer, matrices in groups.items():
        experts = range(1 + max(number for number, _ in matrices))
        gate_up = [torch.cat([matrices[i, "gate_proj"], matrices[i, "up_proj"]]) for i in experts]
        tensors[f"{layer}.gate_up_proj"] = torch.stack(gate_up)
        tensors[f"{layer}.down_proj"] = torch.stack([matrices[i, "down_proj"] for i in experts])
    for name in os.listdir(folder):
        if name.endswith(".safetensors"):
            os.remove(folder / name)
    write(folder, tensors, 2)
    return groups


def export(tmp_path, source, overrides, world_size, *argv):
    """Train a step that changes nothing; return the folder of the export."""
    sections = unchanged(checkpoint={"initial_load_path": str(source)})
    path = hf.toml(str(tmp_path), overrides, model={"name": "qwen3_5"}, **sections)
    ranks.run(train, world_size, ["--job.config_file", path, *argv])
    return tmp_path / "out" / "checkpoint" / "step-1"


@pytest.mark.parametrize(
    ("num_experts", "fused", "world_size", "argv"),
    [
        pytest.param(0, False, 2, [TP, "2"], id="dense, tp 2"),
        pytest.param(4, False, 1, [], id="a tensor for each expert"),
        pytest.param(4, True, 4, [CP, "2", EP, "2"], id="fused experts, cp 2, ep 2"),
        pytest.param(4, True, 2, [TP, "2"], id="fused experts, tp 2", marks=pytest.mark.slow),
    ],
)
def test_files_of_the_whole_model_come_back_bit_for_bit(num_experts, fused, world_size, argv, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    overrides = whole_model(source, num_experts)
    if fused:
        assert fuse(source)
    original = read(source)
    assert any(key.startswith("model.visual.") for key in original)
    assert any(key.startswith("model.language_model.layers.3.") for key in original)
    exported = export(tmp_path, source, overrides, world_size, *argv)
    assert_same(read(exported), original)
    assert json.loads((exported / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )


def test_the_first_expert_of_a_fused_tensor_has_its_gate_first(tmp_path):
    """The values of a fused tensor, as transformers multiplies them, against ours."""
    theirs, overrides = hf.model("qwen3_5")
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    os.remove(tmp_path / "model.safetensors")
    write(tmp_path, tensors, 1)
    fuse(tmp_path)
    in_memory = theirs.model.layers[1].mlp.experts.gate_up_proj
    assert torch.equal(read(tmp_path)["model.layers.1.mlp.experts.gate_up_proj"], in_memory)

    from tests.test_mtp import ours

    model, _ = ours("qwen3_5", overrides | {"mtp": False}, tmp_path)
    tokens = torch.randint(0, 264, (2, 50))
    torch.testing.assert_close(model(tokens), theirs(tokens, use_cache=False).logits, atol=1e-4, rtol=1e-4)


def test_the_rotary_table_is_that_of_three_equal_positions_bit_for_bit():
    """transformers interleaves the frequencies of time, height and width, which are equal for text."""
    theirs, overrides = hf.model("qwen3_5", partial_rotary_factor=0.5)
    config = Qwen3_5Arguments(**overrides).config()
    table = next(layer.attention.rope for layer in config.layers if layer.attention).build().cache
    positions = torch.arange(256)[None]
    cos, sin = theirs.model.rotary_emb(torch.zeros(1), positions.expand(3, 1, -1))
    assert torch.equal(table, torch.cat([cos, sin], -1)[0])


def test_three_positions_rotate_as_in_transformers():
    from transformers.models.qwen3_5.modeling_qwen3_5 import apply_rotary_pos_emb

    theirs, overrides = hf.model("qwen3_5", partial_rotary_factor=0.5)
    config = Qwen3_5Arguments(**overrides).config()
    rope = next(layer.attention.rope for layer in config.layers if layer.attention)
    theirs.model.rotary_emb.mrope_section = list(rope.mrope_section)
    positions, query, key = (
        torch.randint(0, 256, (2, 9, 3)),
        torch.randn(2, 9, 4, 32),
        torch.randn(2, 9, 2, 32),
    )
    cos, sin = theirs.model.rotary_emb(query, positions.permute(2, 0, 1))
    expected = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
    for own, other in zip(rope.build()(query, key, positions), expected, strict=True):
        torch.testing.assert_close(own, other.transpose(1, 2))
    assert Qwen3_5Arguments().mrope_section == (11, 11, 10)


def test_config_json_of_the_whole_model_and_of_its_text_give_one_model(tmp_path):
    whole_model(tmp_path, 4)
    file = json.loads((tmp_path / "config.json").read_text())
    assert (file["model_type"], file["text_config"]["model_type"]) == ("qwen3_5_moe", "qwen3_5_moe_text")
    arguments = config_json.arguments_of(file)
    assert numbers(arguments) == numbers(config_json.arguments_of(file["text_config"]))
    assert not config_json.unknown_fields(file) and config_json.hf_config_of(arguments, file) == file
    longer = copy.deepcopy(arguments).overridden(context_length=512)
    changed = config_json.hf_config_of(longer, file, "float32")
    assert changed["text_config"]["max_position_embeddings"] == 512
    assert changed["text_config"]["rope_parameters"] == file["text_config"]["rope_parameters"]
    assert changed["vision_config"] == file["vision_config"]

    for change, message in (
        ({"text_config": None}, "text_config = null: expected a table"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = true and text_config.tie_word_embeddings"),
        ({"model_type": "qwen3_vl"}, '"qwen3_vl": this is another family than "qwen3_5_text" or'),
        ({"architectures": ["Other"]}, r'architectures = \["Other"\]: only \["Qwen3_5MoeForCond'),
    ):
        with pytest.raises(ValueError, match=message):
            config_json.arguments_of(file | change)


PARAMETERS = {
    "0.8B": 0.752,
    "2B": 1.882,
    "4B": 4.206,
    "9B": 8.954,
    "27B": 26.896,
    "35B-A3B": 34.661,
    "122B-A10B": 122.112,
    "397B-A17B": 396.346,
}
"""Billions of parameters of the text models (transformers' classes). Tied embeddings count once."""


@pytest.mark.parametrize("flavor", PARAMETERS)
def test_the_published_sizes_have_their_parameters(flavor):
    with torch.device("meta"):
        model = flavors[flavor].arguments.config().build()
    own = {id(parameter): parameter for parameter in model.parameters()}
    assert round(sum(x.numel() for x in own.values()) / 1e9, 3) == PARAMETERS[flavor]


@pytest.mark.parametrize("flavor", ["debug", "debug_moe"])
def test_the_debug_models_train_at_cp_2_tp_2(flavor, tmp_path):
    argv = ["--job.config_file", os.path.join(CONFIGS, "qwen3_5_debug.toml"), "--model.flavor", flavor]
    argv += ["--job.dump_folder", str(tmp_path), CP, "2", TP, "2", "--training.steps", "3"]
    argv += ["--training.seq_len", "128", "--metrics.log_freq", "1", "--metrics.no-enable_tensorboard"]
    records = ranks.run(train, 4, argv)
    losses = records[0]["loss"]
    assert len(losses) == 3 and losses[-1] < losses[0] - 0.1


def test_the_million_token_run_is_valid_at_full_size_and_runs_dry_when_scaled_down(tmp_path):
    local = ["--model.hf_assets_path", BYTE_TOKENIZER, "--dataloader.dataset_path", os.path.dirname(__file__)]
    local.append("--checkpoint.no-initial_load_in_hf")
    path = os.path.join(CONFIGS, "qwen3_5_9B_262k.toml")
    assert load_config(["--job.config_file", path, *local], 16).training.seq_len == 262144
    path = os.path.join(CONFIGS, "qwen3_5_35B_1M.toml")
    config = load_config(["--job.config_file", path, *local], 64)
    assert config.training.seq_len == 1048576 == config.model_spec.model.max_seq_len
    small = {"vocab_size": 512, "dim": 256, "n_layers": 4, "head_dim": 32, "linear_key_head_dim": 16}
    small |= {"linear_value_head_dim": 16, "n_experts": 64, "n_experts_per_token": 2}
    small |= {"expert_hidden_dim": 64, "shared_expert_hidden_dim": 64}
    assert len(dry_run(path, tmp_path, *local[:-1], **small)["loss"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("num_experts", [0, 4])
def test_pipeline_stages_have_the_numbers_of_one_rank(num_experts, tmp_path):
    theirs, overrides = hf.model("qwen3_5", num_experts=num_experts)
    theirs.save_pretrained(tmp_path)
    path = hf.toml(
        str(tmp_path),
        overrides,
        model={"name": "qwen3_5"},
        checkpoint=hf.weights_of(tmp_path),
        optimizer={"lr": 3e-4},
    )
    argv = ["--job.config_file", path]
    one_rank = ranks.run(train, 1, argv)[0]
    assert one_rank["gap"] is None or one_rank["gap"] > 1e-6, "a near tie between experts: take another seed"
    argv += ["--parallelism.pipeline_parallel_degree", "2", CP, "2", "--linear_attention.exchange", "state"]
    assert_same_numbers(ranks.run(train, 4, argv), one_rank)


def test_a_tied_model_has_no_pipeline_stages():
    argv = ["--job.config_file", os.path.join(CONFIGS, "qwen3_5_debug.toml"), "--model.flavor", "0.8B"]
    with pytest.raises(Exception, match="model.overrides.tie_word_embeddings makes them one weight"):
        load_config([*argv, "--parallelism.pipeline_parallel_degree", "2"], 2)
