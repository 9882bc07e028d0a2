"""`config.json`: what it says is the model that is built, and what is written is what transformers loads."""

import copy
import dataclasses
import json
import logging
import random
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests import hf
from tests.hf import PUBLISHED
from tests.test_hf_parity import CASES, FAMILIES, SHAPES, numbers
from titan_gdn import models
from titan_gdn.assets import BYTE_TOKENIZER
from titan_gdn.config import checkpoint_checks
from titan_gdn.config.load import ConfigError, defaults, load_config
from titan_gdn.models.hybrid.hf_config import CHANGE_NOTHING, TRAINING_ONLY
from titan_gdn.models.kimi_linear.state_dict_adapter import published
from titan_gdn.reference import main as print_reference

JSON = {family: models.load(family).config_json for family in FAMILIES}
every_published = pytest.mark.parametrize("family", hf.PUBLISHED)
every_family = pytest.mark.parametrize("family", FAMILIES)
every_configuration = pytest.mark.parametrize(("family", "name"), CASES)

FLAVOR = {"qwen3_next": "80B-A3B", "kimi_linear": "48B-A3B"}


def changes_of(family, name):
    return SHAPES[family][name]


def changing_nothing(family):
    """Fields of a family that do not change its model."""
    kind = JSON[family].sparse if family == "qwen3_5" else JSON[family]
    return kind.change_nothing


def saved(model, folder):
    """What transformers saved: `config.json` and the tensors."""
    model.save_pretrained(folder)
    files = {published(key): x for key, x in load_file(folder / "model.safetensors").items()}
    return json.loads((folder / "config.json").read_text()), files


def logits_of(arguments, family, files, tokens):
    """The logits of our model with these weights; each of its parameters must be among them."""
    config = arguments.config()
    model = config.build()
    model.init_states()
    missing, unexpected = model.load_state_dict(
        FAMILIES[family][1](config, None).from_hf(files), strict=False
    )
    assert not missing and not unexpected
    with torch.no_grad():
        return model(tokens)


@every_family
def test_each_argument_of_a_model_is_read_from_the_file(family):
    kinds = [JSON[family].dense, JSON[family].sparse] if family == "qwen3_5" else [JSON[family]]
    arguments = kinds[0].arguments()
    entries = [entry for kind in kinds for entry in kind.entries]
    read = {name for entry in entries for name in (*entry.values(arguments), *entry.also)}
    assert read == {field.name for field in dataclasses.fields(arguments)} - TRAINING_ONLY


@every_published
def test_the_published_file_is_the_flavor(family, tmp_path):
    from transformers import AutoConfig

    file, flavor = PUBLISHED[family], models.load(family).flavors[FLAVOR[family]].arguments
    arguments = JSON[family].arguments_of(file)
    assert numbers(arguments) == numbers(flavor)
    assert not JSON[family].unknown_fields(file) and not JSON[family].differences(flavor, file)
    assert JSON[family].hf_config_of(flavor, file) == file
    # As transformers writes it, and as we do without an original.
    (tmp_path / "config.json").write_text(json.dumps(file))
    theirs = AutoConfig.from_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path)
    resaved = json.loads((tmp_path / "config.json").read_text())
    assert numbers(JSON[family].arguments_of(resaved)) == numbers(flavor)
    assert not JSON[family].unknown_fields(resaved)
    (tmp_path / "config.json").write_text(json.dumps(JSON[family].hf_config_of(flavor)))
    own = AutoConfig.from_pretrained(tmp_path).to_dict()
    for name in (theirs.to_dict().keys() & own.keys()) - CHANGE_NOTHING - JSON[family].change_nothing:
        assert own[name] == theirs.to_dict()[name], name


@every_configuration
def test_the_file_that_transformers_saves_is_its_model(family, name, tmp_path):
    theirs, overrides = hf.model(family, **changes_of(family, name))
    file, files = saved(theirs, tmp_path)
    arguments = JSON[family].arguments_of(file)
    assert not JSON[family].unknown_fields(file)
    assert numbers(arguments) == numbers(FAMILIES[family][0](**overrides))
    assert JSON[family].hf_config_of(arguments, file) == file
    tokens = torch.randint(0, 264, (2, 100))
    expected = theirs(tokens, use_cache=False).logits
    ours = logits_of(arguments, family, files, tokens)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)

    (tmp_path / "config.json").write_text(json.dumps(JSON[family].hf_config_of(arguments)))
    reloaded, info = type(theirs).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[keys] for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    torch.testing.assert_close(reloaded(tokens, use_cache=False).logits, expected, atol=1e-5, rtol=1e-5)


