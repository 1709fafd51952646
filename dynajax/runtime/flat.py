"""The optimizer layout: each tensor flattened and cut equally over all devices of a job (ZeRO).

Whatever the pipelines do, master parameters and moments stay where they are, each element on one device. A
tensor is padded with fewer zeros than there are devices, so any number of devices does; borders of dims do not matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dynajax.engine import Bundle
from dynajax.vps import Run

AXIS = "all"


def flat_sharding(devices: Sequence[jax.Device]) -> NamedSharding:
    """Cut a flat array over ``devices``."""
    return NamedSharding(Mesh(np.asarray(devices, dtype=object), (AXIS,)), PartitionSpec(AXIS))


def flat_layout(shapes: Any, sharding: NamedSharding) -> Any:
    """How a tree of tensors lies flat: a ``Bundle`` for each.

    Args:
        shapes: leaves with shapes.
        sharding: of ``flat_sharding``.
    """
    parts = sharding.mesh.size

    def bundle(path: Any, leaf: Any) -> Bundle:
        size = math.prod(leaf.shape)
        run = Run(jax.tree_util.keystr(path), tuple(leaf.shape), 0, size, 0)
        return Bundle(sharding, (_padded(size, parts),), (run,))

    return jax.tree_util.tree_map_with_path(bundle, shapes)


def flatten(tree: Any, parts: int) -> Any:
    """Every leaf as the flat array that ``flat_layout`` tells of."""
    return jax.tree.map(lambda x: jnp.pad(x.reshape(-1), (0, _padded(x.size, parts) - x.size)), tree)


def _padded(size: int, parts: int) -> int:
    return -(-size // parts) * parts
