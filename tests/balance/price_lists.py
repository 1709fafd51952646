"""Price lists, hypothesis strategies and a referee that several tests share."""

import numpy as np
from hypothesis import strategies as st

from dynajax.balance.cost import PipelineCost
from dynajax.meshes import Strategy


def price(text: str, a: float, b: float, c: float, max_len: int) -> PipelineCost:
    return PipelineCost(Strategy.parse(text).pipelines[0], a, b, c, max_len)


SMALL = price("tp1", 4e-6, 0.25, 20, 3_000)
MIDDLE = price("tp2", 2e-6, 0.15, 25, 8_000)
DEEP = price("tp2.pp2", 1e-6, 0.075, 12, 10_000)
RING = price("cp2.tp2", 1e-6, 0.08, 30, 16_000)
DEEPEST = price("tp4.pp3", 0.4e-6, 0.03, 5, 30_000)
LARGE = price("tp8", 0.8e-6, 0.05, 40, 30_000)
KINDS = (SMALL, MIDDLE, DEEP, RING, DEEPEST, LARGE)

LENGTHS = st.lists(st.integers(1, 30_000) | st.integers(1, 500), max_size=40)


def long_tailed(rng: np.random.Generator, count: int, longest: int) -> np.ndarray:
    return np.minimum(rng.lognormal(6.5, 1.2, count).astype(np.int64) + 1, longest)
