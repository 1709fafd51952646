"""Every expert on every token: the oracle of all ways to run the chosen experts alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dynajax.models import Choices, ExpertKernels
from dynajax.models.experts import Arithmetic, activate


def dense_experts(x: jax.Array, choices: Choices, kernels: ExpertKernels, run: Arithmetic) -> jax.Array:
    """Simple and slow, with no movement that depends on data; b batch, s seq, e embed, x expert, m mlp."""
    chosen = choices.experts[..., None] == jnp.arange(kernels.up.shape[0])
    weights = jnp.sum(jnp.where(chosen, choices.gates[..., None], 0.0), axis=2)
    up = run.einsum("bse,xem->bsxm", x, kernels.up)
    gate = None if kernels.gate is None else run.einsum("bse,xem->bsxm", x, kernels.gate)
    inner = activate(up, gate) * weights[..., None].astype(run.dtype)
    return run.einsum("bsxm,xme->bse", inner, kernels.down)
