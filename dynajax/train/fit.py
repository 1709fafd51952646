"""Does a strategy fit a model and a number of devices? Asked before anything is compiled or written."""

from __future__ import annotations

import math

import jax

from dynajax.errors import StrategyError
from dynajax.meshes import AXES, PARAMETER_RULES, Placement, Strategy, spec
from dynajax.models import ParameterSpec, Params

BATCH_AXES = ("dp", "fsdp", "ep")
"""Mesh axes that cut the rows of a batch."""

_TRAINED_AXES = ("dp", "fsdp", "tp")


def require_fit(parameters: Params, placement: Placement, num_devices: int) -> None:
    """Refuse a placement that cannot train a model on devices numbered below ``num_devices``.

    Args:
        parameters: of the model, as ``dynajax.models.parameter_specs`` gives them.
        placement: the placement.
        num_devices: how many devices there are.

    Raises:
        StrategyError: an axis that is not trained yet, a device that is not there, or a dim that its axis
            does not divide; the nearest sizes that do are named.
    """
    _require_trained(placement.strategy)
    if max(placement.devices) >= num_devices:
        raise StrategyError(
            f"{placement} uses device {max(placement.devices)}, but there are {num_devices}, numbered from 0; "
            f"take one of {', '.join(map(str, similar(placement.strategy, num_devices)))}, or more devices"
        )
    sizes = placement.strategy.mesh_shape()
    for path, parameter in jax.tree_util.tree_leaves_with_path(parameters):
        for size, name, axis in _cuts(parameter):
            if size % sizes[axis]:
                where = jax.tree_util.keystr(path, simple=True, separator="/")
                raise StrategyError(
                    f"{placement}: {axis} = {sizes[axis]} does not divide {name} = {size} (of {where}); "
                    f"take {axis} = {_choices(parameters, axis, sizes[axis])}"
                )


def fits(parameters: Params, placement: Placement, num_devices: int) -> bool:
    """True if ``require_fit`` has nothing to say."""
    try:
        require_fit(parameters, placement, num_devices)
    except StrategyError:
        return False
    return True


def batch_shards(strategy: Strategy) -> int:
    """Into how many parts a strategy cuts the rows of a batch."""
    return math.prod(strategy.size(axis) for axis in BATCH_AXES)


def similar(strategy: Strategy, num_devices: int) -> list[Strategy]:
    """Strategies on exactly ``num_devices`` devices that change the size of one axis, or else use one axis alone."""
    sizes = strategy.mesh_shape()
    used = [axis for axis in AXES if sizes[axis] > 1] or ["dp"]
    found = []
    for axis in used:
        others = strategy.num_devices // sizes[axis]
        if num_devices % others == 0:
            shape = sizes | {axis: num_devices // others}
            found.append(".".join(f"{a}{n}" for a, n in shape.items() if n > 1) or "dp1")
    return [Strategy.parse(text) for text in found or [f"{used[0]}{num_devices}"]]


def _require_trained(strategy: Strategy) -> None:
    if not strategy.is_homogeneous or strategy.pipelines[0].experts:
        raise StrategyError(f"{strategy}: several pipelines and expert layouts are not in this version; use one mesh")
    for axis, size in strategy.mesh_shape().items():
        if size > 1 and axis not in _TRAINED_AXES:
            raise StrategyError(f"{strategy}: {axis} is not in this version; use {', '.join(_TRAINED_AXES)}")


def _cuts(parameter: ParameterSpec) -> list[tuple[int, str | None, str]]:
    """``(size, logical axis, mesh axis)`` of each dim that a mesh axis cuts."""
    entries = zip(parameter.shape, parameter.axes, spec(parameter.axes, PARAMETER_RULES), strict=True)
    return [(size, name, axis) for size, name, axis in entries if axis is not None]


def _choices(parameters: Params, axis: str, asked: int) -> str:
    """The sizes nearest to ``asked`` that divide all dims which ``axis`` cuts."""
    common = math.gcd(*(size for p in jax.tree.leaves(parameters) for size, _, cut in _cuts(p) if cut == axis))
    divisors = [n for n in range(1, common + 1) if common % n == 0]
    nearest = sorted(sorted(divisors, key=lambda n: abs(n - asked))[:3])
    return " or ".join(map(str, nearest))
