"""The memory bound, by counting distinct live buffers while the engine works."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import threading
from typing import Any

import jax
import numpy as np
import pytest
from engine.states import P, live_bytes, mesh
from jax.sharding import Mesh, NamedSharding

import dynajax as dj
from dynajax.arrays import _jax_private as private
from dynajax.bytesize import parse_bytes
from dynajax.engine import Bundle, prepare_reshard
from dynajax.engine.check import Comparison
from dynajax.engine.execute import _Run
from dynajax.engine.shared_memory import transport as shared_memory
from dynajax.engine.shared_memory import uninitialised
from dynajax.engine.shared_memory.transport import CopyFilling
from dynajax.engine.transport import PATHS, Path
from dynajax.engine.xla.programs import load
from dynajax.engine.xla.transport import XlaFilling, XlaProgram
from dynajax.errors import BudgetError, TargetError
from dynajax.vps import bucket_parts

LEAF_BYTES = 64 * 64 * 4
LARGE = 512
"""Of matrices whose shards XLA allocates or JAX copies whole, on eight devices: 128 KB each, a MB in all."""


def _tree(sharding: NamedSharding, leaves: int = 12, side: int = 64) -> list[jax.Array]:
    make = jax.jit(lambda k: jax.numpy.zeros((side, side), np.float32) + k, out_shardings=sharding)
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


def _peaks(patch: pytest.MonkeyPatch, other: dict[Any, int]) -> dict[Any, int]:
    """Of each device the most live bytes from now on, without ``other``.

    Seen at the fullest moments: sources not yet given up, targets made, messages cut out, and again when they came.
    """
    peaks: dict[Any, int] = {}

    def look() -> None:
        for device, n in live_bytes(collect=False).items():
            peaks[device] = max(peaks.get(device, 0), n - other.get(device, 0))

    looked = [(_Run, "stage"), (XlaFilling, "fill"), (XlaFilling, "_cut_out"), (XlaFilling, "_put_in_place")]
    for cls, name in looked:
        method = getattr(cls, name)

        def looked_at(self: Any, *args: Any, method: Any = method) -> Any:
            result = method(self, *args)
            look()
            return result

        patch.setattr(cls, name, looked_at)
    return peaks


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("donate", [True, False])
def test_peak_of_live_buffers_is_what_was_planned(
    name: str, donate: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = MOVES[name]
    budget, leaves = {"shared memory": (LEAF_BYTES, 12), "xla": (8 * LEAF_BYTES, 40)}[path]
    other = live_bytes()
    tree = _tree(source, leaves)
    before = live_bytes(tree)
    plan = dj.plan_reshard(tree, target, budget=budget, donate=donate, path=path)
    with monkeypatch.context() as patch:
        peaks = _peaks(patch, other)
        moved, report = dj.reshard(tree, target, plan=plan, path=path)
    after = live_bytes(moved)
    extra = max(
        peak - (max if donate else sum)([before.get(device, 0), after.get(device, 0)]) for device, peak in peaks.items()
    )
    assert extra <= report.peak_extra_bytes <= plan.budget
    if donate and path == "shared memory":
        assert max(extra, 0) == report.peak_extra_bytes == plan.peak_extra_bytes
    if donate:
        assert len(plan.stages) > (name in ("row to column", "grow", "replicate", "permuted"))


LARGE_MOVES = {name: [MOVES[name]] * 12 for name in ("permuted", "row to column")}
LARGE_MOVES["both"] = [MOVES[name] for name in ("permuted", "row to column")] * 6


def _large(name: str, path: Path) -> tuple[list[jax.Array], Any]:
    """Large matrices, and a plan to move them a few at a time."""
    moves = LARGE_MOVES[name]
    tree = _tree(moves[0][0], len(moves), LARGE)
    budget = 2 * LARGE * LARGE * 4 // 8
    return tree, dj.plan_reshard(tree, [to for _, to in moves], budget=budget, donate=True, path=path)


@pytest.mark.parametrize("name", LARGE_MOVES)
def test_peak_of_large_live_buffers_is_what_was_planned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where XLA allocates the targets, and where JAX copies the shards."""
    other = live_bytes()
    tree, plan = _large(name, "shared memory")
    before = live_bytes(tree)
    with monkeypatch.context() as patch:
        peaks = _peaks(patch, other)
        moved, report = dj.reshard(tree, [to for _, to in LARGE_MOVES[name]], plan=plan, path="shared memory")
    after = live_bytes(moved)
    extra = max(peak - max(before.get(device, 0), after.get(device, 0)) for device, peak in peaks.items())
    assert len(plan.stages) >= 3
    stand_in = 1  # byte a device, for all arrays that were given up
    assert 0 < report.peak_extra_bytes == plan.peak_extra_bytes <= plan.budget
    assert extra - plan.peak_extra_bytes in (0, stand_in)
    assert all(np.array_equal(x, np.full((LARGE, LARGE), k, np.float32)) for k, x in enumerate(moved))


