"""Documents: the text that a run reads, as bytes.

A token is a byte, so the vocabulary is the 256 byte values and no more. There is no token for
begin, end or padding: where a document ends is known from its length, and padding is what has
segment id 0 (``dynajax.data.batch``). Any file is therefore a document, whatever its encoding.

Documents are read where they lie, by random access; a scan of a folder reads names and sizes only.
``digest`` reads every byte once and names the corpus, so that a run is not resumed on other text.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dynajax.errors import DataError
from dynajax.types import Ints

VOCAB_SIZE = 256
"""Tokens are bytes: ids 0 to 255, no specials."""

Bytes = NDArray[np.uint8]
_LEFT_OUT_OF_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_WRITTEN_AT_INSTALL = ("_sysconfigdata_", "sitecustomize.py", "usercustomize.py")
_SNIFFED_BYTES = 8192


@runtime_checkable
class Documents(Protocol):
    """Random access to documents; a ``grain.sources.RandomAccessDataSource`` that knows lengths and parts.

    Every method is thread-safe and deterministic.
    """

    @property
    def lengths(self) -> Ints:
        """Bytes of each document, in order."""
        ...

    @property
    def digest(self) -> str:
        """SHA-256 in hex of the names, sizes and bytes of all documents."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Bytes: ...

    def read(self, index: int, start: int, stop: int) -> Bytes:
        """Bytes ``start`` to ``stop`` of document ``index``."""
        ...


@dataclass(frozen=True)
class FileRecord:
    """A line of a manifest: a document's path relative to the root, its bytes and its SHA-256 in hex."""

    path: str
    size: int
    sha256: str


def manifest_text(records: Sequence[FileRecord]) -> str:
    """The manifest as text, a document a line: ``sha256  size  path``. A corpus' digest is the SHA-256 of this."""
    return "".join(f"{r.sha256}  {r.size}  {r.path}\n" for r in records)


def _digest(records: Sequence[FileRecord]) -> str:
    return hashlib.sha256(manifest_text(records).encode("utf-8", "surrogateescape")).hexdigest()


@dataclass(frozen=True, eq=False)
class FileDocuments:
    """Files below a root, one a document, read when asked for.

    Attributes:
        root: the folder.
        paths: paths relative to ``root``, with ``/``, sorted.
        lengths: int64 (documents,), the bytes of each file when the folder was scanned.
        left_out: paths that were passed over because they hold no text (see ``folder_documents``).
    """

    root: Path
    paths: tuple[str, ...]
    lengths: Ints = field(repr=False)
    left_out: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Bytes:
        return self.read(index, 0, int(self.lengths[index]))

    def read(self, index: int, start: int, stop: int) -> Bytes:
        """Bytes ``start`` to ``stop`` of document ``index``; touches that part of the file alone.

        Raises:
            DataError: the file cannot be read any more, or is shorter than it was.
        """
        path = self.root / self.paths[index]
        try:
            part = np.fromfile(path, np.uint8, count=stop - start, offset=start)
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}; make the file readable") from error
        if part.size != stop - start:
            raise DataError(f"{path} no longer has {stop} bytes: it changed during the run; start again")
        return part

    @cached_property
    def manifest(self) -> tuple[FileRecord, ...]:
        """Path, size and SHA-256 of every file. Reads every byte once, at the first call.

        Raises:
            DataError: a file cannot be read, or has another size than when the folder was scanned.
        """
        records = []
        for path, size in zip(self.paths, self.lengths.tolist(), strict=True):
            try:
                with open(self.root / path, "rb") as file:
                    found, sha256 = os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256")
            except OSError as error:
                raise DataError(f"cannot read {self.root / path}: {error.strerror}; make it readable") from error
            if found != size:
                raise DataError(f"{self.root / path} had {size} bytes and now has {found}: start again")
            records.append(FileRecord(path, size, sha256.hexdigest()))
        return tuple(records)

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest."""
        return _digest(self.manifest)


@dataclass(frozen=True, eq=False)
class MemoryDocuments:
    """Documents that the caller holds in memory; they are looked at, not copied."""

    texts: tuple[bytes, ...] = field(repr=False)
    lengths: Ints = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", np.array([len(text) for text in self.texts], np.int64))

    @classmethod
    def of(cls, texts: Sequence[bytes | str]) -> MemoryDocuments:
        """Documents from byte strings, or from text, which is encoded as UTF-8."""
        return cls(tuple(t.encode() if isinstance(t, str) else bytes(t) for t in texts))

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Bytes:
        return np.frombuffer(self.texts[index], np.uint8)

    def read(self, index: int, start: int, stop: int) -> Bytes:
        """Bytes ``start`` to ``stop`` of document ``index``."""
        return self[index][start:stop]

    @cached_property
    def manifest(self) -> tuple[FileRecord, ...]:
        """Size and SHA-256 of every document, which is named by its number."""
        hashes = [hashlib.sha256(text).hexdigest() for text in self.texts]
        return tuple(FileRecord(str(i), len(t), h) for i, (t, h) in enumerate(zip(self.texts, hashes, strict=True)))

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest."""
        return _digest(self.manifest)


