"""The stream: one endless order of samples for the whole job, and where in it a run stands.

A sample's number is global: it counts samples since the start of the run, whatever batch size, strategy
or world read them. So the cursor is a number, not a set of per-worker positions, and a job that
grows, shrinks or resumes goes on with the next sample.
"""

from __future__ import annotations

import abc
import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar, cast

import grain
import numpy as np
from numpy.typing import NDArray

from dynajax.data.corpus import Documents
from dynajax.data.packing import Bins
from dynajax.errors import DataError

T = TypeVar("T")
_PROBED_SAMPLES = 64
_FEW = 2**16
"""Below this, Grain's shuffle takes 2**16 / count tries to find an item; above, it needs no memory."""


@dataclass(frozen=True)
class Cursor:
    """The part of the data side that belongs to the state of a run.

    Attributes:
        step: batches taken so far.
        sample: number of the next sample of the stream.
        corpus: digest of the documents.
        stream: digest of what makes the samples and their order (see ``stream_digest``).
    """

    step: int
    sample: int
    corpus: str
    stream: str

    def require(self, corpus: str, stream: str) -> None:
        """Raises DataError unless this cursor points into that stream of that corpus."""
        if self.corpus != corpus:
            raise DataError(
                f"the saved run read the corpus {self.corpus[:12]} and this one is {corpus[:12]}: give the "
                "same files, unchanged (the standard library changes with the version of Python), or start anew"
            )
        if self.stream != stream:
            raise DataError(
                f"the saved run read its corpus in the order {self.stream[:12]} and this one would in "
                f"{stream[:12]}: give the same seed, sequence length, limits and policy, or start anew"
            )


class Stream(abc.ABC):
    """What every stream of samples can do: say where a run begins, and take up one that was saved."""

    documents: Documents

    @property
    @abc.abstractmethod
    def digest(self) -> str:
        """Names the samples and their order (see ``stream_digest``)."""

    def start(self) -> Cursor:
        """The cursor of a new run."""
        return Cursor(0, 0, self.documents.digest, self.digest)

    def resume(self, cursor: Cursor) -> Cursor:
        """``cursor`` if it points into this stream.

        Raises:
            DataError: the documents or the order have changed.
        """
        cursor.require(self.documents.digest, self.digest)
        return cursor


@dataclass(frozen=True, eq=False)
class _Permutations:
    """A random access source of the same promise as ``endless_order``; holds the permutation of one epoch."""

    count: int
    seed: int

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> int:
        epoch, place = divmod(index, self.count)
        return int(self._epoch(epoch)[place])

    @cached_property
    def _epoch(self) -> Callable[[int], NDArray[np.int64]]:
        @lru_cache(maxsize=2)  # a batch may span two epochs
        def permutation(epoch: int) -> NDArray[np.int64]:
            return np.random.default_rng((self.seed, epoch)).permutation(self.count)

        return permutation


def endless_order(count: int, seed: int) -> grain.MapDataset[int]:
    """Item n is the number, below ``count``, that comes n-th: each once an epoch, reshuffled every epoch.

    Random access: an item depends on ``count``, ``seed`` (0 or more) and n alone, whatever was read before.
    """
    if count < _FEW:
        return grain.MapDataset.source(_Permutations(count, seed))
    # Grain shuffles epoch e with seed + e. Spread the seeds, or seed 1 would be seed 0 one epoch later.
    spread = int(np.random.SeedSequence(seed).generate_state(1, np.uint32)[0])
    return grain.MapDataset.source(range(count)).shuffle(seed=spread).repeat()


def item(dataset: grain.MapDataset[T], index: int) -> T:
    """``dataset[index]``, which Grain types as possibly absent since a dataset may filter; those here do not."""
    return cast(T, dataset[index])


def stream_digest(bins: Bins, order: grain.MapDataset[int], **settings: int | str) -> str:
    """SHA-256 in hex of a stream: its settings, what each sample holds, and how the order begins.

    The order itself is probed, since it comes from libraries that may change theirs.
    """
    text = ";".join(f"{name}={value}" for name, value in sorted(settings.items()))
    digest = hashlib.sha256(text.encode())
    for array in (bins.members, bins.starts, np.array([item(order, i) for i in range(_PROBED_SAMPLES)])):
        digest.update(array.astype("<i8").tobytes())
    return digest.hexdigest()
