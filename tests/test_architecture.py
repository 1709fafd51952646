"""The rules of docs/architecture.md and CONTRIBUTING.md, read off the source: layers, purity, sizes, names.

A rule is a function from a source file to the lines that break it. Each is also shown a bad line, so that it can fail,
and a good one that looks much like it.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

import dynajax

ROOT = Path(__file__).parents[1]
PACKAGES = {"dynajax": "dynajax", "meshes": "dynajax.meshes", "models": "dynajax.models"}
CODE = [*PACKAGES, "tests", "benchmarks", "examples"]
TEXT = [*CODE, "docs", ".ci"]

LAYERS = (
    ("errors", "types"),
    ("bytesize",),
    ("meshes", "models"),
    ("vps", "data", "arrays"),
    ("planner", "balance", "processes"),
    ("engine",),
    ("runtime",),
    ("train",),
    ("cli",),
    ("__main__",),
)
"""Packages of dynajax from the lowest up. One may import itself and what stands in a lower row."""
EDGE = ("cli", "__main__")
"""Where the process meets its caller: may go through the public names, and reads the environment."""

PURE = ("meshes", "vps", "planner", "balance")
EFFECTS_IN_PURE = ("html",)
"""Modules of pure packages that draw what the rest found."""
PURE_THIRD_PARTY = ("numpy", "scipy", "ml_dtypes", "dynajax")
PURE_JAX = ("sharding", "tree_util")
IMPURE_STDLIB = {"asyncio", "datetime", "multiprocessing", "os", "random", "socket", "subprocess", "threading", "time"}

MIRRORED = ("vps", "planner")
"""Packages whose tests lie and are named as their modules."""

JAX_SEAM = "dynajax.arrays._jax_private"
VAGUE_NAMES = {"common", "helper", "helpers", "misc", "shared", "util", "utils"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 80


@dataclass(frozen=True)
class Source:
    """A Python file: ``module`` is its dotted name in dynajax, or "" outside of it."""

    path: str
    text: str
    module: str = ""

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def layer(self) -> str:
        """The package of dynajax it is part of; "" for dynajax itself and for what is outside."""
        return f"{self.module}..".split(".")[1]

    @cached_property
    def imports(self) -> list[tuple[int, str]]:
        """Line and dotted name of all that is imported, at the top or in a function; ``from a import b`` is a.b."""
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found += [(node.lineno, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
        return found

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.module if self.path.endswith("__init__.py") else self.module.rpartition(".")[0]
        for _ in range(node.level - 1):
            package = package.rpartition(".")[0]
        return f"{package}.{node.module}" if node.module else package


def sources() -> list[Source]:
    """Every Python file of the repository."""
    found = []
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT)
            parts = relative.with_suffix("").parts[1:]
            names = [PACKAGES[folder], *parts] if folder in PACKAGES else []
            module = ".".join(names).removesuffix(".__init__")
            found.append(Source(relative.as_posix(), path.read_text(), module))
    return found


def texts() -> list[Source]:
    """Every text file of the repository, code or not."""
    kinds = {".py", ".md", ".toml", ".json", ".sh", ".yml", ".yaml", ".html", ".css", ".js", ""}
    top = [path for path in ROOT.iterdir() if path.suffix in {".md", ".toml"}]
    inner = [path for folder in TEXT for path in (ROOT / folder).rglob("*")]
    files = [p for p in top + inner if p.is_file() and p.suffix in kinds and "__pycache__" not in p.parts]
    return [Source(p.relative_to(ROOT).as_posix(), p.read_text()) for p in sorted(files)]


# The rules ------------------------------------------------------------------------------------------------------------


def rank(layer: str) -> int:
    """The row of a package in LAYERS; -1 if it has none."""
    return next((i for i, row in enumerate(LAYERS) if layer in row), -1)


def upward_imports(source: Source) -> Iterator[str]:
    """Imports from the same row or a higher one, of packages that have no row, or of dynajax as a whole."""
    if not source.layer:
        return
    if rank(source.layer) < 0:
        yield f"{source.path}: give the package {source.layer!r} a row in LAYERS"
    for line, name in source.imports:
        root, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if root != "dynajax" or target == source.layer:
            continue
        # A name that is no package is one that dynajax itself exports: only the top may go through there.
        below = rank(target) < rank(source.layer) if rank(target) >= 0 else source.layer in EDGE
        if not below:
            yield f"{source.path}:{line}: {source.layer} imports {name}, which is not below it"


def impure_imports(source: Source) -> Iterator[str]:
    """In pure packages: anything that knows arrays, devices, clocks, the environment or another library."""
    if source.layer not in PURE or source.module.rpartition(".")[2] in EFFECTS_IN_PURE:
        return
    for line, name in source.imports:
        root, _, rest = name.partition(".")
        if root == "jax":
            pure = rest.partition(".")[0] in PURE_JAX
        else:
            pure = root in PURE_THIRD_PARTY or (root in sys.stdlib_module_names and root not in IMPURE_STDLIB)
        if not pure:
            yield f"{source.path}:{line}: {source.layer} is pure and imports {name}"


def private_jax(source: Source) -> Iterator[str]:
    """Private names of JAX outside of the one module that may use them."""
    if not source.module or source.module == JAX_SEAM:
        return
    for line, name in source.imports:
        root, *rest = name.split(".")
        if root == "jaxlib" or (root == "jax" and any(part.startswith("_") for part in rest)):
            yield f"{source.path}:{line}: {name} is private to JAX; only {JAX_SEAM} may use it"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "jax._src":
            yield f"{source.path}:{node.lineno}: jax._src is private; only {JAX_SEAM} may use it"


def environment_reads(source: Source) -> Iterator[str]:
    """The environment, anywhere but in the command line."""
    if not source.module or source.layer in EDGE:
        return
    names = {"os.environ", "os.environb", "os.getenv", "os.putenv"}
    used = [(node.lineno, ast.unparse(node)) for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)]
    for line, name in used + source.imports:
        if name in names:
            yield f"{source.path}:{line}: {name} outside of dynajax.cli"


def hidden_failures(source: Source) -> Iterator[str]:
    """Handlers that catch everything, and state that functions change behind the caller's back."""
    if not source.module:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler) and (node.type is None or ast.unparse(node.type) == "Exception"):
            yield f"{source.path}:{node.lineno}: name the exceptions that are caught"
        if isinstance(node, ast.Global):
            yield f"{source.path}:{node.lineno}: global state"


