"""Variable-length documents by step: the budget, the order, and rows made of them."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynajax.data import DocumentSteps, MemoryDocuments, Overlong, lay_out, stdlib_documents
from dynajax.errors import DataError


def documents(lengths: list[int]) -> MemoryDocuments:
    rng = np.random.default_rng(0)
    return MemoryDocuments.of([rng.integers(0, 256, length, dtype=np.uint8).tobytes() for length in lengths])


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 50), max_size=20).map(lambda lengths: [*lengths, 2]),
    longest=st.integers(2, 24),
    slack=st.integers(0, 60),
    alignment=st.sampled_from([1, 8]),
    seed=st.integers(0, 3),
)
def test_an_epoch_holds_every_token_once_and_no_step_is_over_budget(lengths, longest, slack, alignment, seed):
    corpus, budget = documents(lengths), 24 + slack
    steps = DocumentSteps(corpus, budget, longest, seed, Overlong.SPLIT, alignment)
    for epoch in range(2):
        read = Counter()
        for step in range(epoch * steps.steps_per_epoch, (epoch + 1) * steps.steps_per_epoch):
            batch = steps[step]
            assert batch.lengths.tolist() == steps.lengths(step).tolist()
            assert 1 <= batch.lengths.min() <= batch.lengths.max() <= longest
            assert sum(-(-length // alignment) * alignment for length in batch.lengths.tolist()) <= budget
            assert batch.num_tokens == batch.lengths.sum()
            assert batch.samples == len(batch.segments)
            for segment in batch.segments:
                text, stop = corpus.texts[segment.document], segment.start + segment.length
                assert segment.text.tobytes() == text[segment.start : stop + 1]
                read.update((segment.document, i) for i in range(segment.start, stop))
        assert read == Counter((d, i) for d, length in enumerate(lengths) for i in range(length))


def test_a_step_depends_on_its_number_alone():
    first, second = (DocumentSteps(documents([7] * 50), 30, 8, seed=2) for _ in range(2))
    expected = [[s.document for s in first[n].segments] for n in range(30)]
    for n in np.random.default_rng(0).permutation(30).tolist():
        assert [s.document for s in second[n].segments] == expected[n]
    other = DocumentSteps(documents([7] * 50), 30, 8, seed=3)
    assert [[s.document for s in other[n].segments] for n in range(30)] != expected
    assert expected[: first.steps_per_epoch] != expected[first.steps_per_epoch : 2 * first.steps_per_epoch]


def test_stdlib_steps_fill_most_of_their_budget():
    steps = DocumentSteps(stdlib_documents(), token_budget=200_000, longest=32_768)
    totals = [int(steps.lengths(n).sum()) for n in range(steps.steps_per_epoch)]
    assert max(totals) <= 200_000
    assert np.mean(totals) > 0.9 * 200_000
    assert sum(totals) == stdlib_documents().lengths.sum()


def test_rows_are_laid_out_as_a_plan_says():
    batch = DocumentSteps(documents([5, 3, 4, 1]), 13, 8)[0]
    order = np.argsort([s.document for s in batch.segments])
    a, b, c, d = (batch.segments[i] for i in order)
    rows = lay_out([[a, b], [c, d], []], seq_len=8, max_segments=2)
    assert rows.segment_ids.tolist() == [[1, 1, 1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 2, 0, 0, 0], [0] * 8]
    assert rows.weights.sum(axis=1).tolist() == [4 + 2, 3 + 0, 0]
    assert (rows.samples, rows.num_tokens, rows.num_targets) == (2, 13, batch.num_targets)
    assert bytes(rows.tokens[0].tolist()) == a.text.tobytes() + b.text.tobytes()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: DocumentSteps(documents([9]), 20, 21), "21"),
        (lambda: DocumentSteps(documents([9]), 20, 17, alignment=16), "32 when aligned to 16"),
        (lambda: DocumentSteps(documents([9]), 20, 8, overlong=Overlong.ERROR), "document 0 has 9"),
        (lambda: DocumentSteps(documents([1, 0]), 20, 8), "no token to predict"),
        (lambda: DocumentSteps(documents([9]), 20, 0), "0 tokens"),
        (lambda: DocumentSteps(documents([9]), 20, 8, alignment=0), "alignment is 0"),
        (lambda: DocumentSteps(documents([9]), 20, 8, seed=-2), "seed -2"),
        (lambda: DocumentSteps(documents([9]), 20, 8)[-1], "step -1"),
        (lambda: lay_out([list(DocumentSteps(documents([9]), 20, 9)[0].segments)], 8, 2), "9 tokens in 1 segments"),
        (lambda: lay_out([list(DocumentSteps(documents([2, 2]), 4, 2)[0].segments)], 8, 1), "2 segments"),
    ],
)
def test_bad_settings_are_refused_in_one_line(call, words: str):
    with pytest.raises(DataError) as caught:
        call()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_cursor_of_another_stream_is_refused():
    steps = DocumentSteps(documents([5, 9, 7]), 20, 8)
    cursor = replace(steps.start(), step=1, sample=1)
    assert steps.resume(cursor) == cursor
    with pytest.raises(DataError, match="order"):
        DocumentSteps(documents([5, 9, 7]), 21, 8).resume(cursor)
    with pytest.raises(DataError, match="corpus"):
        DocumentSteps(documents([5, 9, 8]), 20, 8).resume(cursor)
