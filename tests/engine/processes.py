"""One of several processes that move states between their devices: ``python processes.py ADDRESS COUNT RANK CASES``.

Run by test_processes.py. Each has two devices. All processes run the same cases in the same order, and print a line of
JSON: for each case null, or the errors that it is about, which have to be alike everywhere. A case that fails ends the
process, and with it all others, whose collectives then fail.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import dynajax as dj
from dynajax.engine import Bundle, Stored, prepare_reshard
from dynajax.engine.compiled import programs_compiled
from dynajax.engine.xla import transport as xla
from dynajax.meshes import Tier, Topology
from dynajax.vps import bucket_parts

sys.path.insert(0, str(Path(__file__).parents[1]))
from engine.states import assert_same_bits, bytes_not_held, is_key, live_bytes
from started import join, raised

P = PartitionSpec
BUDGET = "64KB"
WAIT_S = 2
"""What ``absences`` is started with as the time-out of collectives."""


def on(numbers: Any, spec: Any, columns: int = 1) -> NamedSharding:
    """A sharding over some devices, counted through all processes."""
    mesh = Mesh(np.asarray(jax.devices())[list(numbers)].reshape(-1, columns), ("x", "y"))
    return NamedSharding(mesh, spec)


def put(values: Any, sharding: Any, absent: bool = False) -> Any:
    """The values on devices; with ``absent`` only what stands for them, where this process has none of the devices."""

    def one(x: Any, s: NamedSharding) -> Any:
        kind = getattr(x, "weak_type", False)
        if absent and not s.addressable_devices:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s, weak_type=kind)
        if is_key(x):
            words = np.asarray(jax.random.key_data(x))
            made = jax.make_array_from_callback(words.shape, s, lambda i: words[i], dtype=words.dtype)
            return jax.random.wrap_key_data(made, impl=jax.random.key_impl(x))
        whole = np.asarray(x)
        return jax.make_array_from_callback(x.shape, s, lambda i: whole[i], dtype=whole.dtype)

    if isinstance(sharding, NamedSharding):
        sharding = jax.tree.map(lambda _: sharding, values)
    return jax.block_until_ready(jax.tree.map(one, values, sharding))


def values(seed: int = 0) -> dict[str, Any]:
    """All kinds of leaves that rows and columns can be cut of; floats hold all kinds of bits, NaN payloads included."""
    rng = np.random.default_rng(seed)

    def bits(shape: tuple[int, ...], dtype: Any) -> Any:
        size = np.dtype(dtype).itemsize
        return rng.integers(0, 256, (*shape[:-1], shape[-1] * size), np.uint8).view(dtype)

    return {
        "w": bits((48, 24), np.float32),
        "half": bits((24, 12), np.float16),
        "brain": bits((48, 48), ml_dtypes.bfloat16),
        "eight": bits((24, 12), ml_dtypes.float8_e5m2),
        "byte": bits((24, 36), np.int8),
        "flag": rng.integers(0, 2, (24, 12)).astype(np.bool_),
        "four": rng.integers(-8, 8, (24, 12)).astype(ml_dtypes.int4),
        "pair": rng.standard_normal((12, 12)).astype(np.complex64),
        "keys": jax.random.split(jax.random.key(seed), (12, 12)),
        "step": np.int32(16777217),
    }


def by(sharding: Callable[[Any], NamedSharding], tree: Any) -> Any:
    """A sharding for each leaf, scalars whole."""
    return jax.tree.map(lambda x: sharding(P("x", "y")) if x.ndim else sharding(P()), tree)


LAYOUTS: dict[str, tuple[list[int], int]] = {
    "rows": ([0, 1, 2, 3, 4, 5], 1),
    "columns": ([0, 1, 2, 3, 4, 5], 6),
    "both, permuted": ([3, 0, 5, 2, 4, 1], 2),
    "two processes": ([0, 1, 2, 3], 1),
    "two processes, columns": ([0, 1, 2, 3], 4),
    "the last two": ([2, 3, 4, 5], 2),
    "the first": ([0, 1], 1),
    "the last": ([5, 4], 2),
    "one of each": ([0, 2, 4], 3),
}
MOVES = [
    ("rows", "columns"),
    ("columns", "both, permuted"),
    ("two processes", "columns"),
    ("both, permuted", "two processes, columns"),
    ("two processes", "the last two"),
    ("the first", "the last"),
    ("one of each", "the first"),
    ("the last", "rows"),
]


def layout(name: str, tree: Any) -> Any:
    numbers, columns = LAYOUTS[name]
    return by(lambda spec: on(numbers, spec, columns), tree)


def moves() -> None:
    """Every pair of layouts, with every way to give the source up: values, bytes, what is deleted, what is kept."""
    for k, (before, after) in enumerate(MOVES):
        want = values(k)
        tree = put(want, layout(before, want), absent=k % 2 == 0)
        target = layout(after, want)
        donate, commit = ((False, "staged"), (True, "staged"), (True, "safe"))[k % 3]
        moved, report = dj.reshard(
            tree, target, budget=BUDGET, donate=donate, commit=cast(Any, commit), check=bool(k % 2)
        )
        assert_same_bits(moved, want)
        assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding == s, moved, target)), (before, after)
        least = bytes_not_held(want, layout(before, want), target)
        assert report.bytes_moved == report.bytes_lower_bound == least, (before, after)
        assert report.path == "xla"
        if donate:
            assert all(x.is_deleted() for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)), (before, after)
        else:
            assert_same_bits({k: x for k, x in tree.items() if isinstance(x, jax.Array)}, _present(tree, want))


def _present(tree: Any, want: Any) -> Any:
    return {k: want[k] for k, x in tree.items() if isinstance(x, jax.Array)}


def kept_buffers_stay() -> None:
    want = {"a": np.arange(24.0, dtype=np.float32).reshape(12, 2)}
    tree = put(want, on(range(4), P()))
    pointers = {s.device: s.data.unsafe_buffer_pointer() for s in tree["a"].addressable_shards}
    moved, report = dj.reshard(tree, on(range(6), P()), donate=True)
    assert report.bytes_moved == 2 * 96
    now = {s.device: s.data.unsafe_buffer_pointer() for s in moved["a"].addressable_shards}
    assert {d: p for d, p in now.items() if d in pointers} == pointers
    assert_same_bits(moved, want)


def padding_and_weak_types() -> None:
    want = np.arange(40, dtype=np.int16).reshape(10, 4)
    stored = np.zeros((12, 4), np.int16)
    stored[:5], stored[6:11] = want[:5], want[5:]
    halves = Stored(on(range(6), P("x")), (12, 4), (10, 4), (((0, 0, 5), (6, 5, 5)), ((0, 0, 4),)))
    end = np.pad(want, [(0, 2), (0, 0)])
    ended = Stored(on(range(4), P("x")), (12, 4), (10, 4), (((0, 0, 10),), ((0, 0, 4),)))
    tree = put({"a": want}, on([1, 2], P("x")))
    moved, _ = dj.reshard(tree, {"a": halves})
    assert_same_bits(moved, {"a": stored})
    moved, _ = dj.reshard(moved, {"a": ended}, stored={"a": halves}, donate=True, check=True)
    assert_same_bits(moved, {"a": end})

    def weak(where: NamedSharding) -> jax.Array:
        return jax.jit(lambda: jax.numpy.asarray(1.5) * 2, out_shardings=where)()

    moved, _ = dj.reshard(weak(on(range(6), P())), on([3, 2], P()))
    assert moved.aval.weak_type
    assert_same_bits(moved, np.float32(3))


def sums() -> None:
    """Parts on devices of all processes are added in the order of the devices, and a sum is passed on inside nodes."""
    mesh = Mesh(np.asarray(jax.devices()).reshape(3, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    source = NamedSharding(mesh, P(None, "y", unreduced=frozenset({"x"})))
    for shape, dtype in (((48, 48), np.float32), ((12, 4), ml_dtypes.bfloat16), ((96, 48), np.float16)):
        parts = (np.random.default_rng(3).standard_normal((3, *shape)) * 9).astype(dtype)
        shards = [
            jax.device_put(np.split(parts[k // 2], 2, axis=1)[k % 2], d)
            for k, d in enumerate(jax.devices())
            if d.process_index == jax.process_index()
        ]
        array = jax.make_array_from_single_device_arrays(shape, source, shards)
        for target in (on(range(6), P("x")), on([1, 2], P())):
            moved, report = dj.reshard(array, target, budget=BUDGET, check=True)
            assert_same_bits(moved, (parts[0] + parts[1]) + parts[2])
            assert report.bytes_moved == report.bytes_lower_bound


def buckets() -> None:
    """Tensors into flat buckets that ignore their borders, on other processes, and back; small types and sums too."""
    for dtype in (np.float32, ml_dtypes.bfloat16):
        shapes = {"['a']": (12, 8), "['b']": (7,), "['c']": (5, 4, 3)}
        want = {
            p[2:-2]: (np.arange(np.prod(s)) + k).reshape(s).astype(dtype) for k, (p, s) in enumerate(shapes.items())
        }
        flat = np.zeros(180, dtype)
        flat[:163] = np.concatenate([x.ravel() for x in want.values()])
        parts, sizes = bucket_parts(shapes, [96, 84]), (96, 84)
        goal = [
            Bundle(on(numbers, P("x")), (n,), p)
            for numbers, n, p in zip([[1, 2, 0, 4], [5, 3]], sizes, parts, strict=True)
        ]
        plain = {"a": on([0, 1], P(None, "x")), "b": on([5, 0], P()), "c": on([2], P())}
        moved, report = dj.reshard(put(want, plain, absent=True), goal, donate=True, check=True)
        assert_same_bits(moved, [flat[:96], flat[96:]])
        assert report.bytes_moved == report.bytes_lower_bound
        back, _ = dj.reshard(moved, plain, stored=goal, donate=True, commit="safe")
        assert_same_bits(back, want)
    mesh = Mesh(np.asarray(jax.devices()).reshape(6, 1), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    whole = NamedSharding(mesh, P(unreduced=frozenset({"x"})))
    parts = (np.random.default_rng(5).standard_normal((6, 4, 9)) * 9).astype(np.float32)
    mine = [k for k, d in enumerate(jax.devices()) if d.process_index == jax.process_index()]
    shards = [jax.device_put(parts[k], jax.devices()[k]) for k in mine]
    array = jax.make_array_from_single_device_arrays((4, 9), whole, shards)
    flat = Bundle(on(range(4), P("x")), (40,), bucket_parts({"['g']": (4, 9)}, [40])[0])
    moved, _ = dj.reshard({"g": array}, [flat])
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    assert_same_bits(moved, [np.pad(total.ravel(), (0, 4))])


def repeated_arrays() -> None:
    want = np.arange(24, dtype=np.float32)
    one = put(want, on(range(4), P("x")), absent=True)
    moved, report = dj.reshard({"a": one, "b": one}, on(range(6), P("x")), donate=True)
    assert_same_bits(moved, {"a": want, "b": want})
    assert report.leaves == 2
    pointers = [x.addressable_shards[0].data.unsafe_buffer_pointer() for x in moved.values()]
    assert pointers[0] != pointers[1]


def nodes() -> None:
    """A plan for nodes of two devices: what a node needs comes to it once and is passed on inside."""
    tiers = [(Tier("memory", 4e9, 0), 1), (Tier("bus", 2e9, 0), 2), (Tier("net", 1e9, 0), 0)]
    ids = [d.id for d in jax.devices()]
    topology = Topology.regular("pairs", tiers, max(ids) + 1)
    want = np.arange(4096, dtype=np.float32).reshape(64, 64)
    tree = put(want, on([0, 1], P("x")))
    plan = dj.plan_reshard(tree, on(range(6), P()), budget="256KB", topology=topology)
    assert any(move.copies.relayed.any() for move in plan.moves)
    moved, _ = dj.reshard(tree, on(range(6), P()), plan=plan, check=True)
    assert_same_bits(moved, want)


def prepared_moves_compile_nothing() -> None:
    """All that a move needs is compiled when it is prepared, in every process for its own devices."""
    want = {"new": np.zeros((36, 6), np.float32)}
    tree, target = put(want, on([1, 0, 5], P("x"))), on([2, 0, 5], P("x"))
    plan = dj.plan_reshard(tree, target)
    prepare_reshard(tree, target, plan=plan)
    before = programs_compiled()
    _, report = dj.reshard(tree, target, plan=plan)
    assert report.compile_s == 0
    assert programs_compiled() == before


def peak_of_live_buffers() -> None:
    """What lives on this process's devices while the engine works, at its fullest moments."""
    want = {str(k): np.full((48, 48), k, np.float32) for k in range(40)}
    originals = {name: getattr(xla.XlaFilling, name) for name in ("fill", "_run")}
    for donate in (True, False):
        gc.collect()
        other = live_bytes()
        tree = put(want, on(range(4), P("x")))
        before, peaks = live_bytes(tree), dict[Any, int]()

        def watched(name: str, peaks: dict[Any, int] = peaks, other: dict[Any, int] = other) -> Any:
            def call(self: Any, *args: Any) -> Any:
                result = originals[name](self, *args)
                for device, n in live_bytes(collect=False).items():
                    peaks[device] = max(peaks.get(device, 0), n - other.get(device, 0))
                return result

            return call

        for name in originals:
            setattr(xla.XlaFilling, name, watched(name))
        moved, report = dj.reshard(tree, on(range(6), P(None, "x")), donate=donate, budget=BUDGET)
        for name, original in originals.items():
            setattr(xla.XlaFilling, name, original)
        assert_same_bits(moved, want)
        after, base = live_bytes(moved), max if donate else sum
        extra = max(peak - base([before.get(d, 0), after.get(d, 0)]) for d, peak in peaks.items())
        # A source that is kept, or is not here, is no part of what lies above the base.
        least = 1 if donate and any(before.values()) else 0
        assert least <= extra <= report.peak_extra_bytes <= 2**16, (donate, extra, report)
        assert report.stages > 1 or not donate


