"""The baselines, computed once more by hand."""

import numpy as np
import pytest
from balance.price_lists import DEEP, LARGE, MIDDLE, SMALL
from hypothesis import given
from hypothesis import strategies as st

from dynajax.balance.baselines import Homogeneous, first_fit
from dynajax.balance.compare import baselines, setting
from dynajax.balance.profiles import load_profile
from dynajax.errors import BalanceError


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(50, 120))
def test_first_fit_puts_each_into_the_first_pack_with_room(tokens, room):
    packs = first_fit(tokens, room)
    assert sorted(size for pack in packs for size in pack) == sorted(tokens)
    assert all(sum(pack) <= room for pack in packs)
    for later, pack in enumerate(packs):
        for earlier in packs[:later]:  # the first of a pack fitted into none before
            assert sum(earlier) + pack[0] > room or earlier[-1] is not pack[0]


def test_fixed_packs_go_round():
    layout = Homogeneous(MIDDLE, 4)
    tokens = np.array([600, 500, 300, 900, 100, 1000])
    assert first_fit(tokens.tolist(), 1000) == [[600, 300, 100], [500], [900], [1000]]
    first, second = MIDDLE.microbatch_ms([600, 300, 100]) + MIDDLE.microbatch_ms([900]), 0.0
    second = MIDDLE.microbatch_ms([500]) + MIDDLE.microbatch_ms([1000])
    assert layout.fixed_ms(tokens, 1000) == pytest.approx(max(first, second))


def test_padding_computes_every_sequence_at_the_longest():
    layout = Homogeneous(MIDDLE, 4)
    tokens = np.array([4000, 10, 10, 10, 10])  # two rows of 4,000 to a micro-batch of 8,000
    assert layout.padding_ms(tokens) == pytest.approx(MIDDLE.microbatch_ms([4000, 4000]) + MIDDLE.microbatch_ms([4000]))
    assert layout.padding_ms(np.array([], np.int64)) == 0


def test_one_pack_on_stages_passes_them_all():
    assert Homogeneous(DEEP, 4).fixed_ms(np.array([100]), 500) == pytest.approx(2 * DEEP.microbatch_ms([100]))


def test_what_does_not_fit_is_refused():
    with pytest.raises(BalanceError, match="do not divide 12"):
        Homogeneous(LARGE, 12)
    with pytest.raises(BalanceError, match="holds 3000 tokens, not 5000"):
        Homogeneous(SMALL, 2).padding_ms(np.array([5000]))
    with pytest.raises(BalanceError, match="1200 tokens does not fit into packs of 1000"):
        Homogeneous(SMALL, 2).fixed_ms(np.array([1200]), 1000)


def test_balance_beats_fixed_packing_beats_padding():
    shared = setting(load_profile("32b"), 64, 32_768)
    tokens = np.random.default_rng(0).lognormal(6.5, 1.2, 200).astype(int).clip(1, 32_768)
    found = baselines(tokens, shared)
    assert found.bound < found.balanced <= found.fixed < found.padding
