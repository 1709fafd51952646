"""Run the experts that a router chose, each token on its own.

For each token, the outputs of its chosen experts are added up, weighted by gates. A gate of 0 takes a
choice out, which is how padding and choices beyond an expert's capacity are dropped in static shapes.
``sorted_experts`` sorts the choices by expert and computes grouped products: the least work on one device, or inside a
``shard_map`` over local experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp


class Arithmetic(Protocol):
    """What experts need of an ``Execution``, which is given a way to run them and so cannot be named here."""

    @property
    def dtype(self) -> Any:
        """Of activations and of the operands of products."""
        ...

    @property
    def constrain(self) -> Callable[[jax.Array, Sequence[str | None]], jax.Array]:
        """See ``Constrain``."""
        ...

    def einsum(self, equation: str, x: jax.Array, kernel: jax.Array, out_dtype: Any = None) -> jax.Array:
        """See ``Execution.einsum``."""
        ...

    def ragged_dot(self, x: jax.Array, kernels: jax.Array, sizes: jax.Array) -> jax.Array:
        """See ``Execution.ragged_dot``."""
        ...


class Choices(NamedTuple):
    """What a router decided.

    Attributes:
        experts: (batch, seq, top_k) int32; a number that no kernel has adds nothing.
        gates: (batch, seq, top_k) float32 weights; 0 where a choice is dropped.
    """

    experts: jax.Array
    gates: jax.Array


class ExpertKernels(NamedTuple):
    """Kernels of one layer's experts.

    Attributes:
        up: (expert, embed, mlp).
        down: (expert, mlp, embed).
        gate: (expert, embed, mlp), or None for GELU without a gate.
    """

    up: jax.Array
    down: jax.Array
    gate: jax.Array | None


Experts = Callable[[jax.Array, Choices, ExpertKernels, Arithmetic], jax.Array]
"""``experts(x, choices, kernels, run) -> out`` with x and out (batch, seq, embed)."""


def sorted_experts(x: jax.Array, choices: Choices, kernels: ExpertKernels, run: Arithmetic) -> jax.Array:
    """Sort the choices by expert and multiply each group with its expert's kernels."""
    batch, seq, embed = x.shape
    count, top_k = kernels.up.shape[0], choices.experts.shape[-1]
    chosen = choices.experts.reshape(-1)
    chosen = jnp.where((chosen >= 0) & (chosen < count), chosen, count)
    order = jnp.argsort(chosen)  # stable
    back = jnp.argsort(order)
    sizes = jnp.sum(chosen[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)

    def product(rows: jax.Array, kernel: jax.Array) -> jax.Array:
        return run.ragged_dot(rows, kernel, sizes)

    rows = jnp.repeat(x.reshape(-1, embed), top_k, axis=0).at[order].get(unique_indices=True)
    inner = activate(product(rows, kernels.up), None if kernels.gate is None else product(rows, kernels.gate))
    out = product(inner, kernels.down)
    # Rows after the last group belong to experts that have no kernel here; what they hold is not defined.
    out = jnp.where((jnp.arange(out.shape[0]) < jnp.sum(sizes))[:, None], out, 0)
    out = out.at[back].get(unique_indices=True).reshape(batch, seq, top_k, embed)
    return jnp.sum(out * choices.gates[..., None].astype(run.dtype), axis=2)


def activate(up: jax.Array, gate: jax.Array | None) -> jax.Array:
    """SwiGLU's inner product, or GELU where there is no gate."""
    return jax.nn.gelu(up) if gate is None else jax.nn.silu(gate) * up
