"""Large target shards lie in memory of XLA: donated in place by the next step, and compiled for ahead of the move."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine.states import P, assert_same_bits, mesh
from jax.sharding import NamedSharding

import dynajax as dj
from dynajax.engine import prepare_reshard
from dynajax.engine.shared_memory import transport as shared_memory
from dynajax.engine.shared_memory import uninitialised
from dynajax.engine.transport import Path
from dynajax.engine.xla import programs

SIDE = 512


def _host() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, (9, SIDE, SIDE), dtype=np.uint32)
    leaves: dict[str, Any] = {f"f32 {k}": w.view(np.float32) for k, w in enumerate(words[:7])}
    half = words[8].view(np.uint16).reshape(SIDE, 2 * SIDE).view(jnp.bfloat16)
    return leaves | {
        "i32": words[7].view(np.int32),
        "bf16": half,
        "vector": np.arange(SIDE, dtype=np.int32),
        "step": np.int32(5),
    }


def _on(name: str) -> dict[str, NamedSharding]:
    return {k: NamedSharding(mesh(name), P("fsdp", "tp") if np.ndim(v) == 2 else P()) for k, v in _host().items()}


@pytest.fixture
def compiles() -> Any:
    seen: list[str] = []
    listener = lambda event, *_, **__: seen.append(event) if "backend_compile" in event else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listener)


@pytest.mark.parametrize("target", ["tp8", "dp2.tp4", "tp4 overlapping", "sixteen", "dp2.fsdp2.tp2 shifted"])
def test_the_next_step_donates_in_place(target: str, path: Path) -> None:
    source = {k: jax.block_until_ready(jax.device_put(v, _on("fsdp8")[k])) for k, v in _host().items()}
    moved, report = dj.reshard(source, _on(target), donate=True, check=True, path=path)
    assert_same_bits(moved, _host())
    assert report.bytes_moved == report.bytes_lower_bound

    def pointers(tree: Any) -> dict[int, int]:
        shards = [s.data for x in jax.tree.leaves(tree) for s in x.addressable_shards]
        return {s.unsafe_buffer_pointer(): s.nbytes for s in shards}

    before = pointers(moved)
    stepped = jax.block_until_ready(jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)(moved))
    reused = sum(n for p, n in pointers(stepped).items() if p in before)
    assert reused >= 0.95 * sum(before.values())


def test_a_prepared_move_compiles_nothing(compiles: list[str], path: Path) -> None:
    uninitialised.allocator.cache_clear()
    for slots in (programs._on, programs._anywhere):
        slots.cache_clear()
    source = {k: jax.block_until_ready(jax.device_put(v, _on("tp8")[k])) for k, v in _host().items()}
    shapes = {k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for k, x in source.items()}
    budget = {"shared memory": "300KB", "xla": "600KB"}[path]
    plan = dj.plan_reshard(shapes, _on("fsdp8"), donate=True, budget=budget, path=path)
    compiles.clear()
    prepare_reshard(shapes, _on("fsdp8"), plan=plan, path=path)
    assert compiles
    compiles.clear()
    moved, report = dj.reshard(source, _on("fsdp8"), plan=plan, path=path)
    assert not compiles
    assert report.compile_s == 0
    assert report.stages > 1
    assert_same_bits(moved, _host())


def test_shards_that_move_whole_are_copied_by_jax_into_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    copy = shared_memory._copy_batch
    monkeypatch.setattr(
        shared_memory,
        "_copy_batch",
        lambda b, buffers: (copied.extend(box.nbytes for _, boxes in b for box in boxes), copy(b, buffers))[1],
    )
    source = {k: jax.block_until_ready(jax.device_put(v, _on("tp8")[k])) for k, v in _host().items()}
    pointers = {s.data.unsafe_buffer_pointer() for x in source.values() for s in x.addressable_shards}
    moved, report = dj.reshard(source, _on("tp8 reversed"), check=True)
    assert_same_bits(moved, _host())
    assert report.bytes_moved == report.bytes_lower_bound > 100 * sum(copied)
    large = [s.data for x in moved.values() for s in x.addressable_shards if s.data.nbytes >= 2**15]
    assert large
    assert not pointers & {s.unsafe_buffer_pointer() for s in large}


@pytest.mark.parametrize("count", [1, 5])
def test_every_array_has_memory_of_its_own_on_each_device(count: int) -> None:
    devices = [jax.devices()[k] for k in (5, 0, 3)]
    made = uninitialised.allocate(devices, (64, 128), np.dtype(np.float32), count)
    assert [[shard.device for shard in shards] for shards in made] == [devices] * count
    starts = sorted(shard.unsafe_buffer_pointer() for shards in made for shard in shards)
    assert len(starts) == 3 * count
    assert min(np.diff(starts), default=0) >= 64 * 128 * 4
