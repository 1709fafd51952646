"""What elements travel as, so that no bit of them changes.

XLA computes with floats of less than four bytes as larger ones, which changes NaNs, and has no collectives for numbers
of less than a byte. Both travel as unsigned integers, everything else as it is.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dynajax.arrays.dtypes import bits_of
from dynajax.planner.exchanges.part import wire_dtype

_UNSIGNED = {2: jnp.uint2, 4: jnp.uint4, 8: jnp.uint8, 16: jnp.uint16}


def to_wire(x: jax.Array) -> jax.Array:
    """Elements as they travel."""
    wire = wire_dtype(x.dtype)
    if wire == x.dtype:
        return x
    if x.dtype == jnp.bool_:
        return x.astype(wire)
    return jax.lax.bitcast_convert_type(x, _UNSIGNED[bits_of(x.dtype)]).astype(wire)


def from_wire(x: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of ``to_wire``."""
    dtype = jnp.dtype(dtype)
    if wire_dtype(dtype) == dtype:
        return x
    if dtype == jnp.bool_:
        return x.astype(jnp.bool_)
    return jax.lax.bitcast_convert_type(x.astype(_UNSIGNED[bits_of(dtype)]), dtype)
