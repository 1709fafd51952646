import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dynajax.models import mean_loss, token_loss


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.integers(0, 2**16))
def test_equals_a_loop_over_tokens(seed):
    rng = np.random.default_rng(seed)
    logits = 5 * rng.standard_normal((2, 3, 7)).astype(np.float32)
    targets = rng.integers(0, 7, (2, 3))
    weights = rng.integers(0, 3, (2, 3)).astype(np.float32)
    expected = sum(
        weights[i] * (np.log(np.exp(logits[i].astype(float)).sum()) - logits[i][targets[i]]) for i in np.ndindex(2, 3)
    )
    loss, weight = token_loss(logits, targets, weights)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert weight == weights.sum()


def test_parts_of_a_batch_add_up():
    rng = np.random.default_rng(0)
    logits, targets = rng.standard_normal((6, 4, 9)), rng.integers(0, 9, (6, 4))
    weights = rng.integers(0, 2, (6, 4))
    whole = np.array(token_loss(logits, targets, weights))
    parts = sum(np.array(token_loss(logits[i : i + 2], targets[i : i + 2], weights[i : i + 2])) for i in (0, 2, 4))
    np.testing.assert_allclose(parts, whole, rtol=1e-6)


def test_no_weight_means_no_loss_and_no_gradient():
    def loss(logits):
        return mean_loss(*token_loss(logits, np.zeros((2, 3), int), np.zeros((2, 3))))

    value, gradient = jax.value_and_grad(loss)(np.ones((2, 3, 5), np.float32))
    assert value == 0
    assert (np.asarray(gradient) == 0).all()


def test_targets_without_weight_may_be_anything():
    logits = np.float32(np.random.default_rng(1).standard_normal((3, 5)))
    weights = np.array([1, 0, 1])
    low = token_loss(logits, np.array([1, -1, 2]), weights)
    high = token_loss(logits, np.array([1, 99, 2]), weights)
    np.testing.assert_array_equal(low, high)


def test_huge_logits_stay_finite():
    loss, _ = token_loss(np.array([[1e4, -1e4]], np.float32), np.array([1]), np.ones(1))
    np.testing.assert_allclose(loss, 2e4)


def test_mean_of_something():
    assert mean_loss(np.float32(6), np.float32(4)) == 1.5
