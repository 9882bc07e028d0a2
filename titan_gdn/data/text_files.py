"""The `text_files` dataset: text files of this machine, by default the sources of the standard library.

TorchTitan gives every data-parallel rank its own documents, so that the rows of a step depend on the
data-parallel degree. Here all ranks pack the same stream of documents, and its rows are assigned to the ranks
round-robin: a step sees the same rows on every mesh, so that runs on two meshes can be compared. Rows are
packed as in TorchTitan (`torchtitan.hf_datasets.text_datasets`), but the cost of a row does not grow with the
length of its document, and a checkpoint holds three numbers instead of buffered tokens.
"""

import hashlib
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.tools.logging import logger

from titan_gdn.data.files import DataError, Reader, changes, fingerprints, list_files, shuffled

Row: TypeAlias = tuple[dict[str, torch.Tensor], torch.Tensor]

_PROBE = bytes(range(32, 127)).decode() + " the of and return self.__init__(1234567)\n\t" + "Grüße, 世界 🌍"
"""A text of which tokenizers make different tokens."""


def _digest_of(tokenizer: BaseTokenizer) -> str:
    """What a position in tokens depends on. Not of the tokenizer's file: libraries may write it anew."""
    tokens = tokenizer.encode(_PROBE, add_bos=True, add_eos=True)
    return hashlib.blake2b(repr((tokenizer.get_vocab_size(), tokens)).encode(), digest_size=8).hexdigest()


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
        found: The fingerprint of each file; by default they are computed.
        max_invalid_share: The share of a file's bytes that may be no text.
        batch: How many rows for each rank the files must hold at least.

    Yields:
        `({"input": [seq_len], "positions": [seq_len]}, labels [seq_len])`, all int64.

    Raises:
        DataError: A file was deleted or has changed before its turn came, or is no text; or the files hold
            too few tokens.
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
        found: Mapping[str, str] | None = None,
        max_invalid_share: float = 0.01,
        batch: int = 1,
    ) -> None:
        self._files = list(files)
        values = (fingerprints(self._files) if found is None else found).values()
        self._reader = Reader(dict(zip(self._files, values, strict=True)), max_invalid_share)
        self._batch = batch
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
        rounds, whole = 0, self._epoch == self._file == self._token == 0
        for number, row in enumerate(self._rows()):
            turn = number % self._dp_world_size
            if turn == self._dp_rank:
                mine.append(row)
            if turn == self._dp_world_size - 1:
                rounds += 1
                yield mine.pop()
        if whole and rounds < self._batch:
            raise DataError(
                f"text_files: {len(self._files)} files hold {rounds} rows of {self._seq_len} tokens for each "
                f"of {self._dp_world_size} data-parallel ranks, less than one batch of {self._batch} "
                "(training.local_batch_size)"
            )
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
            order = shuffled(self._files, self._epoch) if self._epoch else self._files
            while self._file < len(order):
                tokens = self._tokenize(order[self._file])
                useful |= len(tokens) > 1
                yield tokens
                self._file, self._token = self._file + 1, 0
            if not useful:  # or an infinite stream would loop here forever
                raise DataError(
                    f"text_files: none of {len(order)} files has two tokens, an input and its label (the "
                    f"first file is '{order[0]}'). Set another dataset_path, or use a tokenizer with an end "
                    "token."
                )
            if not self._infinite:
                return
            self._epoch, self._file = self._epoch + 1, 0
            logger.info(f"text_files: epoch {self._epoch} begins with {len(order)} files in a new order")

    def _tokenize(self, file: str) -> torch.Tensor:
        text = self._reader.read(file)
        return torch.tensor(self._tokenizer.encode(text, add_bos=True, add_eos=True), dtype=torch.long)

    def state_dict(self) -> dict[str, Any]:
        """Where the next row begins; the same on all ranks."""
        return {"epoch": self._epoch, "file": self._file, "token": self._token}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was saved."""
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

        max_invalid_share: float = 0.01
        """The share of a file's bytes that may be no UTF-8 text: they are replaced, and a larger share is an
        error"""

        allow_changed_files: bool = False
        """Whether a run may resume where it stopped although files of the same names have other contents"""

        def __post_init__(self) -> None:
            if not 0 <= self.max_invalid_share <= 1:
                raise ValueError(
                    f"max_invalid_share = {self.max_invalid_share}: expected a number from 0 to 1"
                )
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
        """The same on every rank, under one key, so that a run can resume with another number of ranks.

        It is JSON, compressed: unlike a pickle, what a checkpoint holds cannot run code.
        """
        state = {
            "loader": super(ParallelAwareDataloader, self).state_dict(),
            "files": self._found,
            "tokenizer": self._tokenizer_digest,
        }
        return {"stream": zlib.compress(json.dumps(state).encode())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where a run stopped, for any data-parallel degree and `num_workers` of that run.

        Raises:
            DataError: The files have changed since, or the tokenizer has.
        """
        if not state_dict:
            return
        try:
            state = json.loads(zlib.decompress(state_dict["stream"]))
            stream, files, tokenizer = dict(state["loader"]), dict(state["files"]), state["tokenizer"]
        except (KeyError, TypeError, ValueError, zlib.error) as error:
            raise DataError(
                "text_files: the checkpoint's position in the data was not saved by text_files. Start with "
                'the first file: checkpoint.exclude_from_loading = ["dataloader"].'
            ) from error
        if tokenizer != self._tokenizer_digest:
            raise DataError(
                "text_files: the run was saved with another tokenizer than that of model.hf_assets_path, so "
                "its position, in tokens, does not apply. Set that tokenizer, or start with the first file: "
                'checkpoint.exclude_from_loading = ["dataloader"].'
            )
        self._check(files)
        if ("_snapshot" in stream) == (self.num_workers > 0):
            StatefulDataLoader.load_state_dict(self, stream)
            return
        # torchdata's states with and without workers differ, but both hold the position in the stream.
        StatefulDataLoader.load_state_dict(self, {})  # drops an iterator that stands elsewhere
        if "_snapshot" in stream:
            (stream,) = stream["_snapshot"]["_worker_snapshots"].values()
        assert isinstance(self.dataset, TextFiles)
        self.dataset.load_state_dict(stream["dataset_state"])

    def _check(self, before: dict[str, str]) -> None:
        """Check that the files are those that a run was saved with."""
        names, contents = changes(before, self._found)
        where = self._where or "the standard library"
        if names:
            raise DataError(
                f"text_files: since the run was saved, {names} in {where}, so its position does not apply. "
                "Restore the files, or start with the first one: checkpoint.exclude_from_loading = "
                '["dataloader"].'
            )
        if contents and not self._allow_changed_files:
            raise DataError(
                f"text_files: since the run was saved, {contents} in {where}. Restore the contents; or go on "
                "with what is there now: dataloader.allow_changed_files = true."
            )
        if contents:
            logger.warning(f"text_files: since the run was saved, {contents} in {where}")

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
        left_out: Counter[str] = Counter()
        files = list_files(config.dataset_path, left_out)
        self._found, self._where = fingerprints(files), config.dataset_path
        self._allow_changed_files = config.allow_changed_files
        size = sum(os.path.getsize(file) for file in files)
        reasons = ", ".join(f"{reason} ({count:,})" for reason, count in sorted(left_out.items()) if count)
        logger.info(
            f"text_files: {len(files):,} files, {size:,} bytes"
            + (f"; left out: {reasons}" if reasons else "")
        )
        self._tokenizer_digest = _digest_of(tokenizer)
        stream = TextFiles(
            files,
            tokenizer,
            seq_len=seq_len,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            infinite=config.infinite,
            found=self._found,
            max_invalid_share=config.max_invalid_share,
            batch=local_batch_size,
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
