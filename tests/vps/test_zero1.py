"""Flat ZeRO-1 layouts against buckets that are really laid out and cut."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vps.buffers import cut_buffer

from dynajax.meshes import PARAMETER_RULES, Strategy
from dynajax.vps import Space, Tensor, strategy_layout
from dynajax.vps.zero1 import zero1_layout

AXES = {
    "['embed']": ("vocab", "embed"),
    "['head']": ("embed", "vocab"),
    "['attention']['k']": ("layers", "embed", "kv_heads", "head_dim"),
    "['attention']['o']": ("layers", "heads", "head_dim", "embed"),
    "['attention']['q']": ("layers", "embed", "heads", "head_dim"),
    "['mlp']['down']": ("layers", "expert", "mlp", "embed"),
    "['mlp']['gate']": ("layers", "expert", "embed", "mlp"),
    "['mlp']['router']": ("layers", "embed", None),
    "['mlp']['up']": ("layers", "expert", "embed", "mlp"),
    "['norm']": ("layers", "embed"),
}
STORED = {
    "['embed']": (0, 1),
    "['head']": (1, 0),
    "['attention']['k']": (1, 2, 0),
    "['attention']['o']": (2, 0, 1),
    "['attention']['q']": (1, 2, 0),
    "['mlp']['down']": (0, 2, 1),
    "['mlp']['gate']": (0, 2, 1),
    "['mlp']['router']": (1, 0),
    "['mlp']['up']": (0, 2, 1),
    "['norm']": (0,),
}
"""Dims of each tensor, without layers, in the order of the bucket."""
TURNS = [
    ["['norm']"],
    ["['attention']['k']"],
    ["['attention']['q']"],
    ["['attention']['o']"],
    ["['mlp']['router']"],
    ["['mlp']['gate']", "['mlp']['up']"],
    ["['mlp']['down']"],
]
"""Tensors with layers in the order of a layer; those in one list take turns in blocks."""
LAST = frozenset({"['head']"})


def space(layers=5, heads=4, kv_heads=2, vocab=7, embed=3, experts=5, mlp=6):
    sizes = {
        "layers": layers, "heads": heads, "kv_heads": kv_heads, "head_dim": 2, "vocab": vocab, "embed": embed,
        "expert": experts, "mlp": mlp, None: experts,
    }  # fmt: skip
    return Space(tuple(Tensor(p, tuple(sizes[a] for a in axes), "float32", 4) for p, axes in AXES.items()))


def part(size, index, parts, shared=False):
    """Indices of one part of a dim; of a shared dim, all that the part touches."""
    stop = -(-(index + 1) * size // parts) if shared else (index + 1) * size // parts
    return np.arange(index * size // parts, stop)


def buckets(space, strategy, experts):
    """``(devices of the slices, [(path, global flat indices in order)])`` of every bucket, by plain loops."""
    sizes = strategy.mesh_shape()
    grid = np.arange(strategy.num_devices).reshape(sizes["pp"], -1)
    own = strategy.pipelines[0].experts
    numbered = {t.path: np.arange(int(np.prod(t.shape))).reshape(t.shape) for t in space}
    model: list[tuple[tuple[int, ...], np.ndarray]]
    for stage in range(sizes["pp"]):
        if not experts:
            model = [((t,), grid[stage].reshape(-1, sizes["tp"])[:, t]) for t in range(sizes["tp"])]
        elif own:
            model = [((t, e), grid[stage].reshape(-1, *own)[:, e, t]) for e in range(own[0]) for t in range(own[1])]
        else:
            cube = grid[stage].reshape(-1, sizes["ep"], sizes["cp"], sizes["tp"])
            model = [((t, e), cube[:, e, :, t].reshape(-1)) for e in range(sizes["ep"]) for t in range(sizes["tp"])]
        tp, ep = (own[1], own[0]) if own and experts else (sizes["tp"], sizes["ep"])
        for rank, devices in model:
            entries = []
            if stage == 0 and not experts:
                entries.append(("['embed']", stored("['embed']", numbered["['embed']"], rank, tp, ep)))
            parts = [[e] for e in part(5, rank[1], ep)] if experts else [None]
            for layer, one in itertools.product(part(5, stage, sizes["pp"]), parts):
                for names in TURNS:
                    mine = [p for p in names if ("expert" in AXES[p]) == experts]
                    shards = [stored(p, numbered[p][layer], rank, tp, ep, one) for p in mine]
                    for block in range(8):
                        for path, shard in zip(mine, shards, strict=True):
                            entries.append((path, shard[block * len(shard) // 8 : (block + 1) * len(shard) // 8]))
            if stage == sizes["pp"] - 1 and not experts:
                entries.append(("['head']", stored("['head']", numbered["['head']"], rank, tp, ep)))
            yield devices, entries


def stored(path, array, rank, tp, ep, one=None):
    """One model rank's shard, or ``one`` expert of it, flattened as the bucket stores it."""
    index = []
    axes = [a for a in AXES[path] if a != "layers"]
    for n, name in zip(array.shape, axes, strict=True):
        rule = PARAMETER_RULES[name] if name else ()
        if name == "expert" and one:
            index.append(one)
        elif "tp" in rule:
            index.append(part(n, rank[0], tp, name == "kv_heads"))
        elif "ep" in rule and len(rank) > 1:
            index.append(part(n, rank[1], ep))
        else:
            index.append(np.arange(n))
    return array[np.ix_(*index)].transpose(STORED[path]).reshape(-1)


