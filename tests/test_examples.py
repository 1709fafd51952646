"""Every example runs as it stands, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path):
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=600, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout
