"""The command line and the file as such: what can be read, before any key is looked at."""

import pytest

from tests.config.cases import MODEL
from titan_gdn.config.load import load_config
from titan_gdn.config.source import ConfigError


def test_the_command_line_without_a_file_shows_the_usage():
    for argv in ([], ["--training.steps", "3"], ["--job.config_file"]):
        with pytest.raises(ConfigError, match="--job.config_file: expected one FILE.toml\nusage: torchrun"):
            load_config(argv, 1)


def test_help_prints_the_usage_and_exits_without_error(capsys):
    with pytest.raises(SystemExit) as exit:
        load_config(["--help"], 1)
    assert exit.value.code == 0
    assert "usage: torchrun" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["--steps", "--training.", "--.steps", "--", "--training..steps"])
def test_an_option_without_section_and_key_is_an_error(error, word):
    assert "is not --section.key" in error("", word, "3")


def test_a_word_outside_all_options_is_an_error(error):
    assert "run.toml extra: expected one FILE.toml" in error("", "extra")
    with pytest.raises(ConfigError, match='unexpected "run.toml"'):
        load_config(["run.toml"], 1)


def test_dashes_and_underscores_are_interchangeable_for_the_file_too(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(MODEL)
    assert load_config([f"--job.config-file={file}"], 1).training.steps == 7


def test_a_missing_file_or_a_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match="gone.toml: No such file or directory"):
        load_config(["--job.config_file", str(tmp_path / "gone.toml")], 1)
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(["--job.config_file", str(tmp_path)], 1)


def test_broken_toml_names_file_and_line(error, tmp_path):
    message = error("[training]\nsteps = = 3")
    assert "run.toml: this is not TOML: " in message and "line 2" in message
    assert "not TOML" in error("[training]\nsteps = 3\nsteps = 4")
    (tmp_path / "latin.toml").write_bytes("# é".encode("latin-1"))
    with pytest.raises(ConfigError, match="latin.toml: this is not TOML"):
        load_config(["--job.config_file", str(tmp_path / "latin.toml")], 1)


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_a_byte_order_mark_at_the_beginning_is_no_part_of_the_text(tmp_path, ending):
    text = MODEL.replace("\n", ending)
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert load_config(["--job.config_file", str(tmp_path / "run.toml")], 1).training.steps == 7


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (MODEL.encode("utf-16"), "not TOML but UTF-16 or binary; save it as text in UTF-8"),
        (MODEL.encode("utf-16-be"), "not TOML but UTF-16 or binary"),
        (b"\x7fELF\x02\x01\0\0", "not TOML but UTF-16 or binary"),
        (b"\x7fELF\xff", "not TOML, because it is not UTF-8"),
        (b"", "[model]: name is missing. Possible: fake"),
        (b"a = " + b"9" * 5000, "not TOML: Exceeds the limit"),
        (b"a = " + b"[" * 5000, "not TOML: "),
        (
            b"[training]\nsteps = 1\nsteps = 2\n",
            "Cannot overwrite a value (at line 3, column 10): steps = 2",
        ),
        (b"[a]\n[training]\n[a]", "twice (at line 3, column 3): [a]"),
    ],
)
def test_what_is_no_toml_is_said_in_a_line(tmp_path, content, words):
    (tmp_path / "run.toml").write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        load_config(["--job.config_file", str(tmp_path / "run.toml")], 1)
    assert words in str(raised.value) and "\n" not in str(raised.value)
    assert str(raised.value).startswith(f"{tmp_path}/run.toml: ")


def test_a_file_cannot_name_another_file(error):
    assert "only the command line names the file" in error('[job]\nconfig_file = "b.toml"')
