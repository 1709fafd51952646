"""Arrays that store their tensors padded or in another order: only the tensor moves, and padding holds zeros."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine.states import P, mesh
from jax.sharding import NamedSharding

import dynajax as dj
from dynajax.engine import Stored
from dynajax.engine.transport import Path
from dynajax.errors import LayoutError, TargetError
from dynajax.runtime import Cut, CutLayers, Storage, storage_of
from dynajax.vps import named_tiling, stored_tiling

SHAPE = (10, 6, 5)
NAMES = ("tp8", "tp4 overlapping", "fsdp2.tp2 permuted", "dp2.tp4", "one device", "fsdp4.tp2", "tp8 reversed")
PIPELINES = {"pp4": (4, 1), "pp3": (3, 1), "pp2 with 2 chunks": (2, 2), "pp1": (1, 1)}


def _padded(name: str) -> tuple[Storage, NamedSharding]:
    on = mesh(name)
    axes = ("a", "b", None)
    storage = storage_of(SHAPE, axes, {"a": Cut(("tp",)), "b": Cut(("fsdp",), granule=4)}, dict(on.shape))
    return storage, NamedSharding(on, storage.spec)


def _staged(name: str) -> tuple[Storage, NamedSharding]:
    stages, chunks = PIPELINES[name]
    on = dj.Strategy.parse(f"pp{stages}.tp2").mesh(jax.devices()[: 2 * stages])
    rules = {"layers": CutLayers(chunks=chunks), "b": Cut(("tp",))}
    storage = storage_of(SHAPE, ("layers", "b", None), rules, dict(on.shape))
    return storage, NamedSharding(on, storage.spec)


CASES = dict.fromkeys(NAMES, _padded) | dict.fromkeys(PIPELINES, _staged)


def _case(name: str) -> tuple[Storage, Stored]:
    storage, sharding = CASES[name](name)
    pieces = tuple(tuple((p.stored, p.logical, p.length) for p in d.pieces) for d in storage.dims)
    return storage, Stored(sharding, storage.shape, SHAPE, pieces)


@pytest.mark.parametrize("source", CASES)
def test_every_pair_moves_the_tensor_and_nothing_else(source: str, path: Path) -> None:
    whole = np.arange(1.0, 301.0, dtype=np.float32).reshape(SHAPE)
    k = list(CASES).index(source)
    for target in (list(CASES) * 2)[k : k + 3] if path == "xla" else CASES:
        (before, said), (after, wanted) = _case(source), _case(target)
        x = jax.device_put(before.to_storage(jnp.asarray(whole)), said.sharding)
        moved, report = dj.reshard({"x": x}, {"x": wanted}, stored={"x": said}, donate=True, check=True, path=path)
        assert moved["x"].sharding == wanted.sharding
        assert np.array_equal(moved["x"], after.to_storage(jnp.asarray(whole)))
        assert report.bytes_moved == report.bytes_lower_bound == _elements_not_held(said, wanted) * 4


def _elements_not_held(source: Stored, target: Stored) -> int:
    """Logical elements that devices need and do not hold, element by element through index maps."""
    held, needed = _holdings(source), _holdings(target)
    return sum(len(want - held.get(device, set())) for device, want in needed.items())


def _holdings(stored: Stored) -> dict[Any, set[int]]:
    numbers = np.full(stored.array_shape, -1)
    maps = []
    for size, runs in zip(stored.array_shape, stored.pieces, strict=True):
        index = np.full(size, -1)
        for at, first, length in runs:
            index[at : at + length] = np.arange(first, first + length)
        maps.append(index)
    grid = np.meshgrid(*maps, indexing="ij")
    real = np.all([g >= 0 for g in grid], axis=0)
    numbers[real] = np.ravel_multi_index([g[real] for g in grid], stored.shape)
    slices = stored.sharding.devices_indices_map(stored.array_shape)
    return {d: set(numbers[index].ravel().tolist()) - {-1} for d, index in slices.items()}


def test_a_fused_matrix_is_cut_block_by_block(path: Path) -> None:
    """FUSED-1: rows [q16|k16|v32|z32|b4|a4]; each tp rank owns its share of every block."""
    blocks = (16, 16, 32, 32, 4, 4)
    whole = np.repeat(np.arange(104.0, dtype=np.float32)[:, None], 8, axis=1)

    def fused(ranks: int) -> Stored:
        runs, at = [], 0
        for rank in range(ranks):
            for block, first in zip(blocks, np.cumsum((0, *blocks[:-1])), strict=True):
                share = block // ranks
                runs.append((at, int(first) + rank * share, share))
                at += share
        on = dj.Strategy.parse(f"tp{ranks}").mesh(jax.devices()[:ranks])
        return Stored(NamedSharding(on, P("tp")), (104, 8), (104, 8), (tuple(runs), ((0, 0, 8),)))

    x: Any = jax.device_put(whole, NamedSharding(dj.Strategy.parse("tp1").mesh(jax.devices()[:1]), P()))
    said = fused(1)
    for ranks in (2, 4, 1):
        (x,), _ = dj.reshard([x], [fused(ranks)], stored=[said], donate=True, check=True, path=path)
        said = fused(ranks)
        first = np.asarray(x.addressable_shards[0].data)[:, 0]
        starts = np.cumsum((0, *blocks[:-1]))
        assert first.tolist() == [s + k for s, b in zip(starts, blocks, strict=True) for k in range(b // ranks)]
    assert np.array_equal(x, whole)


def test_uneven_vectors_go_round(path: Path) -> None:
    """UNEVEN-1: six elements over 4, 3, 2, 6 and 4 devices come back, never the padding."""

    def over(ways: int) -> Stored:
        on = dj.Strategy.parse(f"tp{ways}").mesh(jax.devices()[:ways])
        return Stored(NamedSharding(on, P("tp")), (-(-6 // ways) * ways,), (6,), (((0, 0, 6),),))

    said = over(4)
    x: Any = jax.device_put(np.asarray([0, 1, 2, 3, 4, 5, 0, 0], np.float32), said.sharding)
    for ways in (3, 2, 6, 4):
        x, _ = dj.reshard(x, over(ways), stored=said, donate=True, path=path)
        said = over(ways)
        assert np.asarray(x)[:6].tolist() == [0, 1, 2, 3, 4, 5]
        assert not np.asarray(x)[6:].any()


def test_what_does_not_fit_is_refused() -> None:
    on = NamedSharding(mesh("tp8"), P("tp"))
    x = jax.device_put(np.zeros(8, np.float32), on)
    with pytest.raises(TargetError, match=r"shape \(8,\) and is said to be stored as \(16,\)"):
        dj.reshard(x, on, stored=Stored(on, (16,), (10,), (((0, 0, 10),),)))
    with pytest.raises(LayoutError, match="piece"):
        stored_tiling(named_tiling(on, (8,)), (6,), (((0, 0, 7),),))
    with pytest.raises(TargetError, match=r"\[6\].*\[8\]"):
        dj.reshard(x, Stored(on, (8,), (6,), (((0, 0, 6),),)))
