"""What is installed: every module and every data file, under the name that it is imported by."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import dynajax

ROOT = Path(__file__).parents[1]
FOLDERS = {"dynajax": "dynajax", "meshes": "dynajax/meshes", "models": "dynajax/models"}
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())


def installed_names() -> set[str]:
    """Path inside the package of every file that users need, from the folders of the repository."""
    names = set()
    for folder, inside in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            linked = any(parent.is_symlink() for parent in path.parents)
            if path.suffix in {".py", ".toml", ".json", ".typed"} and not linked:
                names.add(f"{inside}/{path.relative_to(ROOT / folder).as_posix()}")
    return names


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, so that nothing built earlier gets into it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = ["pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(source)]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (built,) = out.iterdir()
    return built


def test_the_wheel_holds_every_module_and_data_file(wheel: Path):
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert inside == installed_names()
    assert {"dynajax/models/presets.toml", "dynajax/meshes/strategy.py", "dynajax/py.typed"} <= inside


def test_the_installed_wheel_imports_without_the_repository(wheel: Path, tmp_path: Path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import dynajax, dynajax.models as models, dynajax.meshes as meshes, dynajax.cli;"
        "print(models.preset('tiny').layers, meshes.Strategy.parse('dp2.tp4').num_devices);"
        "print(*(m.__file__ for m in (dynajax, models, meshes)), sep='\\n')"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    figures, *files = done.stdout.split("\n")[:4]
    assert figures == "2 8"
    assert [Path(file).relative_to(tmp_path).parts[:-1] for file in files] == [
        ("dynajax",),
        ("dynajax", "models"),
        ("dynajax", "meshes"),
    ]


def test_the_editable_install_leads_to_the_folders_of_the_repository():
    from dynajax import meshes, models

    for package, folder in ((meshes, "meshes"), (models, "models")):
        assert Path(str(package.__file__)).resolve() == ROOT / folder / "__init__.py"


def test_the_version_is_said_once():
    assert "version" not in SETTINGS["project"]
    assert importlib.metadata.version("dynajax") == dynajax.__version__


def test_jax_is_held_to_one_minor_range():
    held = [r for r in SETTINGS["project"]["dependencies"] if r.startswith(("jax>", "jaxlib>"))]
    cuda = SETTINGS["project"]["optional-dependencies"]["cuda"]
    assert len(held) == 2
    assert all(r.endswith(">=0.10.2,<0.11") for r in held + cuda)