@pytest.mark.parametrize("name", ["permuted", "both"])
def test_copies_of_a_stage_have_arrived_before_the_next_allocates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else their sources would still be held beside what comes next. The copies are made to take long."""
    tree, plan = _large(name, "shared memory")
    first, put = jax.devices()[0], jax.device_put
    slowly = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, y: jax.numpy.sin(y) * 0 + x, x))
    sent: list[Any] = []
    late: list[str] = []

    def put_slowly(pieces: Any, devices: Any) -> Any:
        return put([slowly(put(piece, first)) for piece in pieces], devices)

    def began(what: str) -> None:
        late.extend([what] * (not all(x.is_ready() for x in sent)))

    def allocate(*args: Any, allocate: Any = uninitialised.allocate) -> Any:
        began("allocate")
        return allocate(*args)

    def send(self: Any, copies: Any, send: Any = CopyFilling._send_whole) -> None:
        began("send")
        with monkeypatch.context() as patch:
            patch.setattr(jax, "device_put", put_slowly)
            send(self, copies)
        sent.extend(self._sent)

    jax.block_until_ready(slowly(put(np.zeros((LARGE // 8, LARGE), np.float32), first)))
    with monkeypatch.context() as patch:
        patch.setattr(uninitialised, "allocate", allocate)
        patch.setattr(CopyFilling, "_send_whole", send)
        moved, _ = dj.reshard(tree, [to for _, to in LARGE_MOVES[name]], plan=plan, path="shared memory")
        assert all(x.is_ready() for x in moved)
    assert sent
    assert not late
    assert all(np.array_equal(x, np.full((LARGE, LARGE), k, np.float32)) for k, x in enumerate(moved))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_peak_of_live_buffers_between_buckets_and_tensors_is_what_was_planned(
    dtype: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket stays until its last tensor has gone, and is there from when its first arrives; both ways round."""
    shapes = {f"['{k:02}']": (16, 96) for k in range(40)}
    sizes, sharding = [2 * 16 * 96] * 20, _line(slice(0, 4), P("x"))
    parts = bucket_parts(shapes, sizes)
    buckets = [Bundle(sharding, (n,), part) for n, part in zip(sizes, parts, strict=True)]
    rows = {path[2:-2]: _line(slice(2, 6), P("x")) for path in shapes}
    other = live_bytes()
    tree = {k: jax.device_put(np.full((16, 96), int(k), dtype), rows[k]) for k in rows}
    for said, target in ((rows, buckets), (buckets, rows)):
        before = live_bytes(tree)
        budget = "32K" if path == "xla" else "8K"
        plan = dj.plan_reshard(tree, target, stored=said, budget=budget, donate=True, path=path)
        assert len(plan.stages) > 1
        with monkeypatch.context() as patch:
            peaks = _peaks(patch, other)
            tree, report = dj.reshard(tree, target, stored=said, plan=plan, path=path)
        after = live_bytes(tree)
        extra = max(peak - max(before.get(device, 0), after.get(device, 0)) for device, peak in peaks.items())
        stand_in = 1  # byte a device, for all arrays that were given up
        assert 0 < extra <= report.peak_extra_bytes + stand_in
        assert report.peak_extra_bytes <= plan.budget
    assert all(np.array_equal(x, np.full((16, 96), int(k), dtype)) for k, x in tree.items())


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, np.float16])
@pytest.mark.parametrize("name", MOVES)
def test_programs_stay_within_what_is_planned_for_them(dtype: Any, name: str) -> None:
    """What XLA says that they need beside the shards, and what they are counted with, which decides the parts."""
    source, target = MOVES[name]
    tree = [jax.ShapeDtypeStruct((64, 512), dtype, sharding=source) for _ in range(3)]
    for budget in ("2MB", "16MB"):
        program = prepare_reshard(tree, target, budget=budget, donate=True, path="xla")._program
        assert isinstance(program, XlaProgram)
        assert program.overhead <= program.room <= parse_bytes(budget)
        for placed in program._placed:
            assert load(*placed).temporary <= program.room


