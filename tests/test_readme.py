"""What the README and the pages of docs/ promise: their commands, their code and their links."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = "python -m pip install -e . && dynajax train\npython -m pip install -e '.[dev]' && pytest\n"


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_readme_opens_with_the_two_commands():
    text = (ROOT / "README.md").read_text()
    assert text.startswith(f"# dynajax\n\n```bash\n{COMMANDS}```\n")


def test_the_code_of_the_readme_runs_from_top_to_bottom():
    tour = "\n".join(blocks((ROOT / "README.md").read_text(), "python"))
    assert "dj.reshard(" in tour
    assert "trainer.switch(" in tour
    # A process of its own: the tour chooses the number of devices itself.
    done = subprocess.run([sys.executable, "-c", tour], capture_output=True, text=True, timeout=600, cwd=ROOT.anchor)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path):
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    gone = [t for t in targets if not t.startswith("https://") and not (page.parent / t).exists()]
    assert not gone
