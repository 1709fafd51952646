"""Stored dims by brute force: every element once, equal parts, zeros elsewhere, and rules that say what they do."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from dynajax.errors import LayoutError
from dynajax.meshes import Strategy
from dynajax.models import LlamaConfig, MoeConfig, ParameterSpec, parameter_specs
from dynajax.runtime import Cut, CutLayers, ShardedModel, parameter_storage, storage_of

RULES = {"layers": CutLayers(chunks=2), "mlp": Cut(("tp",)), "heads": Cut(("tp", "cp"), granule=3), "embed": Cut()}
MOE = MoeConfig(layers=3, hidden=8, ffn=6, heads=2, kv_heads=2, head_dim=4, vocab=20, experts=8, top_k=2)

mesh_shapes = st.fixed_dictionaries({axis: st.integers(1, 5) for axis in ("pp", "tp", "cp")})
dims = st.lists(st.sampled_from([*RULES, None]), max_size=4, unique=True).flatmap(
    lambda axes: st.tuples(st.just(axes), st.tuples(*[st.integers(1, 9)] * len(axes)))
)


def parts_of(storage, mesh_shape):
    return [int(np.prod([mesh_shape[a] for a in dim.axes])) for dim in storage.dims]


@settings(max_examples=40)
@given(dims.filter(lambda d: not {"mlp", "heads"} <= set(d[0])), mesh_shapes)
def test_storage_holds_every_element_once_in_equal_parts(named, mesh_shape):
    axes, shape = named
    storage = storage_of(shape, axes, RULES, mesh_shape)
    assert storage.logical_shape == shape
    assert all(dim.stored % n == 0 for dim, n in zip(storage.dims, parts_of(storage, mesh_shape), strict=True))
    indices = [dim.index for dim in storage.dims]
    for size, index in zip(shape, indices, strict=True):
        assert sorted(index[index >= 0]) == list(range(size))
    x = np.arange(1, 1 + np.prod(shape, dtype=int)).reshape(shape)
    stored = np.asarray(storage.to_storage(jnp.asarray(x)))
    assert stored.shape == storage.shape
    inside = np.ix_(*(index >= 0 for index in indices))
    want = np.zeros(storage.shape, int)
    want[inside] = x[np.ix_(*(index[index >= 0] for index in indices))]
    assert np.array_equal(stored, want)
    assert np.array_equal(storage.to_logical(jnp.asarray(stored)), x)
    assert storage.is_identity == (storage.shape == shape and np.array_equal(stored, x) and axes_in_order(storage))


def axes_in_order(storage):
    return all(np.array_equal(dim.index, np.arange(len(dim.index))) for dim in storage.dims)


@given(st.integers(1, 40), mesh_shapes, st.integers(1, 3))
def test_a_granule_is_never_cut(groups, mesh_shape, granule):
    dim = Cut(("tp", "cp"), granule).store(groups * granule, mesh_shape)
    parts = mesh_shape["tp"] * mesh_shape["cp"]
    assert parts == 1 or dim.stored % (parts * granule) == 0
    assert 0 <= dim.stored - dim.logical < parts * granule


def test_UNEVEN_1_six_elements_come_back_after_every_hop():
    v = jnp.arange(6.0)
    for parts, stored in [(4, 8), (3, 6), (2, 6), (6, 6), (4, 8)]:
        storage = storage_of((6,), ("mlp",), RULES, {"tp": parts})
        assert storage.shape == (stored,)
        v = storage.to_logical(storage.to_storage(v))
        assert v.tolist() == [0, 1, 2, 3, 4, 5]


def test_UNEVEN_3_and_VOCAB_1_a_table_is_padded_by_its_own_size_each_time_and_never_replicated():
    config = LlamaConfig(layers=1, hidden=16, ffn=16, heads=2, kv_heads=2, head_dim=4, vocab=1003)
    table = parameter_specs(config)["embed"]["tokens"]
    for strategy, rows in [("tp2", 1004), ("tp8", 1008), ("tp4.pp3", 1008), ("tp1", 1003)]:
        storage = parameter_storage(table, config, Strategy.parse(strategy))
        assert storage.shape == (rows, 16)
        assert storage.logical_shape == (1003, 16)
        assert storage.spec[0] == ("tp", "pp")


def test_GQA_1_heads_are_padded_in_whole_groups_or_kv_heads_are_declared_whole():
    config = LlamaConfig(layers=1, hidden=16, ffn=16, heads=12, kv_heads=6, head_dim=4, vocab=8)
    for tp, heads, kv_heads in [(2, 12, 6), (4, 16, 8), (3, 12, 6), (8, 16, 6)]:
        storage = ShardedModel(config, Strategy.parse(f"tp{tp}")).storage["blocks"]["attention"]
        assert storage["q"].shape[2] == heads
        assert storage["k"].shape[2] == kv_heads
        declared = ShardedModel(config, Strategy.parse(f"tp{tp}")).replicated
        assert ("kv_heads" in declared) == (storage["k"].spec[2] is None) == (tp > 6)


def test_MOE_1_expert_e_stays_expert_e_whatever_ep_is():
    specs = parameter_specs(MOE)["blocks"]["mlp"]
    up = jnp.broadcast_to(jnp.arange(8.0)[None, :, None, None], specs["up"].shape)
    router = jnp.broadcast_to(jnp.arange(8.0), specs["router"].shape)
    for strategy in ("ep2", "ep4", "ep1", "ep8", "ep3", "pp2.ep2.tp2", "dp2.tp4/ep8", "ep2"):
        storage = ShardedModel(MOE, Strategy.parse(strategy)).storage["blocks"]["mlp"]
        stored = storage["up"].to_storage(up)
        index = storage["up"].dims[1].index
        real = np.asarray(stored)[0][index >= 0, 0, 0]
        assert real.tolist() == index[index >= 0].tolist()
        up, router = (
            storage["up"].to_logical(stored),
            storage["router"].to_logical(storage["router"].to_storage(router)),
        )
        assert np.array_equal(up[0, :, 0, 0], np.arange(8))
        assert np.array_equal(router[0, 0], np.arange(8))
        assert storage["router"].spec[2] is None


def test_LAYER_3_a_stacked_parameter_is_cut_along_its_own_dims():
    parameter = ParameterSpec((4, 16, 16), jnp.dtype("float32"), ("layers", "embed", "mlp"))
    config = LlamaConfig(layers=4, hidden=16, ffn=16, heads=2, kv_heads=2, head_dim=4, vocab=8)
    assert parameter_storage(parameter, config, Strategy.parse("pp2.fsdp2.tp4")).spec == PartitionSpec(
        "pp", "fsdp", "tp"
    )


def test_pieces_are_runs():
    dim = CutLayers(chunks=1).store(10, {"pp": 4})
    assert [tuple(piece) for piece in dim.pieces] == [(0, 0, 2), (3, 2, 5), (9, 7, 3)]
    assert Cut(("tp",)).store(5, {"tp": 4}).pieces == ((0, 0, 5),)


def test_what_does_not_fit_is_refused():
    with pytest.raises(LayoutError, match=r"no rule for the logical axes \['odd'\]; the rules know embed, heads"):
        storage_of((4,), ("odd",), RULES, {"tp": 2})
    with pytest.raises(LayoutError, match="cut two dims along one mesh axis"):
        storage_of((4, 6), ("mlp", "heads"), RULES, {"tp": 2, "cp": 1})
    with pytest.raises(LayoutError, match=r"got shape \(5,\) where \(6,\) was expected"):
        storage_of((6,), ("mlp",), RULES, {"tp": 4}).to_storage(jnp.zeros(5))