def stdlib_documents() -> FileDocuments:
    """The Python standard library's own source files: real text, offline, with a long tail of lengths.

    Left out are tests, installed packages, and the few modules written when Python was installed, so that
    two machines with the same Python have the same corpus.

    Raises:
        DataError: this Python has no source files of its library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    remedy = "this Python came without its library's source; give a folder of text files instead"

    def is_source(name: str) -> bool:
        return name.endswith(".py") and not name.startswith(_WRITTEN_AT_INSTALL)

    def is_library(name: str) -> bool:
        return name not in _LEFT_OUT_OF_STDLIB and not name.startswith("config-")

    paths, lengths = _scan(root, is_library, is_source, remedy)
    return _documents(root, paths, lengths, (), remedy)


def folder_documents(folder: str | os.PathLike[str]) -> FileDocuments:
    """Every text file below ``folder``, one a document, sorted by relative path.

    Hidden files and folders are passed over; so are files with a zero byte among their first 8192, which
    are taken for binary and named in ``left_out``. Links to files are followed, links to folders are not.

    Raises:
        DataError: the folder is missing, is a file, cannot be read or holds no text; or a file cannot be read.
    """
    root = Path(folder)
    remedy = "give a folder that holds text files"

    def is_visible(name: str) -> bool:
        return not name.startswith(".")

    paths, lengths = _scan(root, is_visible, is_visible, remedy)
    binary = [_is_binary(root / path) for path in paths]
    kept = [i for i, b in enumerate(binary) if not b]
    left_out = tuple(path for path, b in zip(paths, binary, strict=True) if b)
    return _documents(root, [paths[i] for i in kept], [lengths[i] for i in kept], left_out, remedy)


def _documents(
    root: Path, paths: Sequence[str], lengths: Sequence[int], left_out: tuple[str, ...], remedy: str
) -> FileDocuments:
    if not sum(lengths):
        binary = f", only {len(left_out)} binary files" if left_out else ""
        raise DataError(f"no text in {root}{binary}: {remedy}")
    return FileDocuments(root, tuple(paths), np.array(lengths, np.int64), left_out)


def _scan(
    root: Path, keep_folder: Callable[[str], bool], keep_file: Callable[[str], bool], remedy: str
) -> tuple[list[str], list[int]]:
    """Sorted relative paths and sizes of the regular files below ``root`` that are kept."""
    try:
        is_folder = stat.S_ISDIR(os.stat(root).st_mode)
    except OSError as error:
        raise DataError(f"cannot read the folder {root}: {error.strerror}; {remedy}") from error
    if not is_folder:
        raise DataError(f"{root} is a file, not a folder: {remedy}")
    sizes = {}
    for path in _walk(root, keep_folder, keep_file):
        try:
            status = os.stat(root / path)
        except OSError as error:
            raise DataError(f"cannot read {root / path}: {error.strerror}; mend or remove it") from error
        if stat.S_ISREG(status.st_mode):
            sizes[path] = status.st_size
    paths = sorted(sizes)
    return paths, [sizes[path] for path in paths]


def _walk(root: Path, keep_folder: Callable[[str], bool], keep_file: Callable[[str], bool]) -> Iterator[str]:
    def refuse(error: OSError) -> None:
        raise DataError(f"cannot read {error.filename}: {error.strerror}; make the folder readable") from error

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [name for name in subfolders if keep_folder(name)]
        below = Path(folder).relative_to(root)
        for name in names:
            if keep_file(name):
                yield (below / name).as_posix()


def _is_binary(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return b"\0" in file.read(_SNIFFED_BYTES)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; make it readable or remove it") from error
