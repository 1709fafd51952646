"""What does an optimizer see of how tensors are stored? It is tried on a small tree of the same form.

Momentum, Adam, decay, clipping by the norm of all gradients: each element's update depends on its own gradient,
moments and value, and on sums over all elements. Masks by rank, factored moments and means over a tensor see
shapes, and flat arrays would change what they do without a word. Means and noise see padding as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dynajax.errors import StrategyError
from dynajax.runtime.optimizer_layout import flatten
from dynajax.train.job import NO_MESH
from dynajax.train.state import mirrors

_SIZE, _PARTS = 3, 4
_UPDATES, _PATIENCE = 3, 512
"""Updates that a trial compares, and steps that it waits for them: some optimizers add up gradients first."""


def require_elementwise(optimizer: optax.GradientTransformation, params: Any) -> None:
    """Refuse an optimizer that does otherwise with flat arrays than with tensors.

    Args:
        optimizer: any optax optimizer.
        params: parameters as ``ShapeDtypeStruct`` leaves.

    Raises:
        StrategyError: it sees the shapes of tensors.
    """
    shapes = jax.eval_shape(optimizer.init, params)
    paths, alike = jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(mirrors(shapes, params))
    factored = [
        jax.tree_util.keystr(path) for (path, leaf), same in zip(paths, alike, strict=True) if leaf.ndim and not same
    ]
    if factored or not _updates_alike(optimizer, params, lambda tree: flatten(tree, _PARTS)):
        seen = f"keeps {factored[0]}, which has no parameter's shape" if factored else "updates tensors by their shapes"
        raise StrategyError(
            f"the optimizer {seen}, and pipelines side by side keep parameters and moments flat; take one that treats "
            "each element alike (Adam, momentum, decay and masks by name do), or one strategy for all"
        )


def sees_padding(optimizer: optax.GradientTransformation, params: Any) -> bool:
    """True if zeros at the ends of dims, with gradients of zero, change what it does: means count them.

    Args:
        optimizer: any optax optimizer.
        params: parameters as ``ShapeDtypeStruct`` leaves.
    """
    return not _updates_alike(
        optimizer, params, lambda tree: jax.tree.map(lambda x: jnp.pad(x, [(0, 1)] * x.ndim), tree)
    )


def _updates_alike(optimizer: optax.GradientTransformation, params: Any, stored: Callable[[Any], Any]) -> bool:
    """True if it updates what ``stored`` makes of tensors as it updates tensors, under gradients that grow."""
    rng = np.random.default_rng(0)

    def draw(scale: float) -> Any:
        return jax.tree.map(
            lambda x: jnp.asarray(scale * rng.normal(size=[min(n, _SIZE) for n in x.shape]), jnp.float32), params
        )

    @jax.jit
    def step(gradients: Any, state: Any, params: Any) -> Any:
        updates, state = optimizer.update(gradients, state, params)
        return updates, state, optax.apply_updates(params, updates)

    with jax.set_mesh(NO_MESH):
        start, updated = draw(1.0), 0
        whole, other = ((optimizer.init(tree), tree) for tree in (start, stored(start)))
        for _ in range(_PATIENCE):
            gradients = draw(100.0**updated)
            updates, *whole = step(gradients, *whole)
            others, *other = step(stored(gradients), *other)
            if not _close(others, stored(updates)):
                return False
            updated += any(np.any(x) for x in jax.tree.leaves(updates))
            if updated == _UPDATES:
                break
    return True


def _close(a: Any, b: Any) -> bool:
    """True if arrays differ by rounding, beside the largest number of each: a small step is not a small error."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.abs(x - y).max(initial=0) <= 1e-4 * np.abs(y).max(initial=0) for x, y in pairs)
