"""Messages: rounds without padding, and pieces of unlike messages with at most a tenth of it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynajax.planner.exchanges.messages import MOST_BOXES, Messages, in_pieces


@st.composite
def rows(draw, devices=6):
    """Copies with phases, ends, kinds and volumes; those of a kind have one volume."""
    made = draw(st.lists(st.tuples(*(st.integers(0, n) for n in (2, devices - 1, devices - 1, 3))), max_size=40))
    phase, sender, receiver, kind = np.array(made, np.int64).reshape(-1, 4).T
    return phase, sender, receiver, kind, 5 * kind + 1


@given(rows())
def test_a_message_is_all_that_goes_from_one_device_to_another_in_a_phase(drawn):
    phase, sender, receiver, kind, volume = drawn
    m = Messages.of(*drawn)
    seen = []
    for k in range(len(m.sender)):
        mine = m.rows[m.first[k] : m.first[k + 1]]
        expected = (phase == m.phase[k]) & (sender == m.sender[k]) & (receiver == m.receiver[k])
        assert mine.tolist() == np.flatnonzero(expected).tolist()
        assert m.volume[k] == volume[mine].sum()
        seen += mine.tolist()
    assert sorted(seen) == list(range(len(phase)))
    alike = {}
    for k, number in enumerate(m.kind.tolist()):
        kinds = tuple(kind[m.rows[m.first[k] : m.first[k + 1]]].tolist())
        assert (number < 0) == (len(kinds) > MOST_BOXES)
        if number >= 0:
            assert alike.setdefault(number, kinds) == kinds
    assert len(set(alike.values())) == len(alike)


@given(rows())
def test_rounds_have_one_phase_and_one_kind_and_no_device_twice(drawn):
    m = Messages.of(*drawn)
    assert (m.rounds[m.sent] >= 0).all()
    for number in range(m.rounds.max(initial=-1) + 1):
        mine = np.flatnonzero(m.rounds == number)
        assert m.sent[mine].any()
        assert len(set(zip(m.phase[mine].tolist(), m.kind[mine].tolist(), strict=True))) == 1
        for end in (m.sender, m.receiver):
            assert len(set(end[mine].tolist())) == len(mine)
    expected = 0
    for phase, kind in {(p, k) for p, k in zip(m.phase.tolist(), m.kind.tolist(), strict=True)}:
        mine = m.sent & (m.phase == phase) & (m.kind == kind)
        expected += max(int(np.bincount(end[mine]).max(initial=0)) for end in (m.sender, m.receiver))
    assert m.rounds.max(initial=-1) + 1 == expected


def test_what_stays_shares_a_round_with_what_is_sent_if_none_more_is_needed():
    both = Messages.of(*(np.array(x) for x in ([0] * 4, [0, 1, 2, 3], [1, 0, 2, 3], [0] * 4, [1] * 4)))
    assert both.rounds.tolist() == [0] * 4
    alone = Messages.of(*(np.array(x) for x in ([0] * 4, [0, 0, 1, 1], [0, 1, 0, 1], [0] * 4, [1] * 4)))
    assert alone.rounds.tolist() == [-1, 0, 0, -1]


def test_the_busiest_device_is_that_with_most_to_send_or_to_receive():
    ends = [0, 0, 1, 2], [1, 2, 2, 2]
    m = Messages.of(*(np.array(x) for x in ([0] * 4, *ends, [0] * 4, [3, 4, 5, 90])))
    assert m.busiest == 9


counts = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(1, 300)), min_size=1, max_size=20)


@given(counts, st.integers(1, 200), st.integers(1, 50))
def test_pieces_carry_all_of_their_messages_and_little_else(messages, most, start_up):
    sender, receiver, count = np.array(messages, np.int64).T
    carried, covered = 0, [np.zeros(n, np.int64) for n in count.tolist()]
    for pieces in in_pieces(sender, receiver, count, most, start_up):
        assert pieces.size <= most
        carried += pieces.size * len(pieces.message)
        for message, start in zip(pieces.message.tolist(), pieces.start.tolist(), strict=True):
            covered[message][start : start + pieces.size] += 1
        for end in (sender, receiver):
            busy = list(zip(end[pieces.message].tolist(), pieces.round.tolist(), strict=True))
            assert len(set(busy)) == len(busy)
    assert all((c == 1).all() for c in covered)
    assert 10 * carried <= 11 * count.sum()


@pytest.mark.parametrize(
    ("count", "start_up", "sizes"),
    [
        ([64] * 39 + [60], 1, [64]),  # little padding
        ([64, 32], 1, [32]),  # one of them in halves
        ([64, 33], 1, [8]),  # both cut small, while a round costs little
        ([64, 33], 1000, [64, 33]),  # each by itself, where it costs much
    ],
)
def test_messages_are_cut_in_the_way_that_takes_least_time(count, start_up, sizes):
    number = 2 * np.arange(len(count))
    found = in_pieces(number, number + 1, np.array(count), 1000, start_up)
    assert [pieces.size for pieces in found] == sizes
