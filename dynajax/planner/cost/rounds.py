"""Rounds: in each a device sends one message at most and receives one at most, as in a collective permutation.

As many rounds do as the busiest device has messages on one side (``planner.exchanges.colouring``). Heavy messages are
placed first, so that rounds are of messages of like weight.
"""

from __future__ import annotations

import numpy as np

from dynajax.planner.exchanges.colouring import coloured
from dynajax.types import Ints


def in_rounds(sender: Ints, receiver: Ints, weight: np.ndarray) -> Ints:
    """The round of each message, counted from 0 without gaps.

    Args:
        sender, receiver: device numbers, one row a message.
        weight: bytes or time of each message.
    """
    number = np.empty(len(sender), np.int64)
    order = np.lexsort((receiver, sender, -weight))
    number[order] = coloured(sender[order], receiver[order])
    return number
