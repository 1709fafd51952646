"""Parts that are summed as they arrive: in the element's dtype, in the order of their holders, split over no thread."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine.states import P
from jax.sharding import Mesh, NamedSharding

from dynajax.engine import Bundle, shared_memory
from dynajax.engine.places import Places, layouts
from dynajax.engine.regroup import read
from dynajax.engine.report import Stopwatch
from dynajax.engine.shared_memory import SharedMemory
from dynajax.errors import CheckError
from dynajax.meshes import Tier, Topology
from dynajax.planner import build_plan, verify
from dynajax.vps import Layout, Run

SHAPE = (12, 40)


def _on(numbers: Any, shape: tuple[int, ...], names: tuple[str, ...], spec: Any) -> NamedSharding:
    return NamedSharding(Mesh(np.asarray(jax.devices())[list(numbers)].reshape(shape), names), spec)


def _parts(sharding: NamedSharding, shape: tuple[int, ...], dtype: Any) -> tuple[jax.Array, dict[Any, np.ndarray]]:
    """An array whose replicas are unlike numbers, which are to be summed, and what each device has of the whole."""
    rng = np.random.default_rng(4)
    whole, shards = {}, []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        part = np.zeros(shape, dtype)
        part[index] = (rng.standard_normal(shape)[index] * 3).astype(dtype)
        whole[device] = part
        shards.append(jax.device_put(part[index], device))
    return jax.make_array_from_single_device_arrays(shape, sharding, shards), whole


def _summed(whole: dict[Any, np.ndarray], dtype: Any) -> np.ndarray:
    """One part after the other, by device, each sum rounded to the dtype."""
    total = np.zeros(SHAPE, dtype)
    for device in sorted(whole, key=lambda d: d.id):
        total = (total + whole[device]).astype(dtype)
    return total


def _moved(array: jax.Array, target: Any, topology: Any = None, check: bool = True) -> Any:
    leaves, _, _ = read({"w": array}, {"w": target})
    places = Places.of(end.stored.sharding for leaf in leaves for end in (*leaf.sources, *leaf.targets))
    source, goal = layouts(leaves, places)
    source = Layout(source.space, tuple(dataclasses.replace(t, partial=True) for t in source.tilings), source.arrays)
    topology = topology and Topology.regular("pairs", topology, len(places.places))
    plan = build_plan(source, goal, 0, donate=False, topology=topology)
    verify(plan)
    assert any(move.copies.added.any() for move in plan.moves)
    carrier = SharedMemory(places, Stopwatch())
    try:
        (stage,) = ([(plan.moves[k], leaves[k]) for k in stage] for stage in plan.stages)
        (made,) = carrier.fill(stage, share=False, check=check).values()
    finally:
        carrier.close()
    return made


SOURCES = {
    "replicas": _on(range(4), (4,), ("x",), P()),
    "replicas of rows": _on(range(8), (4, 2), ("x", "y"), P("y")),
}
TARGETS = {
    "columns": _on(range(8), (8,), ("x",), P(None, "x")),
    "one device": _on([9], (1,), ("x",), P()),
    "replicas elsewhere": _on([5, 6], (2,), ("x",), P()),
}


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, jnp.float8_e4m3fn, np.int8])
@pytest.mark.parametrize("before", SOURCES)
@pytest.mark.parametrize("after", TARGETS)
def test_parts_are_summed_in_order(dtype: Any, before: str, after: str) -> None:
    array, whole = _parts(SOURCES[before], SHAPE, dtype)
    moved, want = _moved(array, TARGETS[after]), _summed(whole, dtype)
    for shard in moved.addressable_shards:
        assert np.asarray(shard.data).tobytes() == want[shard.index].tobytes()
    assert all(np.asarray(s.data).tobytes() == whole[s.device][s.index].tobytes() for s in array.addressable_shards)


def test_parts_are_summed_into_arrays_that_store_more() -> None:
    """Into a flat bucket cut over five devices, in the middle of padding; sums are passed on inside nodes of two."""
    array, whole = _parts(SOURCES["replicas of rows"], SHAPE, jnp.bfloat16)
    flat = _on(range(5), (5,), ("x",), P("x"))
    moved = _moved(array, Bundle(flat, (500,), (Run("['w']", SHAPE, 0, 480, 10),)))
    want = np.zeros(500, jnp.bfloat16)
    want[10:490] = _summed(whole, jnp.bfloat16).ravel()
    assert np.asarray(moved).tobytes() == want.tobytes()
    tiers = [(Tier("memory", 1e9, 0), 1), (Tier("node", 1e9, 0), 2), (Tier("all", 1e8, 0), 0)]
    moved = _moved(array, TARGETS["replicas elsewhere"], topology=tiers)
    assert all(np.asarray(s.data).tobytes() == want[10:490].tobytes() for s in moved.addressable_shards)


def test_large_sums_are_cut_between_threads_and_stay_in_order() -> None:
    """Seven megabytes a part: more than one batch, and float32 sums that depend on their order."""
    shape = (1200, 1500)
    array, whole = _parts(SOURCES["replicas"], shape, np.float32)
    want = np.zeros(shape, np.float32)
    for device in sorted(whole, key=lambda d: d.id):
        want += whole[device]
    for _ in range(3):
        moved = _moved(array, TARGETS["one device"])
        assert np.asarray(moved).tobytes() == want.tobytes()


def test_a_wrong_sum_is_found_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    array, _ = _parts(SOURCES["replicas"], SHAPE, np.float32)
    copy = shared_memory._copy_batch
    first = lambda batch: [(number, [box for box in boxes if not box.added]) for number, boxes in batch]  # noqa: E731
    monkeypatch.setattr(shared_memory, "_copy_batch", lambda batch, buffers: copy(first(batch), buffers))
    with pytest.raises(CheckError, match=r"\['w'\]"):
        _moved(array, TARGETS["one device"])