def vague_names(source: Source) -> Iterator[str]:
    """Modules and folders named after nothing."""
    for part in Path(source.path).with_suffix("").parts:
        if part in VAGUE_NAMES:
            yield f"{source.path}: name the concept instead of {part!r}"


def too_long(source: Source) -> Iterator[str]:
    """Files and functions that do not fit in a head."""
    lines = source.text.count("\n")
    if lines > MAX_FILE_LINES:
        yield f"{source.path}: {lines} lines, at most {MAX_FILE_LINES}"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{source.path}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"


def unwanted_text(source: Source) -> Iterator[str]:
    """Notes of unfinished work, and paths of the machine on which something was written."""
    # Written apart, so that this file does not break its own rule.
    notes = "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X"])
    paths = "|".join(["work", "root", "tmp", "home"])
    for number, line in enumerate(source.text.splitlines(), 1):
        if match := re.search(rf"\b({notes})\b|(?<![\w.])/({paths})/", line):
            yield f"{source.path}:{number}: {match[0]}"


def import_circles(files: Sequence[Source]) -> Iterator[str]:
    """Modules of dynajax that import one another, directly or through others; imports inside functions count."""
    modules = {source.module for source in files if source.module}
    graph = {source.module: _imported(source, modules) for source in files if source.module}
    seen: set[str] = set()
    for start in sorted(graph):
        if start not in seen and (circle := _circle(graph, start)):
            seen |= set(circle)
            yield " imports ".join(circle)


def _imported(source: Source, modules: Set[str]) -> set[str]:
    """The modules that a file imports, or imports something from."""
    owners = (name if name in modules else name.rpartition(".")[0] for _, name in source.imports)
    return {name for name in owners if name in modules}


def _circle(graph: Mapping[str, Set[str]], start: str) -> list[str]:
    """A shortest way from a module back to itself; nothing if there is none."""
    ways = [[start]]
    reached: set[str] = set()
    for way in ways:  # grows while it is gone through
        for module in sorted(graph[way[-1]] - reached):
            if module == start:
                return [*way, start]
            reached.add(module)
            ways.append([*way, module])
    return []


