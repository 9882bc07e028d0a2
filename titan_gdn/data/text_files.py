"""The `text_files` dataset: text files of this machine, by default the sources of the standard library.

TorchTitan gives every data-parallel rank its own documents, so that the rows of a step depend on the
data-parallel degree. Here all ranks pack the same stream of documents, and its rows are assigned to the ranks
round-robin: a step sees the same rows on every mesh, so that runs on two meshes can be compared. Rows are
packed as in TorchTitan (`torchtitan.hf_datasets.text_datasets`), but the cost of a row does not grow with the
length of its document, and a checkpoint holds three numbers instead of buffered tokens.
"""

import glob
import hashlib
import os
import pickle
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.tools.logging import logger

T = TypeVar("T")
Row: TypeAlias = tuple[dict[str, torch.Tensor], torch.Tensor]


def list_files(path: str | None = None) -> list[str]:
    """List the text files of a data set, in an order that depends only on their names.

    A file is text if it is not empty and has no NUL byte in its first KiB. In the standard library, files
    that are not UTF-8 are left out, too: a few of them test Python's parser.

    Args:
        path: `None` for the sources of Python's standard library, a folder for all files below it (except
            hidden files and linked folders), a glob (`**` for any depth), or one file.

    Returns:
        Paths, shuffled with a fixed seed, because files of the same folder are alike and should not follow
        each other in training. The same names below `path` give the same order on every machine.

    Raises:
        ValueError: There is no text file at `path`.
    """
    root = os.path.expanduser(path or "")
    if path is None:
        found = _standard_library()
    elif os.path.isdir(root):
        found = _walk(root)
    elif os.path.isfile(root):
        found = iter([root])
    else:
        found = glob.iglob(root, recursive=True)
    # All paths share a prefix, so that sorting them sorts the names below `path`. A glob may repeat a file.
    files = sorted({file for file in found if _is_text(file)})
    if not files:
        where = "the standard library's folder" if path is None else f"dataset_path = '{path}'"
        raise ValueError(
            f"no text file at {where} (empty, binary and hidden files do not count). Possible: a "
            "folder, a file, a glob such as 'data/**/*.txt', or no dataset_path for the standard library."
        )
    return _shuffled(files, seed=0)


def _standard_library() -> Iterator[str]:
    for file in _walk(sysconfig.get_path("stdlib"), skip=("site-packages", "dist-packages")):
        if file.endswith(".py") and _is_utf8(file):
            yield file


def _walk(folder: str, skip: Sequence[str] = ()) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        yield from (os.path.join(parent, name) for name in names if not name.startswith("."))


def _is_text(file: str) -> bool:
    if not os.path.isfile(file):  # a folder, a socket, a dangling link
        return False
    with open(file, "rb") as stream:
        head = stream.read(1024)
    return bool(head) and b"\0" not in head


def _is_utf8(file: str) -> bool:
    with open(file, "rb") as stream:
        try:
            stream.read().decode()
        except UnicodeDecodeError:
            return False
    return True


def _shuffled(items: Sequence[T], seed: int) -> list[T]:
    # `random()` is the only function of `random` that is reproducible across versions of Python.
    draw = random.Random(seed)
    return sorted(items, key=lambda _: draw.random())


def _digest(files: Sequence[str]) -> str:
    folder = os.path.commonpath(files)  # left out: the folder may have another name on the next machine
    return hashlib.sha256(os.fsencode("\0".join(file.removeprefix(folder) for file in files))).hexdigest()


