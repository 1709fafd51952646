"""The endless order: a permutation in every epoch, another in the next, from any place."""

import numpy as np
import pytest

from dynajax.data.stream import endless_order, item


@pytest.mark.parametrize(("count", "epoch"), [(1, 0), (1, 5), (2, 3), (7, 0), (7, 5), (1000, 2), (2**16, 1)])
def test_every_number_once_an_epoch(count: int, epoch: int):
    order = endless_order(count, seed=3)
    numbers = [item(order, epoch * count + i) for i in range(count)]
    assert np.array_equal(np.sort(numbers), np.arange(count))


@pytest.mark.parametrize("count", [1000, 2**16 + 1])
def test_epochs_and_seeds_differ_and_the_place_alone_decides(count: int):
    places = [0, 1, 2, 3, 4, 5]
    begins = {}
    for seed in range(3):
        order = endless_order(count, seed)
        for epoch in (2, 0, 1, 10**6):
            begins[seed, epoch] = tuple(item(order, epoch * count + i) for i in places)
    assert len(set(begins.values())) == len(begins)  # seed 1 is not seed 0 an epoch later, either
    again = endless_order(count, 1)
    assert tuple(item(again, 10**6 * count + i) for i in places) == begins[1, 10**6]
