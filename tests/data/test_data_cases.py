"""Faults that trainers were hit by, each as a small scenario with its right outcome; the name says the kind."""

from collections import Counter
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from dynajax.data import Batch, Batches, MemoryDocuments, Overlong, lay_out, pad_rows
from dynajax.data.batch import Segment
from dynajax.data.packing import cut, group_in_order, pack_rows
from dynajax.errors import DataError
from dynajax.models import mean_loss, token_loss


def numbered(samples: int) -> MemoryDocuments:
    """Documents that fill a row of 4 tokens each and tell their number."""
    return MemoryDocuments.of([bytes([number] * 4) for number in range(samples)])


def numbers(batch: Batch) -> list[int]:
    return batch.tokens[batch.segment_ids[:, 0] > 0][:, 0].tolist()


def row_of(*texts: bytes) -> list[Segment]:
    return [Segment(i, 0, len(text), np.frombuffer(text, np.uint8)) for i, text in enumerate(texts)]


@pytest.mark.parametrize("worlds", [(1, 2), (2, 1), (4, 3), (3, 4), (1, 2, 1, 4)])
@pytest.mark.parametrize("seed", [0, 1])
def test_DATA_1_a_resize_in_the_epoch_neither_skips_nor_repeats_samples(worlds: tuple[int, ...], seed: int):
    batches = Batches(numbered(16), batch_size=4, seq_len=4, seed=seed)
    cursor, read = batches.start(), []
    while cursor.sample < 16:
        world = worlds[min(cursor.step, len(worlds) - 1)]
        count = min(4 * world, 16 - cursor.sample)
        read += numbers(batches.take(cursor.sample, count))
        batches = Batches(numbered(16), batch_size=4, seq_len=4, seed=seed)
        cursor = batches.resume(replace(cursor, step=cursor.step + 1, sample=cursor.sample + count))
    assert sorted(read) == list(range(16))
    assert read == numbers(batches.take(0, 16))


def test_DATA_3_no_rank_has_a_position_of_its_own_to_lose():
    # Uneven documents, so that ranks would buffer unequally if they packed for themselves.
    rng = np.random.default_rng(0)
    texts = [bytes([number]) * int(rng.integers(1, 30)) for number in range(100)]
    batches = Batches(MemoryDocuments.of(texts), batch_size=8, seq_len=16, max_segments=4)
    read, expected = Counter(), Counter()
    rows = batches.rows_per_epoch
    for step, sample in enumerate(range(0, rows, 8)):
        world = (4, 2, 4)[min(step // 2, 2)]
        count = min(8, rows - sample)
        for rank in range(world):  # each reads rows of its own, whatever it or another read before
            begin, end = (count * n // world for n in (rank, rank + 1))
            if end > begin:
                part = batches.take(sample + begin, end - begin)
                read.update(part.tokens[part.segment_ids > 0].tolist())
    for text in texts:
        expected.update(text)
    assert read == expected


@pytest.mark.parametrize("rows", [37, 3])
def test_ACCUM_5_filler_rows_do_not_count(rows: int):
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 256, int(rng.integers(2, 16)), dtype=np.uint8).tobytes() for _ in range(60)]
    batch = Batches(MemoryDocuments.of(texts), batch_size=rows, seq_len=16, max_segments=1)[0]
    padded = pad_rows(batch, 8)
    assert padded.rows == -(-rows // 8) * 8
    assert (padded.samples, padded.num_tokens, padded.num_targets) == (rows, batch.num_tokens, batch.num_targets)
    logits = jnp.asarray(rng.normal(size=(padded.rows, 16, 256)), jnp.float32)
    loss = mean_loss(*token_loss(logits[:rows], jnp.asarray(batch.targets), jnp.asarray(batch.weights)))
    shards = zip(*(np.split(x, 8) for x in (np.asarray(logits), padded.targets, padded.weights)), strict=True)
    sums = [token_loss(*map(jnp.asarray, shard)) for shard in shards]
    assert sum(float(weight) for _, weight in sums) == batch.num_targets
    np.testing.assert_allclose(sum(float(s) for s, _ in sums) / batch.num_targets, float(loss), rtol=1e-6)
    assert pad_rows(padded, 8) is padded


def test_EMPTY_1_a_fully_masked_shard_adds_nothing_and_is_finite():
    batch = pad_rows(lay_out([row_of(b"abc")], seq_len=8, max_segments=1), 4)
    masked = slice(2, 3)
    loss, weight = token_loss(
        jnp.ones((1, 8, 256)), jnp.asarray(batch.targets[masked]), jnp.asarray(batch.weights[masked])
    )
    assert (float(loss), float(weight)) == (0.0, 0.0)


def test_PACK_3_positions_restart_with_each_document():
    batch = lay_out([row_of(b"abcde", b"xyz")], seq_len=8, max_segments=2)
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 1, 1, 2, 2, 2]]
    assert bytes(batch.targets[0].tolist()) == b"bcde\0yz\0"
    assert batch.weights.tolist() == [[1, 1, 1, 1, 0, 1, 1, 0]]


