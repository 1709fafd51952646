"""Move by ``jax.device_put``, leaf by leaf: any backend, within one process.

Slower and thirstier than what knows the plan; the fallback where devices share no memory, and the oracle of the tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dynajax.engine.keys import is_key
from dynajax.engine.report import Stopwatch
from dynajax.engine.tree import Leaf
from dynajax.errors import CheckError, TargetError
from dynajax.planner import Move


class DevicePut:
    """The transport for devices of one process that do not share memory."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch

    def run(self, stage: Sequence[tuple[Move, Leaf]], share: bool, check: bool) -> list[jax.Array]:
        """See ``Transport.run``."""
        moved: list[jax.Array] = []
        for _, leaf in stage:
            if not (leaf.source.is_plain and leaf.target.is_plain):
                raise TargetError(f"{leaf.tensor.path}: padded and permuted arrays move only between CPU devices yet")
            with self._watch.phase("move"):
                # One at a time: each may be a collective program, and two in flight can deadlock.
                source = jax.block_until_ready(_words(leaf.array if share else jnp.copy(leaf.array)))
                words = jax.block_until_ready(jax.device_put(source, leaf.target.sharding))
                same = words.dtype == leaf.array.dtype
                moved.append(words if same else jax.lax.bitcast_convert_type(words, leaf.array.dtype))
                jax.block_until_ready(moved[-1])
            if check:
                with self._watch.phase("verify"):
                    _compare(leaf, moved[-1])
        return moved

    def prepare(self, stage: Sequence[tuple[Move, Leaf]]) -> None:
        """See ``Transport.prepare``."""

    def close(self) -> None:
        """See ``Transport.close``."""


def _compare(leaf: Leaf, moved: jax.Array) -> None:
    before, after = (jax.device_get(jax.random.key_data(a) if is_key(a) else a) for a in (leaf.array, moved))
    if before.tobytes() != after.tobytes():
        raise CheckError(f"{leaf.tensor.path}: the moved bytes are not those of the source")


def _words(array: jax.Array) -> jax.Array:
    """Small floats as unsigned integers: some moves are programs, and those may change the payload of a NaN."""
    if jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize < 4 and jnp.finfo(array.dtype).bits >= 8:
        return jax.lax.bitcast_convert_type(array, jnp.uint8 if array.dtype.itemsize == 1 else jnp.uint16)
    return array
