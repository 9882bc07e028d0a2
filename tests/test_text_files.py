"""The `text_files` data set against a packing in plain Python, and against TorchTitan's own."""

import json
import os
import pickle
import shutil
import sysconfig
import zlib
from collections import Counter
from itertools import chain, islice
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets import DatasetConfig, text_datasets

from titan_gdn.assets import BYTE_TOKENIZER
from titan_gdn.data import files
from titan_gdn.data.files import DataError, list_files
from titan_gdn.data.text_files import TextFiles, TextFilesDataLoader

END = 256
SEQ_LEN = 16
LONG = bytes(range(32, 127))  # the tail of this document, five rows long, starts inside a row
CORPUS = {
    "a.txt": b"x",
    "b.txt": b"two lines\r\nof text\n",
    "c.md": "Grüße, 世界 🌍".encode(),
    "d.txt": b"y" * SEQ_LEN,  # with its end token, exactly one row
    "deep/er/e.py": LONG,
    "deep/f.txt": b"not \xff\xfe UTF-8 \xe9",
    "empty.txt": b"",
    "deep/image.png": b"PNG\0\1\2",
    ".hidden": b"hidden",
    ".git/config": b"hidden as well",
}
TEXTS = ["a.txt", "b.txt", "c.md", "d.txt", "deep/er/e.py", "deep/f.txt"]


@pytest.fixture(scope="module")
def tokenizer():
    return HuggingFaceTokenizer(tokenizer_path=BYTE_TOKENIZER)


@pytest.fixture
def corpus(tmp_path):
    for name, content in CORPUS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


@pytest.fixture
def load(corpus, tokenizer):
    def build(rank=0, dp=1, batch=1, path=corpus, seq_len=SEQ_LEN, tokenizer=tokenizer, **config):
        config = {"max_invalid_share": 1.0} | config  # the corpus has a file that is no UTF-8
        return TextFilesDataLoader.Config(dataset_path=str(path), **config).build(
            dp_world_size=dp, dp_rank=rank, tokenizer=tokenizer, seq_len=seq_len, local_batch_size=batch
        )

    return build


def rows(loader, batches=None):
    """The loader's rows as `(inputs, positions, labels)` lists, batch after batch."""
    for inputs, labels in islice(loader, batches):
        triples = zip(inputs["input"].tolist(), inputs["positions"].tolist(), labels.tolist(), strict=True)
        yield from triples


def document(file):
    return [*Path(file).read_bytes().decode(errors="replace").encode(), END]


def packed(files, seq_len=SEQ_LEN):
    """The rows of one pass, made a token at a time: the meaning of packing."""
    result, row = [], []
    for file in files:
        tokens = document(file)
        start = 0  # the index that has position 0 in the row being filled
        for index in range(len(tokens) - 1):
            row.append((tokens[index], index - start, tokens[index + 1]))
            if len(row) == seq_len:
                result.append(tuple(map(list, zip(*row, strict=True))))
                row, start = [], index + 1
    return result


def names(files, folder):
    return sorted(os.path.relpath(file, folder) for file in files)


# --- which files ---


def test_a_folder_means_every_text_file_below_it(corpus):
    assert names(list_files(str(corpus)), corpus) == TEXTS


def test_a_glob_means_the_text_files_that_it_matches(corpus):
    assert names(list_files(f"{corpus}/**/*.txt"), corpus) == ["a.txt", "b.txt", "d.txt", "deep/f.txt"]
    assert names(list_files(f"{corpus}/*.txt"), corpus) == ["a.txt", "b.txt", "d.txt"]
    assert names(list_files(f"{corpus}/**"), corpus) == TEXTS


def test_a_file_means_itself_also_when_its_name_looks_like_a_glob(corpus):
    assert list_files(str(corpus / "c.md")) == [str(corpus / "c.md")]
    (corpus / "odd[1].txt").write_text("odd")
    assert list_files(str(corpus / "odd[1].txt")) == [str(corpus / "odd[1].txt")]


def test_a_tilde_is_the_home_folder(corpus, monkeypatch):
    monkeypatch.setenv("HOME", str(corpus))
    assert list_files("~/a.txt") == [str(corpus / "a.txt")]


@pytest.mark.parametrize("path", ["missing", "*.rs", "empty.txt", "deep/image.png", ".git/*/nothing"])
def test_a_path_without_text_is_refused_by_name(corpus, path):
    with pytest.raises(ValueError, match="no text file at .*glob such as") as error:
        list_files(f"{corpus}/{path}")
    assert f"{corpus}/{path}" in str(error.value)


