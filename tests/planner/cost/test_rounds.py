"""Rounds: everybody meets, nobody waits in a circle, one partner at a time."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynajax.planner.cost.rounds import Pairing, coloured_rounds, rounds_of, xor_rounds


def everybody(n):
    pairs = np.array(list(itertools.permutations(range(n), 2)), np.int64)
    return pairs[:, 0], pairs[:, 1]


def one_partner(rounds):
    """True if no device has two partners in a round."""
    for number in range(rounds.count):
        now = rounds.number == number
        partners = {}
        for s, r in zip(rounds.sender[now].tolist(), rounds.receiver[now].tolist(), strict=True):
            for a, b in ((s, r), (r, s)):
                if partners.setdefault(a, b) != b:
                    return False
    return True


def assert_in_order(rounds, sender, receiver):
    """Every message has one round, and no round is empty."""
    assert rounds.sender.tolist() == sender.tolist()
    assert rounds.receiver.tolist() == receiver.tolist()
    assert sorted(set(rounds.number.tolist())) == list(range(rounds.count))


def partners(found):
    """Each device, those it sends to, and those it receives from."""
    for device in {d for pair in found for d in pair}:
        yield device, {b for a, b in found if a == device}, {a for a, b in found if b == device}


@pytest.mark.parametrize("pairing", Pairing)
@pytest.mark.parametrize("n", range(2, 71))
def test_everybody_meets_everybody_one_partner_a_round(n, pairing):
    sender, receiver = everybody(n)
    rounds = rounds_of(pairing, sender, receiver, np.ones(len(sender), np.int64))
    assert one_partner(rounds)
    assert_in_order(rounds, sender, receiver)


def test_three_devices_need_the_step_to_the_next_power_of_two():
    """Steps 1 … n − 1 would leave out devices 1 and 2."""
    rounds = xor_rounds(*everybody(3))
    assert rounds.count == 3
    last = rounds.number == 2
    assert set(zip(rounds.sender[last].tolist(), rounds.receiver[last].tolist(), strict=True)) == {(1, 2), (2, 1)}


edges = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(1, 100)), max_size=60).map(
    lambda found: {(a, b): w for a, b, w in found if a != b}
)


@settings(max_examples=150)
@given(edges, st.sampled_from(Pairing))
def test_any_traffic_is_scheduled_with_one_partner_a_round(found, pairing):
    pairs = np.array(list(found), np.int64).reshape(-1, 2)
    weight = np.array(list(found.values()), np.int64)
    rounds = rounds_of(pairing, pairs[:, 0], pairs[:, 1], weight)
    assert one_partner(rounds)
    assert_in_order(rounds, pairs[:, 0], pairs[:, 1])
    fewest = max((len({*a, *b} - {d}) for d, a, b in partners(found)), default=0)
    assert fewest <= rounds.count
    if pairing is Pairing.COLOURS:
        assert rounds.count <= max(2 * fewest - 1, 0)


def test_colours_put_messages_of_like_weight_in_one_round():
    sender, receiver = np.array([0, 2, 0, 1]), np.array([1, 3, 2, 3])
    rounds = coloured_rounds(sender, receiver, np.array([100, 90, 10, 9]))
    assert rounds.number.tolist() == [0, 0, 1, 1]
