"""Pull parameters into unlike pipelines and push gradients back: links against what JAX offers, interleaved in one run.

    python benchmarks/links.py [--layers 4] [--rounds 7] [--json]

A case is one direction for all pipelines of a strategy, one pipeline after the other, each waited for. Ratios are to
the link in the same round: 2 means twice as long. Every method gets fresh source arrays each time, and its result is
compared with the link's once.

- link: what a step does. From and to the optimizer layout, flat over all devices; a push adds up over pipelines.
- device_put: from and to an even cut of one dim over all devices, since it cannot leave a flat array.
- all-gather: one program on all devices makes every tensor whole on each of them, then every pipeline cuts its
  parts. To push, each pipeline makes its gradients whole, and one program on all devices sums them into the flat cut.
- floor: two threads copy, contiguously and into fresh pages, as many bytes as the planner's lower bound.

``bytes`` are over all devices: what the link moves, and what devices must be sent to hold what the all-gather makes.
The model is chosen so that 8 and 20 devices divide its dims, which device_put needs and links do not.
"""

from __future__ import annotations

import os

os.environ.setdefault("NPROC", "64")

import argparse
import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from figures import Row, machine, row, show
from floor import copy_seconds
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from peak import in_child, resident_above

from dynajax.bytesize import format_bytes
from dynajax.meshes import Placement, Strategy
from dynajax.models import LlamaConfig, init
from dynajax.runtime import ShardedModel
from dynajax.runtime.gradients import join_sections
from dynajax.runtime.links import Link
from dynajax.runtime.optimizer_layout import AXIS, STACK, add_section, flat_mesh, flatten, optimizer_layout
from dynajax.runtime.sections import Section, sections_of
from dynajax.train.candidates import Candidates

STRATEGIES = ("tp4|pp2.tp2", "tp8|pp2.tp4|tp4")
WAYS = ("pull float32", "pull bfloat16", "push")
Tree = Any