def test_a_program_that_xla_needs_more_for_is_refused_before_anything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = MOVES["row to column"]
    tree = _tree(source, 2)
    with monkeypatch.context() as patch:
        patch.setattr(XlaProgram, "compile", lambda self, compile=XlaProgram.compile: compile(_tight(self)))
        with pytest.raises(BudgetError, match=r"XLA says that a program of this move needs \d+ bytes"):
            dj.reshard(tree, target, donate=True, path="xla")
    assert all(np.array_equal(x, np.full((64, 64), k, np.float32)) for k, x in enumerate(tree))


def _tight(program: XlaProgram) -> XlaProgram:
    return dataclasses.replace(program, room=0)


def test_a_budget_without_room_for_programs_is_refused() -> None:
    source, target = MOVES["row to column"]
    tree = _tree(source)
    with pytest.raises(BudgetError, match=r"leaves \d+ bytes for the programs that exchange shards") as e:
        dj.reshard(tree, target, budget=100, path="xla")
    least = int(re.findall(r"budget that does is (\d+) bytes", str(e.value))[0])
    moved, report = dj.reshard(tree, target, budget=least, path="xla")
    assert report.peak_extra_bytes <= least
    assert all(np.array_equal(x, np.full((64, 64), k, np.float32)) for k, x in enumerate(moved))
    large = jax.device_put(np.zeros((64, 256), np.float32), source)
    with pytest.raises(BudgetError, match=r"budget that does is 8192 .*; beside it the exchange needs \d+ bytes"):
        dj.plan_reshard(large, target, budget=least, donate=True, path="xla")
    plan = dj.plan_reshard(tree, target, budget=2048, donate=True)
    with pytest.raises(BudgetError, match="leaves 0 bytes for the programs"):
        dj.reshard(tree, target, plan=plan, path="xla")


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


def _handles() -> tuple[int, int]:
    """Threads and open files of this process."""
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def test_nothing_is_left_behind(path: Path) -> None:
    source, target = MOVES["grow"]
    dj.reshard(_tree(source), target, donate=True, path=path)
    before = live_bytes(), _handles()
    for donate in (True, False):
        dj.reshard(_tree(source), target, donate=donate, path=path)
    assert (live_bytes(), _handles()) == before


class _InjectedError(OSError):
    """What the tests make fail."""


def _fails_at(failing: int, patch: pytest.MonkeyPatch, path: Path) -> None:
    """Make one stage of a move fail when its buffers are made and not yet arrays."""
    cls = XlaFilling if path == "xla" else CopyFilling
    fill, stages = cls.fill, itertools.count()
    assemble = private.assemble

    def breaks(*args: Any) -> Any:
        raise _InjectedError("injected")

    def counted(self: Any, *args: Any) -> Any:
        patch.setattr(private, "assemble", breaks if next(stages) == failing else assemble)
        return fill(self, *args)

    patch.setattr(cls, "fill", counted)


