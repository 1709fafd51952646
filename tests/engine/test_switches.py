"""No abort and no deadlock in many switches, with the threads that JAX chooses by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from dynajax.engine.transport import Path as Way

SCRIPT = Path(__file__).with_name("switches.py")


def test_200_random_switches_with_default_threads(path: Way) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "NPROC"}
    command = [sys.executable, str(SCRIPT), path, "200", "0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["200"]
