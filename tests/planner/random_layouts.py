"""Hypothesis strategies for layouts of every kind: meshes, flat slices, fused blocks, mixed holdings."""

import itertools
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from dynajax.meshes import Tier, Topology
from dynajax.vps import (
    Arrays,
    Block,
    Layout,
    Region,
    Space,
    Tensor,
    Tiling,
    algebra,
    blocks,
    box,
    bucket_parts,
    interval,
    layer_part,
    mesh_tiling,
    slice_part,
)
from dynajax.vps.parts import joined, parts_tiling
from dynajax.vps.region import concatenate, dense_boxes
from dynajax.vps.stored import stored_tiling, whole_runs

MESH_SIZES = [(1,), (2,), (3,), (4,), (5,), (7,), (2, 2), (2, 3), (4, 2), (2, 2, 2), (3, 1, 2)]
shapes = st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 8]), max_size=3).map(tuple)


@st.composite
def mesh_tilings(draw, shape, pool):
    """A mesh of some of the devices ``0 … pool − 1`` in any order, any spec, cut unevenly where it must be."""
    sizes = draw(st.sampled_from([s for s in MESH_SIZES if np.prod(s) <= pool]))
    devices = np.array(draw(st.permutations(range(pool)))[: int(np.prod(sizes))])
    names = [f"a{k}" for k in range(len(sizes))]
    left = draw(st.permutations(names))
    entries = []
    for _ in shape:
        take = draw(st.integers(0, len(left)))
        entries.append(tuple(left[:take]) or None)
        left = left[take:]
    return mesh_tiling(shape, dict(zip(names, sizes, strict=True)), PartitionSpec(*entries), devices)


@st.composite
def flat_tilings(draw, shape, pool):
    """Slices of the flattened tensor that ignore its rows, each held by one to three devices."""
    size = int(np.prod(shape, dtype=np.int64))
    order = list(draw(st.permutations(range(pool))))
    parts = draw(st.integers(1, pool))
    cuts = [0, *sorted(draw(st.lists(st.integers(0, size), min_size=parts - 1, max_size=parts - 1))), size]
    held = []
    for k in range(parts):
        copies = draw(st.integers(1, min(3, pool)))
        held += [(order[(k + c) % pool], (cuts[k], cuts[k + 1])) for c in range(copies)]
    regions: dict[int, list[Region]] = {}
    for device, (a, b) in held:
        if a < b and all(region_is_apart(shape, a, b, r) for r in regions.get(device, [])):
            regions.setdefault(device, []).append(interval(shape, a, b))
    return Tiling.of_regions(shape, [(d, end_to_end(r)) for d, r in sorted(regions.items())] or [(0, box(*[()] * 2))])


def region_is_apart(shape, a, b, region):
    """True if the slice shares no element with a region of the same device."""
    other = interval(shape, a, b)
    return not len(algebra.overlaps(other.lo, other.hi, region.lo, region.hi)[0])


def end_to_end(regions):
    """Regions laid one after the other in one buffer."""
    start = np.cumsum([0, *[r.volume for r in regions]])
    return concatenate([Region(r.lo, r.hi, r.offset + s, r.stride) for r, s in zip(regions, start[:-1], strict=True)])