SPELLINGS = [(family, spelling) for family in FAMILIES for spelling in ("published", "transformers")]


@pytest.fixture(scope="module", params=SPELLINGS, ids=str)
def base(request, tmp_path_factory):
    """A family and a small file of it in one of its two spellings."""
    family, spelling = request.param
    theirs, _ = hf.model(family, **({"yarn_factor": 2.0} if family == "qwen3_next" else {}))
    file, _ = saved(theirs, tmp_path_factory.mktemp(family))
    if spelling == "published":
        file = JSON[family].hf_config_of(JSON[family].arguments_of(file))
    return family, file


def mutate(file, draw):
    """Change or drop one field at random; return the names that an error may use for it."""
    table, name = file, draw.choice(sorted(file.keys() - {"transformers_version"}))
    if isinstance(file[name], dict):
        table = file[name]
        name = draw.choice(sorted(table))
    old, kind = table[name], draw.randrange(5)
    if kind == 0:
        del table[name]
    elif isinstance(old, bool):
        table[name] = [not old, None, "yes", 1][max(kind - 1, 0)]
    elif isinstance(old, int | float):
        table[name] = [old * 2, old + 1, 0, -old][kind - 1]
    elif isinstance(old, list):
        table[name] = [old[1:], old + old[:1], old[::-1], None][kind - 1]
    else:
        table[name] = ["gelu", 3, ["x"], {"a": 1}][kind - 1]
    return name, old, table.get(name, "(dropped)")


@pytest.mark.parametrize("seed", range(20))
def test_a_changed_field_is_the_model_of_transformers_or_an_error_that_names_it(base, seed, tmp_path):
    family, file = base[0], copy.deepcopy(base[1])
    name, old, new = mutate(file, random.Random(f"{base}{seed}"))
    try:
        arguments = JSON[family].arguments_of(file)
        arguments.config()
    except ValueError as error:
        assert name in str(error), (name, old, new, error)
        return
    try:
        theirs = hf.of_file(file)
    except Exception:  # of transformers, which checks the types of fields that do not change the model, too
        assert name in CHANGE_NOTHING | changing_nothing(family)
        theirs = hf.of_file(base[1])
    _, files = saved(theirs, tmp_path)
    tokens = torch.randint(0, min(264, arguments.vocab_size), (2, 100))
    ours = logits_of(arguments, family, files, tokens)
    torch.testing.assert_close(ours, theirs(tokens, use_cache=False).logits, atol=1e-4, rtol=1e-4)


