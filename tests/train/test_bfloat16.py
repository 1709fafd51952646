"""Unlike pipelines in bfloat16: as one device in bfloat16, closer than rounding in another order would have it differ.

How far that is depends on the parameters. Each step from a bfloat16 number to the next is 1/128 of a power of two, and
where all parameters are rounded the same way by almost half of that, all of the model feels it, while what is rounded
in activations evens out over thousands of tokens. Such parameters tell bfloat16 from float32, and both from a mistake.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from train.document_runs import LONGEST, MODEL, alone, job_and_place, take, trainer, written
from train.small_runs import Step

from dynajax import models
from dynajax.models import Execution
from dynajax.runtime.links import Link
from dynajax.train import StepOptions, Trainer

STEPS = 3
MOST = np.array([2e-4, 2.5e-3, 2e-3])
"""Relative: of a loss, of all gradients, of all that was added to parameters since the start."""


class InHalves(Execution):
    """What comes out of heads and of neurons is summed in two halves, each of them rounded, as by two devices."""

    def einsum(self, equation: str, x: jax.Array, kernel: jax.Array, out_dtype: Any = None) -> jax.Array:
        if equation not in ("bshd,hde->bse", "bsm,me->bse"):
            return super().einsum(equation, x, kernel, out_dtype)
        half = kernel.shape[0] // 2
        first = super().einsum(equation, x[:, :, :half], kernel[:half])
        return first + super().einsum(equation, x[:, :, half:], kernel[half:])


@cache
def start() -> Any:
    """Powers of two and a bit, which are rounded down by 0.35 %; tables large enough for the losses to feel it."""
    params = models.init(MODEL, jax.random.split(jax.random.key(0))[0])
    params["embed"]["tokens"] *= 100
    return jax.tree.map(lambda p: np.array(jnp.sign(p) * 2.0 ** jnp.round(jnp.log2(abs(p))) * (1 + 0.9 / 256)), params)


def optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.trace(decay=0.0), optax.clip_by_global_norm(0.5), optax.trace(0.9), optax.sgd(0.1))


def distances(got: list[Step], wanted: list[Step]) -> np.ndarray:
    """(steps, 3), of what ``MOST`` tells of."""

    def norm(tree: Any) -> float:
        return float(np.sqrt(sum(np.vdot(x, x) for x in jax.tree.leaves(tree))))

    def relative(ours: Any, theirs: Any) -> float:
        return norm(jax.tree.map(np.subtract, ours, theirs)) / norm(theirs)

    def added(step: Step) -> Any:
        return jax.tree.map(np.subtract, step.params, start())

    return np.array(
        [
            (relative(a.loss, b.loss), relative(a.gradient, b.gradient), relative(added(a), added(b)))
            for a, b in zip(got, wanted, strict=True)
        ]
    )


def bytes_pulled_in_float32(running: Trainer) -> list[int]:
    """What each pipeline would pull if nothing was cast."""
    job, place = job_and_place(running)
    flat, runners = job._mesh(place), [job._runner(place, pipeline) for pipeline in place.pipelines(0)]
    links = [[Link.of(s, MODEL.layers, flat, r.mesh, jnp.float32) for s in r.sections] for r in runners]
    return [sum(link.pulls.plan.bytes_moved for link in of_pipeline) for of_pipeline in links]


def test_steps_in_bfloat16_are_those_of_one_device_in_bfloat16():
    lengths = np.random.default_rng(0).integers(2, LONGEST + 1, 400)
    data = written(lengths.tolist(), token_budget=2000)
    running = trainer("tp4|pp2.cp2|dp1", data=data, optimizer=optimizer(), options=StepOptions(dtype=jnp.bfloat16))
    state = running.whole_state()
    begin = jax.tree.map(lambda x, old: jax.device_put(x, old.sharding), start(), state.params)
    running.state = running.job.from_plain(replace(state, params=begin), running.placement)
    taken = [take(running) for _ in range(STEPS)]

    def one_device(run: Execution) -> list[Step]:
        return alone(data, STEPS, optimizer(), start=start(), run=run)

    wanted = one_device(Execution(dtype=jnp.bfloat16))
    assert (distances([step for step, _ in taken], wanted) < MOST).all()
    noise, gap = distances(one_device(InHalves(dtype=jnp.bfloat16)), wanted), distances(one_device(Execution()), wanted)
    assert (noise < MOST).all()
    assert (gap > 2 * MOST).all()
    whole = bytes_pulled_in_float32(running)
    for _, report in taken:
        assert [2 * share.bytes_pulled for share in report.pipelines] == whole
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((running.state.params, running.state.opt_state)))