def random_switches() -> None:
    rng = np.random.default_rng(7)
    want = {"w": rng.standard_normal((24, 24)).astype(np.float32), "step": np.int32(3)}
    groups = [[0, 1, 2, 3, 4, 5], [1, 3, 4, 5]]

    def somewhere() -> Any:
        numbers = rng.permutation(groups[rng.integers(2)])
        columns = int(rng.choice([1, 2, len(numbers)]))
        return by(lambda spec: on(numbers, spec, columns), want)

    state = put(want, somewhere())
    for _ in range(20):
        target, donate = somewhere(), bool(rng.integers(2))
        state, _ = dj.reshard(state, target, donate=donate, budget=BUDGET)
        assert_same_bits(state, want)


def disagreements() -> list[str]:
    """What only one process does otherwise, or cannot do, is an error in all of them before anything moves."""
    rank = jax.process_index()
    want = {"a": np.arange(24, dtype=np.float32), "b": np.arange(12, dtype=np.int32)}
    source, target = on(range(4), P("x")), on(range(6), P("x"))
    tree = put(want, source)
    found = [raised(lambda: dj.reshard(tree, target, budget="64KB" if rank == 2 else "1MB"))]
    found.append(raised(lambda: dj.reshard(tree, target, donate=True, commit="safe" if rank == 1 else "staged")))
    turned = on([1, 0, 2, 3, 4, 5], P("x"))
    found.append(raised(lambda: dj.reshard(tree, target if rank else turned)))
    goal = {"a": target, "b": target}
    found.append(raised(lambda: dj.reshard(tree, goal if rank else {"a": target})))
    gone = tree | {"b": put(want["b"], source)}
    if rank == 1:
        gone["b"].delete()
    found.append(raised(lambda: dj.reshard(gone, target, donate=True)))
    stand_in = {"a": jax.ShapeDtypeStruct((24,), np.float32, sharding=source), "b": tree["b"]}
    found.append(raised(lambda: dj.reshard(stand_in if rank == 0 else tree, target)))
    found.append(raised(lambda: dj.reshard(tree, target, path="shared memory")))
    moved, _ = dj.reshard(tree, target)
    assert_same_bits(tree, want)
    assert_same_bits(moved, want)
    return found


