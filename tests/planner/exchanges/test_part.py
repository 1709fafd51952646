"""Parts: what travels, what programs need beside the shards, and how much is done together."""

import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from planner.exchanges.performed import AMPLE, DEVICES, copies_between

from dynajax.planner.exchanges.exchange import Box, Exchange, Message, Slice
from dynajax.planner.exchanges.groups import groups_of
from dynajax.planner.exchanges.part import elements, in_turn, need, travels, wire_dtype

ONE_PROCESS = np.zeros(DEVICES, np.int64)


@pytest.mark.parametrize(
    ("dtype", "wire"),
    [
        ("float32", "float32"),
        ("float64", "float64"),
        ("complex64", "complex64"),
        ("int8", "int8"),
        ("uint32", "uint32"),
        ("bfloat16", "uint16"),
        ("float16", "uint16"),
        ("float8_e4m3fn", "uint8"),
        ("bool", "uint8"),
    ],
)
def test_elements_travel_as_what_xla_cannot_change(dtype, wire):
    assert wire_dtype(dtype) == np.dtype(wire)


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.float4_e2m1fn])
def test_what_travels_takes_whole_bytes(dtype):
    assert wire_dtype(dtype).itemsize == 1


def test_as_many_as_fit_are_taken_in_turn():
    assert list(in_turn([3, 3, 9, 1, 1], lambda some: sum(some) <= 6)) == [[3, 3], [9], [1, 1]]
    assert list(in_turn([], lambda some: True)) == []


def box(*size, devices=2):
    return Slice(size, ((0,) * len(size),) * devices)


def test_elements_of_a_message_are_those_of_its_boxes_or_chunks():
    exchange = Exchange(2, (8,), (8,), "float32", chunk=4)
    boxes = Message((Box(box(2), box(2)), Box(box(3), box(3))), ((0, 1),), (1,))
    assert elements(exchange, boxes) == 5
    assert elements(exchange, Message((), ((0, 1),), (1,), chunks=3)) == 12


def test_only_what_crosses_travels():
    message = Message((Box(box(4), box(4)),), ((0, 1), (1, 0), (2, 2)), (0, 1, 2))
    stay = Message((Box(box(4), box(4)),), (), (0, 1, 2))
    assert travels(Exchange(3, (4,), (4,), "float32", (message, stay))) == 8


def test_a_collective_sends_a_box_for_each_other_device():
    copies, whole = copies_between((8, 8), ({"x": 4}, P("x")), ({"x": 4}, P(None, "x")))
    (group,) = groups_of(copies, whole, AMPLE, ONE_PROCESS)
    assert travels(group.parts[0].exchange) == 4 * 3 * 4 == group.travels


@pytest.mark.parametrize(("dtype", "factor"), [("float32", 4), ("int8", 1), ("bfloat16", 2)])
def test_messages_lie_there_twice(dtype, factor):
    """As they are cut out and as they come."""
    message = Message((Box(box(4), box(4)),), ((0, 1),), (1,))
    assert need(Exchange(2, (100,), (100,), dtype, (message,))) >= 2 * 4 * factor
    larger = Message((Box(box(8), box(8)),), ((0, 1),), (1,))
    grown = need(Exchange(2, (100,), (100,), dtype, (larger,))) - need(Exchange(2, (100,), (100,), dtype, (message,)))
    assert grown == 2 * 4 * factor