@st.composite
def fused_tilings(draw, shape, pool):
    """Blocks along one dim; every device of a row holds its share of each block, in its own order."""
    dim = draw(st.integers(0, len(shape) - 1))
    inner = sorted(draw(st.sets(st.integers(0, shape[dim]), max_size=3)) | {0, shape[dim]})
    order = list(draw(st.permutations(range(pool))))
    parts = draw(st.integers(1, pool))
    regions = []
    for k in range(parts):
        shares = [(a + k * (b - a) // parts, a + (k + 1) * (b - a) // parts) for a, b in itertools.pairwise(inner)]
        shares = draw(st.permutations([s for s in shares if s[0] < s[1]]))
        if shares:
            corner = [
                ((*[0] * dim, a, *[0] * (len(shape) - dim - 1)), (*shape[:dim], b, *shape[dim + 1 :]))
                for a, b in shares
            ]
            regions.append((order[k], blocks(corner, dim)))
    return Tiling.of_regions(shape, regions)


@st.composite
def mixed_tilings(draw, shape, pool):
    """Overlapping holdings of unlike kinds: a mesh covers, and some devices hold random boxes besides."""
    base = draw(mesh_tilings(shape, pool))
    held = [(d, base.region_of(d)) for d in base.devices.tolist()]
    for device in draw(st.lists(st.integers(0, pool - 1), unique=True, max_size=3)):
        corners = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
        lo, hi = np.array(corners, np.int64).reshape(-1, 2).T
        mine = base.region_of(device)
        new = [dense_boxes(a[None], b[None]) for a, b in zip(*algebra.subtract(lo, hi, mine.lo, mine.hi), strict=True)]
        new = [r for r in new if r.volume]
        if new:
            held = [(d, r) for d, r in held if d != device]
            held.append((device, end_to_end([*([mine] if mine.count else []), *new])))
    return Tiling.of_regions(shape, held) if held else base


@st.composite
def padded_tilings(draw, shape, pool):
    """Arrays longer than their tensor, as a mesh that does not divide it needs; the first dim may be permuted."""
    stored = tuple(n + draw(st.integers(0, 3)) for n in shape)
    pieces = list(whole_runs(shape))
    if draw(st.booleans()):
        cut = draw(st.integers(0, shape[0]))
        pieces[0] = ((shape[0] - cut, 0, cut), (0, cut, shape[0] - cut))
    return stored_tiling(draw(mesh_tilings(stored, pool)), shape, pieces)


@st.composite
def tilings(draw, shape, pool):
    """Any of the kinds above."""
    kinds = [mesh_tilings]
    if shape and 0 not in shape:
        kinds += [flat_tilings, fused_tilings, mixed_tilings, padded_tilings]
    return draw(draw(st.sampled_from(kinds))(shape, pool))


@st.composite
def layout_pairs(draw, max_devices=8):
    """Two layouts of one space, on device sets that are equal, permuted, disjoint, grown, shrunk or overlap."""
    space = Space(
        tuple(
            Tensor(f"t{k}", draw(shapes), "float32" if size == 4 else "bfloat16", size)
            for k, size in enumerate(draw(st.lists(st.sampled_from([2, 4]), min_size=1, max_size=4)))
        )
    )
    pools = [draw(st.integers(1, max_devices)) for _ in range(2)]
    layouts = [Layout(space, tuple(draw(tilings(t.shape, pool)) for t in space)) for pool in pools]
    shift = draw(st.sampled_from([0, 0, 1, pools[0]]))
    return layouts[0], shifted(layouts[1], shift)


@st.composite
def summed_pairs(draw):
    """A pair of layouts of any kinds; some tensors of the first are sums of what their holders have."""
    source, target = draw(layout_pairs(max_devices=6))
    which = draw(st.sets(st.integers(0, len(source.tilings) - 1), min_size=1))
    tilings = (replace(t, partial=k in which) for k, t in enumerate(source.tilings))
    return Layout(source.space, tuple(tilings)), target


def mask(lo, hi, shape):
    """True inside the box."""
    inside = np.zeros(shape, bool)
    inside[tuple(slice(a, b) for a, b in zip(lo.tolist(), hi.tolist(), strict=True))] = True
    return inside


def held(tiling, device):
    """What a device holds, as a mask."""
    inside = np.zeros(tiling.shape, bool)
    region = tiling.region_of(device)
    for lo, hi in zip(region.lo, region.hi, strict=True):
        inside |= mask(lo, hi, tiling.shape)
    return inside


def shifted(layout, by):
    """The layout on device numbers that are ``by`` larger."""
    return Layout(
        layout.space,
        tuple(replace(t, holder=t.holder + by, padded=tuple(d + by for d in t.padded)) for t in layout.tilings),
    )


TIERS = tuple(Tier(name, 1e9 / 4**k, 1e-6) for k, name in enumerate(("memory", "node", "rack", "all")))


@st.composite
def topologies(draw, devices=16):
    """Nodes of any sizes in racks of any sizes, devices in any order."""
    node = np.array(draw(st.lists(st.integers(0, 4), min_size=devices, max_size=devices)))
    rack = np.array(draw(st.lists(st.integers(0, 2), min_size=5, max_size=5)))[node]
    domains = [np.arange(devices), node, rack, np.zeros_like(node)]
    levels = draw(st.sampled_from([(0, 1, 3), (0, 1, 2, 3), (0, 3)]))
    return Topology("drawn", tuple(TIERS[k] for k in levels), np.stack([domains[k] for k in levels]))


@st.composite
def array_layouts(draw, space, pool):
    """A layout whose arrays store parts of tensors: buckets, slices of stacks, fused rows, copies on two meshes."""
    arrays: list[tuple[Tiling, list]] = []
    for size in {t.itemsize for t in space}:
        alike = [t for t in space if t.itemsize == size]
        bucketed = draw(st.lists(st.sampled_from(alike), unique=True)) if draw(st.integers(0, 3)) else alike
        arrays += draw(buckets(bucketed, pool))
        for tensor in (t for t in alike if t not in bucketed):
            arrays += draw(st.one_of(slices(tensor, pool), copies(tensor, pool)))
    tilings, lies_in = [], [[] for _ in arrays]
    for row, tensor in enumerate(space):
        mine = [(k, [p for p in parts if p.tensor == tensor.path]) for k, (_, parts) in enumerate(arrays)]
        mine = [(k, parts) for k, parts in mine if parts]
        found = [parts_tiling(arrays[k][0], tensor.shape, parts) for k, parts in mine]
        for k, _ in mine:
            lies_in[k].append(row)
        if found:
            tilings.append(joined(found, [t.room or 0 for t in found], spare_copies=True))
        else:
            tilings.append(draw(mesh_tilings(tensor.shape, pool)))
            arrays.append((tilings[-1], []))
            lies_in.append([row])
    used = [k for k, rows in enumerate(lies_in) if rows]
    nbytes = np.stack([arrays[k][0].elements(pool) * space.tensors[lies_in[k][0]].itemsize for k in used])
    return Layout(space, tuple(tilings), Arrays(tuple(tuple(lies_in[k]) for k in used), nbytes))


@st.composite
def buckets(draw, tensors, pool):
    """Tensors end to end in any order, cut into padded flat arrays, each on a mesh of its own."""
    shapes = {t.path: t.shape for t in draw(st.permutations(tensors))}
    left = sum(int(np.prod(s, dtype=np.int64)) for s in shapes.values())
    sizes = []
    while left > 0:
        sizes.append(draw(st.integers(1, left + 3)))
        left -= sizes[-1]
    parts = bucket_parts(shapes, sizes)
    return [(draw(mesh_tilings((n,), pool)), list(p)) for n, p in zip(sizes, parts, strict=True)]


@st.composite
def slices(draw, tensor, pool):
    """Runs of rows, or single rows without their dim, in arrays of their own."""
    if not tensor.shape or 0 in tensor.shape:
        return []
    if draw(st.booleans()):
        rows = [layer_part(tensor.path, tensor.shape, k) for k in range(tensor.shape[0])]
        return [(draw(mesh_tilings(tensor.shape[1:], pool)), [p]) for p in rows]
    cuts = sorted({0, tensor.shape[0], *draw(st.lists(st.integers(0, tensor.shape[0]), max_size=3))})
    return [
        (draw(mesh_tilings((b - a, *tensor.shape[1:]), pool)), [slice_part(tensor.path, tensor.shape, a, b)])
        for a, b in itertools.pairwise(cuts)
    ]


@st.composite
def copies(draw, tensor, pool):
    """The whole tensor in each of up to three arrays, on meshes that may share devices."""
    if 0 in tensor.shape:
        return []
    part = Block.whole(tensor.path, tensor.shape)
    return [(draw(mesh_tilings(tensor.shape, pool)), [part]) for _ in range(draw(st.integers(1, 3)))]


@st.composite
def array_layout_pairs(draw, max_devices=8):
    """Two layouts of one space, at least one of them with shared arrays."""
    sizes = draw(st.lists(st.sampled_from([2, 4]), min_size=1, max_size=5))
    space = Space(tuple(Tensor(f"t{k}", draw(shapes), f"bits{8 * n}", n) for k, n in enumerate(sizes)))
    pools = [draw(st.integers(1, max_devices)) for _ in range(2)]
    plain = draw(st.sampled_from([None, None, 0, 1]))
    return tuple(
        Layout(space, tuple(draw(tilings(t.shape, pool)) for t in space))
        if side == plain
        else draw(array_layouts(space, pool))
        for side, pool in enumerate(pools)
    )