def repeats() -> list[str]:
    """A move planned once is right every time, and what one process planned otherwise is an error in all."""
    rank, start, end = jax.process_index(), layout("two processes", values()), layout("the last", values())

    def stand_in(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    like = jax.tree.map(stand_in, values(), start)
    move = prepare_reshard(like, end)
    for seed in range(3):
        moved, report = move(put(values(seed), start, absent=True))
        assert_same_bits(moved, values(seed))
        assert report.bytes_moved == report.bytes_lower_bound == bytes_not_held(values(seed), start, end)
        assert report.compile_s == 0
    other = prepare_reshard(like, layout("rows", values()) if rank == 1 else end)
    return [raised(lambda: other(put(values(), start)))]


def changed_bytes() -> list[str]:
    """A byte that changes on its way to process 1 is found by all, and so are replicas that differ."""
    want = {"a": np.arange(96, dtype=np.float32), "b": np.arange(24, dtype=np.int32)}
    tree, target = put(want, on(range(4), P("x"))), on([5, 4, 3, 2, 1, 0], P("x"))
    finished = xla.XlaFilling._finished

    def damaged(self: Any, finish: Any) -> Any:
        shards = finished(self, finish)
        if jax.process_index() == 1:
            return {n: x + np.ones((), x.dtype) for n, x in shards.items()}
        return shards

    found = []
    xla.XlaFilling._finished = damaged
    for settings in ({"check": True}, {"donate": True, "commit": "safe"}):
        found.append(raised(lambda s=settings: dj.reshard(tree, target, **cast(Any, s))))
        assert_same_bits(tree, want)
    xla.XlaFilling._finished = finished
    moved, _ = dj.reshard(tree, target, donate=True, commit="safe")
    assert_same_bits(moved, want)
    unequal = jax.make_array_from_callback(
        (4,), on(range(6), P()), lambda _: np.full(4, jax.process_index() == 1, np.int8), dtype=np.int8
    )
    found.append(raised(lambda: dj.reshard(unequal, on(range(6), P(), 2), check=True)))
    return found


def absences() -> list[str]:
    """The last process does not come, and then dies: the others wait as long as they were told, or not at all."""
    absent = jax.process_index() == jax.process_count() - 1
    want = np.arange(12, dtype=np.int32)
    array, target = put(want, on(range(4), P("x"))), on(range(4), P(), 2)
    dj.reshard(array, target)
    if absent:
        time.sleep(2 * WAIT_S)
        os._exit(0)
    found = [raised(lambda: dj.reshard(array, target))]
    time.sleep(2 * WAIT_S)
    found.append(raised(lambda: dj.reshard(array, target)))
    assert_same_bits(array, want)
    print(json.dumps({"absences": found}), flush=True)
    os._exit(0)  # the end of a job without one of its processes would wait for it, and abort


CASES: list[Callable[[], list[str] | None]] = [
    moves, kept_buffers_stay, padding_and_weak_types, sums, buckets, repeated_arrays, nodes,
    prepared_moves_compile_nothing, peak_of_live_buffers, random_switches, disagreements, repeats, changed_bytes,
]  # fmt: skip


def main(address: str, count: str, rank: str, what: str) -> None:
    join(address, count, rank)
    cases = CASES if what == "moves" else [absences]
    print(json.dumps({case.__name__: case() for case in cases}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
