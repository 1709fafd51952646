"""Elements as 32-bit words: how values of every dtype travel through XLA without a change of any bit.

XLA may change the payload of a NaN where it computes, so values are taken for unsigned integers first. Elements of
less than four bytes go several to a word where they come in whole words, else each in a word of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


@dataclass(frozen=True)
class Words:
    """How the elements of one dtype are words.

    Attributes:
        dtype: machine dtype of the elements.
        widened: True if an element of less than four bytes has a word of its own.
    """

    dtype: np.dtype[Any]
    widened: bool = False

    @property
    def carrier(self) -> Words:
        """What a buffer is while it is filled: XLA scatters small floats as larger ones, which changes NaNs."""
        small = jnp.issubdtype(self.dtype, jnp.floating) and self.dtype.itemsize < 4
        return Words(np.dtype(_UNSIGNED[self.dtype.itemsize]), self.widened) if small else self

    def count(self, elements: int) -> int:
        """Words of so many elements."""
        return elements if self.widened else elements * self.dtype.itemsize // 4

    def elements(self, words: int) -> int:
        """Elements of so many words."""
        return words if self.widened else words * 4 // self.dtype.itemsize

    def unsigned(self, rows: jax.Array) -> jax.Array:
        """Elements, shape (rows, n), as unsigned integers of their size; those of 8 and more bytes as several."""
        if jnp.issubdtype(rows.dtype, jnp.complexfloating):
            rows = jnp.stack([rows.real, rows.imag], axis=-1).reshape(rows.shape[0], -1)
        if rows.dtype == jnp.bool_:
            return rows.astype(jnp.uint8)
        return jax.lax.bitcast_convert_type(rows, _UNSIGNED[min(rows.dtype.itemsize, 4)]).reshape(rows.shape[0], -1)

    def typed(self, rows: jax.Array) -> jax.Array:
        """The inverse of ``unsigned``."""
        if self.dtype == jnp.bool_:
            return rows.astype(jnp.bool_)
        if jnp.issubdtype(self.dtype, jnp.complexfloating):
            part = jnp.finfo(self.dtype).dtype
            pairs = Words(part).typed(rows).reshape(rows.shape[0], -1, 2)
            return jax.lax.complex(pairs[..., 0], pairs[..., 1])
        size = rows.dtype.itemsize
        if self.dtype.itemsize > size:
            rows = rows.reshape(rows.shape[0], -1, self.dtype.itemsize // size)
        return jax.lax.bitcast_convert_type(rows, self.dtype)

    def sum(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """The sums of the elements of two rows of words, as such words; in the elements' dtype."""
        return self.join(self.unsigned(self.typed(self.split(a)) + self.typed(self.split(b))))

    def join(self, rows: jax.Array) -> jax.Array:
        """Unsigned integers as words, shape (rows, words)."""
        size = rows.dtype.itemsize
        if self.widened or size == 4:
            return rows.astype(jnp.uint32)
        return jax.lax.bitcast_convert_type(rows.reshape(rows.shape[0], -1, 4 // size), jnp.uint32)

    def split(self, rows: jax.Array) -> jax.Array:
        """The inverse of ``join``."""
        size = min(self.dtype.itemsize, 4)
        if self.widened:
            return rows.astype(_UNSIGNED[size])
        return jax.lax.bitcast_convert_type(rows, _UNSIGNED[size]).reshape(rows.shape[0], -1)


def whole_bytes(array: jax.Array) -> jax.Array:
    """Numbers of less than a byte as a byte each; any other array as it is, and one of which nothing is here.

    By ordinary calls of jax: a program compiled ahead does not take arrays of such numbers (their layouts disagree).
    """
    if not is_packed(array.dtype) or not array.addressable_shards:
        return array
    return jax.lax.bitcast_convert_type(array, _part(array.dtype)).astype(jnp.uint8)


def packed_again(array: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of ``whole_bytes``."""
    if not is_packed(dtype) or not array.addressable_shards:
        return array
    return jax.lax.bitcast_convert_type(array.astype(_part(dtype)), dtype)


def is_packed(dtype: Any) -> bool:
    """True for numbers of less than a byte."""
    return _bits(dtype) < 8


def can_be_summed(dtype: Any) -> bool:
    """True for numbers that have whole bytes to themselves."""
    return jnp.issubdtype(dtype, jnp.number) and not is_packed(dtype)


def _bits(dtype: Any) -> int:
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    return jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else 8 * np.dtype(dtype).itemsize


def _part(dtype: Any) -> Any:
    return {4: jnp.uint4, 2: jnp.uint2}[_bits(dtype)]
