"""Every tensor of a directory is loaded, kept, or an error before training."""

import contextlib
import io
import json
import os
import random
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from tests import hf, ranks
from tests.config.cases import named
from titan_gdn.checkpoint.model_directory import INDEX, ModelDirectory
from titan_gdn.config.checkpoint_checks import check_checkpoint
from titan_gdn.config.load import ConfigError, load_config
from titan_gdn.models.kimi_linear import KimiLinearArguments, KimiLinearStateDictAdapter
from titan_gdn.models.qwen3_5 import Qwen3_5Arguments, Qwen3_5StateDictAdapter
from titan_gdn.models.qwen3_next import Qwen3NextArguments, Qwen3NextStateDictAdapter

FAMILIES = {
    "qwen3_5": (Qwen3_5Arguments, Qwen3_5StateDictAdapter),
    "qwen3_next": (Qwen3NextArguments, Qwen3NextStateDictAdapter),
    "kimi_linear": (KimiLinearArguments, KimiLinearStateDictAdapter),
}
MTP = {"mtp.fc.weight": torch.arange(8.0).view(2, 4), "mtp.layers.0.mlp.experts.gate_up_proj": torch.ones(3)}
SHARDS = 3


def write(folder, tensors):
    """Write three files and their index."""
    weight_map = {}
    for i in range(SHARDS):
        name = f"model-{i + 1:05}-of-{SHARDS:05}.safetensors"
        part = {key: x.contiguous() for key, x in list(tensors.items())[i::SHARDS]}
        save_file(part, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """For each family what transformers saves, its configuration, and our overrides for it."""
    found = {}
    for family in FAMILIES:
        theirs, overrides = hf.model(family)
        folder = tmp_path_factory.mktemp(family)
        theirs.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        found[family] = load_file(folder / "model.safetensors"), config, overrides
    return found


@pytest.fixture
def directory(saved, tmp_path):
    """Writes a directory of a family's tensors, changed by a function, in place or by what it returns."""

    def directory(family, change=lambda tensors: None):
        tensors, config, _ = saved[family]
        tensors = dict(tensors)
        tensors = change(tensors) or tensors
        write(tmp_path, tensors)
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return directory


def adapter(saved, family):
    arguments, adapt = FAMILIES[family]
    return adapt(arguments(**saved[family][2]).config(), None)


def account(saved, family, folder):
    return adapter(saved, family).account(ModelDirectory.read(str(folder)))


def run_of(saved, family, folder, **changes):
    """The command line of a run that loads a directory."""
    overrides = saved[family][2] | changes
    (folder / "config.json").write_text(json.dumps(saved[family][1]))
    return [
        "--job.config_file",
        hf.toml(str(folder), overrides, model={"name": family}, checkpoint=hf.weights_of(folder)),
    ]


def refused(saved, family, folder, *words, **changes):
    """The message with which a run is refused before it starts, which is one line."""
    with pytest.raises(ConfigError) as raised:
        load_config([*run_of(saved, family, folder, **changes), *words], 1)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_saves_is_the_whole_model(saved, directory, family):
    accounted, shapes = account(saved, family, directory(family))
    assert accounted.loaded.keys() == shapes.keys() and not accounted.kept
    assert {name for name, _ in accounted.loaded.values()} == saved[family][0].keys()


def test_published_names_are_accepted_beside_those_of_transformers(saved, directory):
    publish = adapter(saved, "kimi_linear").canonical
    folder = directory("kimi_linear", lambda tensors: {publish(key): x for key, x in tensors.items()})
    accounted, shapes = account(saved, "kimi_linear", folder)
    assert "model.layers.0.mlp.gate_proj.weight" in ModelDirectory.read(str(folder)).tensors
    assert accounted.loaded.keys() == shapes.keys()
    name = "model.layers.0.block_sparse_moe.gate_proj.weight"
    write(folder, {publish(key): x for key, x in saved["kimi_linear"][0].items()} | {name: torch.ones(1)})
    message = refused(saved, "kimi_linear", folder)
    assert "holds one tensor of the model twice, as " in message and f"as {name}" in message


def test_mtp_is_kept(saved, directory):
    folder = directory("qwen3_next", lambda tensors: tensors | MTP)
    accounted, _ = account(saved, "qwen3_next", folder)
    assert accounted.kept.keys() == MTP.keys()
    assert accounted.kept_bytes == 4 * (8 + 3)


NORM, HEAD, EMBEDDING = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"
Q = "model.layers.3.self_attn.q_proj.weight"


def without(*names):
    return lambda tensors: {key: x for key, x in tensors.items() if key not in names}


def changed(name, to):
    return lambda tensors: tensors | {name: to(tensors[name])}


@named(
    "change, changes, said",
    {
        "a tensor is missing": (without(NORM), {}, f"1 tensor of the model is missing: {NORM}."),
        "many are missing": (
            lambda tensors: {key: x for key, x in tensors.items() if ".experts." not in key},
            {},
            "48 tensors of the model are missing: model.layers.0.mlp.experts.0.gate_proj.weight, ",
        ),
        "nobody knows it": (
            lambda tensors: tensors | {"model.layers.1.self_attn.q_proj.bias": torch.ones(2)},
            {},
            "1 tensor of the files is unknown to the model: model.layers.1.self_attn.q_proj.bias (model-0000",
        ),
        "biases": (
            lambda tensors: (
                tensors | {f"model.layers.3.self_attn.{part}_proj.bias": torch.ones(2) for part in "qkvo"}
            ),
            {},
            "4 tensors of the files are unknown to the model: ",
        ),
        "transposed": (
            changed(Q, lambda x: x.T),
            {},
            " has [64, 256], the model needs [256, 64]",
        ),
        "another vocabulary": (
            lambda tensors: tensors,
            {"vocab_size": 272},
            "2 tensors have another shape than the model needs: model.embed_tokens.weight",
        ),
        "more layers than the model": (
            lambda tensors: tensors,
            {"n_layers": 3, "layer_types": ["linear_attention"] * 3},
            "The files have layers 0 to 3, the model has layers 0 to 2 (model.overrides.n_layers).",
        ),
        "fewer layers than the model": (
            lambda tensors: tensors,
            {"n_layers": 5, "layer_types": ["linear_attention"] * 3 + ["full_attention"] * 2},
            "The files have layers 0 to 3, the model has layers 0 to 4 (model.overrides.n_layers).",
        ),
        "more experts": (
            lambda tensors: tensors,
            {"n_experts": 2},
            "24 tensors of the files are unknown to the model: ",
        ),
        "untied files of a tied model": (
            lambda tensors: tensors,
            {"tie_word_embeddings": True},
            f"The files have {HEAD}, but the model uses its embedding in place of it: set "
            "model.overrides.tie_word_embeddings = false.",
        ),
        "tied files of an untied model": (
            without(HEAD),
            {},
            "so set model.overrides.tie_word_embeddings = true.",
        ),
        "integers": (
            changed(NORM, lambda x: x.to(torch.int32)),
            {},
            f"1 tensor has a dtype that cannot be trained: {NORM} (model-0000",
        ),
        "float8 without scales": (
            changed(Q, lambda x: x.to(torch.float8_e4m3fn)),
            {},
            "has F8_E4M3. Possible: F64, F32, F16, BF16.",
        ),
        "float8 with scales": (
            lambda tensors: (
                tensors | {Q: tensors[Q].to(torch.float8_e4m3fn), f"{Q}_scale_inv": torch.ones(2, 1)}
            ),
            {},
            f"is quantized: {Q}_scale_inv hold scales of float8 weights",
        ),
        "fused experts": (
            lambda tensors: tensors | {"model.layers.0.mlp.experts.gate_up_proj": torch.ones(4, 64, 64)},
            {},
            "holds all experts in model.layers.0.mlp.experts.gate_up_proj, and "
            "model.layers.0.mlp.experts.0.gate_proj.weight is there, too",
        ),
        "another architecture": (
            lambda tensors: {f"transformer.{key}": x for key, x in tensors.items()},
            {},
            '(config.json: model_type = "qwen3_next"): ',
        ),
    },
)
def test_a_directory_of_another_model_is_refused_by_name(saved, directory, change, changes, said):
    message = refused(saved, "qwen3_next", directory("qwen3_next", change), **changes)
    assert said in message and len(message) < 1000


def test_quantized_loading_is_refused(saved, directory):
    words = ["--checkpoint.initial_load_in_hf_quantized"]
    message = refused(saved, "qwen3_next", directory("qwen3_next"), *words)
    assert "checkpoint.initial_load_in_hf_quantized = true is not supported" in message


@named(
    "damage",
    {
        "missing": (lambda file: file.unlink(),),
        "truncated": (lambda file: file.write_bytes(file.read_bytes()[:-1]),),
        "empty": (lambda file: file.write_bytes(b""),),
        "a pointer of Git LFS": (lambda file: file.write_text("version https://git-lfs.github.com/spec/v1"),),
    },
)
def test_a_damaged_file_is_named_before_the_run(saved, directory, damage):
    folder = directory("qwen3_next")
    damage(folder / "model-00002-of-00003.safetensors")
    message = refused(saved, "qwen3_next", folder)
    assert "model-00002-of-00003.safetensors" in message and "checkpoint.initial_load_path = " in message


def load(saved, family, folder):
    """The model's state after it was loaded as the checkpointer does."""
    adapt = adapter(saved, family)
    model = adapt.model_config.build()
    model.init_states()
    state = model.state_dict()
    reader = adapt.get_hf_storage_reader(str(folder))
    dcp.load(adapt.to_load(state), storage_reader=reader, no_dist=True)
    return adapt.to_hf(state)


def test_experts_in_one_tensor_are_refused_where_the_family_has_none(saved, directory):
    """Those that are kept are not: nothing reads them."""
    name = "model.layers.1.mlp.experts.down_proj"
    folder = directory("kimi_linear", lambda tensors: tensors | MTP)
    assert account(saved, "kimi_linear", folder)[0].kept.keys() == MTP.keys()
    for x in (torch.ones(8, 64, 32), torch.ones(3)):
        folder = directory("kimi_linear", lambda tensors, x=x: tensors | {name: x})
        assert f"in one tensor: {name}. Files need" in refused(saved, "kimi_linear", folder)


def assert_loaded(saved, family, loaded, tensors):
    canonical = adapter(saved, family).canonical
    tensors = {canonical(key): x for key, x in tensors.items() if not key.startswith("mtp.")}
    assert loaded.keys() == tensors.keys()
    for key, x in loaded.items():
        assert torch.equal(x, tensors[key].view(x.shape).float()), key


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_loaded_is_what_the_index_names(saved, directory, family):
    """A stale file beside them counts for nothing, and a broken one does not even have to be opened."""
    folder = directory(family)
    stale = {key: torch.zeros_like(x) for key, x in saved[family][0].items()}
    save_file(stale, folder / "aa.safetensors")
    save_file(stale, folder / "zz.safetensors")
    (folder / "broken.safetensors").touch()
    assert_loaded(saved, family, load(saved, family, folder), saved[family][0])


@pytest.mark.parametrize("family", FAMILIES)
def test_file_names_without_a_number_are_read(saved, tmp_path, family):
    tensors = saved[family][0]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model.safetensors")}))
    assert_loaded(saved, family, load(saved, family, tmp_path), tensors)


def test_one_file_without_an_index_is_read(saved, tmp_path):
    save_file(saved["qwen3_next"][0], tmp_path / "weights.safetensors")
    assert_loaded(saved, "qwen3_next", load(saved, "qwen3_next", tmp_path), saved["qwen3_next"][0])


@pytest.mark.parametrize("shape", [(4,), (1, 4, 1), (4, 1)])
def test_a_log_of_another_shape_is_loaded(saved, directory, shape):
    """FLA and GLM store it as [H], Kimi Linear as [1, 1, H, 1]."""

    def flatten(tensors):
        return {key: x.reshape(shape) if key.endswith("A_log") else x for key, x in tensors.items()}

    folder = directory("kimi_linear", flatten)
    loaded = load(saved, "kimi_linear", folder)
    assert loaded["model.layers.0.self_attn.A_log"].shape == (1, 1, 4, 1)
    assert_loaded(saved, "kimi_linear", loaded, saved["kimi_linear"][0])
    write(folder, flatten(saved["kimi_linear"][0]) | {"model.layers.0.self_attn.A_log": torch.ones(2, 2)})
    assert "A_log (model-0000" in refused(saved, "kimi_linear", folder)


def mutate(random, folder, weight_map, tensors):
    """Change one thing in a directory, and say what."""
    kind = random.choice(["drop", "rename", "transpose", "truncate", "dtype", "index"])
    key = random.choice(sorted(tensors))
    file = folder / weight_map[key]
    content = load_file(file)
    if kind == "drop":
        del content[key]
    elif kind == "rename":
        content[random.choice([f"x.{key}", key[:-1], key.replace("layers.1.", "layers.2.") + "x"])] = (
            content.pop(key)
        )
    elif kind == "transpose":
        content[key] = (
            content[key].flatten(0, -2).T.contiguous() if content[key].ndim > 1 else content[key][:-1]
        )
    elif kind == "dtype":
        to = random.choice([torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.float8_e4m3fn])
        content[key] = content[key].to(to)
    if kind == "truncate":
        data = file.read_bytes()
        file.write_bytes(data[: random.randrange(len(data))])
    elif kind == "index":
        changed = dict(weight_map)
        changed[key] = random.choice(
            sorted(set(weight_map.values()) - {weight_map[key]}) + ["none.safetensors"]
        )
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": changed}))
    else:
        save_file(content, file)
        listed = {name: own for name, own in weight_map.items() if own != file.name}
        if random.random() < 0.7:  # the index says so too
            listed |= dict.fromkeys(content, file.name)
            (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    return f"{kind} of {key}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mutated_directory_is_refused_or_is_loaded_as_it_is(saved, tmp_path, family):
    """Fifty times: one sentence, or exactly what the files hold."""
    generator = random.Random(0)
    tensors = saved[family][0] | (MTP if family == "qwen3_next" else {})
    weight_map = write(tmp_path, tensors)
    (tmp_path / "config.json").write_text(json.dumps(saved[family][1]))
    config = load_config(run_of(saved, family, tmp_path), 1)
    accepted = 0
    for _ in range(50):
        weight_map = write(tmp_path, tensors)
        what = mutate(generator, tmp_path, weight_map, tensors)
        try:
            check_checkpoint(config)
        except ConfigError as error:
            assert "\n" not in str(error) and str(tmp_path) in str(error), what
            continue
        accepted += 1
        assert what.startswith("dtype") or "mtp." in what or square(tensors, what), what
        files = {}
        for name in os.listdir(tmp_path):
            files |= load_file(tmp_path / name) if name.endswith(".safetensors") else {}
        assert_loaded(saved, family, load(saved, family, tmp_path), files)
    assert 0 < accepted < 25


def square(tensors, what):
    x = tensors[what.split()[-1]]
    return what.startswith("transpose") and x.ndim > 1 and x.flatten(0, -2).shape[0] == x.shape[-1]


def test_every_rank_ends_with_exit_code_2_in_less_than_ten_seconds(saved, tmp_path):
    """Fifty files, of which the last is truncated: rank 0 says so, and rank 1 later if it still runs then."""
    items = list(saved["qwen3_next"][0].items())
    weight_map = {}
    for i in range(50):
        save_file(dict(items[i::50]), tmp_path / f"model-{i + 1:05}-of-00050.safetensors")
        weight_map |= dict.fromkeys(dict(items[i::50]), f"model-{i + 1:05}-of-00050.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(saved["qwen3_next"][1]))
    argv = run_of(saved, "qwen3_next", tmp_path)
    last = tmp_path / "model-00050-of-00050.safetensors"
    last.write_bytes(last.read_bytes()[:-1])
    ended = ranks.run(end_of, 2, argv)
    assert [code for code, _, _ in ended] == [2, 2]
    assert ended[0][1] < 10 and ended[1][1] > ended[0][1] + 2
    for _, _, told in ended:
        assert f'"{last}" is truncated' in told and told.count("\n") == 1


def end_of(argv):
    """The exit code of the command, its seconds, and what it wrote to standard error."""
    from titan_gdn.train import main

    start, said = time.monotonic(), io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as ended:
        main(argv)
    lines = [line for line in said.getvalue().splitlines(True) if line.startswith("titan_gdn:")]
    return ended.value.code, time.monotonic() - start, "".join(lines)
