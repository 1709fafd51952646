"""The optimizer layout: each tensor flattened and cut equally over all devices of a job (ZeRO).

Whatever the pipelines do, master parameters and moments stay where they are, each element on one device. A
tensor is padded with fewer zeros than there are devices, so any number of devices does; borders of dims do not matter.
Of a stack of layers every layer is flattened by itself: a few layers are then some rows of the array, of which all
devices have equal parts, so that all of them send when layers are pulled in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dynajax.engine import Bundle
from dynajax.vps.flat import flat_parts, padded

AXIS = "all"
STACK = jax.tree_util.DictKey("blocks")
"""What a model calls its stack of layers."""
Span = tuple[int, int]
"""First layer of a section, and the one past its last."""


def flat_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """What flat arrays are cut over."""
    return Mesh(np.asarray(devices, dtype=object), (AXIS,))


def optimizer_layout(shapes: Any, mesh: Mesh, first_layer: int = 0, layers: int | None = None) -> Any:
    """How a tree of tensors lies flat: a ``Bundle`` for each.

    Args:
        shapes: leaves with shapes; a path with ``STACK`` in it is of a stack of layers.
        mesh: of ``flat_mesh``.
        first_layer: row of the first layer of ``shapes``, where the arrays have more ``layers`` than that.
        layers: of the arrays; default: those of ``shapes``.
    """

    def bundle(path: Any, leaf: Any) -> Bundle:
        name, is_stack = jax.tree_util.keystr(path), STACK in path
        array_shape, runs = flat_parts(name, tuple(leaf.shape), mesh.size, is_stack, first_layer, layers)
        spec = PartitionSpec(None, AXIS) if is_stack else PartitionSpec(AXIS)
        return Bundle(NamedSharding(mesh, spec), array_shape, runs)

    return jax.tree_util.tree_map_with_path(bundle, shapes)


def flatten(tree: Any, parts: int) -> Any:
    """Every leaf as the array that ``optimizer_layout`` tells of."""
    return jax.tree_util.tree_map_with_path(lambda path, x: flatten_leaf(path, x, parts), tree)


def flatten_leaf(path: Any, x: jax.Array, parts: int) -> jax.Array:
    """A leaf of ``flatten``."""
    rows = x.reshape(x.shape[0], -1) if STACK in path else x.reshape(-1)
    size = rows.shape[-1]
    return jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, padded(size, parts) - size)])


def add_section(span: Span, sums: Any, part: Any) -> Any:
    """Flat arrays of all parameters, with those of a section added to them.

    Args:
        span: of the section's layers.
        sums: of the whole model.
        part: of the section: its layers of the stack, and what else it owns.
    """
    stack = jax.tree.map(lambda rows, more: rows.at[slice(*span)].add(more), sums[STACK.key], part[STACK.key])
    rest = {name: jax.tree.map(jnp.add, sums[name], tree) for name, tree in part.items() if name != STACK.key}
    return sums | rest | {STACK.key: stack}
