"""The most memory that a process holds while it does something, taken in a process of its own."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def resident_above(run: Callable[[], Any], release: Callable[[], None]) -> int:
    """Resident bytes above the larger of before and after, at the fullest moment of ``run``.

    Args:
        run: what is measured; its result is held.
        release: gives up what only ``run`` needed, before "after" is read.
    """
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    result = run()
    high = _resident("VmHWM")
    release()
    gc.collect()
    after = _resident("VmRSS")
    del result
    return max(0, high - max(before, after))


def in_child(arguments: Sequence[str]) -> int:
    """What a Python script prints last, as a number, in a fresh process that gives freed memory back at once."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=120)
    return json.loads(done.stdout.splitlines()[-1])


def _resident(field: str) -> int:
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(field))
    return int(line.split()[1]) * 1024
