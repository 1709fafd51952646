"""A job: what is trained, whatever the strategy. From it and a placement follow layouts, shapes and steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from dynajax.data import Batch
from dynajax.meshes import ACTIVATION_RULES, PARAMETER_RULES, Placement, Strategy, spec
from dynajax.models import LlamaConfig, Params, init, parameter_specs
from dynajax.train.fit import require_fit
from dynajax.train.state import TrainState, abstract, initial_state, shardings, state_specs


class Data(Protocol):
    """Where global batches come from; ``dynajax.data.Batches`` is one."""

    @property
    def batch_size(self) -> int:
        """Rows of the global batch."""
        ...

    def take(self, sample: int, count: int) -> Batch:
        """Rows ``sample`` to ``sample + count`` of one endless stream: the same whoever asks, and when."""
        ...


@dataclass(frozen=True, eq=False)
class Job:
    """Model, optimizer, shape of the global batch and the devices that placements number.

    Attributes:
        model: shape of the decoder.
        optimizer: any optax optimizer.
        batch: a global batch with ``ShapeDtypeStruct`` leaves.
        devices: all that there are; a placement may use fewer.
    """

    model: LlamaConfig
    optimizer: optax.GradientTransformation
    batch: Batch
    devices: tuple[jax.Device, ...]

    def place(self, strategy: str | Strategy | Placement) -> Placement:
        """Read a placement and check that it fits.

        Raises:
            StrategyError: it cannot be read, or fits neither the model nor the devices.
        """
        placement = Placement.parse(strategy)
        require_fit(self.parameters, placement, len(self.devices))
        return placement

    @cached_property
    def parameters(self) -> Params:
        """Shapes and logical axes of the parameters."""
        with jax.set_mesh(_NO_MESH):
            return parameter_specs(self.model)

    @cached_property
    def shapes(self) -> TrainState:
        """The state as ``ShapeDtypeStruct`` leaves."""
        with jax.set_mesh(_NO_MESH):
            return jax.eval_shape(self._initial, 0)

    @cached_property
    def specs(self) -> TrainState:
        """The state as PartitionSpecs, which hold for every mesh."""
        return state_specs(self.shapes, jax.tree.map(lambda p: spec(p.axes, PARAMETER_RULES), self.parameters))

    def layout(self, placement: Placement) -> TrainState:
        """The state as shardings."""
        return shardings(placement.mesh(self.devices), self.specs)

    def abstract_state(self, placement: Placement) -> TrainState:
        """The state as ``ShapeDtypeStruct`` leaves with shardings."""
        return abstract(self.shapes, self.layout(placement))

    def initial_state(self, placement: Placement, seed: int) -> TrainState:
        """The state before the first step: each device makes its own shards, no device holds the whole."""
        with jax.set_mesh(_NO_MESH):
            return jax.jit(self._initial, out_shardings=self.layout(placement))(np.uint32(seed))

    def _initial(self, seed: Any) -> TrainState:
        params_key, run_key = jax.random.split(jax.random.key(seed))
        return initial_state(init(self.model, params_key), self.optimizer, run_key)


def make_job(
    model: LlamaConfig, optimizer: optax.GradientTransformation, data: Data, devices: Sequence[jax.Device]
) -> Job:
    """The job that trains ``model`` on ``data``."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), data.take(0, data.batch_size))
    return Job(model, optimizer, shapes, tuple(devices))


_NO_MESH = Mesh(np.empty((), dtype=object), ())
"""Set where JAX is called in the caller's thread, who may have set a mesh that has nothing to do with the job."""

ROWS = spec(("batch", "seq"), ACTIVATION_RULES)
"""How the leaves of a batch are cut."""
