"""The optimizer that the command line trains with."""

from __future__ import annotations

import optax

WARMUP_STEPS = 10


def adamw(lr: float) -> optax.GradientTransformation:
    """AdamW with a clipped global norm, a linear warm-up and then a constant rate.

    The rate does not depend on how long the run is meant to be: one that stops and goes on, or is made
    longer, trains the same.

    A switched run is compared with an unswitched one. The two differ in the order of float32 sums, by
    about 1e-7, and what becomes of that is up to the optimizer. With the small model and its default
    rate of 1e-3 it stays at 1e-7 over hundreds of steps. At 3e-3 training is at the edge of stability:
    the loss falls no lower, and differences grow tenfold every 30 steps, whatever the epsilon.

    Args:
        lr: peak rate.
    """
    rate = optax.linear_schedule(lr / WARMUP_STEPS, lr, WARMUP_STEPS)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.1))
