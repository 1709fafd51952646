"""Typed PRNG keys among other arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def is_key(x: Any) -> bool:
    """True for an array (or a shape) of typed PRNG keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
