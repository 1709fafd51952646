"""The floor that moves are measured against: two threads that copy, contiguously and into fresh pages or warm ones."""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np


def copy_seconds(sources: Sequence[Sequence[np.ndarray[Any, Any]]], nbytes: int, warm: bool = False) -> float:
    """Seconds to copy ``nbytes`` out of each group of byte arrays, again from its start where it holds less.

    Args:
        sources: groups of byte arrays.
        nbytes: to copy of each group.
        warm: into pages that were written before, where a move has to be given memory.
    """
    written = [np.ones(nbytes, np.uint8) for _ in sources if warm]

    def fill(group: Sequence[np.ndarray[Any, Any]]) -> Any:
        slab, at = written.pop() if warm else np.frombuffer(_fresh_pages(nbytes), np.uint8), 0
        while at < nbytes:
            for source in group:
                n = min(len(source), nbytes - at)
                slab[at : at + n] = source[:n]
                at += n
        return slab

    with ThreadPoolExecutor(2) as pool:
        start = time.perf_counter()
        slabs = list(pool.map(fill, sources))
        seconds = time.perf_counter() - start
    del slabs
    return seconds


def _fresh_pages(nbytes: int) -> mmap.mmap:
    """Memory that no one touched before, in huge pages where the system gives them, as numpy asks for large arrays."""
    pages = mmap.mmap(-1, max(nbytes, 1))
    pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