@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.parametrize("how", ["kept", "safe"])
@pytest.mark.parametrize(
    ("path", "side", "name"),
    [
        *((path, 64, "row to column") for path in PATHS),
        *(("shared memory", LARGE, name) for name in ("row to column", "permuted")),
    ],
)
def test_a_fault_leaves_the_source_usable_and_nothing_else(
    where: str, how: str, side: int, name: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = MOVES[name]
    tree = _tree(source, 6, side)
    staged = dj.plan_reshard(tree, target, budget=side * side, donate=True, path="shared memory")
    plan = dj.plan_reshard(tree, target, donate=how == "safe", commit="safe", path=path)
    plan = dataclasses.replace(plan, stages=staged.stages)
    assert len(plan.stages) > 2
    failing = {"first": 0, "middle": len(plan.stages) // 2, "last": len(plan.stages) - 1}[where]

    def move() -> Any:
        return dj.reshard(tree, target, plan=plan, donate=how == "safe", commit="safe", path=path)

    for attempt in range(20):
        with monkeypatch.context() as patch:
            _fails_at(failing, patch, path)
            with pytest.raises(_InjectedError) as error:
                move()
        assert not hasattr(error.value, "__notes__")
        del error
        if attempt == 0:
            before = live_bytes(), _handles()
    assert (live_bytes(), _handles()) == before
    assert all(np.array_equal(x, np.full((side, side), k, np.float32)) for k, x in enumerate(tree))
    moved, report = move()
    assert report.commit == how
    assert all(np.array_equal(x, np.full((side, side), k, np.float32)) for k, x in enumerate(moved))
    assert all(x.is_deleted() == (how == "safe") for x in tree)


def test_a_fault_of_a_staged_move_names_what_to_go_on_from(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = MOVES["row to column"]
    budget = {"shared memory": "8K", "xla": "32K"}[path]
    plan = dj.plan_reshard(_tree(source), target, budget=budget, donate=True, path=path)
    assert len(plan.stages) > 1
    for snapshot, named in (("ckpt/7", "go on from ckpt/7;"), (None, "go on from a checkpoint;")):
        tree = _tree(source)
        with monkeypatch.context() as patch:
            _fails_at(1, patch, path)
            with pytest.raises(_InjectedError) as error:
                dj.reshard(tree, target, plan=plan, snapshot=snapshot, path=path)
        (note,) = error.value.__notes__
        assert named in note
        assert f"1 of {len(plan.stages)} stages" in note
        given_up = [x.is_deleted() for x in tree]
        assert sum(given_up) == len(plan.stages[0])
        assert all(np.array_equal(x, np.full((64, 64), k, np.float32)) for k, x in enumerate(tree) if not given_up[k])
    _, report = dj.reshard(_tree(source), target, plan=plan, snapshot="ckpt/7", path=path)
    assert (report.commit, report.snapshot) == ("staged", "ckpt/7")


def test_a_safe_move_gives_up_the_source_only_when_the_target_is_verified(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = MOVES["grow"]
    tree = _tree(source)
    checked: list[bool] = []
    compare = Comparison.stage

    def looked_at(*args: Any) -> None:
        checked.append(any(x.is_deleted() for x in tree))
        compare(*args)

    monkeypatch.setattr(Comparison, "stage", looked_at)
    plan = dj.plan_reshard(tree, target, donate=True, commit="safe", path=path)
    assert plan.peak_bytes() == (plan.footprint.source + plan.footprint.target).tolist()
    moved, report = dj.reshard(tree, target, plan=plan, donate=True, commit="safe", path=path)
    assert checked == [False] * len(plan.stages)
    assert all(x.is_deleted() for x in tree)
    assert report.verify_s > 0
    assert all(np.array_equal(x, np.full((64, 64), k, np.float32)) for k, x in enumerate(moved))
    staged = dj.plan_reshard(moved, source, donate=True, path=path)
    with pytest.raises(TargetError, match="in stages"):
        dj.reshard(moved, source, plan=staged, donate=True, commit="safe", path=path)
    with pytest.raises(TargetError, match="'staged' or 'safe'"):
        dj.plan_reshard(moved, source, donate=True, commit="sure")  # pyright: ignore[reportArgumentType]


def test_many_leaves_share_their_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    on = NamedSharding(mesh("dp8"), P())
    tree = jax.device_put([np.full(16, k, np.float32) for k in range(300)], on)
    batches: list[int] = []
    copy = shared_memory._copy_batch
    monkeypatch.setattr(shared_memory, "_copy_batch", lambda b, buffers: (batches.append(len(b)), copy(b, buffers))[1])
    moved, _ = dj.reshard(tree, NamedSharding(mesh("sixteen"), P("fsdp")))
    assert len(batches) == 1
    assert all(np.array_equal(x, np.full(16, k, np.float32)) for k, x in enumerate(moved))
