"""The state of a training job as a plain pytree, and how each of its leaves is stored under a strategy.

A leaf of the optimizer state mirrors a parameter when its path ends in that parameter's path: Adam's
moments, accumulated gradients and the states inside chains, masks and groups all keep the tree of
parameters below some prefix. It is then stored like that parameter. This reads the state itself, not the
optimizer that made it, so it holds for optimizers that nobody has written yet.
Leaves that mirror no parameter (counts, hyperparameters) are kept whole on every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from dynajax.errors import StrategyError
from dynajax.runtime import Storage

KeyPath = tuple[Any, ...]
T = TypeVar("T")


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


def state_storage(shapes: TrainState, params: Any) -> TrainState:
    """How a state is stored: a ``Storage`` in the place of each leaf.

    Args:
        shapes: the state as ``ShapeDtypeStruct`` leaves, each of its logical shape.
        params: storage of the parameters, in the tree of ``shapes.params``.

    Raises:
        StrategyError: a leaf sums over a dim that is padded.
    """
    whole = Storage.whole(())
    return TrainState(params, mirror_storage(shapes.opt_state, params), whole, whole, whole)


def mirror_storage(opt_shapes: Any, params: Any) -> Any:
    """How an optimizer state is stored: as the parameters that its leaves mirror.

    Args:
        opt_shapes: optimizer state as ``ShapeDtypeStruct`` leaves.
        params: a tree of ``Storage``.

    Raises:
        StrategyError: a leaf sums over a dim that is padded.
    """
    mirrored = dict(jax.tree_util.tree_leaves_with_path(params))
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _leaf_storage(path, leaf.shape, mirrored), opt_shapes)


def mirrors(opt_shapes: Any, params: Any) -> Any:
    """True in the place of each leaf of an optimizer state that mirrors a parameter and has its shape.

    Args:
        opt_shapes: optimizer state as ``ShapeDtypeStruct`` leaves.
        params: parameters as ``ShapeDtypeStruct`` leaves.
    """
    of_path = dict(jax.tree_util.tree_leaves_with_path(params))

    def is_like_its_parameter(path: KeyPath, leaf: Any) -> bool:
        parameter = _mirrored(path, of_path)
        return parameter is not None and parameter.shape == leaf.shape

    return jax.tree_util.tree_map_with_path(is_like_its_parameter, opt_shapes)


def to_storage(storage: Any, state: Any) -> Any:
    """A state of whole tensors in its stored form, zeros in padding; inside jit or out."""
    return jax.tree.map(lambda s, x: x if s.is_identity else s.to_storage(x), storage, state)


def abstract_arrays(shapes: Any, layout: Any) -> Any:
    """``ShapeDtypeStruct`` leaves as they are stored, for compiling and planning without arrays.

    Args:
        shapes: leaves with dtypes.
        layout: a ``Stored`` or ``Bundle`` for each.
    """
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(s.array_shape, x.dtype, sharding=s.sharding), shapes, layout)


def _mirrored(path: KeyPath, of_path: Mapping[KeyPath, T]) -> T | None:
    """What ``of_path`` has for the parameter that a leaf mirrors: the longest path that ends its own."""
    return next((of_path[path[start:]] for start in range(len(path) + 1) if path[start:] in of_path), None)


def _leaf_storage(path: KeyPath, shape: tuple[int, ...], params: Mapping[KeyPath, Storage]) -> Storage:
    param = _mirrored(path, params)
    return Storage.whole(shape) if param is None else _fit(path, shape, param)


def _fit(path: KeyPath, shape: tuple[int, ...], param: Storage) -> Storage:
    """The storage of a leaf that mirrors a parameter: its own, or without the dim that a factored moment sums over."""
    if shape == param.logical_shape:
        return param
    for number, dim in enumerate(param.dims):
        if shape == param.without(number).logical_shape:
            if dim.stored != dim.logical:
                raise StrategyError(
                    f"{jax.tree_util.keystr(path, simple=True, separator='/')} is a mean over a dim of {dim.logical}, "
                    f"which {' and '.join(dim.axes)} would pad to {dim.stored}; take sizes that divide it, or an "
                    "optimizer without factored moments"
                )
            return param.without(number)
    return Storage.whole(shape)
