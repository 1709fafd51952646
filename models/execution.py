"""How a model runs, apart from what it is: attention, activation sharding, precision, rematerialising.

A strategy changes these while the parameters stay the same, so they are handed to each call and
are no part of the config or of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dynajax.models.attention import packed_attention
from dynajax.models.experts import Experts, sorted_experts

Attention = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""``attention(q, k, v, segment_ids, positions) -> out``; shapes as in ``packed_attention``."""

Constrain = Callable[[jax.Array, Sequence[str | None]], jax.Array]
"""``constrain(x, logical_axes) -> x``: the same values, with a say in how they are cut; None is a dim never cut."""


def unconstrained(x: jax.Array, logical_axes: Sequence[str | None]) -> jax.Array:
    """Leave the layout of an activation to the compiler."""
    del logical_axes
    return x


@dataclass(frozen=True)
class Execution:
    """What a call of the model is given besides parameters and tokens.

    Attributes:
        attention: mixes values along the sequence; ring attention takes this place.
        constrain: is shown every activation that matters, with the names of its dims.
        dtype: of activations and of the operands of matrix products. Norms, softmax, router and
            logits are always float32, and so are the parameters.
        experts: runs the chosen experts of a mixture; an exchange between devices takes this place.
        remat: recompute each block in the backward pass instead of keeping its activations.
    """

    attention: Attention = packed_attention
    constrain: Constrain = unconstrained
    experts: Experts = sorted_experts
    dtype: Any = jnp.float32
    remat: bool = False

    def einsum(self, equation: str, x: jax.Array, kernel: jax.Array, out_dtype: Any = None) -> jax.Array:
        """A matrix product in ``dtype``; float32 means float32 also where TF32 would be the default.

        Args:
            equation: of two operands, as ``jnp.einsum`` takes it.
            x: activations.
            kernel: a float32 parameter.
            out_dtype: what products are summed and returned in, ``dtype`` if None.
        """
        x, kernel = x.astype(self.dtype), kernel.astype(self.dtype)
        return jnp.einsum(equation, x, kernel, precision=self._precision, preferred_element_type=out_dtype)

    def ragged_dot(self, x: jax.Array, kernels: jax.Array, sizes: jax.Array) -> jax.Array:
        """Rows of ``x`` (rows, in), in groups of the given ``sizes`` (n,), each with its kernel of (n, in, out)."""
        return jax.lax.ragged_dot(x.astype(self.dtype), kernels.astype(self.dtype), sizes, precision=self._precision)

    @property
    def _precision(self) -> jax.lax.Precision | None:
        return jax.lax.Precision.HIGHEST if jnp.dtype(self.dtype) == jnp.float32 else None
