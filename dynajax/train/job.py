"""A job: what is trained, whatever the strategy. From it and a placement follow layouts, shapes and steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dynajax.data import Batch
from dynajax.engine import Stored, reshard
from dynajax.errors import StrategyError
from dynajax.meshes import Placement, Strategy
from dynajax.models import LlamaConfig, init
from dynajax.runtime import Propagation
from dynajax.train.fit import batch_shards, require_fit
from dynajax.train.state import TrainState, abstract, initial_state, state_storage, stored_on, to_storage


class Data(Protocol):
    """Where global batches come from; ``dynajax.data.Batches`` is one."""

    @property
    def batch_size(self) -> int:
        """Rows of the global batch."""
        ...

    def take(self, sample: int, count: int) -> Batch:
        """Rows ``sample`` to ``sample + count`` of one endless stream: the same whoever asks, and when."""
        ...


@dataclass(frozen=True)
class StepOptions:
    """How a step runs, whatever the strategy.

    Attributes:
        microbatches: parts of a batch that follow one another through a pipeline; None: two for each pipeline stage,
            as far as there are rows, and one without a pipeline.
        chunks: runs of layers that a pipeline stage has; more than 1 interleaves the stages.
        dtype: of activations and matrix products.
        remat: compute each layer again in the backward pass.

    Raises:
        StrategyError: a number is below 1.
    """

    microbatches: int | None = None
    chunks: int = 1
    dtype: Any = jnp.float32
    remat: bool = False

    def __post_init__(self) -> None:
        for name, value in (("microbatches", self.microbatches), ("chunks", self.chunks)):
            if value is not None and value < 1:
                raise StrategyError(f"{name} is {value}: give 1 or more")


DEFAULT_OPTIONS = StepOptions()


@dataclass(frozen=True, eq=False)
class Job:
    """Model, optimizer, shape of the global batch and the devices that placements number.

    Attributes:
        model: shape of the decoder, dense or a mixture of experts.
        optimizer: any optax optimizer.
        batch: a global batch with ``ShapeDtypeStruct`` leaves.
        devices: all that there are; a placement may use fewer.
        options: how a step runs.
    """

    model: LlamaConfig
    optimizer: optax.GradientTransformation
    batch: Batch
    devices: tuple[jax.Device, ...]
    options: StepOptions = DEFAULT_OPTIONS

    def place(self, strategy: str | Strategy | Placement) -> Placement:
        """Read a placement and check that it fits.

        Raises:
            StrategyError: it cannot be read, or fits neither the model nor the devices.
        """
        placement = Placement.parse(strategy)
        require_fit(self.model, placement, len(self.devices))
        return placement

    @cached_property
    def shapes(self) -> TrainState:
        """The state as ``ShapeDtypeStruct`` leaves, each of its logical shape."""
        with jax.set_mesh(_NO_MESH):
            return jax.eval_shape(self._initial, 0)

    def propagation(self, strategy: Strategy) -> Propagation:
        """How the model is stored and run under ``strategy``."""
        options, pp = self.options, strategy.size("pp")
        rows = -(-self.batch.rows // batch_shards(strategy))
        microbatches = (min(2 * pp, rows) if pp > 1 else 1) if options.microbatches is None else options.microbatches
        chunks = options.chunks if pp > 1 else 1
        with jax.set_mesh(_NO_MESH):
            made = Propagation(self.model, strategy, microbatches, chunks, options.dtype, options.remat)
            _ = made.storage
        return made

    def storage(self, strategy: Strategy) -> TrainState:
        """How the state is stored under ``strategy``: a ``Storage`` in the place of each leaf."""
        return state_storage(self.shapes, self.propagation(strategy).storage)

    def layout(self, placement: Placement) -> TrainState:
        """How the state lies under a placement: an ``engine.Stored`` in the place of each leaf."""
        return stored_on(placement.mesh(self.devices), self.storage(placement.strategy))

    def abstract_state(self, placement: Placement) -> TrainState:
        """The state as ``ShapeDtypeStruct`` leaves as they are stored, with shardings."""
        return abstract(self.shapes, self.layout(placement))

    def plain_layout(self, placement: Placement) -> TrainState:
        """How the tensors of the state would lie under a placement without padding or an order of their own."""
        return jax.tree.map(lambda s: Stored.plain(_plain_sharding(s), s.shape), self.layout(placement))

    def to_plain(self, state: TrainState, placement: Placement) -> TrainState:
        """The tensors of a state that lies as ``layout`` says; arrays that are their tensors are shared."""
        return _rearranged(state, self.layout(placement), self.plain_layout(placement))

    def from_plain(self, state: TrainState, placement: Placement) -> TrainState:
        """Undo ``to_plain``."""
        return _rearranged(state, self.plain_layout(placement), self.layout(placement))

    def initial_state(self, placement: Placement, seed: int) -> TrainState:
        """The state before the first step: each device makes its own shards, no device holds the whole."""
        storage = self.storage(placement.strategy)
        shardings = jax.tree.map(lambda stored: stored.sharding, self.layout(placement))
        with jax.set_mesh(_NO_MESH):
            made = jax.jit(lambda seed: to_storage(storage, self._initial(seed)), out_shardings=shardings)
            return made(np.uint32(seed))

    def _initial(self, seed: Any) -> TrainState:
        params_key, run_key = jax.random.split(jax.random.key(seed))
        return initial_state(init(self.model, params_key), self.optimizer, run_key)


def make_job(
    model: LlamaConfig,
    optimizer: optax.GradientTransformation,
    data: Data,
    devices: Sequence[jax.Device],
    options: StepOptions = DEFAULT_OPTIONS,
) -> Job:
    """The job that trains ``model`` on ``data``."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), data.take(0, data.batch_size))
    return Job(model, optimizer, shapes, tuple(devices), options)


def _rearranged(state: TrainState, source: TrainState, target: TrainState) -> TrainState:
    """``state`` moved from one layout to the other, where they differ."""
    arrays, tree = jax.tree.flatten(state)
    layouts = zip(jax.tree.leaves(source), jax.tree.leaves(target), strict=True)
    differ = {number: (here, there) for number, (here, there) in enumerate(layouts) if here != there}
    moved, _ = reshard(
        {number: arrays[number] for number in differ},
        {number: there for number, (_, there) in differ.items()},
        stored={number: here for number, (here, _) in differ.items()},
    )
    return jax.tree.unflatten(tree, [moved.get(number, array) for number, array in enumerate(arrays)])


def _plain_sharding(stored: Stored) -> NamedSharding:
    """The sharding of a tensor that is stored as it is; else one over the same mesh, cut where it divides evenly."""
    sharding = stored.sharding
    assert isinstance(sharding, NamedSharding)
    if stored.is_plain:
        return sharding
    left, cuts = dict(sharding.mesh.shape), []
    for size in stored.shape:
        axes: list[str] = []
        for axis, parts in left.items():
            if parts > 1 and size % (parts * math.prod(left[a] for a in axes)) == 0:
                axes.append(axis)
        cuts.append(tuple(axes) or None)
        left = {axis: parts for axis, parts in left.items() if axis not in axes}
    return NamedSharding(sharding.mesh, PartitionSpec(*cuts))


_NO_MESH = Mesh(np.empty((), dtype=object), ())
"""Set where JAX is called in the caller's thread, who may have set a mesh that has nothing to do with the job."""