def untested_modules(files: Sequence[Source]) -> Iterator[str]:
    """Modules of the packages in MIRRORED without a test module at their place and of their name."""
    paths = {source.path for source in files}
    for source in files:
        package, _, name = source.module.rpartition(".")
        if source.layer in MIRRORED and not source.path.endswith("__init__.py"):
            test = f"tests/{package.removeprefix('dynajax.').replace('.', '/')}/test_{name}.py"
            if test not in paths:
                yield f"{source.path}: has no tests in {test}"


def repeated_names(files: Sequence[Source]) -> Iterator[str]:
    """Public classes and functions of the package that another module has one of by the same name.

    Commands are left out: each is a ``run``.
    """
    found: dict[str, str] = {}
    for source in files:
        if not source.module.startswith("dynajax") or source.layer in EDGE:
            continue
        for node in source.tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                other = found.setdefault(node.name, source.path)
                if other != source.path:
                    yield f"{source.path}: {node.name} is a name in {other} too"


CODE_RULES = [
    upward_imports,
    impure_imports,
    private_jax,
    environment_reads,
    hidden_failures,
    vague_names,
    too_long,
]


@pytest.mark.parametrize("rule", CODE_RULES)
def test_the_code_keeps_the_rule(rule: Callable[[Source], Iterator[str]]):
    broken = [line for source in sources() for line in rule(source)]
    assert not broken, "\n".join(broken)


def test_no_modules_import_one_another_in_a_circle():
    assert not list(import_circles(sources()))


def test_modules_have_tests_of_their_own():
    assert not list(untested_modules(sources()))


def test_a_name_means_one_thing():
    assert not list(repeated_names(sources()))


def test_no_text_has_unfinished_notes_or_paths_of_a_machine():
    broken = [line for source in texts() for line in unwanted_text(source)]
    assert not broken, "\n".join(broken)


def test_all_folders_are_read():
    modules = {source.module for source in sources()}
    assert {"dynajax", "dynajax.errors", "dynajax.vps", "dynajax.meshes.strategy", "dynajax.models"} <= modules
    assert {"README.md", "pyproject.toml", ".ci/run", "docs/architecture.md"} <= {text.path for text in texts()}


# Each rule can fail ---------------------------------------------------------------------------------------------------


def code(text: str, module: str = "dynajax.vps.region") -> Source:
    return Source(module.replace(".", "/") + ".py", text, module)


BAD_AND_GOOD = [
    (upward_imports, code("from dynajax.planner import Plan"), code("from dynajax.errors import LayoutError")),
    (upward_imports, code("def f():\n    import dynajax.engine"), code("def f():\n    import dynajax.meshes")),
    (upward_imports, code("from dynajax import Strategy"), code("from dynajax import errors")),
    (upward_imports, code("from .. import train"), code("from .. import meshes")),
    (upward_imports, code("from ..data import Batches"), code("from . import algebra")),
    (upward_imports, code("", "dynajax.unheard.of"), code("from dynajax import reshard", "dynajax.cli.train")),
    (impure_imports, code("import jax"), code("import jax.tree_util as jtu")),
    (impure_imports, code("from jax import numpy"), code("from jax import sharding")),
    (impure_imports, code("import jax.numpy as jnp"), code("from jax.sharding import PartitionSpec")),
    (impure_imports, code("import time"), code("import time", "dynajax.engine.execute")),
    (impure_imports, code("from os import environ", "dynajax.meshes.rules"), code("import math")),
    (impure_imports, code("import optax", "dynajax.planner.plan"), code("import numpy.linalg, scipy.optimize")),
    (impure_imports, code("import threading", "dynajax.balance.pack"), code("import time", "dynajax.balance.html")),
    (private_jax, code("from jax._src import core"), code("from jax._src import core", JAX_SEAM)),
    (private_jax, code("import jax\njax._src.core"), code("import jax\njax.core")),
    (private_jax, code("import jaxlib"), code("import jax")),
    (environment_reads, code("import os\nos.environ['A']"), code("import os\nos.environ['A']", "dynajax.cli.train")),
    (environment_reads, code("from os import getenv"), code("from os import path")),
    (hidden_failures, code("try: f()\nexcept: pass"), code("try: f()\nexcept ValueError: pass")),
    (hidden_failures, code("try: f()\nexcept Exception: pass"), code("try: f()\nexcept (KeyError, OSError): pass")),
    (hidden_failures, code("def f():\n    global x\n    x = 1"), code("x = 1")),
    (vague_names, code("", "dynajax.vps.utils"), code("", "dynajax.vps.utility_of_moves")),
    (vague_names, code("", "tests.common.test_plan"), code("", "tests.planner.test_plan")),
    (too_long, code("x = 1\n" * 501), code("x = 1\n" * 500)),
    (too_long, code("def f():\n" + "    x = 1\n" * 80), code("def f():\n" + "    x = 1\n" * 79)),
    (unwanted_text, code("# TO" + "DO: later"), code("# todos are a list of ours")),
    (unwanted_text, code("open('/" + "tmp/x')"), code("open('runs/tmp/x')")),
]


