"""From the logical axes of a tensor to the mesh axes that cut it.

A model names what each dim of a parameter means ("embed", "heads", ...). Rules say which mesh axes
cut a dim of that name. Specs are made from both when a mesh is known and never stored, so that
nothing in the state remembers the mesh it came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from jax.sharding import PartitionSpec

from dynajax.errors import LayoutError

Rules = Mapping[str, tuple[str, ...]]

PARAMETER_RULES: Rules = MappingProxyType(
    {
        "vocab": ("tp",),
        "heads": ("tp",),
        "kv_heads": ("tp",),
        "mlp": ("tp",),
        "embed": ("fsdp",),
        "layers": ("pp",),
        "expert": ("ep",),
        "head_dim": (),
    }
)
"""How parameters, and moments of the same shape, are cut."""

ACTIVATION_RULES: Rules = MappingProxyType(
    {
        "batch": ("dp", "fsdp", "ep"),
        "seq": ("cp",),
        "vocab": ("tp",),
        "heads": ("tp",),
        "kv_heads": ("tp",),
        "mlp": ("tp",),
        "embed": (),
        "expert": ("ep",),
        "head_dim": (),
    }
)
"""How activations and batches are cut."""


def spec(axes: Sequence[str | None], rules: Rules) -> PartitionSpec:
    """The PartitionSpec of a tensor whose dims have the logical names ``axes`` (None: never cut).

    Raises:
        LayoutError: a name that the rules do not know, or a mesh axis that would cut two dims.
    """
    entries: list[tuple[str, ...] | str | None] = []
    used: set[str] = set()
    for name in axes:
        mesh_axes = () if name is None else _mesh_axes(name, rules)
        if used.intersection(mesh_axes):
            raise LayoutError(f"logical axes {tuple(axes)} cut two dims along the mesh axes {mesh_axes}")
        used.update(mesh_axes)
        entries.append(mesh_axes[0] if len(mesh_axes) == 1 else (mesh_axes or None))
    return PartitionSpec(*entries)


def _mesh_axes(name: str, rules: Rules) -> tuple[str, ...]:
    try:
        return rules[name]
    except KeyError:
        raise LayoutError(f"no rule for the logical axis {name!r}; the rules know {', '.join(sorted(rules))}") from None
