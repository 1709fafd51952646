"""Does an optimizer treat each element alike, whatever tensor it is in? Only then may tensors be flattened.

Momentum, Adam, decay, clipping by the norm of all gradients: each element's update depends on its own gradient,
moments and value, and on sums over all elements. Masks by rank, factored moments and means over a tensor see
shapes, and flat arrays would change what they do without a word. So the optimizer is tried, on a small tree of the
same form.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dynajax.errors import StrategyError
from dynajax.runtime.flat import flatten
from dynajax.train.state import mirrors

_SIZE, _PARTS, _STEPS = 3, 4, 2


def require_elementwise(optimizer: optax.GradientTransformation, params: Any) -> None:
    """Refuse an optimizer that does otherwise with flat arrays than with tensors.

    Args:
        optimizer: any optax optimizer.
        params: parameters as ``ShapeDtypeStruct`` leaves.

    Raises:
        StrategyError: it sees the shapes of tensors.
    """
    rng = np.random.default_rng(0)
    draws = [
        jax.tree.map(lambda x: jnp.asarray(rng.normal(size=[min(n, _SIZE) for n in x.shape]), jnp.float32), params)
        for _ in range(_STEPS + 1)
    ]
    whole, flat = _trained(optimizer, draws), _trained(optimizer, [flatten(tree, _PARTS) for tree in draws])
    shapes = jax.eval_shape(optimizer.init, params)
    paths, alike = jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(mirrors(shapes, params))
    factored = [
        jax.tree_util.keystr(path) for (path, leaf), same in zip(paths, alike, strict=True) if leaf.ndim and not same
    ]
    if factored or not _close(flat, flatten(whole, _PARTS)):
        seen = f"keeps {factored[0]}, which has no parameter's shape" if factored else "updates tensors by their shapes"
        raise StrategyError(
            f"the optimizer {seen}, and pipelines side by side keep parameters and moments flat; take one that treats "
            "each element alike (Adam, momentum, decay and masks by name do), or one strategy for all"
        )


def _trained(optimizer: optax.GradientTransformation, draws: list[Any]) -> Any:
    params, *grads = draws
    state = optimizer.init(params)
    for gradient in grads:
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params


def _close(a: Any, b: Any) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.allclose(x, y, rtol=1e-5, atol=1e-6) for x, y in pairs)
