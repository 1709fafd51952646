"""Orders of a row against what they promise: every token on one device once, equal shares, padding of zeros."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtime.packed_rows import restored

from dynajax.errors import LayoutError
from dynajax.runtime import contiguous, zigzag

orders = st.sampled_from([contiguous, zigzag])


@given(orders, st.integers(1, 70), st.integers(1, 9))
def test_every_token_lies_at_one_place_and_every_device_has_as_many_places(make, length, cp):
    order = make(length, cp)
    index = order.index
    assert sorted(index[index >= 0]) == list(range(length))
    assert len(index) == order.stored_length
    assert order.stored_length % cp == 0
    assert order.stored_length - length < len(order.runs)


@given(orders, st.integers(1, 40), st.integers(1, 5))
def test_every_token_can_be_read_again_and_padding_is_zero(make, length, cp):
    order = make(length, cp)
    rows = {"tokens": np.arange(1, 2 * length + 1).reshape(2, length), "kept": np.ones((2, length, 3), np.float32)}
    stored = order.arrange(rows)
    assert np.all(stored["tokens"][:, order.index < 0] == 0)
    assert np.all(stored["kept"][:, order.index < 0] == 0)
    assert np.array_equal(stored["tokens"][0, order.index >= 0], order.index[order.index >= 0] + 1)
    for name, leaf in restored(order, stored).items():
        assert np.array_equal(leaf, rows[name])


def test_zigzag_gives_each_device_an_early_and_a_late_run():
    assert zigzag(12, 3).index.reshape(3, 4).tolist() == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]


@given(st.integers(1, 8), st.integers(1, 6))
def test_zigzag_evens_out_the_pairs_that_a_causal_mask_leaves(cp, run):
    seen = (zigzag(2 * cp * run, cp).index + 1).reshape(cp, -1).sum(1)  # token t sees t + 1 tokens
    assert len(set(seen.tolist())) == 1


@pytest.mark.parametrize("tokens", [10, 2])
@pytest.mark.parametrize("make", [contiguous, zigzag])
def test_CP_1_a_row_that_cp_does_not_divide_loses_no_token(make, tokens):
    places = make(tokens, 3).index.reshape(3, -1)
    owners = [[device for device in range(3) if token in places[device]] for token in range(tokens)]
    assert all(len(owner) == 1 for owner in owners)


def test_a_row_of_another_length_or_no_row_at_all_is_refused():
    with pytest.raises(LayoutError, match="rows of 8 tokens"):
        contiguous(8, 2).arrange(np.zeros((2, 9)))
    with pytest.raises(LayoutError, match="cp = 0"):
        contiguous(8, 0)