class TextFiles(IterableDataset, Stateful):
    """A packed stream of documents, whose rows are distributed to the data-parallel ranks.

    Every file is a document: its text, with the tokenizer's begin and end tokens if it has them. Documents
    are concatenated without padding and cut into rows of `seq_len` tokens. A label is the next token of the
    same document, so the last token of a document is never an input. Positions restart at 0 with each
    document and with each row, as in TorchTitan.

    Rank `r` of `n` gets rows `r, r + n, r + 2n, ...`. A round of `n` rows is yielded once all of them are
    packed, so that all ranks get the same number of rows and none waits for another at the end. In return,
    every rank reads and tokenizes the whole stream. A file is read when its turn comes and tokenized in one
    piece, which takes about 220 bytes of memory per token with Hugging Face's tokenizers.

    Args:
        files: Paths, in the order of the first epoch. Each later epoch has its own fixed order.
        tokenizer: Converts a text into token ids.
        seq_len: Number of tokens in a row.
        dp_rank: Index of this rank among the data-parallel ranks.
        dp_world_size: Number of data-parallel ranks.
        infinite: Whether to start over after the last file. If not, the last tokens, too few for one more row
            on each rank, are dropped.

    Yields:
        `({"input": [seq_len], "positions": [seq_len]}, labels [seq_len])`, all int64.

    Raises:
        FileNotFoundError: A file was deleted before its turn came.
        ValueError: No file has a token to train on, or (`load_state_dict`) a checkpoint was made with other
            files.
    """

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: BaseTokenizer,
        *,
        seq_len: int,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        infinite: bool = True,
    ) -> None:
        self._files = list(files)
        self._names = _digest(self._files)
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        self._dp_rank = dp_rank
        self._dp_world_size = dp_world_size
        self._infinite = infinite
        # Where the next row begins. A run resumes from these three numbers: nothing is buffered between rows.
        self._epoch = 0
        self._file = 0  # in the order of the epoch
        self._token = 0  # in the file

    def __iter__(self) -> Iterator[Row]:
        mine: list[Row] = []
        for number, row in enumerate(self._rows()):
            turn = number % self._dp_world_size
            if turn == self._dp_rank:
                mine.append(row)
            if turn == self._dp_world_size - 1:
                yield mine.pop()
        logger.warning(f"text_files: all {len(self._files)} files were read once; the data ends here")

    def _rows(self) -> Iterator[Row]:
        inputs, labels, positions = torch.empty(3, self._seq_len, dtype=torch.long)
        filled = 0
        for tokens in self._documents():
            while (left := len(tokens) - 1 - self._token) > 0:  # the last token is a label only
                count = min(left, self._seq_len - filled)
                piece = tokens[self._token : self._token + count + 1]
                here = slice(filled, filled + count)
                inputs[here], labels[here], positions[here] = piece[:-1], piece[1:], torch.arange(count)
                self._token += count
                filled += count
                if filled == self._seq_len:
                    yield {"input": inputs, "positions": positions}, labels
                    inputs, labels, positions = torch.empty(3, self._seq_len, dtype=torch.long)
                    filled = 0

    def _documents(self) -> Iterator[torch.Tensor]:
        useful = self._file > 0 or self._token > 0
        while True:
            order = _shuffled(self._files, self._epoch) if self._epoch else self._files
            while self._file < len(order):
                tokens = self._tokenize(order[self._file])
                useful |= len(tokens) > 1
                yield tokens
                self._file, self._token = self._file + 1, 0
            if not useful:  # or an infinite stream would loop here forever
                raise ValueError(
                    f"text_files: none of {len(order)} files has two tokens, an input and its label (the "
                    f"first file is '{order[0]}'). Set another dataset_path, or use a tokenizer with an end "
                    "token."
                )
            if not self._infinite:
                return
            self._epoch, self._file = self._epoch + 1, 0
            logger.info(f"text_files: epoch {self._epoch} begins with {len(order)} files in a new order")

    def _tokenize(self, file: str) -> torch.Tensor:
        try:
            with open(file, "rb") as stream:  # as bytes, which keeps line ends unchanged
                text = stream.read().decode("utf-8", errors="replace")
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"text_files: '{file}' was deleted after the run began. Restore it and resume: data must not "
                "change during a run."
            ) from error
        return torch.tensor(self._tokenizer.encode(text, add_bos=True, add_eos=True), dtype=torch.long)

    def state_dict(self) -> dict[str, Any]:
        """Where the next row begins, and a digest of the files' names; the same on all ranks."""
        return {
            "epoch": self._epoch,
            "file": self._file,
            "token": self._token,
            "names": self._names,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was saved; refuse one that was saved with other files."""
        if state_dict["names"] != self._names:
            raise ValueError(
                f"text_files: the checkpoint was saved with other files than the {len(self._files)} found "
                "now, so its position does not apply. Use the dataset_path and files of that run, or start "
                'with the first file: checkpoint.exclude_from_loading = ["dataloader"].'
            )
        self._epoch, self._file, self._token = (state_dict[key] for key in ("epoch", "file", "token"))


class TextFilesDataLoader(ParallelAwareDataloader):
    """TorchTitan's data loader for `TextFiles`: batches of `local_batch_size` rows, resumable at any step.

    With the same `dp_world_size * local_batch_size`, a step has the same rows on every mesh, also at the end
    of a finite pass, where a last batch that is not full is dropped.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        """The section `[dataloader]`."""

        dataset: str = "text_files"
        """Name of the data set; this loader reads no other"""

        dataset_path: str | None = None
        """A folder, a glob (`**` for any depth) or a file; by default the sources of the standard library"""

        infinite: bool = True
        """Whether to start over, in a new order, after the last file"""

        def __post_init__(self) -> None:
            if self.dataset != "text_files":
                raise ValueError(
                    f"dataset = '{self.dataset}': this loader reads only 'text_files'. For TorchTitan's data "
                    "sets, use torchtitan.hf_datasets.text_datasets.HuggingFaceTextDataLoader."
                )
            if self.num_workers > 1:
                raise ValueError(
                    f"num_workers = {self.num_workers}: each worker would read the whole stream, and every "
                    "row would be repeated. Use 0, or 1 to read ahead in another process."
                )

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank, under one key, so that a run can resume with another number of ranks."""
        return {"stream": super().state_dict()[self._rank_id]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where a run stopped, for any data-parallel degree and `num_workers` of that run."""
        if not state_dict:
            return
        stream = pickle.loads(state_dict["stream"])
        if ("_snapshot" in stream) == (self.num_workers > 0):
            super().load_state_dict({self._rank_id: state_dict["stream"], "world_size": self.dp_world_size})
            return
        # torchdata's states with and without workers differ, but both hold the position in the stream.
        StatefulDataLoader.load_state_dict(self, {})  # drops an iterator that stands elsewhere
        if "_snapshot" in stream:
            (stream,) = stream["_snapshot"]["_worker_snapshots"].values()
        assert isinstance(self.dataset, TextFiles)
        self.dataset.load_state_dict(stream["dataset_state"])

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = 1,
        **kwargs: Any,
    ) -> None:
        stream = TextFiles(
            list_files(config.dataset_path),
            tokenizer,
            seq_len=seq_len,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            infinite=config.infinite,
        )
        super().__init__(
            stream,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            batch_size=local_batch_size,
            drop_last=True,
            num_workers=config.num_workers,
            persistent_workers=config.persistent_workers,
            pin_memory=config.pin_memory,
            prefetch_factor=config.prefetch_factor,
            snapshot_every_n_steps=snapshot_every_n_steps,
        )
