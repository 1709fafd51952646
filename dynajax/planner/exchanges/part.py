"""A part of what a group does: an exchange, what its programs are told, and the memory that they need."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ml_dtypes  # noqa: F401  (numpy knows small floats by name once it is there)
import numpy as np

from dynajax.planner.exchanges.exchange import Exchange, Message, Shape
from dynajax.types import Ints

_LITTLE = 256
"""Bytes of the numbers that a program computes with besides."""

T = TypeVar("T")
Tables = Callable[[Ints], tuple[np.ndarray, np.ndarray]]
"""From devices of the group to the chunks of the source, and of the target, that their messages are made of in turn."""


@dataclass(frozen=True, eq=False)
class Part:
    """An exchange, and what its programs are told.

    Attributes:
        exchange: what is done.
        shifts: where the parts of boxes begin; empty if boxes are whole.
        tables: what names the chunks of messages; None if these are made of boxes.
    """

    exchange: Exchange
    shifts: Shape = ()
    tables: Tables | None = None


def in_turn(items: Iterable[T], fit: Callable[[Sequence[T]], bool]) -> Iterator[list[T]]:
    """Items in turn, as many together as fit; one at least."""
    some: list[T] = []
    for item in items:
        if some and not fit([*some, item]):
            yield some
            some = []
        some.append(item)
    if some:
        yield some


def wire_dtype(dtype: Any) -> np.dtype[Any]:
    """The dtype of the same storage that elements travel as: what XLA could change the bits of goes as integers.

    Those are floats of less than four bytes, with which it computes as larger ones, and numbers of less than a byte.
    """
    dtype = np.dtype(dtype)
    return dtype if dtype.kind in "iuc" or dtype.itemsize >= 4 else np.dtype(f"uint{8 * dtype.itemsize}")


def travels(exchange: Exchange) -> int:
    """Elements that cross from device to device, padding included."""
    if exchange.collective is not None:
        return exchange.devices * (exchange.devices - 1) * box_elements(exchange)
    return sum(elements(exchange, m) * sum(a != b for a, b in m.pairs) for m in exchange.messages)


def elements(exchange: Exchange, message: Message) -> int:
    """Elements that one device has for a message."""
    return message.chunks * exchange.chunk or sum(math.prod(cut.read.size) for cut in message.boxes)


def box_elements(exchange: Exchange) -> int:
    """Elements of the box that one device has for another in a collective."""
    collective = exchange.collective
    assert collective is not None
    box = [n // k for n, k in zip(exchange.target, collective.target.counts, strict=True)]
    if collective.part is not None:
        box[collective.part[0]] = collective.part[1]
    return math.prod(box)


def need(exchange: Exchange) -> int:
    """Bytes that a device needs for what comes and goes, beside the shards of one source and one target array.

    Of messages, smaller ones need less. Programs are compared with it, and with what ``retyped`` adds.
    """
    itemsize = wire_dtype(exchange.dtype).itemsize
    if exchange.collective is not None:
        return _LITTLE + itemsize * 3 * exchange.devices * box_elements(exchange)
    sent = 2 * sum(elements(exchange, message) for message in exchange.messages)
    parts = len(exchange.sums) * exchange.parts * math.prod(exchange.sums[0].filled.size) if exchange.sums else 0
    return _LITTLE + itemsize * (sent + parts) + 8 * sum(message.chunks for message in exchange.messages)


def retyped(exchange: Exchange) -> int:
    """Bytes of a target shard that lies there as what its elements travel as, while it becomes what they are."""
    wire = wire_dtype(exchange.dtype)
    return math.prod(exchange.target) * wire.itemsize * (wire != np.dtype(exchange.dtype))