STRATEGIES = [
    "dp1", "dp2", "tp2", "pp2", "dp3.pp2.tp2", "fsdp2.tp2.cp2", "pp3.dp2", "pp4.tp4", "ep2.dp2", "ep3.tp2",
    "dp4.tp2/ep4", "dp4.tp2/ep2.tp2", "pp2.dp2.tp2/ep4", "pp2.dp2.tp2/ep2", "dp7", "tp3.dp5", "pp5.dp3.tp2/ep3.tp2",
]  # fmt: skip


@pytest.mark.parametrize("text", STRATEGIES)
def test_each_device_has_its_slice_of_its_bucket(text):
    strategy, tensors = Strategy.parse(text), space()
    layout = zero1_layout(tensors, AXES, strategy, last=LAST)
    layout.validate()
    expected = {(d, t.path): np.zeros(0, int) for d in range(strategy.num_devices) for t in tensors}
    for experts in (False, True):
        for devices, entries in buckets(tensors, strategy, experts):
            names = np.concatenate([np.full(len(a), k) for k, (_, a) in enumerate(entries)])
            bucket = np.concatenate([a for _, a in entries])
            for r, device in enumerate(devices):
                mine = slice(r * len(bucket) // len(devices), (r + 1) * len(bucket) // len(devices))
                for k, (path, _) in enumerate(entries):
                    key = (int(device), path)
                    expected[key] = np.concatenate([expected[key], bucket[mine][names[mine] == k]])
    for tensor, tiling in zip(tensors, layout.tilings, strict=True):
        whole = np.arange(int(np.prod(tensor.shape))).reshape(tensor.shape)
        for d in range(strategy.num_devices):
            np.testing.assert_array_equal(
                cut_buffer(whole, tiling.region_of(d)), expected[d, tensor.path], err_msg=tensor.path
            )


@settings(max_examples=60)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 9), st.integers(1, 5), st.randoms(use_true_random=False))
def test_slices_of_a_bucket_are_equal_to_one_element(pp, tp, dp, layers, random):
    strategy = Strategy.parse(f"pp{pp}.tp{tp}.dp{dp}")
    order = list(range(strategy.num_devices))
    random.shuffle(order)
    tensors = space(layers=layers)
    layout = zero1_layout(tensors, AXES, strategy, last=LAST, devices=np.array(order))
    layout.validate()
    dense = [t for t, x in zip(layout.tilings, tensors, strict=True) if "expert" not in AXES[x.path]]
    elements = np.sum([t.elements(strategy.num_devices) for t in dense], axis=0)[order].reshape(pp, dp, tp)
    assert (elements.max(axis=1) - elements.min(axis=1) <= 1).all()


def test_a_slice_of_whole_layers_is_one_box():
    strategy = Strategy.parse("pp4.tp8")
    tensors = Space((Tensor("q", (80, 8192, 64, 128), "float32", 4),))
    region = zero1_layout(tensors, {"q": AXES["['attention']['q']"]}, strategy).tilings[0].region_of(9)
    assert region.lo.tolist() == [[20, 0, 8, 0]]
    assert region.hi.tolist() == [[40, 8192, 16, 128]]


def test_a_flat_layout_of_one_data_rank_holds_what_the_strategy_layout_holds():
    strategy, tensors = Strategy.parse("pp2.tp2"), space()
    flat = zero1_layout(tensors, AXES, strategy, last=LAST)
    dense = strategy_layout(tensors, AXES, strategy, last=LAST)
    for a, b, tensor in zip(flat.tilings, dense.tilings, tensors, strict=True):
        whole = np.arange(int(np.prod(tensor.shape))).reshape(tensor.shape)
        for d in range(4):
            one, other = (np.sort(cut_buffer(whole, t.region_of(d))) for t in (a, b))
            np.testing.assert_array_equal(one, other)


def test_kv_heads_fewer_than_tp_are_held_by_the_ranks_that_need_them():
    """GQA-1: two kv heads, each held by half of eight ranks."""
    tensors = Space((Tensor("k", (1, 2, 2, 4), "float32", 4),))
    layout = strategy_layout(tensors, {"k": AXES["['attention']['k']"]}, Strategy.parse("tp8"))
    layout.validate()
    assert [layout.tilings[0].region_of(d).lo[0, 2] for d in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert set(layout.bytes_by_device().tolist()) == {2 * 4 * 4}


def test_experts_fold_over_the_devices_of_a_stage():
    tensors = Space((Tensor("experts", (2, 8, 1, 1), "float32", 4),))
    axes = {"experts": AXES["['mlp']['up']"]}
    eight, four = (strategy_layout(tensors, axes, Strategy.parse(f"dp2.tp4/ep{n}")) for n in (8, 4))
    assert [eight.tilings[0].region_of(d).lo[0, 1] for d in range(8)] == list(range(8))
    assert [four.tilings[0].region_of(d).lo[0, 1] for d in range(8)] == [0, 2, 4, 6] * 2


def test_counts_past_two_to_the_32_are_exact():
    tensors = Space((Tensor("q", (80, 70_000, 64, 1_000), "float32", 4),))
    layout = zero1_layout(tensors, {"q": AXES["['attention']['q']"]}, Strategy.parse("pp2.dp7.tp8"))
    assert int(layout.bytes_by_device().sum()) == 80 * 70_000 * 64 * 1_000 * 4
    layout.validate()