@dataclass(frozen=True)
class Setting:
    """A strategy on the first devices, one way, and all that methods compile for it."""

    text: str
    way: str
    model: LlamaConfig

    @property
    def name(self) -> str:
        return f"{self.text} {self.way}"

    @property
    def dtype(self) -> Any:
        return jnp.bfloat16 if "bfloat16" in self.way else jnp.float32

    @cached_property
    def devices(self) -> list[jax.Device]:
        return jax.devices()[: Strategy.parse(self.text).num_devices]

    @cached_property
    def mesh(self) -> Mesh:
        """All devices in a row."""
        return flat_mesh(self.devices)

    @cached_property
    def flat(self) -> Tree:
        """Shardings of the optimizer layout."""
        return jax.tree.map(lambda bundle: bundle.sharding, optimizer_layout(self.shapes, self.mesh))

    @cached_property
    def whole(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @cached_property
    def shapes(self) -> Tree:
        return jax.eval_shape(lambda: init(self.model, jax.random.key(0)))

    @cached_property
    def even(self) -> Tree:
        """Each tensor cut over all devices along the first dim that they divide."""
        count = len(self.devices)

        def cut(x: Any) -> NamedSharding:
            dim = next(d for d, size in enumerate(x.shape) if size % count == 0)
            return NamedSharding(self.mesh, PartitionSpec(*(None,) * dim, AXIS))

        return jax.tree.map(cut, self.shapes)

    @cached_property
    def pipelines(self) -> list[tuple[Mesh, ShardedModel]]:
        """Mesh and model of each pipeline; nothing is padded or in another order."""
        found = []
        for placed in Candidates.one(Placement.parse(self.text)).pipelines(0):
            run = ShardedModel(self.model, placed.strategy)
            assert all(s.is_identity for s in jax.tree.leaves(run.storage)), "device_put would move other tensors"
            found.append((placed.mesh(jax.devices()), run))
        return found

    @cached_property
    def links(self) -> list[list[tuple[Section, Link]]]:
        """Of each pipeline the sections of its model and their links."""
        return [
            [(s, Link.of(s, self.model.layers, self.mesh, mesh, self.dtype)) for s in sections_of(run)]
            for mesh, run in self.pipelines
        ]

    def target(self, pipeline: int) -> Tree:
        """Shardings of a pipeline's parameters."""
        mesh, run = self.pipelines[pipeline]
        return jax.tree.map(lambda s: s.on(mesh).sharding, run.storage)

    @cached_property
    def flatten(self) -> Callable[[Tree], Tree]:
        return jax.jit(lambda t: flatten(t, len(self.devices)), out_shardings=self.flat)

    @cached_property
    def unflatten(self) -> Callable[[Tree], Tree]:
        def tensors(flat: Tree) -> Tree:
            return unflat(jax.lax.with_sharding_constraint(flat, self.whole), self.shapes)

        return jax.jit(tensors, out_shardings=self.whole)

    @cached_property
    def add(self) -> Callable[[Tree, Tree], Tree]:
        return jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)

    @cached_property
    def add_sections(self) -> dict[Any, Callable[[Tree, Tree], Tree]]:
        """By the layers of a section: its flat gradients added to those of the whole model."""
        spans = {section.span for links in self.links for section, _ in links}
        return {s: jax.jit(partial(add_section, s), out_shardings=self.flat, donate_argnums=0) for s in spans}

    @cached_property
    def zeros(self) -> Callable[[], Tree]:
        shapes = jax.eval_shape(lambda t: flatten(t, len(self.devices)), self.shapes)
        return jax.jit(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape), shapes), out_shardings=self.flat)

    @cached_property
    def cuts(self) -> list[Callable[[Tree], Tree]]:
        """For each pipeline: its parts of whole tensors, without a word between devices."""
        return [jax.jit(lambda t: t, out_shardings=self.target(n)) for n in range(len(self.pipelines))]

    @cached_property
    def gathers(self) -> list[Callable[[Tree], Tree]]:
        """For each pipeline: its gradients whole and flat on each of its devices, in a row of their own."""
        count = len(self.devices)

        def gather(mesh: Mesh) -> Callable[[Tree], Tree]:
            return jax.jit(lambda t: jax.tree.map(lambda x: x[None], flatten(t, count)), out_shardings=_on(mesh))

        return [gather(mesh) for mesh, _ in self.pipelines]

    @cached_property
    def reduce(self) -> Callable[[Tree, jax.Array], Tree]:
        """Rows of all devices summed into the flat cut; ``counts`` is 1 for one device of each pipeline, else 0."""
        return jax.jit(
            lambda rows, counts: jax.tree.map(lambda x: jnp.tensordot(counts, x, (0, 0)), rows), out_shardings=self.flat
        )

    @cached_property
    def counts(self) -> jax.Array:
        firsts = {mesh.devices.flat[0] for mesh, _ in self.pipelines}
        ones = np.array([d in firsts for d in self.devices], np.float32)
        return jax.device_put(ones, NamedSharding(self.mesh, PartitionSpec(AXIS)))


@dataclass(frozen=True)
class Method:
    """One way to pull and push; sources are made by ``make`` and not timed."""

    name: str
    make: Callable[[Setting], Any]
    run: Callable[[Setting, Any], list[Tree]]


def unflat(tree: Tree, shapes: Tree) -> Tree:
    """Tensors of their flat arrays, or of tensors."""

    def tensor(path: Any, x: Any, like: Any) -> Any:
        if x.shape == like.shape:
            return x
        rows = like.shape[:1] if STACK in path else ()
        return x.reshape(*rows, -1)[..., : math.prod(like.shape[len(rows) :])].reshape(like.shape)

    return jax.tree_util.tree_map_with_path(tensor, tree, shapes)


