"""Does a strategy fit a model and a number of devices? Asked before anything is compiled or written."""

from __future__ import annotations

import math

from dynajax.errors import StrategyError
from dynajax.meshes import ACTIVATION_RULES, AXES, Placement, Strategy
from dynajax.models import LlamaConfig, MoeConfig
from dynajax.runtime import ShardedModel, refined


def require_fit(model: LlamaConfig, placement: Placement, num_devices: int) -> None:
    """Refuse a placement that cannot train ``model`` on devices numbered below ``num_devices``.

    Dims that an axis does not divide are no misfit: they are stored padded (see ``dynajax.runtime.storage``).

    Raises:
        StrategyError: several pipelines, a device that is not there, experts that the model or the axes do not allow,
            or a pipeline stage without a layer.
    """
    strategy = placement.strategy
    if not strategy.is_homogeneous:
        raise StrategyError(f"{strategy}: several pipelines share documents, not rows: give the trainer DocumentSteps")
    if max(placement.devices) >= num_devices:
        raise StrategyError(
            f"{placement} uses device {max(placement.devices)}, but there are {num_devices}, numbered from 0; "
            f"take one of {', '.join(map(str, similar(strategy, num_devices)))}, or more devices"
        )
    ShardedModel(model, refined(strategy))
    if strategy.size("pp") > model.layers:
        raise StrategyError(
            f"{placement}: pp = {strategy.size('pp')} leaves pipeline stages without one of the {model.layers} layers; "
            f"take pp = {model.layers} or less"
        )


def fits_evenly(model: LlamaConfig, placement: Placement, num_devices: int) -> bool:
    """True if ``require_fit`` has nothing to say, and the placement pads and copies nothing."""
    try:
        require_fit(model, placement, num_devices)
    except StrategyError:
        return False
    return not surprises(model, placement.strategy)


def surprises(model: LlamaConfig, strategy: Strategy) -> list[str]:
    """What a strategy stores in more places or at a greater length than its axes say, a line for each dim."""
    run = ShardedModel(model, refined(strategy))
    found = list(run.replicated.values())
    if strategy.size("ep") > 1 and not isinstance(model, MoeConfig):
        found.append(f"the model has no experts, so that ep = {strategy.size('ep')} is data parallel")
    return found + [
        f"{name} is stored as {stored}, not {logical}, to be cut in equal parts; the rest is zeros"
        for name, (logical, stored) in sorted(run.padded.items())
    ]


def batch_shards(strategy: Strategy) -> int:
    """Into how many parts a strategy cuts the rows of a batch."""
    return math.prod(strategy.size(axis) for axis in ACTIVATION_RULES["batch"])


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