NOT_SUPPORTED = {
    "qwen3_next": {
        "hidden_act": ("gelu", 'hidden_act = "gelu": only "silu" is supported'),
        "attention_bias": (True, "attention_bias = true: only false is supported"),
        "attention_dropout": (0.1, "attention_dropout = 0.1: only 0 is"),
        "use_sliding_window": (True, "use_sliding_window = true: only false"),
        "model_type": ("kimi_linear", 'model_type = "kimi_linear": this is another family than "qwen3_next"'),
        "architectures": (["Qwen3NextModel"], 'architectures = \\["Qwen3NextModel"\\]: only'),
        "num_key_value_heads": (3, "num_key_value_heads = 3: expected a divisor of num_attention_heads = 4"),
        "hidden_size": (60, "hidden_size = 60: expected a multiple of 8"),
        "num_experts": ("4", 'num_experts = "4": expected an integer'),
        "rms_norm_eps": (float("nan"), "rms_norm_eps = NaN: expected a number"),
        "partial_rotary_factor": (0.5, "partial_rotary_factor = 0.5 and rope_parameters.partial_rotary_fac"),
        "full_attention_interval": (2, "layer_types = .* and full_attention_interval = 2 contradict"),
        "layer_types": (["linear_attention"], "layer_types has 1 entries and num_hidden_layers = 4"),
        "rope_parameters.rope_type": ("llama3", 'rope_parameters.rope_type = "llama3": only "default" and'),
        "rope_parameters.type": ("yarn", 'rope_type = "default" and rope_parameters.type = "yarn" contrad'),
        "rope_parameters.factor": (4.0, 'rope_parameters.factor = 4.0: only rope_type = "yarn" has it'),
        "rope_parameters.mrope_section": ([1], "rope_parameters.mrope_section = .*not supported"),
        "rope_scaling": ({"rope_type": "linear", "factor": 2.0}, "rope_scaling.rope_type|rope_scaling"),
        "rope_scaling.beta_fast": (16, "rope_scaling.beta_fast = 16: this field is not supported"),
    },
    "kimi_linear": {
        "hidden_act": ("situ", 'hidden_act = "situ": only "silu" is supported'),
        "attention_bias": (True, "attention_bias = true: only false is supported"),
        "model_type": ("qwen3_next", 'model_type = "qwen3_next": this is another family than "kimi_linear"'),
        "num_expert_group": (2, "num_expert_group = 2: only 1 is supported"),
        "topk_group": (2, "topk_group = 2: only 1 is supported"),
        "moe_router_activation_func": ("softmax", 'moe_router_activation_func = "softmax": only "sigmoid"'),
        "moe_layer_freq": (2, "moe_layer_freq = 2: only 1 is supported"),
        "mla_use_nope": (False, "mla_use_nope = false: only true is supported"),
        "q_lora_rank": (16, "q_lora_rank = 16: only null is supported"),
        "rope_scaling": ({"type": "yarn"}, "rope_scaling = .*: only null is supported"),
        "num_nextn_predict_layers": (1, "num_nextn_predict_layers = 1: only 0 is supported"),
        "tie_word_embeddings": (True, "tie_word_embeddings = true: only false is supported"),
        "num_key_value_heads": (2, "num_key_value_heads = 2: only num_attention_heads = 4 is supported"),
        "num_local_experts": (4, "num_experts = 8 and num_local_experts = 4 contradict each other"),
        "mlp_layer_types": (["sparse", "dense"] * 2, 'mlp_layer_types = .*: only "dense" at the beginning'),
        "first_k_dense_replace": (2, "mlp_layer_types = .* and first_k_dense_replace = 2 contradict"),
        "layer_types": (["full_attention"] * 4, "layer_types = .* and linear_attn_config.full_attn_layers"),
        "linear_attn_config.kda_layers": ([1, 2], "expected each layer from 1 to num_hidden_layers = 4"),
        "linear_attn_config.head_dim": (8, "linear_attn_config.head_dim = 8 and linear_head_dim = 16"),
        "linear_attn_config.gate_lower_bound": (-5.0, "gate_lower_bound = -5.0: only null is supported"),
        "linear_attn_config.expand": (2, "linear_attn_config.expand = 2: this field is not supported"),
        "routed_expert_hidden_size": (32, "routed_expert_hidden_size = 32: only null is supported"),
    },
}


@pytest.mark.parametrize(
    ("family", "path"), [(family, path) for family, paths in NOT_SUPPORTED.items() for path in paths]
)
def test_what_is_not_supported_is_refused_by_name(family, path, tmp_path):
    file, _ = saved(hf.model(family)[0], tmp_path)
    value, message = NOT_SUPPORTED[family][path]
    table, _, name = path.rpartition(".")
    (file.setdefault(table, {}) if table else file)[name] = value
    with pytest.raises(ValueError, match=message):
        JSON[family].arguments_of(file)


YARN = {
    "beta_fast": (16, "rope_parameters.beta_fast = 16.0: only 32.0 is supported"),
    "attention_factor": (1.0, "rope_parameters.attention_factor = 1.0: only 1.138"),
    "mscale": (0.7, "rope_parameters.mscale = 0.7: only null is supported"),
    "truncate": (False, "rope_parameters.truncate = false: only true is supported"),
    "factor": (0.5, "rope_parameters.factor = 0.5: expected at least 1"),
}


@pytest.mark.parametrize("name", YARN)
def test_yarn_is_supported_as_it_was_published(name, tmp_path):
    file, _ = saved(hf.model(yarn_factor=4.0)[0], tmp_path)
    file["rope_parameters"][name], message = YARN[name]
    with pytest.raises(ValueError, match=message):
        JSON["qwen3_next"].arguments_of(file)
    file["rope_parameters"] |= {"beta_fast": 32, "factor": 4, "truncate": True, "mscale": None}
    file["rope_parameters"]["attention_factor"] = 1.138629436111989
    assert JSON["qwen3_next"].arguments_of(file).yarn_factor == 4.0


