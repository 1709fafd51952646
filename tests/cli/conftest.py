"""What runs of the command train on."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def texts(tmp_path: Path) -> str:
    """A folder of short files."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number}.py").write_text(f"def f{number}(x):\n    return x * {number}\n" * (1 + number % 4))
    return str(folder)
