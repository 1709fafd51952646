"""The peak of a move as the system sees it, in a process that gives freed memory back at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from dynajax.engine.transport import Path as Way

BUDGET_MB = 4


def test_resident_bytes_stay_within_the_budget_of_all_devices(path: Way) -> None:
    """128 MB on eight devices with 4 MB each: a move that held both states would take 128 MB more."""
    script = Path(__file__).with_name("resident.py")
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, str(script), path, f"{BUDGET_MB}MB"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    state, extra = json.loads(done.stdout.splitlines()[-1])
    allowed = 8 * BUDGET_MB * 2**20
    assert extra <= allowed + 2**22 < state  # what else a process allocates meanwhile is less than 4 MB
