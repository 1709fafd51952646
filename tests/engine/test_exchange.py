"""What only the XLA path has: one exchange program for every move, waves that lose nothing, passing on, many leaves."""

from __future__ import annotations

import logging
from typing import Any

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from engine.states import P, assert_same_bits, host_state, mesh, shardings, state
from hypothesis import given
from jax.sharding import NamedSharding

import dynajax as dj
from dynajax.engine import programs
from dynajax.engine.transport import Path
from dynajax.engine.waves import NOWHERE, Grains, longest_of, waves_of, words_and_grain
from dynajax.engine.words import Words, is_packed
from dynajax.errors import LayoutError, TopologyError
from dynajax.meshes import Tier, Topology


@pytest.fixture
def compiled(caplog: pytest.LogCaptureFixture) -> Any:
    """Messages of jax about programs that it had XLA compile."""
    programs.exchange.cache_clear()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        yield lambda: [r.getMessage() for r in caplog.records if "Finished XLA compilation" in r.getMessage()]


def _exchanges(messages: list[str]) -> int:
    return sum("dynajax_exchange" in message for message in messages)


def test_one_exchange_program_serves_every_move_between_the_same_devices(compiled: Any) -> None:
    before, _ = dj.reshard(state("dp2.tp4"), shardings("fsdp8"), path="xla")
    assert _exchanges(compiled()) == 1
    after, _ = dj.reshard(before, shardings("tp8 reversed"), donate=True, path="xla")
    other = [jax.device_put(np.full((8, 24), k, np.int16), NamedSharding(mesh("tp8"), P("tp"))) for k in range(3)]
    moved, _ = dj.reshard(other, NamedSharding(mesh("dp2.tp4"), P(None, "tp")), path="xla")
    assert _exchanges(compiled()) == 1
    assert len(compiled()) > 1
    assert_same_bits(after, host_state())
    assert all(np.array_equal(x, np.full((8, 24), k)) for k, x in enumerate(moved))


def test_many_leaves_share_their_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    on = NamedSharding(mesh("dp8"), P())
    tree = jax.device_put([np.full(16, k, np.float32) for k in range(300)], on)
    calls: list[str] = []
    for name in ("exchange", "pack", "unpack", "put", "take"):
        get = getattr(programs, name)

        def counted(*key: Any, name: str = name, get: Any = get) -> Any:
            program = get(*key)
            return lambda *args: (calls.append(name), program(*args))[1]

        monkeypatch.setattr(programs, name, counted)
    moved, _ = dj.reshard(tree, NamedSharding(mesh("sixteen"), P("fsdp")), path="xla")
    assert all(np.array_equal(x, np.full(16, k, np.float32)) for k, x in enumerate(moved))
    assert calls.count("exchange") == calls.count("pack") == 1
    assert len(calls) < 50


