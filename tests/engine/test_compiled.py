"""A move that is planned once gives what ``reshard`` gives, every time, and refuses what it was not planned for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine.states import P, live_bytes, mesh
from jax.sharding import NamedSharding

import dynajax as dj
from dynajax.engine import Bundle, prepare_reshard
from dynajax.engine.compiled import programs_compiled
from dynajax.engine.transport import Path
from dynajax.errors import TargetError
from dynajax.vps import bucket_parts

SHAPES = {"['b']": (5,), "['deep']['w']": (4, 6), "['s']": (), "['w']": (256, 160)}
SIZES = [20_000, 21_004]


def _on(strategy: str, spec: Any) -> NamedSharding:
    return NamedSharding(mesh(strategy), spec)


def _buckets() -> list[Bundle]:
    parts = bucket_parts(SHAPES, SIZES)
    over = [_on("tp4 overlapping", P("tp")), _on("one device", P())]
    return [Bundle(s, (n,), p) for s, n, p in zip(over, SIZES, parts, strict=True)]


def _tensors(target: NamedSharding) -> dict[str, Any]:
    whole = NamedSharding(target.mesh, P())
    return {"b": whole, "deep": {"w": whole}, "s": whole, "w": target}


def _source(seed: int, dtype: Any) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    return [
        jax.device_put(rng.integers(0, 99, n).astype(dtype), b.sharding) for n, b in zip(SIZES, _buckets(), strict=True)
    ]


def _bits(tree: Any) -> list[tuple[int, bytes]]:
    shards = [s for x in jax.tree.leaves(tree) for s in x.addressable_shards]
    return [(s.device.id, np.asarray(s.data).tobytes()) for s in shards]


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("target", [_on("tp8 reversed", P(None, "tp")), _on("dp2.tp4", P("tp"))])
def test_every_call_gives_what_a_reshard_gives(dtype: Any, target: NamedSharding, path: Path) -> None:
    there = prepare_reshard(_source(0, dtype), _tensors(target), stored=_buckets(), path=path)
    back = None
    for seed in range(3):
        tree = _source(seed, dtype)
        moved, report = there(tree)
        want, planned = dj.reshard(tree, _tensors(target), stored=_buckets())
        assert _bits(moved) == _bits(want)
        assert jax.tree.structure(moved) == jax.tree.structure(want)
        assert jax.tree.map(lambda x: x.sharding, moved) == _tensors(target)
        assert (report.bytes_moved, report.bytes_by_tier) == (planned.bytes_moved, planned.bytes_by_tier)
        assert report.bytes_moved == report.bytes_lower_bound
        assert (report.path, report.compile_s) == (path, 0)
        assert report.peak_extra_bytes <= report.budget_bytes
        back = back or prepare_reshard(jax.tree.map(_like, moved), _buckets(), stored=_tensors(target), path=path)
        again, _ = back(moved)
        assert _bits(again) == _bits(dj.reshard(moved, _buckets(), stored=_tensors(target))[0])


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def test_calls_leave_the_source_and_each_other_alone() -> None:
    move = prepare_reshard(_source(0, np.float32), _tensors(_on("tp8", P("tp"))), stored=_buckets())
    move(_source(0, np.float32))
    before = live_bytes()
    one, two = _source(1, np.float32), _source(2, np.float32)
    (first, _), (second, _) = move(one), move(two)
    kept = _bits(first), _bits(one)
    step = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)
    jax.block_until_ready(step(second))
    assert (_bits(first), _bits(one)) == kept
    del one, two, first, second, _
    assert live_bytes() == before


def test_what_was_not_planned_for_is_refused() -> None:
    tree = _source(0, np.float32)
    move = prepare_reshard(tree, _tensors(_on("tp8", P("tp"))), stored=_buckets())
    gone = [jnp.copy(x) for x in tree]
    gone[1].delete()
    elsewhere = [tree[0], jax.device_put(tree[1], _on("tp8", P()))]
    cases = [
        ([tree[0], _like(tree[1])], r"\[1\]: .* ShapeDtypeStruct without data"),
        (gone, r"\[1\]: .* deleted"),
        (elsewhere, r"\[1\]: .* planned for"),
        (_source(0, jnp.bfloat16), r"\[0\]: .*bfloat16"),
        (tree[:1], "tree"),
    ]
    for wrong, message in cases:
        with pytest.raises(TargetError, match=message) as error:
            move(wrong)
        assert "\n" not in str(error.value)
    twice = prepare_reshard({"a": tree[0], "b": tree[0]}, {"a": tree[0].sharding, "b": tree[1].sharding})
    with pytest.raises(TargetError, match="planned for one array at several places"):
        twice({"a": tree[0], "b": jnp.copy(tree[0])})
    plan = dj.plan_reshard(tree, _tensors(_on("tp8", P("tp"))), stored=_buckets())
    with pytest.raises(TargetError, match="made for another state or other targets"):
        prepare_reshard(tree, _tensors(_on("dp2.tp4", P("tp"))), stored=_buckets(), plan=plan)


@pytest.mark.parametrize("commit", ["staged", "safe"])
def test_a_prepared_move_gives_up_what_it_was_planned_to(commit: Any, path: Path) -> None:
    goal = _tensors(_on("tp8", P("tp")))
    move = prepare_reshard(_source(0, np.float32), goal, stored=_buckets(), donate=True, commit=commit, path=path)
    before = programs_compiled()
    for seed in range(2):
        tree = _source(seed, np.float32)
        want = _bits(dj.reshard(tree, goal, stored=_buckets())[0])
        moved, report = move(tree, check=seed == 1, snapshot="there")
        assert _bits(moved) == want
        assert all(x.is_deleted() for x in tree)
        assert (report.commit, report.snapshot, report.compile_s) == (commit, "there", 0)
    assert programs_compiled() == before
    assert move.ownership.value == commit
