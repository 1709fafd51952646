"""Reshard live state: dynajax against what a JAX user has today, interleaved in one run.

    python benchmarks/reshard.py [--megabytes 256] [--leaf-megabytes 8] [--rounds 5] [--json]

Times are ratios to the fresh-page floor: two threads that copy, contiguously and into fresh pages, just the bytes that
have to change devices. "copy, warm" copies them into pages that were written before, which a move that has to allocate
does not have. Orbax saves to a folder among the system's temporary files, waits, and restores to the new shardings.
Every method gets fresh source arrays each time (a host copy cached by one would flatter the next), prepares on shapes
before these are made, and is done when the source is let go. The order of the methods changes from round to round,
since what one has freed is memory for the next. Peaks are taken untimed in processes of their own, which give freed
memory back to the system at once: resident bytes of the whole process above the larger of before and after, so that
host copies count too. dynajax is given a budget of 8 MB on each of the 8 devices.
"""

from __future__ import annotations

import os

os.environ.setdefault("NPROC", "64")

import argparse
import functools
import gc
import json
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path as File
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from figures import machine, row, show
from floor import copy_seconds
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from peak import in_child, resident_above

import dynajax as dj
from dynajax.engine import prepare_reshard
from dynajax.engine.transport import PATHS, Path

P = PartitionSpec
Tree = list[jax.Array]
BUDGET = "8MB"
WARM = "copy, warm"


@dataclass(frozen=True)
class Case:
    """One move: a name, and the sharding before and after."""

    name: str
    source: NamedSharding
    target: NamedSharding


@dataclass(frozen=True)
class Method:
    """One way to move; ``prepare`` runs untimed on shapes (what a prepared switch has ready), ``run`` is timed."""

    name: str
    run: Callable[[Tree, Case, Any], Tree]
    prepare: Callable[[list[Any], Case], Any] = lambda shapes, case: None
    applies: Callable[[Case], bool] = lambda case: True


def cases() -> list[Case]:
    d = jax.devices()

    def line(devices: Sequence[Any], spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(Mesh(np.asarray(devices), ("x",)), spec)

    def strategy(text: str, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(dj.Strategy.parse(text).mesh(d), spec)

    rows, cols = P("x"), P(None, "x")
    return [
        Case("row->column", line(d, rows), line(d, cols)),
        Case("dp2.tp4->tp8", strategy("dp2.tp4", P(None, "tp")), strategy("tp8", P(None, "tp"))),
        Case("tp8->dp2.tp4", strategy("tp8", P(None, "tp")), strategy("dp2.tp4", P(None, "tp"))),
        Case("permuted", line(d, rows), line([d[i] for i in (3, 0, 6, 1, 7, 5, 2, 4)], rows)),
        Case("4->8", line(d[:4], rows), line(d, rows)),
        Case("8->4", line(d, rows), line(d[:4], rows)),
        Case("disjoint", line(d[:4], rows), line(d[4:], rows)),
        Case("disjoint row->column", line(d[:4], rows), line(d[4:], cols)),
    ]


def _dynajax(path: Path) -> Method:
    def prepare(shapes: list[Any], case: Case) -> Any:
        return prepare_reshard(shapes, case.target, budget=BUDGET, donate=True, path=path)

    def run(tree: Tree, case: Case, move: Any) -> Tree:
        return move(tree)[0]

    return Method("dynajax" if path == "shared memory" else f"dynajax, {path}", run, prepare)


def _device_put(tree: Tree, case: Case, _: Any) -> Tree:
    # Leaf by leaf and waited for: a whole tree on a permuted order puts many collective programs in flight and hangs.
    return [jax.block_until_ready(jax.device_put(x, case.target)) for x in tree]


def _same_devices(case: Case) -> bool:
    return list(case.source.mesh.devices.flat) == list(case.target.mesh.devices.flat)  # pyright: ignore


def _compiled_identity(shapes: list[Any], case: Case) -> Any:
    identity = jax.jit(lambda t: [jnp.copy(x) for x in t], out_shardings=case.target, donate_argnums=0)
    start = time.perf_counter()
    compiled = identity.lower(shapes).compile()
    _COMPILE_SECONDS.append(time.perf_counter() - start)
    return compiled


_COMPILE_SECONDS: list[float] = []


def _identity(tree: Tree, case: Case, compiled: Any) -> Tree:
    return compiled(tree)


def _host(tree: Tree, case: Case, _: Any) -> Tree:
    return [jax.block_until_ready(jax.device_put(np.asarray(x), case.target)) for x in tree]


def _orbax(tree: Tree, case: Case, folder: File) -> Tree:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", tree)
        checkpointer.wait_until_finished()
        wanted = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=case.target) for x in tree]
        return checkpointer.restore(folder / "state", wanted)


METHODS = [
    *map(_dynajax, PATHS),
    Method("device_put", _device_put),
    Method("jit identity", _identity, _compiled_identity, _same_devices),
    Method("host round trip", _host),
    Method("orbax", _orbax, lambda tree, case: File(tempfile.mkdtemp(prefix="dynajax-bench-"))),
]


def _shapes(case: Case, leaves: int, rows: int, columns: int) -> list[Any]:
    return [jax.ShapeDtypeStruct((rows, columns), jnp.float32, sharding=case.source) for _ in range(leaves)]


