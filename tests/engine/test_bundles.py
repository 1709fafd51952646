"""Arrays that store parts of tensors: every tensor bit-equal whichever arrays it lies in, and the fewest bytes."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine.states import P, live_bytes, mesh
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding

import dynajax as dj
from dynajax.arrays.host_view import bytes_of_each
from dynajax.engine import Bundle, Stored, prepare_reshard
from dynajax.engine.memories import Memories, layouts
from dynajax.engine.request import read
from dynajax.engine.shared_memory import uninitialised
from dynajax.engine.transport import PATHS, Path
from dynajax.errors import BudgetError, CheckError, TargetError
from dynajax.meshes import Tier, Topology
from dynajax.planner import build_plan, verify
from dynajax.vps import Block, Run, bucket_parts, fused_parts, layer_part, slice_part

Numpy = np.ndarray[Any, Any]


def on(devices: Any, spec: Any) -> NamedSharding:
    """The devices of these numbers in a row, which the axis ``x`` names."""
    return NamedSharding(Mesh(np.asarray(jax.devices())[np.asarray(devices)], ("x",)), spec)


def filled(bundle: Bundle, tensors: dict[str, Numpy]) -> Numpy:
    """What the array must hold, element by element from the words of ``Block`` and ``Run``; padding is zero."""
    dtype = next(iter(tensors.values())).dtype
    array = np.zeros(bundle.array_shape, dtype)
    for part in bundle.parts:
        whole = tensors[part.tensor]
        if not isinstance(part, Block):
            run = whole.reshape(-1)[part.first : part.first + part.length]
            array[(*part.row, slice(part.at, part.at + part.length))] = run
            continue
        for inside in np.ndindex(*part.extent):
            place = list(part.at)
            for step, dim in zip(inside, part.dims, strict=True):
                if dim is not None:
                    place[dim] += step
            array[tuple(place)] = whole[tuple(f + k for f, k in zip(part.first, inside, strict=True))]
    return array


def placed(bundle: Any, tensors: dict[str, Numpy]) -> jax.Array:
    return jax.block_until_ready(jax.device_put(filled(bundle, tensors), bundle.sharding))


def numbered(shapes: dict[str, tuple[int, ...]], dtype: Any = np.float32) -> dict[str, Numpy]:
    """Tensors in which every element is another one, and none is zero."""
    ends = np.cumsum([0, *(math.prod(s) for s in shapes.values())]) + 1
    pairs = zip(shapes.items(), ends, strict=False)
    return {path: np.arange(a, a + math.prod(s)).reshape(s).astype(dtype) for (path, s), a in pairs}


def bytes_not_held(before: Any, after: Any, tensors: dict[str, Numpy]) -> int:
    """Elements that devices need and do not hold, counted by their values, which all differ."""
    held: dict[Any, set[float]] = {}
    for array in jax.tree.leaves(before):
        for shard in array.addressable_shards:
            held.setdefault(shard.device, {0.0}).update(np.asarray(shard.data).ravel().tolist())
    need: dict[Any, set[float]] = {}
    for array in jax.tree.leaves(after):
        for shard in array.addressable_shards:
            need.setdefault(shard.device, set()).update(np.asarray(shard.data).ravel().tolist())
    itemsize = next(iter(tensors.values())).dtype.itemsize
    return sum(len(values - held.get(device, {0.0})) for device, values in need.items()) * itemsize


def assert_holds(tree: Any, targets: Any, tensors: dict[str, Numpy]) -> None:
    """Every array of the result against what its target asks for."""
    paths = jax.tree_util.tree_leaves_with_path(targets, is_leaf=lambda x: isinstance(x, Bundle))
    for (path, target), array in zip(paths, jax.tree.leaves(tree), strict=True):
        name = jax.tree_util.keystr(path)
        want = filled(target, tensors) if isinstance(target, Bundle) else tensors[name]
        assert array.sharding == target.sharding if isinstance(target, Bundle) else array.sharding == target
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == want[shard.index].tobytes(), (name, shard.device)


def there_and_back(tree: Any, said: Any, targets: Any, tensors: dict[str, Numpy], path: Path) -> None:
    """Move to the targets and back to where the tree was."""
    copied = jax.tree.map(jnp.copy, tree)
    jax.block_until_ready(copied)
    moved, report = dj.reshard(tree, targets, stored=said, donate=True, check=True, path=path)
    assert_holds(moved, targets, tensors)
    assert report.bytes_moved == report.bytes_lower_bound == bytes_not_held(copied, moved, tensors)
    back, report = dj.reshard(moved, said, stored=targets, check=True, path=path)
    assert jax.tree.structure(back) == jax.tree.structure(copied)
    assert_holds(back, said, tensors)
    assert report.bytes_moved == report.bytes_lower_bound == bytes_not_held(moved, back, tensors)
    assert_holds(moved, targets, tensors)


SHAPES = {"['b']": (5,), "['deep']['w']": (4, 6), "['s']": (), "['w']": (8, 16), "['x']": (2, 3, 4)}


def flat(sizes: list[int], shardings: list[NamedSharding], shapes: Any = None) -> list[Bundle]:
    parts = bucket_parts(SHAPES if shapes is None else shapes, sizes)
    return [Bundle(s, (n,), p) for n, s, p in zip(sizes, shardings, parts, strict=True)]


def plain(w: NamedSharding) -> dict[str, Any]:
    whole = NamedSharding(w.mesh, P())
    return {"b": whole, "deep": {"w": whole}, "s": whole, "w": w, "x": whole}


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int8])
def test_flat_buckets_become_tensors_and_buckets_again(dtype: Any, path: Path) -> None:
    """182 elements in three padded buckets over 8, 3 and 1 devices that ignore the borders of tensors."""
    tensors = numbered(SHAPES, dtype)
    buckets = flat([64, 102, 20], [on(range(8), P("x")), on([9, 2, 5], P("x")), on([3], P())])
    tree = [placed(b, tensors) for b in buckets]
    if dtype != np.float32:  # elements of small types do not all differ
        moved, _ = dj.reshard(tree, plain(on([4, 1], P("x"))), stored=buckets, check=True, path=path)
        assert_holds(moved, plain(on([4, 1], P("x"))), tensors)
        return
    for w in (on(range(8), P("x")), on(range(8), P(None, "x")), on([4, 1], P(None, "x"))):
        there_and_back([jnp.copy(a) for a in tree], buckets, plain(w), tensors, path)
    others = flat([90, 100], [on(range(10), P("x")), on(range(5), P("x"))])
    there_and_back(tree, buckets, others, tensors, path)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.data())
def test_any_buckets_on_any_devices(data: Any) -> None:
    def drawn(label: str) -> list[Bundle]:
        left, sizes, shardings = 182, [], []
        while left > 0:
            devices = data.draw(st.lists(st.integers(0, 15), min_size=1, max_size=16, unique=True), label)
            sizes.append(len(devices) * data.draw(st.integers(1, 1 + left // len(devices))))
            shardings.append(on(devices, data.draw(st.sampled_from([P("x"), P()]))))
            left -= sizes[-1]
        return flat(sizes, shardings)

    tensors = numbered(SHAPES)
    source, path = drawn("source"), data.draw(st.sampled_from(PATHS))
    target = drawn("target") if data.draw(st.booleans()) else plain(on([6, 7, 2, 0], P("x")))
    there_and_back([placed(b, tensors) for b in source], source, target, tensors, path)


@pytest.mark.parametrize("spec", [P(None, "x"), P("x"), P()])
def test_runs_in_the_rows_of_an_array(spec: Any, path: Path) -> None:
    """Rows that hold a layer each, padded; an array of some layers names no others and leaves the rest of it alone."""
    tensors = numbered({"['w']": (4, 5, 3)})
    width = 16 if spec == P(None, "x") else 15

    def rows(first: int, count: int, high: int) -> tuple[Run, ...]:
        """Layers of a stack of ``count``, from row ``first`` on of an array of ``high``."""
        assert first + count <= high
        return tuple(Run("['w']", (count, 5, 3), 15 * k, 15, 0, (first + k,)) for k in range(count))

    for devices in ([3, 0], [5, 1, 2, 9]):
        sharding = on(devices, spec)
        whole = Bundle(sharding, (4, width), rows(0, 4, 4))
        array = placed(whole, tensors)
        there_and_back([array], [whole], {"w": on(range(4), P("x"))}, tensors, path)
        some = {"['w']": tensors["['w']"][1:3]}
        named = Bundle(sharding, (4, width), rows(1, 2, 4))
        moved, _ = dj.reshard([placed(whole, tensors)], {"w": on([4], P())}, stored=[named], check=True, path=path)
        assert_holds(moved, {"w": on([4], P())}, some)
        bad = [Bundle(sharding, (4, width), rows(3, 2, 5))]
        with pytest.raises(TargetError, match="lies outside of the tensor or of the array"):
            dj.reshard([placed(whole, tensors)], {"w": on([4], P())}, stored=bad, path=path)


def test_buckets_that_stay_the_same_move_as_they_are() -> None:
    """The same buckets on other devices are plain arrays, and where shards stay their buffers stay."""
    tensors = numbered(SHAPES)
    source = flat([96, 96], [on(range(8), P("x")), on(range(8), P("x"))])
    target = flat([96, 96], [on(range(8), P("x")), on(range(8, 16), P("x"))])
    tree = [placed(b, tensors) for b in source]
    tree = [jax.block_until_ready(jax.jit(lambda a: a + 0)(a)) for a in tree]
    pointers = [s.data.unsafe_buffer_pointer() for s in tree[0].addressable_shards]
    moved, report = dj.reshard(tree, target, stored=source, donate=True, budget=48)
    assert_holds(moved, target, tensors)
    assert [s.data.unsafe_buffer_pointer() for s in moved[0].addressable_shards] == pointers
    assert report.bytes_moved == 96 * 4


def test_buckets_are_freed_one_by_one_within_the_budget() -> None:
    """Forty tensors in twenty buckets: what lies above the base is a bucket and a tensor, counted in live buffers."""
    shapes = {f"['{k:02}']": (16, 48) for k in range(40)}
    tensors = numbered(shapes)
    size = 40 * 16 * 48 // 20
    sizes = [size + 64] * 20
    buckets = flat(sizes, [on(range(4), P("x"))] * 20, shapes)
    target = {path[2:-2]: on(range(4), P(None, "x")) for path in shapes}
    tree = [placed(b, tensors) for b in buckets]
    with pytest.raises(BudgetError) as refused:
        dj.plan_reshard(tree, target, stored=buckets, budget=0, donate=True)
    smallest = int(str(refused.value).split("budget that does is ")[1].split()[0])
    assert smallest <= 4 * (size + 64 + 16 * 48) // 4
    plan = dj.plan_reshard(tree, target, stored=buckets, budget=smallest, donate=True)
    verify(plan)
    before = live_bytes()
    moved, report = dj.reshard(tree, target, stored=buckets, plan=plan)
    assert report.peak_extra_bytes == plan.peak_extra_bytes <= smallest
    assert report.stages > 10
    assert all(a.is_deleted() for a in tree)
    assert max(live_bytes().values()) <= max(before.values())
    assert_holds(moved, target, tensors)


def test_layers_one_by_one_are_the_stack(path: Path) -> None:
    """Unstacked and stacked states are the same region: ten arrays on two meshes, and one on a third."""
    tensors = numbered({"['w']": (10, 4, 8)})
    near, far = on(range(4), P(None, "x")), on(range(8, 12), P("x"))
    parts = [layer_part("['w']", (10, 4, 8), k) for k in range(10)]
    layers = [Bundle(near if k < 6 else far, (4, 8), (part,)) for k, part in enumerate(parts)]
    tree = {"layers": [placed(b, tensors) for b in layers]}
    there_and_back(tree, {"layers": layers}, {"w": on(range(5), P("x"))}, tensors, path)
    tree = {"layers": [placed(b, tensors) for b in layers]}
    pipeline = Stored(
        on(range(4), P("x")),
        (12, 4, 8),
        (10, 4, 8),
        (((0, 0, 3), (3, 3, 3), (6, 6, 2), (9, 8, 2)), ((0, 0, 4),), ((0, 0, 8),)),
    )
    moved, _ = dj.reshard(tree, {"w": pipeline}, stored={"layers": layers}, check=True, path=path)
    want = np.zeros((12, 4, 8), np.float32)
    for at, first, length in pipeline.pieces[0]:
        want[at : at + length] = tensors["['w']"][first : first + length]
    assert np.array_equal(moved["w"], want)


def test_a_mixed_present_becomes_one_target(path: Path) -> None:
    """Five layers of a stack are on a cp mesh, five on a tp mesh, the head on a third: tp2.cp4 takes them all."""
    shapes = {"['head']": (8, 4), "['stack']": (10, 8, 4)}
    tensors = numbered(shapes)
    cp = NamedSharding(dj.Strategy.parse("cp4").mesh(jax.devices()[:4]), P())
    tp = NamedSharding(dj.Strategy.parse("pp2.tp4").mesh(jax.devices()[8:16]), P(None, "tp"))
    pp = NamedSharding(dj.Strategy.parse("pp2.tp2").mesh(jax.devices()[4:8]), P("tp"))
    said = {
        "stack": (
            Bundle(cp, (5, 8, 4), (slice_part("['stack']", (10, 8, 4), 0, 5),)),
            Bundle(tp, (5, 8, 4), (slice_part("['stack']", (10, 8, 4), 5, 10),)),
        ),
        "head": pp,
    }
    tree = {
        "stack": tuple(placed(b, tensors) for b in said["stack"]),
        "head": jax.device_put(tensors["['head']"], pp),
    }
    target = dj.Strategy.parse("tp2.cp4").mesh(jax.devices()[4:12])
    goal = {"stack": NamedSharding(target, P(None, None, "tp")), "head": NamedSharding(target, P("tp"))}
    there_and_back(tree, said, goal, tensors, path)


def test_the_example_of_sixteen_devices_to_eight(path: Path) -> None:
    """cp2.tp4.pp2 to tp2.cp4: layers by pipeline stage on meshes of their own, to one stack."""
    tensors = numbered({"['w']": (6, 8, 12)})
    devices = np.asarray(jax.devices())[:16]
    source = dj.Strategy.parse("pp2.tp4.cp2").mesh(list(devices))
    stages = [Mesh(source.devices.reshape(2, -1)[k].reshape(4, 2), ("tp", "cp")) for k in range(2)]
    said = [
        Bundle(NamedSharding(m, P(None, None, "tp")), (3, 8, 12), (slice_part("['w']", (6, 8, 12), 3 * k, 3 * k + 3),))
        for k, m in enumerate(stages)
    ]
    target = NamedSharding(dj.Strategy.parse("tp2.cp4").mesh(list(devices[:8])), P(None, None, "tp"))
    there_and_back([placed(b, tensors) for b in said], said, {"w": target}, tensors, path)


def test_whole_leaves_on_different_meshes() -> None:
    """Where every leaf has one mesh, nothing needs to be said."""
    names = ("dp2.tp4", "tp2 disjoint", "tp4 overlapping", "one device")
    tree = {
        n: jax.device_put(np.arange(64.0).reshape(8, 8) + k, NamedSharding(mesh(n), P("tp")))
        for k, n in enumerate(names)
    }
    moved, report = dj.reshard(tree, NamedSharding(mesh("fsdp4.tp2"), P("fsdp", "tp")), donate=True, check=True)
    assert report.bytes_moved == report.bytes_lower_bound
    assert all(np.array_equal(moved[n], np.arange(64.0).reshape(8, 8) + k) for k, n in enumerate(names))


def test_copies_on_two_meshes_serve_whoever_is_near(path: Path) -> None:
    """A tensor that two pipelines hold, each in its way, is read from whichever a device has; one copy is made."""
    tensors = numbered({"['w']": (8, 8)})
    copies = [
        Bundle(on([0, 1, 2, 3], P("x")), (8, 8), (Block.whole("['w']", (8, 8)),)),
        Bundle(on([3, 4, 5], P()), (8, 8), (Block.whole("['w']", (8, 8)),)),
    ]
    tree = [placed(b, tensors) for b in copies]
    moved, report = dj.reshard(tree, {"w": on([0, 1, 2, 3, 4, 5, 6, 7], P("x"))}, stored=copies, check=True, path=path)
    assert np.array_equal(moved["w"], tensors["['w']"])
    assert report.bytes_moved == report.bytes_lower_bound == bytes_not_held(tree, moved, tensors) == 4 * 8 * 4
    again, report = dj.reshard(
        moved,
        [*copies[:1], Bundle(on([4, 5], P()), (8, 8), copies[1].parts)],
        stored={"w": moved["w"].sharding},
        path=path,
    )
    assert all(np.array_equal(a, tensors["['w']"]) for a in again)
    with pytest.raises(TargetError, match="holds one element twice"):
        dj.reshard(moved, copies, stored={"w": moved["w"].sharding}, path=path)


QKV = {"['q']": (16, 6), "['k']": (4, 6), "['v']": (4, 6)}


def fused(ranks: int, devices: Any) -> Bundle:
    return Bundle(on(devices, P("x")), (24, 6), fused_parts(QKV, ranks))


def test_fused_attention_changes_its_tp_degree_and_comes_apart(path: Path) -> None:
    """Rank r of tp4 holds [q_r|k_r|v_r]; of tp2, the same in halves; apart, q, k and v are arrays of their own."""
    tensors = numbered(QKV)
    four, two = fused(4, range(4)), fused(2, [6, 1])
    first = np.asarray(placed(four, tensors).addressable_shards[1].data)
    assert np.array_equal(first, np.concatenate([tensors["['q']"][4:8], tensors["['k']"][1:2], tensors["['v']"][1:2]]))
    there_and_back({"qkv": placed(four, tensors)}, {"qkv": four}, {"qkv": two}, tensors, path)
    apart = {"q": on(range(8), P("x")), "k": on(range(4), P("x")), "v": on([4, 2], P(None, "x"))}
    there_and_back({"qkv": placed(two, tensors)}, {"qkv": two}, apart, tensors, path)


def test_fused_gate_and_up_along_columns_of_a_stack(path: Path) -> None:
    shapes = {"['gate']": (3, 4, 8), "['up']": (3, 4, 8)}
    tensors = numbered(shapes)
    columns, side = (
        P(None, None, "x"),
        [Bundle(on(range(n), P(None, None, "x")), (3, 4, 16), fused_parts(shapes, n, 2)) for n in (8, 2)],
    )
    there_and_back([placed(side[0], tensors)], side[:1], side[1:], tensors, path)
    there_and_back(
        [placed(side[1], tensors)], side[1:], {"gate": on([5, 3], columns), "up": on(range(4), columns)}, tensors, path
    )


def test_other_leaves_keep_their_places_and_keys_move(path: Path) -> None:
    keys = jax.random.split(jax.random.key(3), 6)
    whole = jax.device_put(keys, on([0, 1, 2], P("x")))
    said = {"keys": Bundle(whole.sharding, (6,), (slice_part("['keys']", (6,), 0, 6),)), "n": None}
    halves = [Bundle(on([k], P()), (3,), (slice_part("['keys']", (6,), 3 * k, 3 * k + 3),)) for k in (0, 1)]
    moved, _ = dj.reshard(
        {"keys": whole, "n": 7},
        {"halves": halves, "n": 7},
        stored={"keys": said["keys"], "n": whole.sharding},
        path=path,
    )
    assert moved["n"] == 7
    got = np.concatenate([jax.random.key_data(h) for h in moved["halves"]])
    assert np.array_equal(got, jax.random.key_data(keys))


def test_what_does_not_meet_is_refused_by_name() -> None:
    tensors = numbered({"['w']": (4, 4)})
    sharding = on([0, 1], P("x"))
    half = Bundle(sharding, (2, 4), (slice_part("['w']", (4, 4), 0, 2),))
    tree = {"half": placed(half, tensors)}
    cases = [
        ({"w": sharding}, {"half": half}, r"\['w'\].*cover"),
        ({"v": sharding}, {"half": half}, r"\['v'\]: the state has no tensor of this name; it has \['w'\]"),
        ({"half": half}, {"half": sharding}, r"\['half'\].*\['w'\]"),
        ({"half": Bundle(sharding, (4,), half.parts)}, {"half": half}, r"\['half'\].*dims"),
        ({"half": Bundle(sharding, (2, 4), ())}, {"half": half}, "no part"),
        ({}, {"half": half}, r"no place for \['w'\]"),
    ]
    for target, said, message in cases:
        with pytest.raises(TargetError, match=message) as error:
            dj.reshard(tree, target, stored=said, donate=True)
        assert "\n" not in str(error.value)
    assert not tree["half"].is_deleted()
    halves = [Bundle(sharding, (2, 4), (slice_part("['w']", (4, 4), k, k + 2),)) for k in (0, 2)]
    with pytest.raises(TargetError, match="one array is at two places"):
        dj.reshard([tree["half"]] * 2, {"w": sharding}, stored=halves, donate=True)


def test_replicas_in_different_arrays_are_compared_when_asked(path: Path) -> None:
    part = (Block.whole("['w']", (4,)),)
    said = [Bundle(on([k], P()), (4,), part) for k in range(2)]
    tree = [jax.device_put(np.full(4, 1.0 + k, np.float32), b.sharding) for k, b in enumerate(said)]
    with pytest.raises(CheckError, match=r"\['w'\].*replicas differ"):
        dj.reshard(tree, {"w": on([5], P())}, stored=said, check=True, path=path)


def test_a_plan_needs_shapes_only_and_fits_the_move(path: Path) -> None:
    tensors = numbered(SHAPES)
    buckets = flat([100, 84], [on(range(4), P("x")), on([7], P())])
    tree = [placed(b, tensors) for b in buckets]
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for a in tree]
    target = plain(on(range(8), P("x")))
    plan = dj.plan_reshard(shapes, target, stored=buckets, path=path)
    verify(plan)
    prepare_reshard(shapes, target, plan=plan, stored=buckets, path=path)
    moved, _ = dj.reshard(tree, target, plan=plan, stored=buckets, path=path)
    assert_holds(moved, target, tensors)
    other = flat([84, 100], [on([7], P()), on(range(4), P("x"))])
    with pytest.raises(TargetError, match="another state"):
        dj.reshard([placed(b, tensors) for b in other], target, plan=plan, stored=other, path=path)


def test_a_none_of_both_trees_is_part_of_the_result(path: Path) -> None:
    """As where optax masks a leaf: the tree of targets is written out whole, and has None where the state has."""
    tensors = numbered({"['w']": (8, 4)})
    bucket = Bundle(on([0, 1], P("x")), (32,), (Run("['w']", (8, 4), 0, 32, 0),))
    tree = {"w": placed(bucket, tensors), "masked": None, "count": np.int32(3), "stays": jnp.ones(2)}
    said = {"w": bucket, "masked": None, "count": None, "stays": None}
    target = {"w": on([3], P()), "masked": None, "count": None, "stays": None}
    moved, _ = dj.reshard(tree, target, stored=said, check=True, path=path)
    assert moved["masked"] is None
    assert moved["stays"] is tree["stays"]
    assert moved["count"] == 3
    assert np.array_equal(moved["w"], tensors["['w']"])


def test_large_targets_can_be_donated_and_preparing_compiles_them(path: Path) -> None:
    """Two flat buckets of 640 KB become three matrices that the next step reuses in place."""
    shapes = {f"['{k}']": (256, 400) for k in range(3)}
    tensors = numbered(shapes)
    buckets = flat([160_000, 160_000], [on(range(4), P("x"))] * 2, shapes)
    target = {str(k): on(range(8), P("x")) for k in range(3)}
    tree = [placed(b, tensors) for b in buckets]
    plan = dj.plan_reshard(tree, target, stored=buckets, donate=True, path=path)
    prepare_reshard(tree, target, plan=plan, stored=buckets, path=path)
    moved, report = dj.reshard(tree, target, stored=buckets, plan=plan, check=True, path=path)
    assert report.compile_s == 0
    pointers = {name: [s.data.unsafe_buffer_pointer() for s in x.addressable_shards] for name, x in moved.items()}
    step = jax.jit(lambda t: jax.tree.map(lambda a: a + 1, t), donate_argnums=0)
    stepped = jax.block_until_ready(step(moved))
    for name, x in stepped.items():
        assert np.array_equal(x, tensors[f"['{name}']"] + 1)
        assert [s.data.unsafe_buffer_pointer() for s in x.addressable_shards] == pointers[name]


def test_what_a_plan_for_nodes_relays_is_passed_on(path: Path) -> None:
    """Nodes of two devices: a node gets each byte once, and its devices pass it on to each other."""
    tensors = numbered(SHAPES)
    buckets = flat([100, 84], [on([0, 1], P("x")), on([1], P())])
    target = plain(on([4, 5, 6, 7], P("x")))
    tree = [placed(b, tensors) for b in buckets]
    request = read(tree, target, buckets)
    memories = Memories.of_request(request)
    tiers = [(Tier("memory", 1e9, 0), 1), (Tier("node", 1e9, 0), 2), (Tier("all", 1e8, 0), 0)]
    topology = Topology.regular("pairs", tiers, len(memories.listed))
    plan = build_plan(*layouts(request, memories), 10**6, False, topology=topology)
    assert any(move.copies.relayed.any() for move in plan.moves)
    verify(plan)
    moved, _ = dj.reshard(tree, target, stored=buckets, plan=plan, check=True, path=path)
    assert_holds(moved, target, tensors)


def test_padding_of_large_targets_is_zero_whatever_lay_in_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = uninitialised.allocate

    def dirty(*args: Any) -> list[list[jax.Array]]:
        made = allocate(*args)
        for shard in (shard for shards in made for shard in shards):
            bytes_of_each([shard])[0][...] = 0xA5
        return made

    monkeypatch.setattr(uninitialised, "allocate", dirty)
    shapes = {"['w']": (256, 400), "['v']": (100, 100)}
    tensors = numbered(shapes)
    tree = {path[2:-2]: jax.device_put(x, on([0], P())) for path, x in tensors.items()}
    buckets = flat([60_000, 60_000], [on(range(4), P("x"))] * 2, shapes)
    moved, _ = dj.reshard(tree, buckets, check=True)
    assert_holds(moved, buckets, tensors)
