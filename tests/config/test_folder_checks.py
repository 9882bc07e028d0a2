"""Folders that a run writes: what cannot be written is an error before the run, and nothing is made."""

import errno
import os
import tempfile

import pytest

from tests.config.cases import named

CHECKPOINTS = "[checkpoint]\nenable = true\n"
KEYS = {
    "checkpoints": (f"{CHECKPOINTS}folder = ", "checkpoint.folder"),
    "TensorBoard": ("[metrics]\nenable_tensorboard = true\nsave_tb_folder = ", "metrics.save_tb_folder"),
    "traces": ("[profiler]\nenable_profiling = true\nsave_traces_folder = ", "profiler.save_traces_folder"),
    "flight recorder": ("[comm]\nsave_traces_folder = ", "comm.save_traces_folder"),
}


@pytest.fixture
def tree(tmp_path):
    """A folder with a file, a link to nowhere, and a folder."""
    (tmp_path / "out" / "folder").mkdir(parents=True)
    (tmp_path / "out" / "file").touch()
    (tmp_path / "out" / "dangling").symlink_to(tmp_path / "nowhere")
    return tmp_path / "out"


def job(folder) -> str:
    return f'[job]\ndump_folder = "{folder}"\n'


@pytest.mark.parametrize("below", ["", "/below", "/far/below"])
@pytest.mark.parametrize("name", ["file", "dangling"])
def test_a_dump_folder_that_is_no_folder_is_an_error(error, tree, name, below):
    message = error(job(f"{tree}/{name}{below}"))
    assert f'job.dump_folder = "{tree}/{name}{below}": "{tree}/{name}" is not a directory' in message


@named("text, key", KEYS)
def test_a_folder_that_is_a_file_names_its_key(error, load, tree, text, key):
    for value in ("file", "file/below", f"{tree}/file"):
        message = error(f'{job(tree)}{text}"{value}"')
        assert f'{key} = "{value}": "{tree}/file" is not a directory that this user may write to' in message
    for value in ("folder", "new", "new/below", "gs://bucket/file"):
        load(f'{job(tree)}{text}"{value}"')
    assert not (tree / "new").exists()


@named("text, key", KEYS)
def test_an_empty_name_is_an_error(error, tree, text, key):
    for value in ("", " "):
        message = error(f'{job(tree)}{text}"{value}"')
        assert "folder" in message and ("expected the name of a folder" in message or "empty" in message)


def test_an_empty_dump_folder_is_an_error(error):
    assert 'job.dump_folder = "": expected the name of a folder' in error(job(""))


def test_folders_of_what_is_off_are_not_looked_at(load, tree):
    off = '[checkpoint]\nfolder = "file"\n[metrics]\nsave_tb_folder = "file"\n'
    off += '[profiler]\nsave_traces_folder = ""\nsave_memory_snapshot_folder = "file"\n'
    load(job(tree) + off + '[comm]\ntrace_buf_size = 0\nsave_traces_folder = ""')


def test_the_configuration_is_saved_to_a_file(error, load, tree):
    for value, problem in (
        ("", "expected the name of a file, not of a folder"),
        ("folder", "expected the name of a file, not of a folder"),
        ("new/", "expected the name of a file, not of a folder"),
        ("file/x.json", f'"{tree}/file" is not a directory'),
    ):
        message = error(f'{job(tree)}[debug]\nsave_config_file = "{value}"')
        assert f'debug.save_config_file = "{value}": {problem}' in message
    load(f'{job(tree)}[debug]\nsave_config_file = "new/x.json"')


def test_a_prefix_of_files_names_no_folder(error, tree):
    message = error(f'{job(tree)}[comm]\nsave_traces_file_prefix = "a/b"')
    assert 'comm.save_traces_file_prefix = "a/b": expected the beginning of a file\'s name' in message


@named(
    "folder, problem",
    {
        "no file can be made in /proc": ("/proc/titan_gdn", '"/proc" is not a directory that this user may'),
        "the name is too long": ("{tree}/" + "n" * 300 + "/below", "(File name too long)"),
    },
)
def test_what_only_the_file_system_knows_is_said(error, tree, folder, problem):
    assert problem in error(job(folder.format(tree=tree)))


def test_a_full_disk_is_said_and_nothing_is_left(error, load, tree, monkeypatch):
    load(job(tree / "new"))
    assert sorted(os.listdir(tree)) == ["dangling", "file", "folder"]

    def full(dir):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    assert error(job(tree / "new")).endswith("may write to (No space left on device)")
