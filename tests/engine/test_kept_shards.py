"""Shards that are where they have to be keep their buffers: random switches of trees of many leaves."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine.states import P, assert_same_bits, mesh
from jax.sharding import NamedSharding

import dynajax as dj
from dynajax.engine.transport import Path

MESHES = ["dp2.tp4", "fsdp8", "tp8", "tp8 reversed", "dp8", "tp4 overlapping", "fsdp2.tp2 permuted", "sixteen"]
SHAPES: list[tuple[tuple[int, ...], Any]] = [
    ((), jnp.int32),
    ((), jnp.float32),
    ((16,), jnp.float32),
    ((16, 32), jnp.bfloat16),
    ((32, 16), jnp.float32),
    ((64, 64), jnp.float32),
    ((16, 16), jnp.int8),
]


def random_sharding(rng: np.random.Generator, name: str, rank: int) -> NamedSharding:
    """A sharding over a mesh that cuts each dim by one axis, or none."""
    axes = [*mesh(name).axis_names, *[None] * rank]
    return NamedSharding(mesh(name), P(*[axes[k] for k in rng.permutation(len(axes))[:rank]]))


def random_tree(rng: np.random.Generator, source: str, target: str, leaves: int) -> tuple[Any, Any, Any]:
    """Values, and where they are before and after."""
    kinds = [SHAPES[k] for k in rng.integers(0, len(SHAPES), leaves)]
    values = [rng.integers(0, 100, shape).astype(dtype) for shape, dtype in kinds]
    before, after = ([random_sharding(rng, name, np.ndim(v)) for v in values] for name in (source, target))
    return values, before, after


def where(array: jax.Array) -> dict[tuple[jax.Device, str], int]:
    """Where the buffer of each device lies, by device and what it holds."""
    return {(s.device, str(s.index)): s.data.unsafe_buffer_pointer() for s in array.addressable_shards}


@pytest.mark.parametrize("seed", range(25))
def test_shards_that_stay_keep_their_buffers(seed: int, path: Path) -> None:
    rng = np.random.default_rng(seed)
    source, target = (MESHES[k] for k in rng.integers(0, len(MESHES), 2))
    values, before, after = random_tree(rng, source, target, int(rng.integers(1, 40)))
    make = jax.jit(lambda tree: [x * 1 for x in tree])
    tree = [jax.block_until_ready(make([jax.device_put(v, s)])[0]) for v, s in zip(values, before, strict=True)]
    old = [where(x) for x in tree]
    moved, report = dj.reshard(tree, after, donate=True, budget="64KB", path=path)
    assert_same_bits(moved, values)
    assert report.bytes_moved == report.bytes_lower_bound
    copied = [
        (k, values[k].shape, str(device))
        for k, x in enumerate(moved)
        for (device, index), pointer in where(x).items()
        if old[k].get((device, index), pointer) != pointer
    ]
    assert not copied
