"""Fitting T from measured points, and profiles made by a measuring function."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynajax.balance.cost_fit import SHARED_BY, Point, fit_cost, measure_profile, rows_to_measure
from dynajax.balance.profiles import load_profile, save_profile
from dynajax.errors import BalanceError
from dynajax.meshes import Strategy


def point(lengths: tuple[int, ...], a: float, b: float, c: float) -> Point:
    return Point(lengths, a * sum(size**2 for size in lengths) + b * sum(lengths) + c)


@given(st.floats(1e-8, 1e-4), st.floats(1e-3, 1), st.floats(0.1, 200))
def test_exact_points_give_the_coefficients_back(a, b, c):
    points = [point(lengths, a, b, c) for lengths in ((128,), (1024,), (4096,), (16_384,), (512, 512, 2048))]
    found = fit_cost(points)
    assert (found.a, found.b, found.c) == pytest.approx((a, b, c), rel=1e-5)
    assert found.worst_error < 1e-7


def test_noise_shows_in_the_error_and_little_in_the_prediction():
    rng = np.random.default_rng(0)
    points = [point((size,), 2e-6, 0.1, 30) for size in (256, 512, 1024, 2048, 4096, 8192)] * 3
    noisy = [Point(p.lengths, p.ms * (1 + rng.normal(0, 0.02))) for p in points]
    found = fit_cost(noisy)
    assert 0.005 < found.mean_error < found.worst_error < 0.08
    for size in (300, 3000, 8000):
        truth = point((size,), 2e-6, 0.1, 30).ms
        assert found.a * size**2 + found.b * size + found.c == pytest.approx(truth, rel=0.03)


def test_shared_rows_tell_attention_from_what_else_grows():
    """Where a token costs the more the longer its row is, ``a`` stays what sequences cost."""
    rows = [row for tokens in (128, 256, 512) for row in rows_to_measure(tokens)]
    assert all(sum(row) in (128, 256, 512) for row in rows)
    points = [Point(p.lengths, p.ms * sum(p.lengths) ** 0.1) for p in (point(row, 1e-5, 0.02, 0.5) for row in rows)]
    both, alone = fit_cost(points), fit_cost([p for p in points if len(p.lengths) == 1])
    unlike = point((256, 128, 64, 32, 16, 16), 1e-5, 0.02, 0.5)

    def error(found):
        a, b, c = found.a, found.b, found.c
        return abs(point(unlike.lengths, a, b, c).ms / (unlike.ms * 512**0.1) - 1)

    assert error(both) < 0.03 < error(alone)


def test_coefficients_are_never_negative():
    found = fit_cost([Point((100,), 10.0), Point((200,), 15.0), Point((400,), 20.0)])  # bends the wrong way
    assert min(found.a, found.b, found.c) >= 0
    assert found.a == 0
    assert found.worst_error > 0.05


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([Point((5,), 1.0)] * 4, "1 different micro-batches were measured"),
        ([Point((5,), 1.0), Point((6,), 1.0), Point((7,), 0.0)], "must be above 0"),
    ],
)
def test_too_few_or_impossible_points_are_refused(points, said):
    with pytest.raises(BalanceError, match=said):
        fit_cost(points)


def test_a_measured_profile_is_a_profile(tmp_path):
    """The measuring function is handed in; here it computes what a device would take."""
    truth = {"tp1": (4e-6, 0.2, 10.0, 5_000), "tp2.cp2": (1e-6, 0.06, 15.0, 20_000)}
    measured: list[tuple[str, tuple[int, ...]]] = []

    def measure(pipeline, row: tuple[int, ...]) -> float:
        measured.append((str(pipeline), row))
        a, b, c, _ = truth[str(pipeline)]
        return point(row, a, b, c).ms

    pipelines = [Strategy.parse(text).pipelines[0] for text in truth]
    profile = measure_profile("tiny", "here", pipelines, (512, 1024, 4096, 16_384), measure, lambda p: truth[str(p)][3])
    assert max(sum(row) for name, row in measured if name == "tp1") == 4096
    assert {("tp2.cp2", (16_384,)), ("tp2.cp2", (2_048,) * SHARED_BY)} <= set(measured)
    save_profile(profile, tmp_path / "tiny.json", "measured by a test")
    again = load_profile(str(tmp_path / "tiny.json"))
    assert again == profile
    for timing in again.timings:
        assert (timing.a, timing.b, timing.c, timing.max_len) == pytest.approx(truth[str(timing.pipeline)], rel=1e-5)
        assert timing.error is not None
        assert timing.error < 1e-6
    assert [cost.max_len for cost in again.costs(pipelines[0])] == [5_000, 20_000]
