"""The memory bound, by counting distinct live buffers while the engine works."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from engine.states import P, live_bytes, mesh
from jax.sharding import Mesh, NamedSharding

import dynajax as dj
from dynajax.engine import execute, shared_memory
from dynajax.errors import BudgetError

LEAF_BYTES = 64 * 64 * 4


def _tree(sharding: NamedSharding, leaves: int = 12) -> list[jax.Array]:
    make = jax.jit(lambda k: jax.numpy.zeros((64, 64), np.float32) + k, out_shardings=sharding)
    return jax.block_until_ready([make(np.float32(k)) for k in range(leaves)])


def _line(numbers: Any, spec: Any) -> NamedSharding:
    return NamedSharding(Mesh(np.asarray(jax.devices())[numbers], ("x",)), spec)


MOVES = {
    "row to column": (_line(slice(0, 8), P("x")), _line(slice(0, 8), P(None, "x"))),
    "grow": (_line(slice(0, 4), P("x")), _line(slice(0, 8), P(None, "x"))),
    "shrink": (_line(slice(0, 8), P("x")), _line(slice(2, 6), P(None, "x"))),
    "disjoint": (_line(slice(0, 4), P("x")), _line(slice(8, 12), P("x"))),
    "replicate": (_line(slice(0, 8), P("x")), _line(slice(0, 8), P())),
    "cut replicas": (_line(slice(0, 8), P()), _line(slice(0, 8), P("x"))),
    "permuted": (_line(slice(0, 8), P("x")), _line([3, 0, 6, 1, 7, 5, 2, 4], P("x"))),
}


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("donate", [True, False])
def test_peak_of_live_buffers_is_what_was_planned(name: str, donate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = MOVES[name]
    other = live_bytes()
    tree = _tree(source)
    before = live_bytes(tree)
    plan = dj.plan_reshard(tree, target, budget=LEAF_BYTES, donate=donate)
    peaks: dict[Any, int] = {}
    run = shared_memory.SharedMemory.run

    def looked_at(self: Any, *args: Any) -> list[jax.Array]:
        arrays = run(self, *args)  # sources not yet given up, targets made: the fullest moment of a stage
        for device, n in live_bytes().items():
            peaks[device] = max(peaks.get(device, 0), n - other.get(device, 0))
        return arrays

    monkeypatch.setattr(shared_memory.SharedMemory, "run", looked_at)
    moved, report = dj.reshard(tree, target, plan=plan)
    after = live_bytes(moved)
    for device, peak in peaks.items():
        base = [before.get(device, 0), after.get(device, 0)]
        assert peak <= (max(base) if donate else sum(base)) + plan.budget
    if donate:
        worst = max(p - max(before.get(d, 0), after.get(d, 0)) for d, p in peaks.items())
        assert max(worst, 0) == report.peak_extra_bytes == plan.peak_extra_bytes
        assert len(plan.stages) > (name in ("row to column", "grow", "replicate", "permuted"))


def test_a_budget_too_small_is_refused_before_anything_moves_and_the_named_one_does() -> None:
    source, target = MOVES["row to column"]
    tree = _tree(source)
    with pytest.raises(BudgetError, match=r"\[\d+\] is freed only after.*smallest budget that does is 2048 bytes") as e:
        dj.reshard(tree, target, budget=2047, donate=True)
    assert "\n" not in str(e.value)
    assert all(np.array_equal(x, np.full((64, 64), k, np.float32)) for k, x in enumerate(tree))
    moved, report = dj.reshard(tree, target, budget="2K", donate=True)
    assert report.peak_extra_bytes == 2048
    assert report.stages == len(tree)
    assert all(np.array_equal(x, np.full((64, 64), k, np.float32)) for k, x in enumerate(moved))


def test_nothing_is_left_behind() -> None:
    source, target = MOVES["grow"]
    dj.reshard(_tree(source), target, donate=True)
    before = live_bytes()
    for donate in (True, False):
        dj.reshard(_tree(source), target, donate=donate)
    assert live_bytes() == before


@pytest.mark.parametrize("failing", [0, 7, 19])
def test_a_fault_in_the_middle_leaves_the_source_usable_and_nothing_else(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = MOVES["row to column"]
    tree = _tree(source, 20)
    before = live_bytes()
    assemble = execute.private.assemble
    for _ in range(20):
        calls = iter(range(100))

        def breaks(*args: Any, calls: Any = calls) -> jax.Array:
            if next(calls) == failing:
                raise OSError("injected")
            return assemble(*args)

        with monkeypatch.context() as patch:
            patch.setattr(execute.private, "assemble", breaks)
            with pytest.raises(OSError, match="injected"):
                dj.reshard(tree, target)
    assert live_bytes() == before
    assert all(np.array_equal(x, np.full((64, 64), k, np.float32)) for k, x in enumerate(tree))
    moved, _ = dj.reshard(tree, target)
    assert all(np.array_equal(x, np.full((64, 64), k, np.float32)) for k, x in enumerate(moved))


def test_many_leaves_share_their_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    on = NamedSharding(mesh("dp8"), P())
    tree = jax.device_put([np.full(16, k, np.float32) for k in range(300)], on)
    batches: list[int] = []
    copy = shared_memory._copy_batch
    monkeypatch.setattr(shared_memory, "_copy_batch", lambda b: (batches.append(len(b)), copy(b))[1])
    moved, _ = dj.reshard(tree, NamedSharding(mesh("sixteen"), P("fsdp")))
    assert len(batches) == 1
    assert all(np.array_equal(x, np.full(16, k, np.float32)) for k, x in enumerate(moved))