@pytest.mark.parametrize("yarn", [1.0, 4.0])
@pytest.mark.parametrize("rope_type", ["rope_type", "type"])
def test_the_rotary_embedding_may_be_spelled_as_in_published_files(rope_type, yarn, tmp_path):
    file, _ = saved(hf.model(yarn_factor=yarn)[0], tmp_path)
    rope = file.pop("rope_parameters")
    spelled = {**file, "rope_theta": rope.pop("rope_theta"), "partial_rotary_factor": 0.25}
    spelled["rope_scaling"] = {rope_type: "yarn", "factor": yarn} if yarn > 1 else None
    if yarn > 1:
        # As the model card says it: the longest sequence stays that of the model without YaRN.
        spelled["max_position_embeddings"] = 256
    read = JSON["qwen3_next"].arguments_of(spelled)
    assert (read.context_length, read.yarn_factor, read.rope_theta) == (256, yarn, 1e7)
    assert JSON["qwen3_next"].hf_config_of(read, spelled) == spelled


def test_what_training_changed_is_changed_in_the_file_and_nothing_else():
    arguments = dataclasses.replace(
        JSON["qwen3_next"].arguments_of(PUBLISHED["qwen3_next"]), yarn_factor=4.0, vocab_size=152064
    )
    file = PUBLISHED["qwen3_next"] | {"new_field": 1, "quantization_config": {"quant_method": "fp8"}}
    written = JSON["qwen3_next"].hf_config_of(arguments, file, dtype="float32")
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}
    changed = {"vocab_size": 152064, "max_position_embeddings": 1048576, "torch_dtype": "float32"}
    layers = {"layer_types": arguments.kinds()}
    expected = PUBLISHED["qwen3_next"] | changed | layers | {"new_field": 1, "rope_scaling": scaling}
    del expected["full_attention_interval"]
    assert written == expected


@pytest.mark.parametrize("argument", ["lower_bound=-5.0", "linear_gate_rank=64", "n_linear_value_heads=64"])
def test_a_model_that_no_file_can_describe_is_refused(argument):
    name, value = argument.split("=")
    arguments = JSON["kimi_linear"].arguments(**{name: json.loads(value)})
    with pytest.raises(ValueError, match=f"config.json of kimi_linear cannot describe .*{name} = {value}"):
        JSON["kimi_linear"].hf_config_of(arguments)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Writes a directory with weights and a file of a run; returns the run's configuration.

    The weights are an empty file, because their tensors are compared with the model elsewhere.
    """
    monkeypatch.setattr(checkpoint_checks, "_account", lambda *args: None)

    def run(family, flavor, file, overrides=(), *words, here=True, **checkpoint):
        weights = tmp_path / "weights"
        weights.mkdir(exist_ok=True)
        (weights / "model.safetensors").touch()
        if file is not None:
            (weights / "config.json").write_text(json.dumps(file))
        path = hf.toml(
            str(tmp_path),
            dict(overrides),
            model={"name": family, "flavor": flavor},
            checkpoint=hf.weights_of(weights) | checkpoint,
        )
        return load_config(["--job.config_file", path, *words], 1, here=here)

    return run


@pytest.fixture
def log():
    """The lines that are logged."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


@every_family
def test_from_hf_is_the_model_of_the_directory_that_gives_the_weights(family, run, tmp_path, log):
    file, _ = saved(hf.model(family)[0], tmp_path)  # hf_assets_path, of which only the tokenizer counts
    shutil.copy(f"{BYTE_TOKENIZER}/tokenizer.json", tmp_path)
    small = JSON[family].hf_config_of(dataclasses.replace(JSON[family].arguments_of(file), norm_eps=1e-3))
    config = run(family, "from_hf", small, (), "--model.hf_assets_path", str(tmp_path))
    assert numbers(config.model_spec.model.arguments) == numbers(JSON[family].arguments_of(small))
    assert config.model_spec.flavor == "from_hf" and config.hf_assets_path == str(tmp_path)
    assert any("weights/config.json (checkpoint.initial_load_path)" in line for line in log)
    # Without weights to load: that of hf_assets_path; the planner reads it, too.
    words = ("--model.hf_assets_path", str(tmp_path), "--checkpoint.no-initial_load_in_hf")
    config = run(family, "from_hf", small, (), *words, here=False)
    assert numbers(config.model_spec.model.arguments) == numbers(JSON[family].arguments_of(file))


