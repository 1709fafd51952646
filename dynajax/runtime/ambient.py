"""Name shardings from wherever the code is traced: at the top of a step or inside a manual region.

Inside ``shard_map`` jax wants the mesh of that region, in which some axes are manual; an array is
whole along these, and a sharding must not name them.
"""

from __future__ import annotations

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec


def ambient_mesh(mesh: Mesh) -> Mesh | AbstractMesh:
    """``mesh``, or the mesh of the manual region that is being traced."""
    here = jax.sharding.get_abstract_mesh()
    return here if here.manual_axes else mesh


def ambient_sharding(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    """``spec`` on ``mesh``, or on the mesh of the manual region that is being traced, without its manual axes."""
    here = ambient_mesh(mesh)
    manual = set(here.manual_axes) if isinstance(here, AbstractMesh) else set()
    entries = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
    return NamedSharding(
        here, PartitionSpec(*(tuple(a for a in entry if a not in manual) or None for entry in entries))
    )


def constrained(x: jax.Array, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """``x`` cut as ``spec`` says."""
    return jax.lax.with_sharding_constraint(x, ambient_sharding(mesh, spec))
