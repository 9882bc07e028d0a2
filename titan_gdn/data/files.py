"""The text files of a data set: which they are, whether they have changed, and what is in them."""

import glob
import hashlib
import os
import random
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn, TypeVar

from torchtitan.tools.logging import logger

T = TypeVar("T")

_END = 4096
"""How many bytes from the beginning and the end of a file its fingerprint depends on."""


class DataError(RuntimeError):
    """The files of a data set do not suffice, have changed, or are no text."""


def list_files(path: str | None = None, left_out: Counter[str] | None = None) -> list[str]:
    """List the text files of a data set, in an order that depends only on their names.

    A file is text if it is not empty and has no NUL byte in its first KiB. In the standard library, files
    that are not UTF-8 are left out, too: a few of them test Python's parser.

    Args:
        path: `None` for the sources of Python's standard library, a folder for all files below it (except
            hidden files and linked folders), a glob (`**` for any depth), or one file.
        left_out: Counts the files that are left out, by reason. A glob never finds hidden files, and of the
            standard library, only sources count.

    Returns:
        Paths, shuffled with a fixed seed, because files of the same folder are alike and should not follow
        each other in training. The same names below `path` give the same order on every machine.

    Raises:
        ValueError: There is no text file at `path`, or a file or folder there cannot be read.
    """
    left_out = Counter() if left_out is None else left_out
    root = os.path.expanduser(path or "")
    if path is None:
        found = _standard_library(left_out)
    elif os.path.isdir(root):
        found = _walk(root, left_out)
    elif os.path.isfile(root):
        found = iter([root])
    else:
        found = glob.iglob(root, recursive=True)
    # All paths share a prefix, so that sorting them sorts the names below `path`. A glob may repeat a file.
    files = []
    for file in sorted(set(found)):
        if os.path.isdir(file):  # as `**` finds them
            continue
        if reason := _no_text(file):
            left_out[reason] += 1
        else:
            files.append(file)
    if not files:
        where = "the standard library's folder" if path is None else f"dataset_path = '{path}'"
        raise ValueError(
            f"no text file at {where} (empty, binary and hidden files do not count). Possible: a "
            "folder, a file, a glob such as 'data/**/*.txt', or no dataset_path for the standard library."
        )
    return shuffled(files, seed=0)


def _standard_library(left_out: Counter[str]) -> Iterator[str]:
    for file in _walk(sysconfig.get_path("stdlib"), Counter(), skip=("site-packages", "dist-packages")):
        if not file.endswith(".py"):
            continue
        if _is_utf8(file):
            yield file
        else:
            left_out["no UTF-8"] += 1


def _walk(folder: str, left_out: Counter[str], skip: Sequence[str] = ()) -> Iterator[str]:
    for parent, folders, names in os.walk(folder, onerror=_refuse):
        shown = [name for name in folders if not name.startswith(".") and name not in skip]
        left_out["hidden folder"] += sum(name.startswith(".") for name in folders)
        left_out["linked folder"] += sum(os.path.islink(os.path.join(parent, name)) for name in shown)
        left_out["hidden file"] += sum(name.startswith(".") for name in names)
        folders[:] = shown
        yield from (os.path.join(parent, name) for name in names if not name.startswith("."))


def _no_text(file: str) -> str:
    """Why a file is no text, "" if it may be one."""
    if not os.path.isfile(file):
        return "dangling link" if os.path.islink(file) else "no regular file"  # a FIFO, a socket
    try:
        with open(file, "rb") as stream:
            head = stream.read(1024)
    except OSError as error:
        error.filename = file  # which an error of `read` lacks
        _refuse(error)
    return "binary" if b"\0" in head else "" if head else "empty"


def _refuse(error: OSError) -> NoReturn:
    raise ValueError(
        f'"{error.filename}" cannot be read ({error.strerror}): make it readable, or set a dataset_path '
        "without it"
    ) from error


def _is_utf8(file: str) -> bool:
    with open(file, "rb") as stream:
        try:
            stream.read().decode()
        except UnicodeDecodeError:
            return False
    return True