@every_published
def test_a_flavor_that_differs_from_the_file_is_an_error_with_both_values(family, run, log):
    flavor = FLAVOR[family]
    assert run(family, flavor, PUBLISHED[family])
    file = PUBLISHED[family] | {"rms_norm_eps": 1e-3, "num_attention_heads": 16, "num_key_value_heads": 16}
    with pytest.raises(ConfigError) as raised:
        run(family, flavor, file)
    told = str(raised.value)
    own = {"qwen3_next": "1e-06", "kimi_linear": "1e-05"}[family]
    assert re.search(
        rf'model.flavor = "{flavor}" differs from /.*/config.json \(checkpoint.initial_load_path', told
    )
    assert f"norm_eps = {own} in the flavor, 0.001 (rms_norm_eps = 0.001) in the file; " in told
    assert "\n" not in told
    assert ("num_attention_heads = 16" in told) == (family == "kimi_linear")
    heads = {"n_heads": 32, "n_key_value_heads": 32} if family == "qwen3_next" else {"n_heads": 32}
    log.clear()
    config = run(family, flavor, file, {"norm_eps": 1e-4, **heads})
    assert config.model_spec.model.norm.eps == 1e-4
    assert any(
        "norm_eps = 0.0001 in [model.overrides] wins over 0.001 (rms_norm_eps = 0.001) in /" in line
        for line in log
    )


def test_the_flavor_for_a_million_tokens_extends_the_published_file(run, log):
    run("qwen3_next", "80B-A3B-1M", PUBLISHED["qwen3_next"])
    assert (
        sum("yarn_factor = 4.0 in model.flavor = " in line and "wins over 1.0" in line for line in log) == 1
    )
    with pytest.raises(ConfigError, match="rope_theta = 10000000.0 in the flavor, 10000.0"):
        run("qwen3_next", "80B-A3B-1M", PUBLISHED["qwen3_next"] | {"rope_theta": 1e4})


@pytest.mark.parametrize("flavor", ["80B-A3B", "from_hf"])
def test_weights_of_which_nobody_knows_the_model_are_an_error(flavor, run, tmp_path):
    with pytest.raises(ConfigError, match='initial_load_path = ".*weights": there is no config.json'):
        run("qwen3_next", flavor, None)
    with pytest.raises(ConfigError, match="config.json is not a table of fields"):
        run("qwen3_next", flavor, [1])
    with pytest.raises(ConfigError, match='model_type = "kimi_linear": this is another family than "qwen3_n'):
        run("qwen3_next", flavor, PUBLISHED["kimi_linear"])
    (tmp_path / "weights" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json cannot be read"):
        run("qwen3_next", flavor, None)


def test_an_unknown_field_is_told_once(run, log):
    run("qwen3_next", "80B-A3B", PUBLISHED["qwen3_next"] | {"new_field": 1})
    run("qwen3_next", "from_hf", PUBLISHED["qwen3_next"] | {"new_field": 1})
    assert sum("unknown fields, which are ignored: new_field." in line for line in log) == 2


def test_a_run_that_resumes_is_not_compared_with_the_weights_it_began_with(run, tmp_path):
    file = PUBLISHED["qwen3_next"] | {"rms_norm_eps": 1e-3}
    step = tmp_path / "out" / "checkpoint" / "step-3"
    step.mkdir(parents=True)
    (step / "model.safetensors.index.json").touch()
    # The step itself is refused, and nothing is said of rms_norm_eps, by which the files differ.
    with pytest.raises(ConfigError, match="step-3.* holds Hugging Face files"):
        run("qwen3_next", "80B-A3B", file)


def test_fewer_layers_than_the_file_lists_are_its_first(run):
    file = PUBLISHED["qwen3_next"] | {"mlp_only_layers": [1, 9]}
    file |= {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12}
    model = run("qwen3_next", "from_hf", file, (), "--model.overrides.n_layers", "4").model_spec.model
    assert model.arguments.layer_types == file["layer_types"][:4] and len(model.layers) == 4
    assert model.arguments.mlp_only_layers == [1]


def test_the_reference_takes_a_directory(tmp_path, capsys):
    saved(hf.model(rms_norm_eps=1e-3, max_position_embeddings=4096)[0], tmp_path)
    capsys.readouterr()
    print_reference(["qwen3_next", "from_hf", str(tmp_path)])
    told = capsys.readouterr().out
    assert f'hf_assets_path = "{tmp_path}"' in told and "norm_eps = 0.001" in told
    (tmp_path / "run.toml").write_text(told)
    read = load_config(["--job.config_file", str(tmp_path / "run.toml")], 1, here=False)
    own = defaults("qwen3_next", "from_hf", str(tmp_path))
    assert numbers(read.model_spec.model.arguments) == numbers(own.model_spec.model.arguments)
    with pytest.raises(SystemExit):
        print_reference(["qwen3_next", "from_hf"])
    assert "FOLDER" in capsys.readouterr().err
