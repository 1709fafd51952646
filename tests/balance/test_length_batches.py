"""Length distributions and the batches that are drawn from them."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynajax.balance.lengths import LengthBatches, Lengths, lognormal, read_lengths, shipped_lengths
from dynajax.data.packing import Overlong
from dynajax.errors import BalanceError, DataError

FEW = Lengths("few", (1, 5, 40, 100), (3, 2, 1))


@given(
    st.integers(1, 3000), st.integers(1, 60), st.sampled_from([Overlong.TRUNCATE, Overlong.SPLIT]), st.integers(0, 9)
)
def test_a_batch_has_its_tokens_whatever_the_policy(tokens, longest, overlong, iteration):
    batches = LengthBatches(FEW, tokens, longest, overlong, seed=1)
    drawn = batches.batch(iteration)
    assert drawn.tokens.sum() == tokens
    assert 1 <= drawn.tokens.min() <= drawn.tokens.max() <= longest
    assert (drawn.dropped_tokens == 0) or overlong is Overlong.TRUNCATE
    assert np.array_equal(drawn.tokens, batches.batch(iteration).tokens)


def test_batches_differ_by_iteration_and_seed():
    texts = {
        str(LengthBatches(FEW, 500, 99, seed=seed).batch(iteration).tokens.tolist())
        for seed in (0, 1)
        for iteration in (0, 1)
    }
    assert len(texts) == 4


def test_overlong_documents_are_counted_or_refused():
    five = Lengths("five", (5, 6), (1,))
    drawn = LengthBatches(five, 40, 4).batch(0)
    assert (drawn.tokens.tolist(), drawn.cut_documents, drawn.dropped_tokens) == ([4] * 10, 10, 10)
    split = LengthBatches(five, 40, 4, Overlong.SPLIT).batch(0)
    assert (split.tokens.tolist(), split.cut_documents, split.dropped_tokens) == ([4, 1] * 8, 8, 0)
    with pytest.raises(DataError, match="document 0 has 5 tokens and the limit is 4"):
        LengthBatches(five, 40, 4, Overlong.ERROR).batch(0)


def test_wikipedia_lengths_have_the_published_quantiles():
    drawn = shipped_lengths("wikipedia").documents(200_000, np.random.default_rng(0))
    published = {50: 347, 75: 862, 90: 2112, 95: 3720, 99: 10_919}
    found = {q: float(np.percentile(drawn, q)) for q in published}
    assert found == pytest.approx(published, rel=0.05)


def test_stdlib_lengths_are_longer_and_long_tailed():
    stdlib = shipped_lengths("stdlib").documents(50_000, np.random.default_rng(0))
    assert 1_300 < np.median(stdlib) < 2_500
    assert stdlib[stdlib > 8192].sum() / stdlib.sum() > 0.5


def test_lognormal_has_its_median_and_tail():
    drawn = lognormal(800, 1.2).documents(50_000, np.random.default_rng(0))
    assert np.median(drawn) == pytest.approx(800, rel=0.03)
    assert np.log(drawn).std() == pytest.approx(1.2, rel=0.03)


@pytest.mark.parametrize(
    "content", ["3\n3\n900\n", "[3, 3, 900]", json.dumps({"edges": [3, 4, 900, 901], "counts": [2, 0, 1]})]
)
def test_files_of_all_forms_are_read(tmp_path, content):
    path = tmp_path / "lengths"
    path.write_text(content)
    drawn = read_lengths(str(path)).documents(900, np.random.default_rng(0))
    assert set(drawn.tolist()) == {3, 900}
    assert (drawn == 3).mean() == pytest.approx(2 / 3, abs=0.06)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nowhere.txt", "is neither a file nor wikipedia, stdlib"),
        ("lognormal:5", "expected lognormal:MEDIAN:SIGMA"),
        ("lognormal:0:1", "give 1 or more"),
    ],
)
def test_unknown_lengths_are_refused(text, said):
    with pytest.raises(BalanceError, match=said):
        read_lengths(text)


@pytest.mark.parametrize(
    ("content", "said"),
    [("a b", "expected a JSON histogram"), ("[]", "one length or more"), ('{"edges": [1]}', "'counts'")],
)
def test_broken_files_are_refused(tmp_path, content, said):
    (tmp_path / "broken").write_text(content)
    with pytest.raises(BalanceError, match=said):
        read_lengths(str(tmp_path / "broken"))


def test_impossible_batches_are_refused():
    with pytest.raises(BalanceError, match="batches of 0 tokens"):
        LengthBatches(FEW, 0, 5)
