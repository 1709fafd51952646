"""One to seventy devices in any order: whatever layouts are drawn, plans are exact and move the least.

Layouts come from a random generator that hypothesis hands in, since one choice for each of seventy devices would be
more than it likes to draw.
"""

import itertools
import math
from random import Random

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from planner.random_layouts import held

from dynajax.planner import build_plan, verify
from dynajax.vps import (
    Arrays,
    Block,
    Layout,
    Space,
    Tensor,
    Tiling,
    bucket_parts,
    fused_parts,
    interval,
    layer_part,
    mesh_tiling,
    slice_part,
)
from dynajax.vps.parts import joined, parts_tiling

AMPLE = 2**60
MOST = 70
DIMS = (1, 2, 3, 5, 7, 8, 10, 12)


def on_mesh(random: Random, shape, pool: int) -> Tiling:
    """A mesh of one to three axes over any devices in any order, any dims cut by any of them, evenly or not."""
    names, sizes = ("a", "b", "c")[: random.randint(1, 3)], []
    for _ in names:
        sizes.append(random.randint(1, max(pool // math.prod(sizes), 1)))
    left, entries = random.sample(names, len(names)), []
    for _ in shape:
        take = random.randint(0, len(left))
        entries.append(tuple(left[:take]) or None)
        left = left[take:]
    devices = np.array(random.sample(range(pool), math.prod(sizes)))
    return mesh_tiling(shape, dict(zip(names, sizes, strict=True)), PartitionSpec(*entries), devices)


def in_slices(random: Random, shape, pool: int) -> Tiling:
    """Slices of the flattened tensor, some empty, on devices in any order."""
    size, parts = math.prod(shape), random.randint(1, pool)
    cuts = [0, *sorted(random.randint(0, size) for _ in range(parts - 1)), size]
    devices = random.sample(range(pool), parts)
    regions = [interval(shape, a, b) for a, b in itertools.pairwise(cuts)]
    return Tiling.of_regions(shape, [(d, r) for d, r in zip(devices, regions, strict=True) if r.volume])


def in_arrays(random: Random, space: Space, pool: int) -> list[tuple[Tiling, list]]:
    """Every tensor in arrays: buckets of many, or fused with those of its shape, or in slices, layers or copies."""
    arrays, left = [], random.sample(space.tensors, len(space))
    while left:
        mine = [left.pop()]
        shape, path = mine[0].shape, mine[0].path
        kind = random.choice(["bucket", "fused", "slices", "layers", "copies"])
        if kind == "bucket":
            mine += [t for t in left if t.itemsize == mine[0].itemsize and random.random() < 0.7]
            total, sizes = sum(math.prod(t.shape) for t in mine), []
            while total > sum(sizes):
                sizes.append(random.randint(1, total))
            parts = bucket_parts({t.path: t.shape for t in mine}, sizes)
            arrays += [(on_mesh(random, (n,), pool), list(p)) for n, p in zip(sizes, parts, strict=True)]
        elif kind == "fused":
            mine += [t for t in left if t.itemsize == mine[0].itemsize and t.shape[1:] == shape[1:]]
            ranks = random.choice([n for n in DIMS if all(t.shape[0] % n == 0 for t in mine)])
            parts = fused_parts({t.path: t.shape for t in mine}, ranks)
            arrays.append((on_mesh(random, (sum(t.shape[0] for t in mine), *shape[1:]), pool), list(parts)))
        elif kind == "slices":
            cut = random.randint(0, shape[0])
            parts = [slice_part(path, shape, a, b) for a, b in ((0, cut), (cut, shape[0])) if a < b]
            arrays += [(on_mesh(random, p.extent, pool), [p]) for p in parts]
        elif kind == "layers":
            arrays += [(on_mesh(random, shape[1:], pool), [layer_part(path, shape, k)]) for k in range(shape[0])]
        else:
            whole = Block.whole(path, shape)
            arrays += [(on_mesh(random, shape, pool), [whole]) for _ in range(random.randint(1, 3))]
        left = [t for t in left if t not in mine]
    return arrays


def any_layout(random: Random, space: Space, pool: int) -> Layout:
    """Every tensor alone in an array of any kind, or all in arrays that share them."""
    if random.random() < 0.4:
        kinds = (on_mesh, in_slices)
        return Layout(space, tuple(random.choice(kinds)(random, t.shape, pool) for t in space))
    arrays = in_arrays(random, space, pool)
    stores = [{p.tensor for p in parts} for _, parts in arrays]
    tilings = []
    for tensor in space:
        mine = [arrays[k] for k, paths in enumerate(stores) if tensor.path in paths]
        found = [parts_tiling(t, tensor.shape, [p for p in parts if p.tensor == tensor.path]) for t, parts in mine]
        tilings.append(joined(found, [t.room or 0 for t in found], spare_copies=True))
    lies_in = tuple(tuple(k for k, t in enumerate(space) if t.path in paths) for paths in stores)
    sizes = [space.tensors[rows[0]].itemsize for rows in lies_in]
    nbytes = np.stack([t.elements(pool) * n for (t, _), n in zip(arrays, sizes, strict=True)])
    return Layout(space, tuple(tilings), Arrays(lies_in, nbytes))


@st.composite
def pairs(draw):
    """Two layouts of one space on device numbers that are the same, overlap, or have nothing in common."""
    random = draw(st.randoms(use_true_random=False))
    tensors = []
    for k in range(draw(st.integers(1, 5))):
        shape = tuple(random.choice(DIMS) for _ in range(random.randint(1, 3)))
        tensors.append(Tensor(f"t{k}", shape, "any", random.choice((2, 4))))
    space = Space(tuple(tensors))
    source, target = (any_layout(random, space, draw(st.integers(1, MOST))) for _ in range(2))
    return source, target


@settings(derandomize=True, deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(pairs())
def test_every_element_is_covered_once_and_moved_once(pair):
    source, target = pair
    plan = build_plan(source, target, AMPLE)
    verify(plan)
    least = 0
    for move in plan.moves:
        count = np.zeros(move.tensor.shape, np.int64)
        for device in move.target.devices.tolist():
            mine = held(move.target, device)
            assert mine.sum() == move.target.region_of(device).volume
            count += mine
            least += int((mine & ~held(move.source, device)).sum()) * move.tensor.itemsize
        assert count.min() >= 1
    assert plan.bytes_moved == plan.bytes_lower_bound == least


def test_what_is_drawn_is_what_was_promised():
    """Buckets of several tensors, fused orders, copies, device subsets, and all numbers of devices do come up."""
    seen = set()

    @settings(derandomize=True, deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
    @given(pairs())
    def look(pair):
        for layout in pair:
            used = set(np.concatenate([t.devices for t in layout.tilings]).tolist())
            seen.add(("devices", min(len(used) // 20, 3)))
            seen.add(("subset", len(used) < layout.num_devices))
            seen.add(("padded", any(t.room for t in layout.tilings)))
            if layout.arrays is not None:
                rows = layout.arrays.tensors
                seen.add(("many tensors in an array", any(len(r) > 1 for r in rows)))
                seen.add(("many arrays of a tensor", len(layout.arrays.shared) > 0 and len(rows) > len(layout.space)))

    look()
    assert seen >= {("devices", k) for k in range(4)}
    assert all((what, yes) in seen for what, _ in seen for yes in (True, False) if what != "devices")