def make_tree(case: Case, leaves: int, rows: int, columns: int) -> Tree:
    make = _maker(case.source, rows, columns)
    return jax.block_until_ready([make(jnp.float32(k)) for k in range(leaves)])


@functools.cache
def _maker(sharding: NamedSharding, rows: int, columns: int) -> Any:
    def numbers(k: jax.Array) -> jax.Array:
        return jnp.arange(rows * columns, dtype=jnp.float32).reshape(rows, columns) + k

    return jax.jit(numbers, out_shardings=sharding)


def floor_seconds(tree: Tree, case: Case, warm: bool = False) -> float:
    """Two threads copy, from the real source buffers into fresh or warm pages, as many bytes as must change devices."""
    plan = dj.plan_reshard(tree, case.target, budget="1TB")
    sources = [[np.asarray(s.data).reshape(-1).view(np.uint8) for s in x.addressable_shards] for x in tree]
    return copy_seconds(sources, plan.bytes_moved // len(tree), warm)


def peak_extra(method: Method, case: Case, size: tuple[int, int, int]) -> int:
    """Resident bytes above the larger of before and after, at the fullest moment of the method."""
    prepared = method.prepare(_shapes(case, *size), case)
    tree = make_tree(case, *size)
    peak = resident_above(lambda: jax.block_until_ready(method.run(tree, case, prepared)), tree.clear)
    _clean(prepared)
    return peak


def peak_in_child(method: Method, case: Case, args: argparse.Namespace) -> int:
    """``peak_extra`` in a process of its own."""
    size = ["--megabytes", str(args.megabytes), "--leaf-megabytes", str(args.leaf_megabytes)]
    return in_child([__file__, "--peak-of", method.name, "--cases", case.name, *size])


def _clean(prepared: Any) -> None:
    if isinstance(prepared, File):
        shutil.rmtree(prepared, ignore_errors=True)


def timed(method: Method, case: Case, size: tuple[int, int, int]) -> float:
    prepared = method.prepare(_shapes(case, *size), case)
    gc.collect()
    tree = make_tree(case, *size)
    start = time.perf_counter()
    moved = jax.block_until_ready(method.run(tree, case, prepared))
    tree.clear()
    seconds = time.perf_counter() - start
    _clean(prepared)
    del moved
    return seconds


def run_case(case: Case, size: tuple[int, int, int], args: argparse.Namespace) -> list[dict[str, Any]]:
    methods = [m for m in METHODS if m.applies(case)]
    timers: dict[str, Callable[[], float]] = {m.name: functools.partial(timed, m, case, size) for m in methods}
    timers[WARM] = lambda: floor_seconds(make_tree(case, *size), case, warm=True)
    seconds: dict[str, list[float]] = {name: [] for name in timers}
    ratios: dict[str, list[float]] = {name: [] for name in timers}
    shuffled = random.Random(0)
    for _ in range(args.rounds):
        for name in shuffled.sample(list(timers), len(timers)):
            # The floor is taken beside every method, since the machine's speed drifts within a round.
            around = [floor_seconds(make_tree(case, *size), case)]
            seconds[name].append(timers[name]())
            around.append(floor_seconds(make_tree(case, *size), case))
            ratios[name].append(seconds[name][-1] / statistics.mean(around))
    peaks = {m.name: peak_in_child(m, case, args) for m in methods}
    return [row(case.name, name, ratios[name], seconds[name], peaks.get(name)) for name in timers]


def compare(rows: list[dict[str, Any]]) -> str:
    """Medians of one case set against each other: what copying alone leaves to gain over Orbax, and what is gained."""
    median = {r["method"]: r["ratio"]["median"] for r in rows}
    orbax = median["orbax"]
    return (
        f"  dynajax is {median['device_put'] / median['dynajax']:.2f} times as fast as device_put, and "
        f"{orbax / median['dynajax']:.1f} times as fast as Orbax; a mere copy of the bytes would be {orbax:.1f} times "
        f"as fast as Orbax into fresh pages, {orbax / median[WARM]:.1f} times into warm ones"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256, help="size of the state")
    parser.add_argument("--leaf-megabytes", type=int, default=8, help="size of each of its float32 leaves")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="*", help="names of the cases to run; default all")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "Some donated buffers")
    jax.config.update("jax_num_cpu_devices", 8)
    columns = 2048
    size = (args.megabytes // args.leaf_megabytes, args.leaf_megabytes * 2**20 // (4 * columns), columns)
    rows: list[dict[str, Any]] = []
    for case in cases():
        if args.cases and case.name not in args.cases:
            continue
        if args.peak_of:
            method = next(m for m in METHODS if m.name == args.peak_of)
            print(json.dumps(peak_extra(method, case, size)))
            return
        made = run_case(case, size, args)
        rows += made
        if not args.json:
            show(made, "floor")
            print(compare(made), flush=True)
    if args.json:
        print(json.dumps({"machine": machine(), "cases": rows}))
    elif _COMPILE_SECONDS:
        print(f"jit identity compiles, not in its times: median {statistics.median(_COMPILE_SECONDS):.2f} s a tree")


if __name__ == "__main__":
    main()
