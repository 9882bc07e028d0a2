"""The last save in the Hugging Face format is a model directory that loads, with everything that came in."""

import contextlib
import io
import json
import os
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests import hf, ranks
from tests.test_hf_parity import FAMILIES
from tests.training import train
from titan_gdn import convert
from titan_gdn.assets import BYTE_TOKENIZER
from titan_gdn.checkpoint import export as module
from titan_gdn.checkpoint.export import Beside, ExportedTensor, ExportError, export, filled
from titan_gdn.checkpoint.model_directory import ModelDirectory, ModelDirectoryError, TensorEntry
from titan_gdn.config.load import ConfigError, load_config
from titan_gdn.models.kimi_linear.state_dict_adapter import published as canonical

INDEX = "model.safetensors.index.json"


def published(folder, family="qwen3_next", dtype=torch.bfloat16, files=3, **changes):
    """Write a random model as transformers does, in several files, with `mtp.*` beside it.

    Return the model and its overrides. The scale of each row of each tensor is another one, so that no two
    heads, experts or halves of a tensor could change places unseen.
    """
    theirs, overrides = hf.model(family, **changes)
    scale_rows(theirs)
    theirs.to(dtype)
    theirs.save_pretrained(folder, max_shard_size="1GB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(os.path.join(BYTE_TOKENIZER, name), folder / name)
    (folder / "chat_template.jinja").write_text("mine")
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    tensors = load_file(folder / "model.safetensors") | {"mtp.norm.weight": torch.arange(7, dtype=dtype)}
    tensors["mtp.fc.weight"] = torch.randn(5, 3)
    os.remove(folder / "model.safetensors")
    write(folder, tensors, files)
    return theirs, overrides


def scale_rows(model):
    """Give each row of each parameter another scale."""
    with torch.no_grad():
        for x in model.parameters():
            if x.ndim > 1:
                x.mul_(torch.linspace(0.5, 1.5, x.numel() // x.shape[-1]).view(*x.shape[:-1], 1))


def write(folder, tensors, files):
    """Write tensors in `files` files with an index."""
    names, index = sorted(tensors), {}
    for i in range(files):
        file = f"model-{i + 1:05}-of-{files:05}.safetensors"
        part = {name: tensors[name].contiguous() for name in names[i::files]}
        save_file(part, folder / file, {"format": "pt"})
        index |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))


def read(folder):
    """All tensors that the index of a model directory names, each from the file that it names."""
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    tensors = {}
    for file in sorted(set(index.values())):
        with safe_open(folder / file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
            assert set(opened.keys()) == {name for name, where in index.items() if where == file}
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}
    assert sorted(set(index.values())) == sorted(n for n in os.listdir(folder) if n.endswith(".safetensors"))
    return tensors


def unchanged(**sections):
    """The sections of a run of one step that changes no weight, and exports."""
    checkpoint = {"enable": True, "last_save_model_only": True, "last_save_in_hf": True}
    return {
        "checkpoint": checkpoint | {"initial_load_in_hf": True} | sections.pop("checkpoint", {}),
        "training": {"steps": 1, "local_batch_size": 2} | sections.pop("training", {}),
        "optimizer": {"lr": 0.0, "weight_decay": 0.0},
        **sections,
    }


def run_toml(tmp_path, source, family, overrides, **sections):
    """The file of a run that loads `source` and exports, and the folder of the export."""
    if family == "kimi_linear":
        overrides = overrides | {"load_balance_coeff": 1e-30}  # the bias is trained without the optimizer
    sections = unchanged(**sections)
    if source is not None:
        sections["checkpoint"].setdefault("initial_load_path", str(source))
    path = hf.toml(str(tmp_path), overrides, model={"name": family}, **sections)
    return ["--job.config_file", path], tmp_path / "out" / "checkpoint" / "step-1"


def assert_same(exported, original):
    assert exported.keys() == original.keys()
    for name, x in original.items():
        assert exported[name].dtype == x.dtype, name
        assert torch.equal(exported[name], x), name


def test_keys_that_the_model_lacks_are_copied_and_not_made_up(tmp_path):
    """The published Qwen3-Next files hold `mtp.*`, which was written with an empty dtype."""
    source = tmp_path / "source"
    source.mkdir()
    _, overrides = published(source, files=1)
    argv, exported = run_toml(tmp_path, None, "qwen3_next", overrides)
    argv += ["--model.hf_assets_path", str(source)]
    ranks.run(train, 1, argv)
    assert_same(read(exported), read(source))


def test_files_of_any_name_are_read(tmp_path):
    """TorchTitan looks for a number in the names of the files that an index names."""
    source = tmp_path / "source"
    source.mkdir()
    _, overrides = published(source, files=1)
    index = json.loads((source / INDEX).read_text())
    (source / "model-00001-of-00001.safetensors").rename(source / "model.safetensors")
    index["weight_map"] = dict.fromkeys(index["weight_map"], "model.safetensors")
    (source / INDEX).write_text(json.dumps(index))
    argv, exported = run_toml(tmp_path, source, "qwen3_next", overrides)
    ranks.run(train, 1, [*argv, "--model.hf_assets_path", str(source)])
    assert read(exported).keys() == index["weight_map"].keys()


every_mesh = pytest.mark.parametrize(
    ("tp", "cp"), [(1, 1), (2, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.slow)]
)


def mesh(tp, cp):
    """The words of a command line that choose a mesh."""
    return [f"--parallelism.{axis}_parallel_degree={n}" for axis, n in (("tensor", tp), ("context", cp))]


def leave_other_tensors(tmp_path, source, exported):
    """Put tensors of the same names, all zeros, wherever a run must not look for any.

    Beside the index of the source, in the parts of an earlier export, and in a directory that gives the
    tokenizer and has an index of its own. Return the words of a command line that name the latter.
    """
    zeros = {name: torch.zeros_like(x) for name, x in read(source).items()}
    save_file(zeros, source / "old.safetensors")
    (exported / "sharded").mkdir(parents=True)
    where = {name: {"saved_offsets": [0] * x.ndim} for name, x in zeros.items()}
    path = exported / "sharded" / "shard-00009-model-00001-of-00001.safetensors"  # of a run on more ranks
    save_file(zeros, path, {"DCP_SHARDING_INFO": json.dumps(where)})
    other = tmp_path / "other"
    other.mkdir()
    write(other, {name: x for name, x in zeros.items() if "layers.3." not in name}, 2)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(os.path.join(BYTE_TOKENIZER, name), other / name)
    return ["--model.hf_assets_path", str(other)]


@every_mesh
@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear"])
def test_a_directory_survives_a_run_that_changes_no_weight(family, tp, cp, tmp_path):
    """Bit for bit, on every mesh; and transformers computes with the export what our model does.

    Experts are square, so that a transposed one keeps its shape.
    """
    source = tmp_path / "source"
    source.mkdir()
    theirs, overrides = published(source, family, moe_intermediate_size=64)
    original = read(source)
    argv, exported = run_toml(tmp_path, source, family, overrides)
    argv += leave_other_tensors(tmp_path, source, exported)
    ranks.run(train, tp * cp, argv + mesh(tp, cp))

    tensors = read(exported)
    assert_same(tensors, original)
    small = {name for name in os.listdir(source) if not name.endswith((".safetensors", INDEX))}
    assert small | {INDEX} == {n for n in os.listdir(exported) if not n.endswith(".safetensors")}
    for name in small:
        assert (source / name).read_bytes() == (exported / name).read_bytes(), name

    reloaded, told = type(theirs).from_pretrained(exported, dtype=torch.float32, output_loading_info=True)
    assert not told["missing_keys"] and not told["mismatched_keys"]
    assert set(told["unexpected_keys"]) <= {"mtp.fc.weight", "mtp.norm.weight"}
    tokens = torch.randint(0, 264, (2, 100))
    with torch.no_grad():
        expected = reloaded(tokens, use_cache=False).logits
        model = ours(family, overrides, {name: x.float() for name, x in tensors.items()})
        logits = model(tokens)
        generated = reloaded.generate(tokens[:1, :8], max_new_tokens=3, do_sample=False)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        for length in (8, 9, 10):
            assert generated[0, length] == model(generated[:, :length])[0, -1].argmax()


@every_mesh
def test_another_model_is_refused_on_every_rank(tp, cp, tmp_path):
    """Before a process group exists, which ranks that go on would wait in."""
    source = tmp_path / "source"
    source.mkdir()
    _, overrides = published(source)
    del overrides["rope_theta"]  # the flavor's is that of the file

    def another(name, change_tensors=lambda tensors: {}, **fields):
        folder = shutil.copytree(source, tmp_path / name)
        tensors = read(source)
        write(folder, tensors | change_tensors(tensors), 3)
        config = json.loads((source / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))
        return folder

    head, bias = "lm_head.weight", "model.layers.3.self_attn.q_proj.bias"
    rope = json.loads((source / "config.json").read_text())["rope_parameters"]
    directories = {
        another("theta", rope_parameters=rope | {"rope_theta": 1e4}): "rope_theta = 10000",
        another("tied", tie_word_embeddings=True): "tie_word_embeddings",
        another("bias", lambda tensors: {bias: torch.ones(256)}): f"unknown to the model: {bias}",
        another("float8", lambda tensors: {f"{head}_scale_inv": torch.ones(3, 1)}): "is quantized",
        another("wide", lambda tensors: {head: tensors[head][:, :32]}): "has [264, 32], the model needs",
    }
    del overrides["tie_word_embeddings"]
    argv, exported = run_toml(tmp_path, None, "qwen3_next", overrides)
    runs = [[*argv, *mesh(tp, cp), "--checkpoint.initial_load_path", str(folder)] for folder in directories]
    for ended in ranks.run(ends, tp * cp, runs):
        for said, (code, told) in zip(directories.values(), ended, strict=True):
            assert code == 2 and "Traceback" not in told
            assert said in told and told.count("\n") == 1, (said, told)
    assert not exported.exists()


def ends(runs):
    """The exit code of each command, and what it wrote to standard error."""
    from titan_gdn import train

    train.time.sleep = lambda seconds: None  # torchrun ends other ranks before they print
    found = []
    for argv in runs:
        said = io.StringIO()
        with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as ended:
            train.main(argv)
        lines = [line for line in said.getvalue().splitlines(True) if line.startswith("titan_gdn:")]
        found.append((ended.value.code, "".join(lines)))
    return found


def ours(family, overrides, tensors):
    """Our model with the weights of a model directory."""
    arguments, adapt = FAMILIES[family]
    config = arguments(**overrides).config()
    model = config.build()
    model.init_states()
    missing, unexpected = model.load_state_dict(adapt(config, None).from_hf(tensors), strict=False)
    assert not missing and not unexpected
    return model


def test_pipeline_stages_and_experts_of_several_ranks_make_one_directory(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    _, overrides = published(source)
    argv, exported = run_toml(tmp_path, source, "qwen3_next", overrides)
    for name in ("pipeline_parallel", "expert_parallel"):
        argv += [f"--parallelism.{name}_degree", "2"]
    ranks.run(train, 4, argv)
    assert_same(read(exported), read(source))


def test_config_json_says_what_the_run_changed(tmp_path):
    """A context that was extended by YaRN is extended where the export is loaded, too."""
    source = tmp_path / "source"
    source.mkdir()
    theirs, overrides = published(source)
    overrides |= {"yarn_factor": 4.0, "context_length": 64}
    argv, exported = run_toml(tmp_path, source, "qwen3_next", overrides)
    ranks.run(train, 1, argv)
    reloaded = type(theirs).from_pretrained(exported, dtype=torch.float32)
    tokens = torch.randint(0, 264, (2, 200))
    with torch.no_grad():
        logits = ours("qwen3_next", overrides, {k: x.float() for k, x in read(exported).items()})(tokens)
        torch.testing.assert_close(logits, reloaded(tokens).logits, atol=1e-4, rtol=1e-4)
        without = type(theirs).from_pretrained(source, dtype=torch.float32)(tokens).logits
    assert (logits - without).abs().max() > 1e-3


def test_names_and_dimensions_are_those_of_the_files(tmp_path):
    """Kimi Linear as it was published, where dense layers have other names than transformers gives them.

    FLA and GLM hold `A_log` as a vector.
    """
    source = tmp_path / "source"
    source.mkdir()
    _, overrides = published(source, "kimi_linear")
    tensors = {canonical(name): x for name, x in read(source).items()}
    assert tensors.keys() != read(source).keys()
    write(source, {name: x.flatten() if "A_log" in name else x for name, x in tensors.items()}, 3)
    argv, exported = run_toml(tmp_path, source, "kimi_linear", overrides)
    ranks.run(train, 2, [*argv, "--parallelism.tensor_parallel_degree", "2"])
    assert_same(read(exported), read(source))


def test_the_folder_of_the_tokenizer_says_nothing_about_the_tensors(tmp_path):
    """A model that was trained from scratch, beside the index of another one with fewer layers.

    An earlier, interrupted export left its parts and a file behind: they do not enter.
    """
    from transformers import AutoModelForCausalLM

    source = tmp_path / "source"
    source.mkdir()
    _, overrides = published(source, num_hidden_layers=2, layer_types=["linear_attention"] * 2)
    overrides |= {"n_layers": 4, "tie_word_embeddings": True}
    overrides["layer_types"] = [*["linear_attention"] * 3, "full_attention"]
    argv, exported = run_toml(
        tmp_path, None, "qwen3_next", overrides, checkpoint={"initial_load_in_hf": False}
    )
    (exported / "sharded").mkdir(parents=True)
    stale = {"model.norm.weight": torch.full((64,), 7.0)}
    where = {"DCP_SHARDING_INFO": json.dumps({"model.norm.weight": {"saved_offsets": [0]}})}
    for name in ("sharded/shard-00002-model-00001-of-00001", "sharded/shard-00002-model-00003-of-00003"):
        save_file(stale, exported / f"{name}.safetensors", where)
    save_file(stale, exported / "model-00003-of-00003.safetensors")

    ranks.run(train, 1, [*argv, "--model.hf_assets_path", str(source)])
    tensors = read(exported)
    config = FAMILIES["qwen3_next"][0](**overrides).config()
    with torch.device("meta"):
        model = config.build()
    assert sum(x.numel() for x in tensors.values()) == sum(x.numel() for x in model.parameters())
    assert "lm_head.weight" not in tensors and not any(name.startswith("mtp.") for name in tensors)
    assert torch.equal(tensors["model.norm.weight"], torch.zeros(64))  # Qwen3-Next's norms add 1
    assert not (exported / "sharded").exists()
    assert (exported / "tokenizer.json").exists()

    theirs, told = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not any(told.values()) and theirs.dtype == torch.float32
    sequence = torch.randint(0, 264, (1, 100))
    with torch.no_grad():
        logits = ours("qwen3_next", overrides, tensors)(sequence)
        torch.testing.assert_close(logits, theirs(sequence).logits, atol=1e-4, rtol=1e-4)


def test_export_dtype_if_given_is_the_dtype_of_what_was_trained(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    _, overrides = published(source)
    argv, exported = run_toml(tmp_path, source, "qwen3_next", overrides)
    ranks.run(train, 1, [*argv, "--checkpoint.export_dtype", "float32"])
    original, tensors = read(source), read(exported)
    assert tensors.keys() == original.keys()
    for name, x in tensors.items():
        assert torch.equal(x, original[name].to(x.dtype)), name
        assert x.dtype == (original[name].dtype if name.startswith("mtp.") else torch.float32), name
    assert json.loads((exported / "config.json").read_text())["dtype"] == "float32"


def test_a_resumed_run_exports_beside_the_files_that_the_first_one_began_with(tmp_path, capsys):
    source = tmp_path / "source"
    source.mkdir()
    _, overrides = published(source)
    argv, first = run_toml(
        tmp_path,
        source,
        "qwen3_next",
        overrides,
        checkpoint={"last_save_in_hf": False, "last_save_model_only": False},
    )
    ranks.run(train, 1, argv)
    argv, _ = run_toml(
        tmp_path,
        None,
        "qwen3_next",
        overrides,
        checkpoint={"initial_load_in_hf": False},
        training={"steps": 2},
    )
    ranks.run(train, 1, argv)
    assert_same(read(first.with_name("step-2")), read(source))

    shutil.rmtree(first.with_name("step-2"))
    source.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=f'came from .*: "{source}" is not a directory'):
        load_config(argv, 1)
    moved = ["--checkpoint.initial_load_in_hf", "--checkpoint.initial_load_path", str(tmp_path / "moved")]
    ranks.run(train, 1, argv + moved)
    assert_same(read(first.with_name("step-2")), read(tmp_path / "moved"))


def test_a_folder_that_cannot_be_written_is_an_error_before_the_run(tmp_path):
    _, overrides = hf.model()
    scratch = {"initial_load_in_hf": False}
    argv, _ = run_toml(tmp_path, None, "qwen3_next", overrides, checkpoint=scratch)
    (tmp_path / "out").touch()
    with pytest.raises(ConfigError, match=r'out" is not a directory that this user may write to'):
        load_config(argv, 1)


def tensors_of(*names):
    return {name: torch.randn(3, 5).to(torch.bfloat16) for name in names}


def test_an_interrupted_export_is_not_taken_for_complete(tmp_path, monkeypatch):
    """Neither a first one nor one over a complete directory, wherever it stops."""
    kept = {"mtp.norm.weight": TensorEntry(str(tmp_path / "gone"), "F32", (2,), 0, 8)}
    export(tensors_of("b", "a"), str(tmp_path / "out"), Beside({}))
    assert (tmp_path / "out" / INDEX).exists()
    with pytest.raises(ExportError, match="FileNotFoundError.*gone"):
        export(tensors_of("b", "a"), str(tmp_path / "out"), Beside(kept))
    assert not (tmp_path / "out" / INDEX).exists()

    def killed(*args):
        raise KeyboardInterrupt

    for function in ("_clear", "_write_file", "_copy_small_files", "_write_index"):
        export(tensors_of("b", "a"), str(tmp_path / "out"), Beside({}))
        with monkeypatch.context() as patch:
            real = getattr(module, function)
            patch.setattr(module, function, lambda *args, real=real: (real(*args), killed()))
            with pytest.raises(KeyboardInterrupt):
                export(tensors_of("b", "a", "c"), str(tmp_path / "out"), Beside({}))
        if (tmp_path / "out" / INDEX).exists():
            assert function == "_write_index" and read(tmp_path / "out").keys() == {"a", "b", "c"}


def test_the_source_is_not_overwritten(tmp_path):
    export(tensors_of("a"), str(tmp_path), Beside({}))
    with pytest.raises(ExportError, match="holds the weights that the run began with"):
        export(tensors_of("a"), str(tmp_path), Beside({}, source=str(tmp_path)))
    assert read(tmp_path).keys() == {"a"}


def test_kept_tensors_are_copied_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PIECE_BYTES", 7)
    kept = tensors_of("mtp.a", "mtp.b") | {"mtp.number": torch.tensor(3), "mtp.none": torch.zeros(0, 4)}
    save_file(kept, tmp_path / "model.safetensors")
    trained = tensors_of("x") | {"scalar": torch.tensor(2.0)}
    export(trained, str(tmp_path / "out"), Beside(ModelDirectory.read(str(tmp_path)).tensors))
    assert_same(read(tmp_path / "out"), kept | trained)


def test_files_are_filled_in_the_order_of_the_layers():
    tensors = {f"layers.{i}.w": ExportedTensor("BF16", (i % 3 + 1,)) for i in (10, 9, 2, 1, 0)}
    tensors["layers.9.a"] = ExportedTensor("F32", (1,))
    files = filled(tensors, 8)
    assert [list(file) for file in files] == [
        ["layers.0.w", "layers.1.w"],
        ["layers.2.w"],
        ["layers.9.a", "layers.9.w"],
        ["layers.10.w"],
    ]


def test_a_step_is_converted_to_a_directory_and_back(tmp_path):
    """Bit for bit, in one process; the step that is made is one that a run begins with."""
    for family in ("qwen3_next", "kimi_linear"):
        here = tmp_path / family
        source, step, folder = here / "source", here / "step-0", here / "folder"
        source.mkdir(parents=True)
        _, overrides = published(source, family)
        argv, exported = run_toml(
            here,
            None,
            family,
            overrides,
            checkpoint={"initial_load_in_hf": False, "initial_load_path": str(step)},
        )
        convert.main([str(source), str(step), *argv])
        convert.main([str(step), str(folder), *argv])
        assert_same(read(folder), read(source))
        assert (folder / "config.json").read_bytes() == (source / "config.json").read_bytes()
        ranks.run(train, 1, argv)
        assert_same(read(exported), read(source))


def test_a_directory_whose_config_json_says_otherwise_is_not_converted(tmp_path, capsys):
    """Same shapes, another model: nothing but the file can tell."""
    source = tmp_path / "source"
    source.mkdir()
    _, overrides = published(source)
    argv, _ = run_toml(
        tmp_path, None, "qwen3_next", {k: v for k, v in overrides.items() if k != "rope_theta"}
    )
    file = json.loads((source / "config.json").read_text())
    file["rope_parameters"]["rope_theta"] = 1e4
    (source / "config.json").write_text(json.dumps(file))
    with pytest.raises(SystemExit):
        convert.main([str(source), str(tmp_path / "step"), *argv])
    assert "rope_theta = 10000000.0 in the flavor, 10000.0" in capsys.readouterr().err
    assert not (tmp_path / "step").exists()


def test_a_conversion_that_is_killed_leaves_nothing_that_is_taken_for_a_model(tmp_path):
    """Its files have valid headers and their full size before they have values."""

    def killed():
        yield "a", torch.ones(3)
        raise KeyboardInterrupt

    tensors = {name: ExportedTensor("F32", (3,)) for name in "ab"}
    with pytest.raises(KeyboardInterrupt):
        module.write_one_by_one(str(tmp_path), tensors, killed(), Beside({}))
    with pytest.raises(ModelDirectoryError):
        ModelDirectory.read(str(tmp_path))


def test_a_tied_model_is_converted_with_both_names_of_its_weight(tmp_path):
    source, step = tmp_path / "source", tmp_path / "step"
    source.mkdir()
    _, overrides = published(source, tie_word_embeddings=True)
    argv, _ = run_toml(tmp_path, None, "qwen3_next", overrides)
    convert.main([str(source), str(step), *argv])
    weights = {name: torch.zeros(264, 64) for name in ("tok_embeddings.weight", "lm_head.weight")}
    dcp.load(weights, checkpoint_id=str(step), no_dist=True)
    assert weights["lm_head.weight"].any()
    assert torch.equal(weights["lm_head.weight"], weights["tok_embeddings.weight"])


def test_a_step_of_another_model_is_not_converted(tmp_path, capsys):
    source = tmp_path / "source"
    source.mkdir()
    _, overrides = published(source)
    argv, _ = run_toml(tmp_path, None, "qwen3_next", overrides)
    convert.main([str(source), str(tmp_path / "step"), *argv])
    for name in ("step", "source"):
        with pytest.raises(SystemExit):
            larger = ["--model.overrides.vocab_size", "272"]
            convert.main([str(tmp_path / name), str(tmp_path / "new"), *argv, *larger])
        assert not (tmp_path / "new").exists()
    with pytest.raises(SystemExit):
        convert.main([str(tmp_path / "step"), str(source), *argv])
    told = capsys.readouterr().err
    assert "tok_embeddings.weight: the model has [272, 64], the step has [264, 64]" in told
    assert "have another shape than the model needs: " in told
    assert f'"{source}" exists and is not an empty directory' in told