def shuffled(items: Sequence[T], seed: int) -> list[T]:
    """The items in an order that depends on the seed alone."""
    # `random()` is the only function of `random` that is reproducible across versions of Python.
    draw = random.Random(seed)
    return sorted(items, key=lambda _: draw.random())


def fingerprints(files: Sequence[str]) -> dict[str, str]:
    """The fingerprint of each file, by its name below the folder that all files share.

    The folder is left out: it may have another name on the next machine.
    """
    below = os.path.commonpath([os.path.dirname(file) for file in files])
    return {os.path.relpath(file, below): _fingerprint_of_file(file) for file in files}


def _fingerprint_of_file(file: str) -> str:
    with open(file, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        head = stream.read(_END)
        stream.seek(max(size - _END, 0))
        return _fingerprint(size, head, stream.read(_END))


def _fingerprint(size: int, head: bytes, tail: bytes) -> str:
    return hashlib.blake2b(b"%d:%b:%b" % (size, head, tail), digest_size=8).hexdigest()


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, str]:
    """What a run's files have become: the sentence part of other names, and that of other contents.

    Args:
        before: The fingerprints with which a run was saved.
        now: Those of the files as they are.

    Returns:
        Each is "" if there is no such change.
    """
    missing = [f"{_some(sorted(before.keys() - now.keys()))} missing"] if before.keys() - now.keys() else []
    new = [f"{_some(sorted(now.keys() - before.keys()))} new"] if now.keys() - before.keys() else []
    other = sorted(name for name in before.keys() & now.keys() if before[name] != now[name])
    return " and ".join(missing + new), f"{_some(other)} changed" if other else ""


def _some(names: Sequence[str]) -> str:
    """The first names of a list, how many more there are, and a verb."""
    shown = ", ".join(f'"{name}"' for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{shown}{more} {'is' if len(names) == 1 else 'are'}"


class Reader:
    """Reads the files of a data set, as they were when the run began.

    Args:
        fingerprints: Of each file, by its path.
        max_invalid_share: The share of a file's bytes up to which those that are no text are replaced.
    """

    def __init__(self, fingerprints: Mapping[str, str], max_invalid_share: float) -> None:
        self._fingerprints = fingerprints
        self._max_invalid_share = max_invalid_share
        self._told: set[str] = set()

    def read(self, file: str) -> str:
        """The text of a file, without a byte-order mark. Line ends are unchanged.

        Raises:
            DataError: The file was deleted or has changed, or too much of it is no text.
        """
        try:
            with open(file, "rb") as stream:
                content = stream.read()
        except OSError as error:
            raise DataError(
                f'text_files: "{file}" cannot be read any more ({error.strerror}). Restore it and resume: '
                "data must not change during a run."
            ) from error
        found = _fingerprint(len(content), content[:_END], content[-_END:])
        if self._fingerprints.get(file, found) != found:
            raise DataError(
                f'text_files: "{file}" has changed after the run began. Restore it and resume: data must not '
                "change during a run."
            )
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError:
            text = content.decode("utf-8-sig", errors="replace")
        if invalid := _invalid(content):
            self._judge(file, invalid, len(content))
        return text

    def _judge(self, file: str, invalid: int, size: int) -> None:
        """Warn of bytes that are no text, once a file, or refuse the file."""
        told = f'text_files: "{file}": {invalid:,} of {size:,} bytes are no UTF-8 text'
        if invalid > self._max_invalid_share * size:
            raise DataError(
                f"{told}, more than dataloader.max_invalid_share = {self._max_invalid_share} "
                "allows (for validation, validator.dataloader.max_invalid_share). Convert or remove the "
                "file, or set a larger share to read it as it is."
            )
        if file not in self._told:
            self._told.add(file)
            logger.warning(f"{told}; they are replaced by U+FFFD")


def _invalid(content: bytes) -> int:
    """How many bytes are not UTF-8, or NUL, which no text has."""
    return content.count(b"\0") + len(content) - len(content.decode(errors="ignore").encode())
