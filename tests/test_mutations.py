"""A model directory or a file with one thing changed is refused in one sentence, or is as it says."""

import json
import random
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests import hf, test_accounting, test_hf_config
from titan_gdn.config import reference
from titan_gdn.config.load import ConfigError, defaults, load_config
from titan_gdn.models.hybrid.hf_config import CHANGE_NOTHING

saved = test_accounting.saved


def mutate(draw, folder, family, saved):
    """Write a directory, change one thing in it, and say what."""
    tensors, config, _ = saved[family]
    tensors = tensors | (test_accounting.MTP if family == "qwen3_next" else {})
    weight_map = test_accounting.write(folder, tensors)
    content = json.loads(json.dumps(config))
    what = None
    if draw.random() < 0.4:
        what = "config.json: {}: {} became {}".format(*test_hf_config.mutate(content, draw))
    (folder / "config.json").write_text(json.dumps(content))
    return what or test_accounting.mutate(draw, folder, weight_map, tensors)


def logits_of(config, folder, tokens):
    """What the model of a run computes with the weights that it starts with."""
    spec = config.model_spec
    model = spec.model.build()
    model.init_states()
    adapter = spec.state_dict_adapter(spec.model, None)
    dcp.load(
        adapter.to_load(model.state_dict()),
        storage_reader=adapter.get_hf_storage_reader(str(folder)),
        no_dist=True,
    )
    with torch.no_grad():
        return model(tokens)


def logits_of_transformers(folder, family, saved, tokens):
    theirs = type(hf.model(family)[0])
    read = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
    try:
        model, told = theirs.from_pretrained(folder, **read)
    except Exception:  # it checks the types of fields that do not change the model, too
        content = json.loads((folder / "config.json").read_text())
        original = saved[family][1]
        differ = {name for name in original if content.get(name, original[name]) != original[name]}
        assert differ <= CHANGE_NOTHING | test_hf_config.changing_nothing(family), differ
        (folder / "config.json").write_text(json.dumps(original))
        model, told = theirs.from_pretrained(folder, **read)
    assert not told["missing_keys"] and not told["mismatched_keys"]
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


@pytest.mark.parametrize("n", [10, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", test_accounting.FAMILIES)
def test_a_mutated_directory_is_never_another_model(saved, family, n, tmp_path):
    draw = random.Random(n)
    weights = tmp_path / "weights"
    weights.mkdir()
    model = {"name": family, "flavor": "from_hf"}
    argv = ["--job.config_file", hf.toml(str(tmp_path), {}, model=model, checkpoint=hf.weights_of(weights))]
    tokens = torch.randint(0, 264, (2, 100))
    accepted = []
    for _ in range(n):
        what = mutate(draw, weights, family, saved)
        try:
            config = load_config(argv, 1)
        except ConfigError as error:
            assert "\n" not in str(error) and str(weights) in str(error), what
            continue
        accepted.append(what)
        ours = logits_of(config, weights, tokens)
        expected = logits_of_transformers(weights, family, saved, tokens)
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4, msg=what)
    assert 0 < len(accepted) < n / 2


NOWHERE_VALID = ["-inf", "nan", "1e300", f"{2**70}", '"\\u0000"']
EXTREME = [*NOWHERE_VALID, "inf", "-1", "0", f"{2**62}", '""', "true", "[]", "{}"]


def keys_of(family, flavor):
    """Every section and key of the reference."""
    section, keys = None, []
    for line in "\n".join(reference.lines(defaults(family, flavor), family, flavor)).splitlines():
        if header := re.fullmatch(r"\[(.+)\]", line):
            section = header[1]
        elif key := re.match(r"\w+(?= = )", line):
            keys.append((section, key[0]))
    return keys


@pytest.mark.parametrize("n", [450, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("family", "ranks"), [("qwen3_next", 1), ("qwen3_next", 2), ("kimi_linear", 1)])
def test_an_extreme_value_of_any_key_is_refused_by_name_or_makes_a_configuration(family, ranks, n, tmp_path):
    """On two ranks, in a pipeline."""
    draw = random.Random(n)
    keys = keys_of(family, "debug_moe")
    assert len(keys) > 150
    cases = [(section, key, value) for section, key in keys for value in EXTREME]
    accepted = 0
    drawn = draw.sample(cases, min(n, len(cases)))
    for section, key, value in drawn:
        tables = {"model": {"name": f'"{family}"', "flavor": '"debug_moe"'}, "validator": {"enable": "true"}}
        tables["job"] = {"dump_folder": f'"{tmp_path}/out"'}
        if ranks > 1:
            tables["parallelism"] = {"pipeline_parallel_degree": "2"}
        tables.setdefault(section, {})[key] = value
        file = tmp_path / "run.toml"
        file.write_text(
            "".join(
                f"[{name}]\n" + "".join(f"{one} = {given}\n" for one, given in table.items())
                for name, table in tables.items()
            )
        )
        what = f"{section}.{key} = {value}"
        try:
            load_config(["--job.config_file", str(file)], ranks)
        except ConfigError as error:
            assert "\n" not in str(error) and key in str(error), f"{what}: {error}"
            continue
        accepted += 1
        assert value not in NOWHERE_VALID, what
        assert value != "inf" or key == "max_norm", what
    assert accepted > len(drawn) / 30
