"""What a directory of safetensors files holds, and one sentence for everything that is wrong with it."""

import json
import struct
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from titan_gdn.checkpoint.model_directory import INDEX, ModelDirectory, ModelDirectoryError

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def folder(tmp_path):
    """Two files with an index."""
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4).bfloat16()}, tmp_path / FIRST)
    save_file({"c": torch.ones(5), "d": torch.tensor(2.0)}, tmp_path / SECOND)
    index(tmp_path, {"a": FIRST, "b": FIRST, "c": SECOND, "d": SECOND})
    return tmp_path


def refused(folder):
    with pytest.raises(ModelDirectoryError) as raised:
        ModelDirectory.read(str(folder))
    assert "\n" not in str(raised.value)
    return str(raised.value)


def write_header(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_entries_are_the_bytes_of_the_tensors(folder):
    (folder / "config.json").write_text('{"model_type": "x"}')
    read = ModelDirectory.read(str(folder))
    assert read.config == {"model_type": "x"}
    assert list(read.tensors) == ["a", "b", "c", "d"]
    tensors = load_file(folder / FIRST) | load_file(folder / SECOND)
    for name, entry in read.tensors.items():
        with open(entry.file, "rb") as file:
            file.seek(entry.begin)
            data = file.read(entry.end - entry.begin)
        assert data == tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes()
        assert entry.shape == tuple(tensors[name].shape)
        assert entry.dtype == ("BF16" if name == "b" else "F32")


def test_files_that_the_index_does_not_name_do_not_count(folder):
    save_file({"a": torch.zeros(9), "old": torch.zeros(9)}, folder / "old.safetensors")
    (folder / "broken.safetensors").touch()
    read = ModelDirectory.read(str(folder))
    assert list(read.tensors) == ["a", "b", "c", "d"] and read.tensors["a"].shape == (2, 3)
    assert read.config is None


def test_without_an_index_model_safetensors_or_the_only_file_counts(tmp_path):
    assert "has no model.safetensors.index.json and no *.safetensors files" in refused(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "weights.safetensors")
    assert list(ModelDirectory.read(str(tmp_path)).tensors) == ["a"]
    save_file({"b": torch.zeros(1)}, tmp_path / "more.safetensors")
    assert "has 2 *.safetensors files but no model.safetensors.index.json" in refused(tmp_path)
    save_file({"c": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert list(ModelDirectory.read(str(tmp_path)).tensors) == ["c"]
    assert "is not a directory" in refused(tmp_path / "nowhere")


def test_a_missing_file_is_named(folder):
    (folder / SECOND).unlink()
    assert refused(folder) == f'"{folder / INDEX}" names {SECOND}, which the directory does not have'
    (folder / FIRST).unlink()
    assert f"names {FIRST} and 1 more, which" in refused(folder)


@pytest.mark.parametrize("length", [3, 8, 20, -1])
def test_a_truncated_file_is_named(folder, length):
    whole = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(whole[:length])
    message = refused(folder)
    assert (
        message.startswith(f'"{folder / SECOND}" is truncated') and f"{len(whole[:length])} bytes" in message
    )


def test_a_file_longer_than_its_header_says_is_named(folder):
    with open(folder / FIRST, "ab") as file:
        file.write(b"x")
    assert refused(folder).startswith(f'"{folder / FIRST}" has data that its header does not name')


@pytest.mark.parametrize("name", [FIRST, INDEX, "config.json"])
def test_an_empty_file_and_a_pointer_of_git_lfs_are_named(folder, name):
    (folder / name).write_bytes(b"")
    assert refused(folder) == f'"{folder / name}" is empty'
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert refused(folder).startswith(f'"{folder / name}" is a Git LFS pointer')


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"{no json", "the header is not JSON"),
        (b"\xff\xfe", "the header is not JSON"),
        (b"[1]", "the header is not a JSON object"),
        (b'{"c": 1, "c": 2}', "names c twice"),
        ({"c": 1}, "tensor c has no valid dtype, shape and data_offsets"),
        ({"c": ENTRY | {"shape": [-1]}}, "tensor c has no valid dtype, shape and data_offsets"),
        ({"c": ENTRY | {"data_offsets": [0]}}, "tensor c has no valid dtype, shape and data_offsets"),
        ({"c": ENTRY | {"dtype": "F7"}}, 'tensor c has dtype "F7". Possible: F4'),
        ({"c": ENTRY | {"shape": [2]}}, "tensor c has 4 bytes, which is not the size of [2] in F32"),
        ({"c": ENTRY, "d": ENTRY}, "tensor d begins at byte"),
    ],
)
def test_a_header_that_makes_no_sense_is_named(folder, header, said):
    write_header(folder / SECOND, header, bytes(4))
    message = refused(folder)
    assert message.startswith(f'"{folder / SECOND}"') and said in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "the file is not JSON"),
        ("[]", "the file is not a JSON object"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": {"a": 1}}', "tensor a: expected the name of a *.safetensors file"),
        ('{"weight_map": {"a": "../a.safetensors"}}', 'in the same directory, got "../a.safetensors"'),
        (f'{{"weight_map": {{"a": "{FIRST}", "a": "{SECOND}"}}}}', "names a twice"),
    ],
)
def test_a_broken_index_is_named(folder, text, said):
    (folder / INDEX).write_text(text)
    message = refused(folder)
    assert message.startswith(f'"{folder / INDEX}"') and said in message


def test_an_index_and_its_files_agree(folder):
    index(folder, {"a": FIRST, "x": SECOND, "y": SECOND})
    assert "says that tensor x is in " + SECOND in (message := refused(folder))
    assert message.endswith("but it is not (and 1 more such tensors)")
    save_file({"a": torch.zeros(2, 3), "c": torch.ones(5)}, folder / SECOND)
    index(folder, {"a": FIRST, "c": SECOND})
    assert f'tensor a is in two files, "{folder / SECOND}" and "{folder / FIRST}"' in refused(folder)


def test_fifty_files_of_many_tensors_are_read_in_less_than_ten_seconds(tmp_path):
    weight_map = {}
    for number in range(50):
        tensors = {f"layers.{number}.experts.{i}.weight": torch.zeros(1) for i in range(1500)}
        save_file(tensors, tmp_path / f"{number}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"{number}.safetensors")
    index(tmp_path, weight_map)
    start = time.monotonic()
    assert len(ModelDirectory.read(str(tmp_path)).tensors) == 75_000
    assert time.monotonic() - start < 10
