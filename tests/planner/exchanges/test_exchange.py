"""Exchanges as values: equal where they say the same, whoever made them."""

from dataclasses import replace

import numpy as np
from jax.sharding import PartitionSpec as P
from planner.exchanges.performed import AMPLE, DEVICES, copies_between

from dynajax.planner.exchanges.exchange import Exchange, Message
from dynajax.planner.exchanges.groups import groups_of


def exchange():
    copies, whole = copies_between((8, 8), ({"x": 4}, P("x")), ({"x": 8}, P("x")))
    (group, *_) = groups_of(copies, whole, AMPLE, np.zeros(DEVICES, np.int64))
    return group.parts[0].exchange


def test_the_same_plan_makes_equal_exchanges():
    one, other = exchange(), exchange()
    assert one is not other
    assert one == other
    assert hash(one) == hash(other)
    assert len({one, other}) == 1


def test_whatever_programs_read_tells_exchanges_apart():
    one = exchange()
    others = [
        replace(one, dtype="int32"),
        replace(one, devices=one.devices + 1),
        replace(one, messages=one.messages[:-1]),
        replace(one, messages=(*one.messages, Message((), ((0, 1),), (1,), 1))),
        replace(one, chunk=2),
        replace(one, parts=2),
    ]
    assert len({one, *others}) == 1 + len(others)


def test_the_hash_is_worked_out_once():
    one = Exchange(2, (4,), (4,), "float32")
    assert hash(one) == one.__dict__["_hash"] == hash(one)
