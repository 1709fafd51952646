"""Exchanges taken apart: cut out, sent and put in place, they come to the whole."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planner.exchanges.performed import (
    AMPLE,
    DEVICES,
    add_up,
    exchanges,
    pairs,
    payload_of,
    performed,
    place,
    random_shards,
)

from dynajax.planner.exchanges.by_chunk import NOWHERE
from dynajax.planner.exchanges.exchange import Exchange, Message
from dynajax.planner.exchanges.groups import groups_of
from dynajax.planner.exchanges.split import Split

SETTINGS = settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


def done_apart(part, splits, sources, targets):
    """The targets after a part, of which each process does its halves."""
    exchange = part.exchange
    read, filled = sources.reshape(-1, *exchange.source), targets.copy().reshape(-1, *exchange.target)
    sent, chunks = {}, [message.chunks for message in exchange.messages]
    for split in splits:
        half, told = split.cut, None
        if part.tables:
            told = [half.told(part.tables(np.asarray(half.devices, np.int64))[0], chunks, 0)]
        for slot, at, message in _slots(half):
            for device in message.receivers:
                at_home = read[list(half.devices)]
                sent[half.devices[device], slot] = payload_of(
                    half.exchange, message, told, at, device, part.shifts, at_home
                )
    for split in splits:
        half, told, parts = split.placed, None, {}
        if part.tables:
            told = [None, half.told(part.tables(np.asarray(half.devices, np.int64))[1], chunks, NOWHERE)]
        mine = filled[list(half.devices)]
        for slot, at, message in _slots(half):
            for device in message.receivers:
                (came,) = [s for s in split.sent if (s.receiver, s.placed) == (half.devices[device], slot)]
                payload = sent[came.sender, _cut_of(splits, came)]
                place(half.exchange, message, told, at, device, part.shifts, payload, mine, parts)
        add_up(half.exchange, part.shifts, parts, mine)
        filled[list(half.devices)] = mine
    return filled.reshape(targets.shape)


def _slots(half):
    """Each slot with the first of its chunks and its message."""
    at = 0
    for slot, message in enumerate(half.exchange.messages):
        yield slot, at, message
        at += message.chunks


def _cut_of(splits, sent):
    """The slot that the sender's process cuts a message out to."""
    of = (sent.sender, sent.receiver, sent.message)
    (slot,) = {s.cut for split in splits for s in split.sent if (s.sender, s.receiver, s.message) == of} - {-1}
    return slot


@SETTINGS
@given(pairs, st.sampled_from([AMPLE, 500]), st.lists(st.integers(0, 1), min_size=DEVICES, max_size=DEVICES))
def test_halves_come_to_the_whole(pair, room, process):
    for copies, whole in exchanges(pair):
        for group in groups_of(copies, whole, room, np.zeros(DEVICES, np.int64)):
            sources = random_shards(whole.source)[group.devices]
            of = np.asarray(process)[group.devices]
            for part in group.parts:
                if part.exchange.collective is not None:
                    continue
                here = [np.flatnonzero(of == k).tolist() for k in (0, 1)]
                splits = [Split.of(part.exchange, mine, mine) for mine in here]
                zeros = np.zeros((len(sources), int(np.prod(whole.target))), np.float32)
                np.testing.assert_array_equal(done_apart(part, splits, sources, zeros), performed(part, sources, zeros))


@SETTINGS
@given(pairs)
def test_a_slot_is_used_once_by_each_device(pair):
    for copies, whole in exchanges(pair):
        for group in groups_of(copies, whole, AMPLE, np.zeros(DEVICES, np.int64)):
            everyone = range(len(group.devices))
            for part in group.parts:
                if part.exchange.collective is not None:
                    continue
                split = Split.of(part.exchange, everyone, everyone)
                for ends in (
                    [(s.sender, s.cut) for s in split.sent],
                    [(s.receiver, s.placed) for s in split.sent],
                ):
                    assert len(set(ends)) == len(ends)
                for half in (split.cut, split.placed):
                    for slot, rows in enumerate(half.rows):
                        assert len({len(part.exchange.messages[row].boxes) for row in rows.values()}) == 1
                        assert half.exchange.messages[slot].receivers == tuple(sorted(rows))


def test_a_process_without_a_message_has_no_chunks():
    """One device sends to another; the third one, in a process of its own, only takes part."""
    split = Split.of(_one_message(), [2], [2])
    assert split.cut.told(np.zeros((1, 1), np.int64), [1], 0).shape == (1, 0)
    assert [(s.cut, s.placed) for s in split.sent] == [(-1, -1)]


def _one_message():
    return Exchange(3, (4,), (4,), "float32", (Message((), ((0, 1),), (1,), 1),), chunk=4)