def _on(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def tensors(case: Setting, seed: int, shardings: Any, dtype: Any = jnp.float32) -> Tree:
    """Whole numbers of few digits, so that sums and bfloat16 are exact."""

    def make() -> Tree:
        keys = jax.tree.unflatten(jax.tree.structure(case.shapes), range(len(jax.tree.leaves(case.shapes))))
        return jax.tree.map(
            lambda x, k: ((jnp.arange(x.size) * (k + 3) + seed) % 61).astype(dtype).reshape(x.shape), case.shapes, keys
        )

    return jax.block_until_ready(jax.jit(make, out_shardings=shardings)())


def gradients(case: Setting) -> list[Tree]:
    """What each pipeline has to push."""
    return [tensors(case, n, case.target(n)) for n in range(len(case.pipelines))]


def flat_source(case: Setting) -> Any:
    if case.way == "push":
        return gradients(case)
    return jax.block_until_ready(case.flatten(tensors(case, 0, case.whole, case.dtype)))


def link_source(case: Setting) -> Any:
    """As ``flat_source``, with the gradients of each pipeline by section."""
    source = flat_source(case)
    if case.way != "push":
        return source
    pairs = zip(case.links, source, strict=True)
    return jax.block_until_ready([[section_of(s, grads) for s, _ in links] for links, grads in pairs])


def section_of(section: Section, tree: Tree) -> Tree:
    """What a section owns of a tree of the whole model."""
    rows = slice(*section.span)
    return {n: jax.tree.map(lambda x: x[rows], tree[n]) if n == STACK.key else tree[n] for n in section.owns}


def by_links(case: Setting, source: Any) -> list[Tree]:
    """A tree for each pipeline, with the stack by section; or one tree of sums."""
    if case.way != "push":
        return [
            join_sections([jax.block_until_ready(link.pull(source)[0]) for _, link in links]) for links in case.links
        ]
    total = case.zeros()
    for links, grads in zip(case.links, source, strict=True):
        for (section, link), part in zip(links, grads, strict=True):
            total = case.add_sections[section.span](total, link.push(part)[0])
    return [jax.block_until_ready(total)]


def even_source(case: Setting) -> Any:
    return gradients(case) if case.way == "push" else tensors(case, 0, case.even, case.dtype)


def by_device_put(case: Setting, source: Any) -> list[Tree]:
    def put(tree: Tree, shardings: Tree) -> Tree:
        # Leaf by leaf and waited for: many collective programs in flight on emulated devices can hang.
        return jax.tree.map(lambda x, s: jax.block_until_ready(jax.device_put(x, s)), tree, shardings)

    if case.way != "push":
        return [put(source, case.target(n)) for n in range(len(case.pipelines))]
    return [_summed(case, (put(grads, case.even) for grads in source))]


def by_all_gather(case: Setting, source: Any) -> list[Tree]:
    if case.way != "push":
        whole = jax.block_until_ready(case.unflatten(source))
        parts = [_shards_of(whole, mesh) for mesh, _ in case.pipelines]
        return [jax.block_until_ready(cut(part)) for cut, part in zip(case.cuts, parts, strict=True)]
    rows = [jax.block_until_ready(gather(grads)) for gather, grads in zip(case.gathers, source, strict=True)]
    stacked = NamedSharding(case.mesh, PartitionSpec(AXIS))

    def stack(*of_pipelines: jax.Array) -> jax.Array:
        held = {s.device: s.data for x in of_pipelines for s in x.addressable_shards}
        shape = len(case.devices), *of_pipelines[0].shape[1:]
        return jax.make_array_from_single_device_arrays(shape, stacked, [held[d] for d in case.devices])

    return [jax.block_until_ready(case.reduce(jax.tree.map(stack, *rows), case.counts))]


def _shards_of(whole: Tree, mesh: Mesh) -> Tree:
    """Tensors that are whole on all devices, as arrays on those of ``mesh``: nothing is copied."""

    def part(x: jax.Array) -> jax.Array:
        held = {s.device: s.data for s in x.addressable_shards}
        return jax.make_array_from_single_device_arrays(x.shape, _on(mesh), [held[d] for d in mesh.devices.flat])

    return jax.tree.map(part, whole)


def _summed(case: Setting, trees: Any) -> Tree:
    total: Any = None
    for tree in trees:
        total = tree if total is None else case.add(total, tree)
    return jax.block_until_ready(total)


def by_floor(case: Setting, source: Any) -> list[Tree]:
    first = source[0] if case.way == "push" else source
    shards = [np.asarray(s.data).reshape(-1).view(np.uint8) for x in _leaves(first) for s in x.addressable_shards]
    copy_seconds([shards, shards[::-1]], bytes_of(case)["bound"] // 2)
    return []


def _leaves(tree: Tree) -> list[jax.Array]:
    return jax.tree.leaves(tree)


LINK = Method("link", link_source, by_links)
FLOOR = Method("floor", flat_source, by_floor)
METHODS = [LINK, Method("device_put", even_source, by_device_put), Method("all-gather", flat_source, by_all_gather)]


def bytes_of(case: Setting) -> dict[str, int]:
    """Bytes over all devices that a case moves."""
    links = [link for sections in case.links for _, link in sections]
    plans = [(link.pushes if case.way == "push" else link.pulls).plan for link in links]
    count, sizes = len(case.devices), [x.size for x in jax.tree.leaves(case.shapes)]
    whole = sum(-(-size // count) * count for size in sizes) * jnp.dtype(case.dtype).itemsize
    return {
        "link": sum(plan.bytes_moved for plan in plans),
        "bound": sum(plan.bytes_lower_bound for plan in plans),
        "all-gather": whole * (count - 1),
    }


def require_same(case: Setting, method: Method) -> None:
    """Compare what a method made with what the link made, element by element."""

    def logical(tree: Tree) -> Tree:
        tree = jax.tree.map(np.asarray, tree)
        if isinstance(tree[STACK.key], list):
            tree |= {STACK.key: jax.tree.map(lambda *parts: np.concatenate(parts), *tree[STACK.key])}
        return unflat(tree, case.shapes)

    ours, theirs = (m.run(case, m.make(case)) for m in (LINK, method))
    for a, b in zip(ours, theirs, strict=True):
        jax.tree.map(np.testing.assert_array_equal, logical(a), logical(b))


def seconds_of(case: Setting, method: Method) -> float:
    source = method.make(case)
    start = perf_counter()
    moved = method.run(case, source)
    seconds = perf_counter() - start
    del moved
    return seconds


def run_case(case: Setting, args: argparse.Namespace) -> list[Row]:
    methods = [*METHODS, FLOOR]
    for method in METHODS:
        require_same(case, method)  # compiles, too
    seconds: dict[str, list[float]] = {m.name: [] for m in methods}
    for _ in range(args.rounds):
        for method in methods:
            seconds[method.name].append(seconds_of(case, method))
    rows = []
    for method in methods:
        taken = seconds[method.name]
        ratios = [mine / link for mine, link in zip(taken, seconds["link"], strict=True)]
        arguments = [__file__, "--peak-of", method.name, "--cases", case.name, "--layers", str(args.layers)]
        peak = in_child(arguments) if method in METHODS else None
        rows.append(row(case.name, method.name, ratios, taken, peak, bytes=bytes_of(case)))
    return rows


def peak_extra(case: Setting, method: Method) -> int:
    method.run(case, method.make(case))  # compiles
    source = [method.make(case)]
    return resident_above(lambda: method.run(case, source[0]), source.clear)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="of the model; each has 5.3 MB of float32 parameters")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cases", nargs="*", help="names of the cases to run; default all")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as compiled:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", compiled)  # the processes that take peaks compile nothing
        jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        run(args)


def run(args: argparse.Namespace) -> None:
    jax.config.update("jax_num_cpu_devices", max(Strategy.parse(s).num_devices for s in STRATEGIES))
    sizes = {"layers": args.layers, "hidden": 320, "ffn": 960, "heads": 40, "kv_heads": 40, "head_dim": 8, "vocab": 320}
    rows: list[Row] = []
    for case in (Setting(text, way, LlamaConfig(**sizes)) for text in STRATEGIES for way in WAYS):
        if args.cases and case.name not in args.cases:
            continue
        if args.peak_of:
            print(json.dumps(peak_extra(case, next(m for m in METHODS if m.name == args.peak_of))))
            return
        made = run_case(case, args)
        rows += made
        if not args.json:
            show(made, "the link")
            print("  bytes: " + ", ".join(f"{name} {format_bytes(n)}" for name, n in bytes_of(case).items()))
    if args.json:
        print(json.dumps({"machine": machine(), "cases": rows}))


if __name__ == "__main__":
    main()