def test_the_default_is_the_standard_library_in_utf8():
    stdlib = sysconfig.get_path("stdlib")
    files = list_files(None)
    found = set(names(files, stdlib))
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= found
    assert all(name.endswith(".py") and "site-packages" not in name for name in found)
    for file in files:
        Path(file).read_bytes().decode()


def test_the_order_depends_only_on_the_names_and_differs_from_that_of_the_tree(tmp_path):
    orders = []
    for folder, numbers in ("here", range(50)), ("else/where", reversed(range(50))):
        (tmp_path / folder).mkdir(parents=True)
        for number in numbers:
            (tmp_path / folder / f"{number:02}").write_text("text")
        orders.append([os.path.basename(file) for file in list_files(str(tmp_path / folder))])
    assert orders[0] == orders[1] != sorted(orders[0])
    assert orders[0][:5] == ["40", "35", "25", "46", "48"]  # on every machine, in every version of Python


def test_files_that_are_left_out_are_counted_by_reason(load, corpus, caplog):
    (corpus / "nowhere").symlink_to("missing")
    (corpus / "linked").symlink_to(corpus / "deep")
    (corpus / "utf16.txt").write_bytes("wide".encode("utf-16"))
    os.mkfifo(corpus / "fifo")
    caplog.set_level("INFO")
    load()
    assert [message for message in caplog.messages if "text_files" in message] == [
        f"text_files: 6 files, {sum(len(CORPUS[name]) for name in TEXTS)} bytes; left out: binary (2), "
        "dangling link (1), empty (1), hidden file (1), hidden folder (1), linked folder (1), "
        "no regular file (1)"
    ]


def test_what_cannot_be_read_is_an_error_not_left_out(corpus, monkeypatch):
    with pytest.raises(ValueError, match='"/proc/self/mem" cannot be read .Input/output error.'):
        list_files("/proc/self/mem")  # readable by its mode, also for tests that root runs
    scan = os.scandir

    def refuse(path):
        if str(path).endswith("er"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ValueError, match='deep/er" cannot be read .Permission denied.: make it readable'):
        list_files(str(corpus))


# --- what is in a row ---


def test_rows_are_those_of_a_packing_in_plain_python(load, corpus):
    expected = packed(list_files(str(corpus)))
    assert len(expected) >= 10
    assert list(rows(load(infinite=False))) == expected


@pytest.mark.parametrize("seq_len", [1, 2, 7, 64])
def test_rows_of_any_length_are_right(load, corpus, seq_len):
    expected = packed(list_files(str(corpus)), seq_len)
    assert list(rows(load(infinite=False, seq_len=seq_len))) == expected


def test_rows_are_those_of_torchtitans_own_packing(load, corpus, tokenizer, monkeypatch):
    texts = [Path(file).read_bytes().decode(errors="replace") for file in list_files(str(corpus))]
    entry = DatasetConfig("", lambda path: Dataset.from_dict({"text": texts}), lambda sample: sample["text"])
    monkeypatch.setitem(text_datasets.DATASETS, "ours", entry)
    theirs = text_datasets.HuggingFaceTextDataset("ours", None, tokenizer, seq_len=SEQ_LEN)
    expected = [(x["input"].tolist(), x["positions"].tolist(), y.tolist()) for x, y in theirs]
    assert list(rows(load(infinite=False))) == expected


def test_positions_start_at_0_per_document_and_row_and_rise_by_one(load):
    for inputs, positions, labels in rows(load(), 50):
        for index, position in enumerate(positions):
            after_an_end = index > 0 and labels[index - 1] == END
            assert position == (0 if index == 0 or after_an_end else positions[index - 1] + 1)
        assert END not in inputs


def test_a_label_is_the_next_token_of_its_document(load):
    for inputs, _, labels in rows(load(), 50):
        for index in range(SEQ_LEN - 1):
            assert labels[index] in (END, inputs[index + 1])


