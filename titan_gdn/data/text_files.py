"""The `text_files` dataset: trains on text that is on the machine, by default the standard library's sources.

TorchTitan gives every data-parallel rank its own documents, so a mesh with another data-parallel degree
trains on other rows. Here all ranks pack one and the same stream, and its rows are dealt out like cards: a
step sees the same rows on every mesh, and two meshes can be compared through the loader. The rows are
TorchTitan's (`torchtitan.hf_datasets.text_datasets`), but the cost of a row does not grow with the document
that it is cut from, and a checkpoint holds three numbers instead of the tokens in hand.
"""

import glob
import hashlib
import os
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.tools.logging import logger

T = TypeVar("T")
Row: TypeAlias = tuple[dict[str, torch.Tensor], torch.Tensor]


def list_files(path: str | None = None) -> list[str]:
    """Lists the text files of a data set in an order that depends on nothing but their names.

    Text is what is not empty and has no NUL byte in its first KiB. Only in the standard library is it looked
    at whole: a few of its files, there to test Python's parser, are not UTF-8 and left out.

    Args:
        path: `None` for the sources of Python's standard library, a folder for all files below it (not the
            hidden ones, nor those behind a linked folder), a glob (`**` for any depth), or one file.

    Returns:
        Paths, shuffled with a fixed seed: neighbours in a folder are alike, and are not to be neighbours in
        training. The same names below `path` come in the same order on every machine.

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
    # All paths begin alike, so that sorting them sorts what is below `path`; a glob may name a file twice.
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
    # Of all of `random`, only `random()` is promised to give the same numbers in every version of Python.
    draw = random.Random(seed)
    return sorted(items, key=lambda _: draw.random())


def _digest(files: Sequence[str]) -> str:
    folder = os.path.commonpath(files)  # left out: on the next machine the folder may lie elsewhere
    return hashlib.sha256(os.fsencode("\0".join(file.removeprefix(folder) for file in files))).hexdigest()


class TextFiles(IterableDataset, Stateful):
    """One packed stream of documents, whose rows are dealt out to the data-parallel ranks.

    Every file is a document: its text, with the tokenizer's begin and end tokens where it has them. Documents
    follow each other without padding and are cut into rows of `seq_len` tokens. A label is the next token of
    the same document, so that a document's last token is no input. Positions start at 0 with each document,
    and again with each row, as TorchTitan's do.

    Rank `r` of `n` gets rows `r, r + n, r + 2n, ...`. A round of `n` rows is dealt once all of it is packed,
    so that all ranks get equally many and none waits for another at the end. The price: every rank reads and
    tokenizes the whole stream. A file is read when it is its turn and tokenized in one piece, which takes
    about 220 bytes of memory a token with Hugging Face's tokenizers.

    Args:
        files: Paths, in the order of the first epoch. Each later epoch has its own, fixed order.
        tokenizer: Turns a text into token ids.
        seq_len: Tokens in a row.
        dp_rank: This rank among the data-parallel ranks.
        dp_world_size: How many data-parallel ranks there are.
        infinite: Whether to start over when the files are used up. If not, the tokens left over, too few for
            one more row on each rank, are dropped.

    Yields:
        `({"input": [seq_len], "positions": [seq_len]}, labels [seq_len])`, all int64.

    Raises:
        FileNotFoundError: A file is gone when it is its turn.
        ValueError: No file holds a token to train on, or (`load_state_dict`) a checkpoint was made on other
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
        # Where the next row begins. This is all there is to resume from: between two rows nothing is in hand.
        self._epoch = 0
        self._file = 0  # in the order of the epoch
        self._token = 0  # in the file

    def __iter__(self) -> Iterator[Row]:
        for number, row in enumerate(self._rows()):
            turn = number % self._dp_world_size
            if turn == self._dp_rank:
                mine = row
            if turn == self._dp_world_size - 1:
                yield mine
        logger.warning(f"text_files: one pass over {len(self._files)} files is over")

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
            if not useful:  # or an infinite stream would spin here for ever
                raise ValueError(
                    f"text_files: none of {len(order)} files has two tokens, an input and its label (the "
                    f"first is '{order[0]}'). Give another dataset_path, or a tokenizer with an end token."
                )
            if not self._infinite:
                return
            self._epoch, self._file = self._epoch + 1, 0
            logger.info(f"text_files: epoch {self._epoch} begins, {len(order)} files in a new order")

    def _tokenize(self, file: str) -> torch.Tensor:
        try:
            with open(file, "rb") as stream:  # as bytes, which keeps the line ends as they are
                text = stream.read().decode("utf-8", errors="replace")
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"text_files: '{file}' was there when the run began and is gone. Put it back and resume: "
                "data must not change under a run."
            ) from error
        return torch.tensor(self._tokenizer.encode(text, add_bos=True, add_eos=True), dtype=torch.long)

    def state_dict(self) -> dict[str, Any]:
        """Where the next row begins, and a digest of the files' names; the same on all ranks, and small."""
        return {
            "epoch": self._epoch,
            "file": self._file,
            "token": self._token,
            "names": self._names,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues where `state_dict` was taken; refuses one that was taken on other files."""
        if state_dict["names"] != self._names:
            raise ValueError(
                f"text_files: the checkpoint was made on other files than the {len(self._files)} found now, "
                "so that its place among them means nothing. Give the dataset_path and files of that run, or "
                'start the data anew: [checkpoint] exclude_from_loading = ["dataloader"].'
            )
        self._epoch, self._file, self._token = (state_dict[key] for key in ("epoch", "file", "token"))


class TextFilesDataLoader(ParallelAwareDataloader):
    """TorchTitan's data loader for `TextFiles`: batches of `local_batch_size` rows, resumable at any step.

    With the same `dp_world_size * local_batch_size`, a step has the same rows on every mesh, also at the end
    of a finite pass: a last batch that is not full is dropped there.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        """What to read, and how."""

        dataset: str = "text_files"
        """The name of this data set: the only one that this loader reads"""

        dataset_path: str | None = None
        """A folder, a glob (`**` for any depth) or a file; by default the standard library's sources"""

        infinite: bool = True
        """Whether to start over, in a new order, when all files are used up"""

        def __post_init__(self) -> None:
            if self.dataset != "text_files":
                raise ValueError(
                    f"dataset = '{self.dataset}': this loader reads 'text_files' alone. TorchTitan's data "
                    "sets are read by torchtitan.hf_datasets.text_datasets.HuggingFaceTextDataLoader."
                )
            if self.num_workers > 1:
                raise ValueError(
                    f"num_workers = {self.num_workers}: each worker would read the whole stream, and every "
                    "row would come that many times. Use 0, or 1 to read ahead in another process."
                )

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank, under one name: a run may go on with another number of them."""
        return {"stream": super().state_dict()[self._rank_id]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where a run stopped, whatever its data-parallel degree was."""
        if state_dict:
            super().load_state_dict({self._rank_id: state_dict["stream"], "world_size": self.dp_world_size})

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
