"""The printed reference is a file that can be run."""

import re

import pytest

from titan_gdn.config.load import defaults, load_config
from titan_gdn.config.sections import SECTIONS
from titan_gdn.models.hybrid.quantize import PARTS
from titan_gdn.reference import main


@pytest.mark.parametrize(
    ("model", "flavor"), [("qwen3_next", "debug"), ("qwen3_next", "80B-A3B-1M"), ("kimi_linear", "48B-A3B")]
)
def test_the_printed_file_is_the_run_of_the_flavor(model, flavor, capsys, tmp_path):
    main([model, flavor])
    path = tmp_path / "reference.toml"
    path.write_text(capsys.readouterr().out)
    read, own = load_config(["--job.config_file", str(path)], 8, here=False), defaults(model, flavor)
    for section in SECTIONS:
        assert getattr(read, section) == getattr(own, section), section
    without_addresses = [re.sub("0x[0-9a-f]+", "", repr(x.model_spec.model)) for x in (read, own)]
    assert without_addresses[0] == without_addresses[1]


def test_every_key_has_its_meaning_and_every_converter_is_there(capsys):
    main(["kimi_linear", "debug_moe"])
    told = capsys.readouterr().out
    for part, converters in PARTS.items():
        for name in converters:
            assert f'# [quantize.{part}]\n# name = "{name}"' in told
    assert "# Sequence length (int)\nseq_len = 256\n" in told
    assert "# Epsilon of all norms" in told and '# mode = "memory_budget"' in told


@pytest.mark.parametrize("argv", [[], ["qwen3_next"], ["qwen3_next", "7B"], ["mamba", "debug"]])
def test_a_missing_model_or_flavor_is_refused_with_those_there_are(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    said = capsys.readouterr().err
    assert (
        ended.value.code == 2 and "MODEL FLAVOR" in said and re.match(r"titan_gdn: (expected|model\.)", said)
    )


def test_the_printed_keys_of_a_converter_can_be_set(capsys, tmp_path):
    """Every key of `[quantize.linear]`, without its comment signs."""
    main(["qwen3_next", "debug"])
    told = capsys.readouterr().out
    table = re.search(r"# \[quantize\.linear\]\n# name = .float8.\n(.+?)(?=# \[quantize)", told, re.DOTALL)[1]
    keys = re.findall(r"^# (\w+ = .+)$", table, re.MULTILINE)
    assert len(keys) > 2
    path = tmp_path / "quantized.toml"
    model = '[model]\nname = "qwen3_next"\nflavor = "debug"'
    path.write_text("\n".join([model, "[quantize.linear]", 'name = "float8"', *keys]))
    (converter,) = load_config(["--job.config_file", str(path)], 1, here=False).model_spec.model.converters
    assert type(converter) is PARTS["linear"]["float8"]
