"""Tilings of meshes against jax itself, on real emulated devices."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.op_shardings import op_sharding_to_indices
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from dynajax.errors import LayoutError
from dynajax.meshes import PARAMETER_RULES, Strategy
from dynajax.vps import Space, Tensor, mesh_tiling, named_tiling, strategy_layout

P = PartitionSpec
MESHES = [{"x": 8}, {"x": 2, "y": 4}, {"x": 2, "y": 2, "z": 2}, {"x": 3, "y": 2}, {"x": 5}, {"x": 1, "y": 7}]


@st.composite
def shardings(draw):
    """A NamedSharding over any real devices in any order, and a shape that it divides."""
    sizes = draw(st.sampled_from(MESHES))
    order = draw(st.permutations(range(8)))[: int(np.prod(list(sizes.values())))]
    devices = np.array(jax.devices(), object)[list(order)].reshape(tuple(sizes.values()))
    axes = draw(st.permutations(list(sizes)))
    rank = draw(st.integers(0, 3))
    entries, shape = [], []
    for _ in range(rank):
        take = draw(st.integers(0, len(axes)))
        mine, axes = axes[:take], axes[take:]
        entries.append(None if not mine else mine[0] if len(mine) == 1 else tuple(mine))
        shape.append(draw(st.integers(0, 3)) * int(np.prod([sizes[a] for a in mine], initial=1)))
    return NamedSharding(Mesh(devices, tuple(sizes)), P(*entries)), tuple(shape)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(shardings())
def test_a_mesh_tiling_is_what_jax_says(case):
    sharding, shape = case
    tiling = named_tiling(sharding, shape)
    for device, index in sharding.devices_indices_map(shape).items():
        expected = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
        region = tiling.region_of(device.id)
        if any(a >= b for a, b in expected):
            assert region.count == 0
        else:
            assert region.lo.tolist() == [[a for a, _ in expected]]
            assert region.hi.tolist() == [[b for _, b in expected]]
    tiling.validate()


@settings(derandomize=True, deadline=None, max_examples=100)
@given(shardings())
def test_an_abstract_mesh_tiles_like_the_real_one_and_like_its_op_sharding(case):
    sharding, shape = case
    mesh = sharding.mesh
    abstract = NamedSharding(AbstractMesh(mesh.axis_sizes, mesh.axis_names), sharding.spec)
    order = [d.id for d in mesh.devices.flat]
    assert named_tiling(abstract, shape, np.array(order)).key == named_tiling(sharding, shape).key
    hlo = abstract._to_xla_hlo_sharding(len(shape))
    indices = op_sharding_to_indices(hlo, shape, mesh.size)
    tiling = named_tiling(abstract, shape)
    for position, index in enumerate(indices):
        box = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
        solid = all(a < b for a, b in box)
        assert tiling.region_of(position).lo.tolist() == ([[a for a, _ in box]] if solid else [])


def test_the_first_named_axis_of_a_dim_cuts_slowest():
    tiling = mesh_tiling((8,), {"x": 2, "y": 4}, P(("y", "x")), np.arange(8))
    assert {d: tiling.region_of(d).lo[0, 0] for d in range(8)} == {0: 0, 1: 2, 2: 4, 3: 6, 4: 1, 5: 3, 6: 5, 7: 7}


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 6, 7])
@pytest.mark.parametrize("size", [6, 10, 17, 94])
def test_uneven_dims_differ_by_at_most_one_and_are_held_once(size, parts):
    """UNEVEN-1, UNEVEN-3, LAYER-1: no part is lost, none is silently replicated."""
    tiling = mesh_tiling((size,), {"x": parts}, P("x"), np.arange(parts))
    tiling.validate()
    extents = tiling.elements(parts)
    assert extents.sum() == size
    assert extents.max() - extents.min() <= 1


def test_jax_arrays_refuse_an_uneven_cut_with_the_pad_that_would_do():
    sharding = NamedSharding(AbstractMesh((8,), ("x",)), P("x"))
    with pytest.raises(LayoutError, match=r"dim 0 of size 17 .* pad the dim to 24"):
        named_tiling(sharding, (17, 16))


@pytest.mark.parametrize(
    ("spec", "words"), [(P("x", None, None), "names 3 dims"), (P("nope"), "does not fit a mesh with the axes")]
)
def test_a_spec_that_does_not_fit_is_refused(spec, words):
    with pytest.raises(LayoutError, match=words):
        mesh_tiling((4, 4), {"x": 2}, spec, np.arange(2))


def test_a_stacked_layer_dim_goes_to_the_pipeline_and_specs_are_never_shifted():
    """LAYER-3: a spec shorter than the rank leaves the last dims whole, and the stack goes to pp."""
    space = Space((Tensor("w", (4, 16, 16), "float32", 4),))
    layout = strategy_layout(space, {"w": ("layers", "embed", "mlp")}, Strategy.parse("pp2.tp2"))
    boxes = {d: layout.tilings[0].region_of(d) for d in range(4)}
    assert {d: (b.lo[0].tolist(), b.hi[0].tolist()) for d, b in boxes.items()} == {
        0: ([0, 0, 0], [2, 16, 8]),
        1: ([0, 0, 8], [2, 16, 16]),
        2: ([2, 0, 0], [4, 16, 8]),
        3: ([2, 0, 8], [4, 16, 16]),
    }


def test_a_strategy_layout_equals_the_named_sharding_of_its_mesh():
    strategy = Strategy.parse("fsdp2.tp4")
    space = Space((Tensor("a", (8, 16), "float32", 4), Tensor("b", (16,), "bfloat16", 2)))
    axes = {"a": ("embed", "heads"), "b": ("mlp",)}
    layout = strategy_layout(space, axes, strategy, PARAMETER_RULES, np.arange(8)[::-1])
    mesh = strategy.mesh(jax.devices()[:8][::-1])
    for tiling, spec in zip(layout.tilings, (P("fsdp", "tp"), P("tp")), strict=True):
        assert tiling.key == named_tiling(NamedSharding(mesh, spec), tiling.shape).key
    assert layout.bytes_by_device().tolist() == [8 * 16 * 4 // 8 + 16 * 2 // 4] * 8


@pytest.mark.parametrize(
    ("spec", "parts", "copies"),
    [
        (P("tp", unreduced=frozenset({"dp"})), 2, 2),
        (P(None, "tp", unreduced=frozenset({"dp", "cp"})), 4, 1),
        (P(("cp", "tp"), unreduced=frozenset({"dp"})), 2, 1),
        (P(unreduced=frozenset({"tp"})), 2, 4),
    ],
)
def test_unreduced_axes_hold_parts_of_a_sum_and_copies_count_once(spec, parts, copies):
    devices = np.array(jax.devices()[:8], object)[::-1].reshape(2, 2, 2)
    mesh = Mesh(devices, ("dp", "cp", "tp"), axis_types=(AxisType.Explicit,) * 3)
    tiling = named_tiling(NamedSharding(mesh, spec), (8, 4))
    assert tiling.partial
    held = np.zeros((8, 4), int)
    for lo, hi in zip(tiling.region.lo, tiling.region.hi, strict=True):
        held[tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))] += 1
    assert (held == parts).all()
    assert len(tiling.padded) == 8 - 8 // copies
    assert tiling.devices.tolist() == list(range(8))
    assert (tiling.elements(8) == 32 * parts * copies // 8).all()


@pytest.mark.parametrize(("pp", "holders"), [(1, [0, 1]), (2, [0, 1, 2, 3]), (3, [0, 1, 4, 5])])
def test_a_tied_table_is_at_both_ends_and_nowhere_between(pp, holders):
    space = Space(tuple(Tensor(p, s, "float32", 4) for p, s in (("w", (6, 2, 4)), ("embed", (6, 2)), ("head", (2, 6)))))
    axes = {"w": ("layers", "embed", "mlp"), "embed": ("vocab", "embed"), "head": ("embed", "vocab")}
    last, tied = frozenset({"head"}), frozenset({"embed"})
    layout = strategy_layout(space, axes, Strategy.parse(f"pp{pp}.tp2"), last=last, tied=tied)
    layout.validate()
    table, head, _ = layout.tilings
    assert table.devices.tolist() == holders
    assert head.devices.tolist() == holders[-2:]
    for device in holders:
        assert table.region_of(device).lo.tolist() == [[3 * (device % 2), 0]]
