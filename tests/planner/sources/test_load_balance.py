"""Load balancing against pieces given one by one, and against the optimum of a linear programme."""

import heapq

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from dynajax.planner.sources.load_balance import (
    RECEIVE_ABROAD,
    SEND_ABROAD,
    SEND_IN_NODE,
    Requests,
    balance_load,
    water_fill,
)

DEVICES = 6
PORTS = (SEND_IN_NODE, SEND_ABROAD, RECEIVE_ABROAD)
sizes = st.lists(st.integers(0, 50), min_size=1, max_size=12).map(lambda n: np.array(n, np.int64))
loads = st.lists(st.integers(0, 200), min_size=1, max_size=8).map(lambda n: np.array(n, np.int64))


def added(load, pick, nbytes):
    """Loads after the pieces."""
    after = load.copy()
    for device, size in zip(pick.tolist(), nbytes.tolist(), strict=True):
        after[device] += size
    return after


def poured(nbytes, load, *ties):
    """The device of each piece of one group."""
    return water_fill(nbytes, np.zeros(len(nbytes), np.int64), np.zeros(len(load), np.int64), load, *ties)


@settings(max_examples=300)
@given(sizes, loads)
def test_water_rises_to_its_level_within_one_piece(nbytes, load):
    """A device that gets pieces ends below the level of the water, were pieces divisible, plus a piece."""
    after = added(load, poured(nbytes, load), nbytes)
    level = min(h for h in range(2000) if sum(max(h - n, 0) for n in load.tolist()) >= nbytes.sum())
    filled = after > load
    assert (after[filled] <= level + nbytes.max()).all()
    assert after.sum() == load.sum() + nbytes.sum()


@settings(max_examples=200)
@given(st.integers(1, 100), st.integers(1, 9), loads, st.data())
def test_equal_pieces_are_given_as_to_the_least_loaded_each_time(count, size, load, data):
    """Of equally loaded devices to the one with the smallest tie."""
    ties = [np.array(data.draw(st.permutations(range(len(load)))), np.int64) // k for k in (3, 1)]
    heap = sorted(zip(load.tolist(), *(t.tolist() for t in ties), range(len(load)), strict=True))
    for _ in range(count):
        least, *rest = heap[0]
        heapq.heapreplace(heap, (least + size, *rest))
    after = added(load, poured(np.full(count, size), load, *ties), np.full(count, size))
    assert after.tolist() == [n for n, *_, k in sorted(heap, key=lambda entry: entry[-1])]


@settings(max_examples=200)
@given(st.lists(st.tuples(sizes, loads), min_size=1, max_size=4))
def test_groups_are_poured_as_if_each_were_alone(groups):
    pieces, devices = zip(*groups, strict=True)
    group, of_device = (np.repeat(np.arange(len(groups)), [len(x) for x in some]) for some in (pieces, devices))
    ties = np.arange(len(of_device))[::-1]
    found = water_fill(np.concatenate(pieces), group, of_device, np.concatenate(devices), ties)
    begin = np.cumsum([0, *[len(x) for x in devices]])
    alone = [b + poured(n, x, ties[b : b + len(x)]) for n, x, b in zip(pieces, devices, begin[:-1], strict=True)]
    assert found.tolist() == np.concatenate(alone).tolist()


@st.composite
def request_lists(draw, most=12):
    """Requests with any candidates, on any port."""
    candidates, ports, volumes = [], [], []
    for _ in range(draw(st.integers(1, most))):
        candidates.append(draw(st.lists(st.integers(0, DEVICES - 1), min_size=1, max_size=4, unique=True).map(sorted)))
        ports.append(draw(st.sampled_from(PORTS)))
        volumes.append(draw(st.integers(1, 30)))
    count = np.array([len(c) for c in candidates], np.int64)
    table = np.concatenate([np.array(c, np.int64) for c in candidates])
    begin, volume, none = np.cumsum(count) - count, np.array(volumes, np.int64), np.zeros((2, 0), np.int64)
    requests = Requests.of(table, begin, count, np.array(ports), volume, np.full(len(count), DEVICES), none)
    return candidates, ports, requests


@settings(max_examples=200)
@given(request_lists())
def test_a_group_is_a_port_and_a_set_of_candidates(drawn):
    candidates, ports, requests = drawn
    keys = [(port, tuple(sorted(c))) for c, port in zip(candidates, ports, strict=True)]
    for a, group in zip(keys, requests.group.tolist(), strict=True):
        assert [b == a for b in keys] == [other == group for other in requests.group.tolist()]


def optimum(entries):
    """The least possible largest load of a device and port; ``entries`` are ``(candidates, port, bytes)``."""
    columns = [(k, port * DEVICES + d) for k, (candidates, port, _) in enumerate(entries) for d in candidates]
    whole, load = np.zeros((len(entries), len(columns) + 1)), np.zeros((len(PORTS) * DEVICES, len(columns) + 1))
    load[:, -1] = -1
    for j, (k, slot) in enumerate(columns):
        whole[k, j], load[slot, j] = 1, entries[k][2]
    cost = np.append(np.zeros(len(columns)), 1.0)
    return linprog(cost, A_ub=load, b_ub=np.zeros(len(load)), A_eq=whole, b_eq=np.ones(len(entries))).fun


@settings(max_examples=100)
@given(st.lists(request_lists(8), min_size=1, max_size=3), st.data())
def test_loads_of_every_route_are_near_the_optimum_port_by_port(drawn, data):
    weights = [np.array(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)), np.int64) for _ in drawn]
    picks = balance_load([requests for *_, requests in drawn], weights, DEVICES)
    for (candidates, ports, requests), weight, variants in zip(drawn, weights, picks, strict=True):
        assert len(variants) == len(weight)
        entries = list(zip(candidates, ports, requests.volume.tolist(), strict=True))
        best, largest = optimum(entries), max(volume for *_, volume in entries)
        for pick in variants:
            load = np.zeros(len(PORTS) * DEVICES, np.int64)
            for (c, port, volume), k in zip(entries, pick.tolist(), strict=True):
                assert 0 <= k < len(c)
                load[port * DEVICES + c[k]] += volume
            assert best - 1e-6 <= load.max() <= best + 2 * largest + 1e-6


def test_nothing_to_choose_is_no_trouble():
    none = np.zeros(0, np.int64)
    requests = Requests.of(none, none, none, none, none, none, none.reshape(2, 0))
    assert [pick.tolist() for pick in balance_load([requests], [np.array([4])], DEVICES)[0]] == [[]]
