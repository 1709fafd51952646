"""What elements are: typed keys, numbers of less than a byte, numbers that can be summed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_key(x: Any) -> bool:
    """True for an array (or a shape) of typed PRNG keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def bits_of(dtype: Any) -> int:
    """Bits of an element that say something: less than those of its storage for ``int4`` and its like."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    return jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else 8 * np.dtype(dtype).itemsize


def is_packed(dtype: Any) -> bool:
    """True for numbers of less than a byte."""
    return bits_of(dtype) < 8


def can_be_summed(dtype: Any) -> bool:
    """True for numbers that have whole bytes to themselves."""
    return jnp.issubdtype(dtype, jnp.number) and not is_packed(dtype)