def test_the_next_epoch_has_the_same_documents_in_another_order(load, corpus):
    files = list_files(str(corpus))
    total = sum(len(document(file)) - 1 for file in files)
    stream = list(chain.from_iterable(labels for _, _, labels in rows(load(), 5 * total // SEQ_LEN)))

    def documents(epoch):
        cut, current = [], []
        for token in stream[epoch * total : (epoch + 1) * total]:
            current.append(token)
            if token == END:
                cut.append(tuple(current))
                current = []
        return cut

    epochs = [documents(epoch) for epoch in range(4)]
    assert epochs[0] == [tuple(document(file)[1:]) for file in files]
    assert all(Counter(epoch) == Counter(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_rows_are_int64(load):
    inputs, labels = next(iter(load(batch=3)))
    assert {tensor.dtype for tensor in (*inputs.values(), labels)} == {torch.int64}
    assert {tensor.shape for tensor in (*inputs.values(), labels)} == {(3, SEQ_LEN)}


# --- who gets which row ---


@pytest.mark.parametrize("infinite", [True, False])
def test_a_step_has_the_same_rows_on_every_mesh(load, infinite):
    steps = 10 if infinite else None  # a pass has 10 rows: two steps, and 2 rows that make no third
    expected = list(rows(load(batch=4, infinite=infinite), steps))
    assert len(expected) == (40 if infinite else 8)
    for dp in 2, 4:
        ranks = [list(rows(load(rank, dp, 4 // dp, infinite=infinite), steps)) for rank in range(dp)]
        assert [row for turn in zip(*ranks, strict=True) for row in turn] == expected


def test_a_finite_pass_ends_and_all_ranks_get_equally_many_rows(load, corpus):
    everything = packed(list_files(str(corpus)))
    for dp in 1, 2, 3, 5:
        ranks = [list(rows(load(rank, dp, infinite=False))) for rank in range(dp)]
        assert ranks == [everything[rank : len(everything) // dp * dp : dp] for rank in range(dp)]


def test_a_validator_reads_the_same_pass_each_time(corpus, tokenizer):
    config = TextFilesDataLoader.Config(dataset_path=str(corpus), infinite=False, max_invalid_share=1.0)
    arguments = dict(dp_world_size=1, dp_rank=0, tokenizer=tokenizer, seq_len=SEQ_LEN, local_batch_size=5)
    first, second = (list(rows(config.build(**arguments))) for _ in range(2))
    assert first == second == packed(list_files(str(corpus)))


# --- where it resumes ---


def stopped(load, stop, **arguments):
    """The rows of a run that stops after `stop` batches, and a new loader with its checkpoint in it."""
    loader, fresh = load(**arguments), load(**arguments)
    before = list(rows(iter(loader), stop))
    fresh.load_state_dict(loader.state_dict())
    return before, fresh


@pytest.mark.parametrize("dp", [1, 2])
def test_a_run_stopped_anywhere_resumes_with_the_rows_of_one_that_was_not(load, dp):
    batches = 40 // dp  # more than three epochs
    for rank in range(dp):
        whole = list(rows(load(rank, dp), batches))
        for stop in range(batches):
            before, fresh = stopped(load, stop, rank=rank, dp=dp)
            assert before + list(rows(fresh, batches - stop)) == whole, f"stopped after {stop}"


def test_those_stops_lie_in_several_epochs_and_both_inside_and_at_the_end_of_documents(load):
    loader, places = load(), []
    for _ in islice(loader, 40):
        places.append(loader.dataset.state_dict())
    assert {place["epoch"] for place in places} == {0, 1, 2, 3}
    lengths = {len(content) for content in CORPUS.values()}
    assert any(place["token"] in lengths for place in places)
    assert any(0 < place["token"] and place["token"] not in lengths for place in places)


def test_a_document_longer_than_several_rows_is_resumed_inside(load, corpus):
    whole = list(rows(load(path=corpus / "deep/er/e.py"), 12))
    assert len(LONG) // SEQ_LEN == 5
    for stop in range(12):
        before, fresh = stopped(load, stop, path=corpus / "deep/er/e.py")
        assert before + list(rows(fresh, 12 - stop)) == whole


def test_a_finite_pass_resumes_to_its_end_and_no_further(load, corpus):
    expected = packed(list_files(str(corpus)))
    for stop in range(len(expected) + 2):  # the last stop comes after the loader has said that it is done
        before, fresh = stopped(load, stop, infinite=False)
        assert before + list(rows(fresh)) == expected


def test_a_resumed_run_can_be_stopped_and_resumed_again(load):
    whole = list(rows(load(batch=2), 15))
    state, seen = None, []
    for _ in range(15):
        loader = load(batch=2)
        loader.load_state_dict(state or {})
        seen += rows(iter(loader), 1)
        state = loader.state_dict()
    assert seen == whole


def test_a_checkpoint_outlives_a_moved_folder_and_refuses_other_files(load, corpus, tmp_path_factory):
    moved = tmp_path_factory.mktemp("moved") / "folder"
    corpus.rename(moved)
    loader = load(path=moved)
    expected = list(rows(iter(loader), 3))
    state = loader.state_dict()
    moved.rename(corpus)

    again = load()
    again.load_state_dict(state)
    assert expected + list(rows(again, 3)) == list(rows(load(), 6))

    (corpus / "new.txt").write_text("another file")
    (corpus / "d.txt").unlink()
    said = r'"d.txt" is missing and "new.txt" is new in .*checkpoint.exclude_from_loading = \["dataloader"\]'
    with pytest.raises(DataError, match=said):
        load(allow_changed_files=True).load_state_dict(state)


@pytest.mark.parametrize("at", [0, 5000, -1])
def test_a_checkpoint_refuses_files_with_other_contents(load, corpus, at):
    text = bytearray(b"a text of more than two ends. " * 500)
    (corpus / "long.txt").write_bytes(text)
    loader = load()
    expected = list(rows(iter(loader), 3))
    state = loader.state_dict()
    if at == 5000:
        del text[at]  # in the middle, where only the length tells
    else:
        text[at] ^= 1
    (corpus / "long.txt").write_bytes(text)
    with pytest.raises(DataError, match='"long.txt" is changed in .*dataloader.allow_changed_files = true'):
        load().load_state_dict(state)
    again = load(allow_changed_files=True)
    again.load_state_dict(state)
    assert expected + list(rows(again, 3)) == list(rows(load(), 6))  # of the texts as they are now


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_changes_or_goes_during_a_run_is_an_error(load, corpus, workers):
    for change in (
        lambda file: file.write_text("another text, longer than before"),
        lambda file: file.unlink(),
    ):
        loader = load(infinite=False, num_workers=workers)
        last = corpus / os.path.relpath(list_files(str(corpus))[-1], corpus)
        before = last.read_bytes()
        change(last)
        with pytest.raises(DataError, match=f'"{last}" (has changed|cannot be read)'):
            list(rows(loader))
        last.write_bytes(before)


def lower(tokenizer, config):
    tokenizer["normalizer"] = {"type": "Lowercase"}


def swap_two_tokens(tokenizer, config):
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def leave_out_the_end(tokenizer, config):
    del config["eos_token"]


@pytest.mark.parametrize("change", [None, lower, swap_two_tokens, leave_out_the_end])
def test_a_checkpoint_refuses_another_tokenizer(load, corpus, tmp_path, change):
    folder = shutil.copytree(BYTE_TOKENIZER, tmp_path / ".tokenizer")
    files = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
    parts = [json.loads(file.read_text()) for file in files]
    if change is not None:
        change(*parts)
    for file, part in zip(files, parts, strict=True):
        file.write_text(json.dumps(part, indent=1))  # other bytes that mean the same
    state = load().state_dict()
    other = load(tokenizer=HuggingFaceTokenizer(tokenizer_path=str(folder)))
    if change is None:
        other.load_state_dict(state)
        return
    with pytest.raises(DataError, match="another tokenizer.*hf_assets_path.*exclude_from_loading"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    "state", [[1], {}, {"loader": {}, "files": 7}, {"loader": 3, "files": {}, "tokenizer": ""}]
)
def test_a_state_of_another_form_is_refused(load, state):
    with pytest.raises(DataError, match="was not saved by text_files.*exclude_from_loading"):
        load().load_state_dict({"stream": zlib.compress(json.dumps(state).encode())})


def test_a_state_runs_no_code(load, tmp_path):
    class Attack:
        def __reduce__(self):
            return open, (str(tmp_path / "attacked"), "w")

    with pytest.raises(DataError, match="was not saved by text_files"):
        load().load_state_dict({"stream": pickle.dumps(Attack())})
    assert not (tmp_path / "attacked").exists()


# --- what is no text ---


def test_a_byte_order_mark_is_no_text(load, corpus):
    for file in corpus.rglob("*"):
        if file.is_file():
            file.unlink()
    (corpus / "a.txt").write_bytes(b"\xef\xbb\xbf" + b"abc" * 40)
    (first, *_) = rows(load(infinite=False))
    (corpus / "a.txt").write_bytes(b"abc" * 40)
    assert next(iter(rows(load(infinite=False)))) == first


@pytest.mark.parametrize("spoil", [b"\xff", b"\0", b"\xe9"])
def test_bytes_that_are_no_text_are_counted_and_refused_above_a_share(load, corpus, monkeypatch, spoil):
    told = []
    monkeypatch.setattr(files.logger, "warning", told.append)
    (corpus / "deep/f.txt").unlink()
    noise = corpus / "noise.txt"
    noise.write_bytes(b"x" * 2000 + spoil * 30 + b"x" * 970)
    for share in (0.009, 0.0):
        with pytest.raises(DataError, match=f'"{noise}": 30 of 3,000 bytes are no UTF-8.*max_invalid'):
            list(rows(load(infinite=False, max_invalid_share=share)))
    loader = load(max_invalid_share=0.011)
    list(rows(loader, 3 * len(packed(list_files(str(corpus))))))  # three epochs
    assert sum("noise.txt" in line for line in told) == 1


def test_a_pass_without_a_batch_is_an_error(load):
    with pytest.raises(DataError, match="less than one batch of 999"):
        list(rows(load(infinite=False, batch=999)))


# --- workers ---


def test_one_worker_gives_the_same_rows_and_resumes(load):
    whole = list(rows(load(), 12))
    loader = load(num_workers=1)
    before = list(rows(iter(loader), 5))
    fresh = load(num_workers=1)
    fresh.load_state_dict(loader.state_dict())
    assert before + list(rows(fresh, 7)) == whole


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0)])
@pytest.mark.parametrize("dp", [1, 2])
def test_a_run_resumes_with_another_number_of_workers(load, dp, first, second):
    for rank in range(dp):
        whole = list(rows(load(rank, dp), 12))
        loader, fresh = load(rank, dp, num_workers=first), load(rank, dp, num_workers=second)
        before = list(rows(iter(loader), 5))
        fresh.state_dict()  # as DCP does before it loads
        fresh.load_state_dict(loader.state_dict())
        again = load(rank, dp, num_workers=first)
        again.load_state_dict(fresh.state_dict())  # stopped before its first batch
        assert before + list(rows(again, 3)) == whole[:8]
        assert before + list(rows(fresh, 7)) == whole


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0)])
def test_a_finite_pass_ends_with_another_number_of_workers_too(load, first, second):
    whole = list(rows(load(infinite=False)))
    for stop in (1, len(whole), len(whole) + 1):
        loader = load(infinite=False, num_workers=first)
        before = list(rows(iter(loader), stop))
        fresh = load(infinite=False, num_workers=second)
        fresh.load_state_dict(loader.state_dict())
        assert before + list(rows(fresh)) == whole


def test_several_workers_are_refused():
    with pytest.raises(ValueError, match="num_workers = 2.*Use 0, or 1"):
        TextFilesDataLoader.Config(num_workers=2)


# --- what goes wrong ---


def test_a_deleted_file_is_named(load, corpus):
    loader = load()
    (corpus / "b.txt").unlink()
    with pytest.raises(DataError, match=r'b\.txt" cannot be read any more \(No such file'):
        list(rows(loader, 20))


def test_files_without_a_token_to_train_on_are_an_error_not_an_endless_loop(corpus):
    class Silent:
        def encode(self, text, **_):
            return []

    with pytest.raises(DataError, match=r"none of 1 files has two tokens.*a\.txt"):
        next(iter(TextFiles([str(corpus / "a.txt")], Silent(), seq_len=4)))


def test_another_data_set_is_refused_by_name():
    with pytest.raises(ValueError, match="dataset = 'c4'"):
        TextFilesDataLoader.Config(dataset="c4")


# --- the tokenizer ---


@pytest.mark.parametrize("text", ["", " a\r\n\tb  ", "Grüße, 世界 🌍\0", "".join(map(chr, range(1024)))])
def test_the_byte_tokenizer_gives_the_bytes_and_one_end(tokenizer, text):
    ids = tokenizer.encode(text, add_bos=True, add_eos=True)
    assert ids == [*text.encode(), END]
    assert tokenizer.decode(ids) == text


def test_the_byte_tokenizer_knows_256_bytes_and_an_end(tokenizer):
    assert tokenizer.get_vocab_size() == 257
    assert (tokenizer.eos_token, tokenizer.eos_id, tokenizer.bos_id) == ("<|endoftext|>", END, None)
    assert sorted(tokenizer.get_vocab().values()) == list(range(257))
