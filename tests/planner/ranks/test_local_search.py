"""The local search against all ways to place units on nodes."""

import itertools

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from dynajax.planner.ranks.local_search import CommonBytes, positions, swap_units

NODES, WIDTH = 3, 3
DEVICES = NODES * WIDTH


@st.composite
def cases(draw):
    """Units of one or two ranks, a start that fits, and bytes that ranks need and devices hold."""
    widths = draw(st.lists(st.integers(1, 2), min_size=1, max_size=5).filter(lambda n: sum(n) <= DEVICES - 1))
    borders = np.cumsum([0, *widths])
    units = [np.arange(a, b) for a, b in itertools.pairwise(borders)]
    starts = [p for p in itertools.product(range(NODES), repeat=len(units)) if fits(p, widths)]
    assume(starts)
    start = draw(st.sampled_from(starts))
    keys = st.tuples(st.integers(0, DEVICES - 1), st.integers(0, int(borders[-1]) - 1))
    pairs = draw(st.dictionaries(keys, st.integers(1, 50), max_size=20))
    device, rank = (np.array([p[k] for p in pairs], np.int64) for k in range(2))
    return units, start, CommonBytes(device, rank, np.array(list(pairs.values()), np.int64))


def fits(places, widths):
    return all(sum(w for p, w in zip(places, widths, strict=True) if p == n) <= WIDTH for n in range(NODES))


def kept(common, ranks, devices):
    """The most bytes that the ranks can keep on the devices."""
    table = np.zeros((len(ranks), len(devices)))
    for d, r, nbytes in zip(common.device.tolist(), common.rank.tolist(), common.nbytes.tolist(), strict=True):
        if r in ranks and d in devices:
            table[ranks.index(r), devices.index(d)] = nbytes
    return table[linear_sum_assignment(table, maximize=True)].sum()


def value(common, units, places):
    """Bytes kept with each unit on its node."""
    return sum(
        kept(
            common,
            [r for unit, p in zip(units, places, strict=True) if p == n for r in unit.tolist()],
            list(range(n * WIDTH, (n + 1) * WIDTH)),
        )
        for n in range(NODES)
    )


def alone(common, unit, node):
    """A bound of what a unit keeps on a node: every rank has the device that is best for it."""
    return sum(max(kept(common, [r], [d]) for d in range(node * WIDTH, (node + 1) * WIDTH)) for r in unit.tolist())


@settings(max_examples=80)
@given(cases())
def test_no_unit_that_could_keep_more_elsewhere_finds_a_step_that_keeps_more(case):
    units, start, common = case
    widths, nodes = [len(unit) for unit in units], [np.arange(n * WIDTH, (n + 1) * WIDTH) for n in range(NODES)]
    found = swap_units(common, units, start, nodes)
    assert [len(devices) for devices in found] == widths
    assert len(set(np.concatenate(found).tolist())) == sum(widths)
    places = [int(devices[0]) // WIDTH for devices in found]
    assert all((devices // WIDTH == p).all() for devices, p in zip(found, places, strict=True))
    chosen = dict(zip(np.concatenate(units).tolist(), np.concatenate(found).tolist(), strict=True))
    pairs = zip(common.device.tolist(), common.rank.tolist(), common.nbytes.tolist(), strict=True)
    best = value(common, units, places)
    assert sum(nbytes for d, r, nbytes in pairs if chosen[r] == d) == best >= value(common, units, start)
    for unit, node in itertools.product(range(len(units)), range(NODES)):
        if alone(common, units[unit], node) > alone(common, units[unit], places[unit]):
            for other in [unit, *(u for u, p in enumerate(places) if p == node)]:
                stepped = places.copy()
                stepped[other], stepped[unit] = places[unit], node
                assert not fits(stepped, widths) or value(common, units, stepped) < best + 1


def test_positions_say_which_set_and_where_in_it():
    which, place = positions([np.array([4, 1]), np.array([2])], 6)
    assert which.tolist() == [-1, 0, 1, -1, 0, -1]
    assert place[[4, 1, 2]].tolist() == [0, 1, 0]