@pytest.mark.parametrize("value", [0, 1, 255])
def test_SEG_1_no_token_id_means_padding(value: int):
    # Every token of every document is the same id, the id that fills padding among them.
    lengths = [5, 3, 9, 2, 7]
    batches = Batches(MemoryDocuments.of([bytes([value] * n) for n in lengths]), batch_size=2, seq_len=16)
    batch = batches.take(0, batches.rows_per_epoch)
    assert batch.num_tokens == sum(lengths)
    assert batch.num_targets == sum(lengths) - len(lengths)
    assert batch.num_tokens == (batch.segment_ids > 0).sum()
    assert not batch.weights[batch.segment_ids == 0].any()


def test_SEG_3_the_limit_of_segments_holds_for_many_tiny_documents():
    lengths = [1 + i % 2 for i in range(40)]
    batches = Batches(MemoryDocuments.of([b"ab"[:n] for n in lengths]), batch_size=1, seq_len=64, max_segments=8)
    batch = batches.take(0, batches.rows_per_epoch)
    assert batches.rows_per_epoch == 5
    assert batch.segment_ids.max() == 8
    for ids in batch.segment_ids:
        assert set(ids[ids > 0].tolist()) == set(range(1, int(ids.max()) + 1))
    assert batch.num_tokens == sum(lengths)
    assert batch.max_segments == batches.max_segments == 8


def test_LONG_1_what_happens_to_long_documents_is_said_and_counted():
    lengths = [5, 2, 3, 1]
    with pytest.raises(DataError, match="document 0 has 5 tokens and the limit is 4"):
        cut(lengths, 4, Overlong.ERROR)
    truncated = cut(lengths, 4, Overlong.TRUNCATE)
    assert (truncated.dropped_tokens, len(truncated), truncated.cut_documents) == (1, 4, 1)
    split = cut(lengths, 4, Overlong.SPLIT)
    assert (split.dropped_tokens, len(split), split.cut_documents) == (0, 5, 1)
    assert split.document.tolist() == [0, 0, 1, 2, 3]
    assert split.start.tolist() == [0, 4, 0, 0, 0]
    assert split.length.tolist() == [4, 1, 2, 3, 1]
    batches = Batches(MemoryDocuments.of([b"abcde", b"fg", b"hij", b"k"]), batch_size=1, seq_len=4)
    rows = batches.take(0, batches.rows_per_epoch)
    assert (rows.positions[rows.segment_ids == 0] == 0).all()
    first = rows.tokens[:, 0].tolist().index(ord("a"))
    assert bytes(rows.targets[first].tolist()) == b"bcde"
    assert rows.positions[first].tolist() == [0, 1, 2, 3]
    assert rows.positions[rows.tokens == ord("e")].tolist() == [0]


def test_LONG_3_a_budget_holds_for_every_group():
    assert len(group_in_order([7] * 8, 8)) == len(pack_rows([7] * 8, 8, 8)) == 8
    for refused in (lambda: group_in_order([21], 20), lambda: pack_rows([21], 20, 1)):
        with pytest.raises(DataError, match=r"21 tokens and a bin holds 20"):
            refused()
    assert len(group_in_order([20], 20)) == len(pack_rows([20], 20, 1)) == 1
    assert len(group_in_order([17, 17], 64, alignment=16)) == 1
    with pytest.raises(DataError, match=r"32 tokens and a bin holds 20"):
        group_in_order([20], 20, alignment=16)