@pytest.mark.parametrize(("rule", "bad", "good"), BAD_AND_GOOD)
def test_the_rule_tells_bad_from_good(rule: Callable[[Source], Iterator[str]], bad: Source, good: Source):
    assert list(rule(bad))
    assert not list(rule(good))


def modules(**texts: str) -> list[Source]:
    """Modules a, b, … of dynajax.vps, and the package itself, which passes on a name of a."""
    package = Source("dynajax/vps/__init__.py", "from dynajax.vps.a import A as A", "dynajax.vps")
    return [package, *(code(text, f"dynajax.vps.{name}") for name, text in texts.items())]


@pytest.mark.parametrize(
    ("bad", "good"),
    [
        (  # of two
            modules(a="from dynajax.vps.b import B", b="from dynajax.vps.a import A"),
            modules(a="from dynajax.vps.b import B", b=""),
        ),
        (  # of three, one of them hidden in a function
            modules(a="from dynajax.vps import b", b="import dynajax.vps.c", c="def f():\n    from . import a"),
            modules(a="from dynajax.vps import b, c", b="import dynajax.vps.c", c="def f():\n    import numpy"),
        ),
        (  # through the package that passes the module's own name on
            modules(a="from dynajax.vps.b import B", b="from dynajax.vps import A"),
            modules(a="from dynajax.vps.b import B", b="", c="from dynajax.vps import A"),
        ),
        (modules(a="from dynajax.vps.a import A"), modules(a="from dynajax.errors import a")),  # of itself
    ],
)
def test_a_circle_of_imports_is_told_from_a_chain(bad: list[Source], good: list[Source]):
    assert list(import_circles(bad))
    assert not list(import_circles(good))


def test_a_module_without_tests_is_told_from_one_with_them():
    region = code("", "dynajax.planner.stages.region")
    package = Source("dynajax/planner/__init__.py", "", "dynajax.planner")
    assert list(untested_modules([package, region, Source("tests/planner/test_region.py", "")]))
    assert not list(untested_modules([package, region, Source("tests/planner/stages/test_region.py", "")]))


def test_a_name_used_twice_is_told_from_two_names():
    one, other = code("class Cut: ...", "dynajax.vps.region"), code("def joined(): ...", "dynajax.vps.parts")
    assert not list(repeated_names([one, other]))
    assert list(repeated_names([one, code("class Cut: ...", "dynajax.runtime.storage")]))


# Names ----------------------------------------------------------------------------------------------------------------


def exports(source: Source) -> list[str]:
    """Names that a package passes on as its own, written ``X as X``."""
    nodes = [node for node in source.tree.body if isinstance(node, ast.ImportFrom)]
    return [alias.name for node in nodes for alias in node.names if alias.asname == alias.name]


def has_own_docstring(value: object) -> bool:
    """False for no docstring, an inherited one, and the one that dataclasses write by themselves."""
    text = vars(value).get("__doc__") if isinstance(value, type) else value.__doc__
    return bool(text) and not str(text).startswith(f"{getattr(value, '__name__', '')}(")


def test_every_public_name_is_documented():
    names = exports(Source("", (ROOT / "dynajax" / "__init__.py").read_text()))
    pages = "\n".join(path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))])
    assert len(names) > 1
    assert not [name for name in names if not has_own_docstring(getattr(dynajax, name))]
    assert not [name for name in names if not re.search(rf"\bdj\.{name}\b|`{name}\b", pages)], "say it in docs/"


def test_exports_and_docstrings_are_told_from_what_looks_like_them():
    @dataclass
    class Bare(dynajax.DynajaxError):
        x: int = 0

    assert exports(Source("", "from a import b as b, c as d, e\nimport f as f")) == ["b"]
    assert has_own_docstring(dynajax.Strategy)
    assert not has_own_docstring(Bare)
    assert not has_own_docstring(lambda: None)