@given(st.data())
def test_waves_bring_every_grain_where_it_belongs(data: st.DataObject) -> None:
    devices, buckets, places = (data.draw(st.integers(1, n)) for n in (7, 4, 5))
    sizes = data.draw(st.lists(st.integers(0, 12), min_size=devices * devices, max_size=devices * devices))
    pair = np.repeat(np.arange(devices * devices), sizes)
    sender, receiver = np.divmod(pair, devices)
    rng = np.random.default_rng(0)
    source, target = rng.integers(0, 50, len(pair)), rng.permutation(len(pair))
    held = rng.integers(0, 2**31, (devices, 50))
    made = np.full((devices, len(pair)), -1)
    process = np.asarray(data.draw(st.lists(st.integers(0, 2), min_size=devices, max_size=devices)))
    longest = longest_of(np.asarray(sizes).reshape(devices, devices))
    seen = []
    for k in np.unique(process):
        here, mine = np.flatnonzero(process == k), (process[sender] == k) | (process[receiver] == k)
        grains = Grains(sender[mine], receiver[mine], source[mine], target[mine])
        seen.append((here, list(waves_of(grains, longest, here, buckets, places))))
    for waves in zip(*(waves for _, waves in seen), strict=True):
        order = np.argsort(np.concatenate([here for here, _ in seen]))
        taken, put = (np.concatenate([getattr(w, end) for w in waves])[order] for end in ("source", "target"))
        wave = waves[0]
        assert all(w.count == wave.count and np.array_equal(w.rounds, wave.rounds) for w in waves)
        assert 0 < wave.count <= buckets
        area = np.take_along_axis(held, taken, axis=1).reshape(devices, buckets, places)
        came = np.full_like(area, -2)
        for bucket, step in enumerate(wave.rounds.tolist()):
            for device in range(devices):
                if device ^ step < devices and bucket < wave.count:
                    came[device ^ step, bucket] = area[device, bucket]
        for device, row in enumerate(put):
            written = row != NOWHERE
            assert (made[device, row[written]] == -1).all()
            made[device, row[written]] = came.reshape(devices, -1)[device, written]
    want = np.full_like(made, -1)
    want[receiver, target] = held[sender, source]
    assert np.array_equal(made, want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn", "bool", "int8"])
@pytest.mark.parametrize("widened", [False, True])
def test_words_hold_every_bit(dtype: str, widened: bool) -> None:
    kind = np.dtype(dtype)
    bits = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 256, (6, 8 * kind.itemsize), np.uint8)
    words = Words(kind, widened and kind.itemsize < 4)
    sent = jax.jit(lambda x: words.join(words.unsigned(x)))(bits.view(kind))
    assert sent.dtype == np.uint32
    assert sent.shape == (6, words.count(8))
    assert words.elements(words.count(8)) == 8
    came = jax.jit(lambda x: words.typed(words.split(x)))(sent)
    assert came.dtype == kind
    assert np.asarray(came).tobytes() == bits.tobytes()


def test_more_grains_than_32_bits_count_are_refused() -> None:
    assert words_and_grain(np.dtype(np.float32), 2**12, 2**20, 2**36)[1] == 2**12
    with pytest.raises(LayoutError, match="runs of 3 has more runs than 32 bits count"):
        words_and_grain(np.dtype(np.float32), 3, 2**20, 3 * 2**31)


KINDS = ["float32", "bfloat16", "float16", "float8_e5m2", "bool", "int8", "int4", "uint2", "float4_e2m1fn", "complex64"]


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("columns", [16, 6])
def test_every_bit_arrives_of_large_leaves_and_small(dtype: str, columns: int) -> None:
    kind = jax.numpy.dtype(dtype)
    bits = np.random.default_rng(0).integers(0, 256, (64, columns * kind.itemsize), np.uint8)
    if kind == np.bool_ or is_packed(kind):
        bits = bits & 1
    values = bits.astype(kind) if is_packed(kind) else bits.view(kind)
    x = jax.block_until_ready(jax.device_put(values, NamedSharding(mesh("tp8"), P("tp"))))
    for budget in ("8KB", "4MB"):
        goal = NamedSharding(mesh("fsdp2.tp2 permuted"), P("fsdp", "tp"))
        moved, _ = dj.reshard(x, goal, path="xla", check=True, budget=budget)
        assert_same_bits(moved, values)


def test_what_is_passed_on_inside_a_node_arrives(path: Path) -> None:
    """A plan for two nodes: each piece crosses once, to one device that gives it to the others."""
    tiers = [(Tier("memory", 4e9, 0), 1), (Tier("bus", 2e9, 0), 4), (Tier("net", 1e9, 0), 0)]
    nodes = Topology.regular("two nodes", tiers, 16)
    want = [np.arange(4096.0, dtype=np.float32).reshape(64, 64), np.arange(8, dtype=np.int16)]
    for source, target in (("tp4 overlapping", "sixteen"), ("one device", "dp8"), ("fsdp2.tp2 permuted", "dp8")):
        tree = jax.device_put(want, NamedSharding(mesh(source), P("tp")))
        goal = NamedSharding(mesh(target), P("fsdp"))
        plan = dj.plan_reshard(tree, goal, donate=True, budget="64KB", path=path, topology=nodes)
        assert any(move.copies.relayed.any() for move in plan.moves)
        assert plan.bytes_inter_node == plan.bytes_inter_node_lower_bound
        moved, _ = dj.reshard(tree, goal, plan=plan, check=True, path=path)
        assert_same_bits(moved, want)
    with pytest.raises(TopologyError, match="device 7 and topology 'small' has 4"):
        dj.plan_reshard(moved, goal, topology=Topology.regular("small", tiers, 4))
