"""The state of a training job as a plain pytree, and how each of its leaves is cut.

Specs come from logical axes and rules. A leaf of the optimizer state mirrors a parameter when its
path ends in that parameter's path: Adam's moments, accumulated gradients and the states inside
chains, masks and groups all keep the tree of parameters below some prefix. This reads the state
itself, not the optimizer that made it, so it holds for optimizers that nobody has written yet.
Leaves that mirror no parameter (counts, hyperparameters) are kept whole on every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

KeyPath = tuple[Any, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that a run needs to go on.

    Attributes:
        params: nested dict of parameters.
        opt_state: state of the optax optimizer.
        step: int32[], optimizer steps taken.
        rng: typed PRNG key of the next step.
        cursor: int32[], number of the next sample of the data stream.
    """

    params: Any
    opt_state: Any
    step: Any
    rng: Any
    cursor: Any


def initial_state(params: Any, optimizer: optax.GradientTransformation, rng: jax.Array) -> TrainState:
    """The state before the first step."""
    return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32), rng, jnp.zeros((), jnp.int32))


def state_specs(shapes: TrainState, param_specs: Any) -> TrainState:
    """PartitionSpecs of a state.

    Args:
        shapes: the state as ``ShapeDtypeStruct`` leaves.
        param_specs: PartitionSpecs in the tree of ``shapes.params``.
    """
    whole = PartitionSpec()
    opt_specs = mirror_specs(shapes.opt_state, shapes.params, param_specs)
    return TrainState(param_specs, opt_specs, whole, whole, whole)


def mirror_specs(opt_shapes: Any, param_shapes: Any, param_specs: Any) -> Any:
    """PartitionSpecs of an optimizer state: those of the parameters that its leaves mirror.

    Args:
        opt_shapes: optimizer state as ``ShapeDtypeStruct`` leaves.
        param_shapes: parameters as ``ShapeDtypeStruct`` leaves.
        param_specs: PartitionSpecs in the tree of ``param_shapes``.
    """
    mirrored = {
        path: (shape.shape, spec)
        for (path, shape), spec in zip(
            jax.tree_util.tree_leaves_with_path(param_shapes),
            jax.tree.leaves(param_specs, is_leaf=_is_spec),
            strict=True,
        )
    }
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _leaf_spec(path, leaf.shape, mirrored), opt_shapes)


def shardings(mesh: Mesh, specs: Any) -> Any:
    """``specs`` bound to ``mesh``."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=_is_spec)


def abstract(shapes: Any, shardings: Any) -> Any:
    """``ShapeDtypeStruct`` leaves that carry their shardings, for compiling and planning without arrays."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _leaf_spec(
    path: KeyPath, shape: tuple[int, ...], mirrored: Mapping[KeyPath, tuple[tuple[int, ...], PartitionSpec]]
) -> PartitionSpec:
    for start in range(len(path) + 1):  # the longest suffix first
        if path[start:] in mirrored:
            return _fit(shape, *mirrored[path[start:]])
    return PartitionSpec()


def _fit(shape: tuple[int, ...], param_shape: tuple[int, ...], spec: PartitionSpec) -> PartitionSpec:
    """The spec of a leaf that mirrors a parameter: its own, or without the one dim that a factored moment sums over."""
    if shape == param_shape:
        return spec
    entries = tuple(spec) + (None,) * (len(param_shape) - len(spec))
    for dim in range(len(param_shape)):
        if shape == param_shape[:dim] + param_shape[dim + 1 :]:
            return PartitionSpec(*entries[:dim], *entries[dim + 1 :])
    return PartitionSpec()
