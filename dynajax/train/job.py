"""A job: what is trained, whatever the strategy. From it and a placement follow layouts, shapes and steps.

Two kinds differ in what a step takes, and so in how the state lies: ``RowJob`` and ``DocumentJob``.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dynajax.engine import Stored, reshard
from dynajax.errors import StrategyError
from dynajax.meshes import Strategy
from dynajax.models import LlamaConfig, init
from dynajax.runtime import ShardedModel
from dynajax.train.state import TrainState, abstract_arrays, initial_state
from dynajax.train.step import CompiledStep


class JobPlacement(Hashable, Protocol):
    """Where and how a job runs; equal placements are the same layout, so they are keys. Its text names it to people."""

    @property
    def devices(self) -> tuple[int, ...]:
        """Numbers of the devices."""
        ...


P = TypeVar("P", bound=JobPlacement)


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

    def sharded_model(self, model: LlamaConfig, strategy: Strategy, microbatches: int) -> ShardedModel:
        """``model`` under ``strategy``, with so many micro-batches in a pass."""
        chunks = self.chunks if strategy.size("pp") > 1 else 1
        return ShardedModel(model, strategy, microbatches, chunks, self.dtype, self.remat)

    def of_pipeline(self, model: LlamaConfig, strategy: Strategy) -> ShardedModel:
        """``model`` in a pipeline that is given as many rows as it asks for."""
        pp = strategy.size("pp")
        return self.sharded_model(model, strategy, (self.microbatches or 2 * pp) if pp > 1 else 1)


DEFAULT_OPTIONS = StepOptions()


@dataclass(frozen=True, eq=False)
class Job(abc.ABC, Generic[P]):
    """Model, optimizer and the devices that placements number.

    Attributes:
        model: shape of the decoder, dense or a mixture of experts.
        optimizer: any optax optimizer.
        devices: all that there are; a placement may use fewer.
        options: how a step runs.
    """

    model: LlamaConfig
    optimizer: optax.GradientTransformation
    devices: tuple[jax.Device, ...]
    options: StepOptions

    @abc.abstractmethod
    def place(self, strategy: Any) -> P:
        """Read a placement and check that it fits.

        Raises:
            StrategyError: it cannot be read, or fits neither the model nor the devices.
        """

    @abc.abstractmethod
    def layout(self, placement: P) -> TrainState:
        """How the state lies: an ``engine.Stored`` or ``engine.Bundle`` for each leaf."""

    @abc.abstractmethod
    def arrangement(self, placement: P) -> Callable[[TrainState], TrainState]:
        """Makes of whole tensors the arrays that ``layout`` tells of, in a program that is traced."""

    @abc.abstractmethod
    def compile_step(self, placement: P, layout: TrainState) -> CompiledStep:
        """What takes a step there; from shapes alone, no array is made or touched."""

    @cached_property
    def shapes(self) -> TrainState:
        """The state as ``ShapeDtypeStruct`` leaves, each of its logical shape."""
        with jax.set_mesh(NO_MESH):
            return jax.eval_shape(self._initial, 0)

    def abstract_state(self, placement: P) -> TrainState:
        """The state as ``ShapeDtypeStruct`` leaves as they are stored, with shardings."""
        return abstract_arrays(self.shapes, self.layout(placement))

    def initial_state(self, placement: P, seed: int) -> TrainState:
        """The state before the first step: each device makes its own shards, no device holds the whole."""
        shardings = jax.tree.map(lambda stored: stored.sharding, self.layout(placement))
        arrange = self.arrangement(placement)
        with jax.set_mesh(NO_MESH):
            made = jax.jit(lambda seed: arrange(self._initial(seed)), out_shardings=shardings)
            return made(np.uint32(seed))

    def plain_layout(self, placement: P) -> TrainState:
        """How the tensors of the state would lie there without padding or an order of their own."""
        return jax.tree.map(_plain, self.shapes, self.layout(placement))

    def to_plain(self, state: TrainState, placement: P) -> TrainState:
        """The tensors of a state that lies as ``layout`` says; arrays that are their tensors are shared."""
        return _rearranged(state, self.layout(placement), self.plain_layout(placement))

    def from_plain(self, state: TrainState, placement: P) -> TrainState:
        """Undo ``to_plain``."""
        return _rearranged(state, self.plain_layout(placement), self.layout(placement))

    def _initial(self, seed: Any) -> TrainState:
        params_key, run_key = jax.random.split(jax.random.key(seed))
        return initial_state(init(self.model, params_key), self.optimizer, run_key)


def _rearranged(state: TrainState, source: TrainState, target: TrainState) -> TrainState:
    """``state`` moved from one layout to the other, where they differ."""

    def where_they_differ(tree: TrainState) -> TrainState:
        return jax.tree.map(lambda x, here, there: None if here == there else x, tree, source, target)

    parts = map(where_they_differ, (state, target, source))
    moved, _ = reshard(next(parts), next(parts), stored=next(parts))
    return jax.tree.map(lambda new, old: old if new is None else new, moved, state, is_leaf=lambda x: x is None)


def _plain(shape: jax.ShapeDtypeStruct, stored: Any) -> Stored:
    """The tensor as it is stored if that is plain; else over the same mesh, cut where it divides evenly."""
    sharding = stored.sharding
    if isinstance(stored, Stored) and stored.is_plain:
        return stored
    left, cuts = dict(sharding.mesh.shape), []
    for size in shape.shape:
        axes, rest = [], size
        for axis, parts in left.items():
            if parts > 1 and rest % parts == 0:
                axes.append(axis)
                rest //= parts
        cuts.append(tuple(axes) or None)
        left = {axis: parts for axis, parts in left.items() if axis not in axes}
    return Stored.plain(NamedSharding(sharding.mesh, PartitionSpec(*cuts)), shape.shape)


NO_MESH = Mesh(np.empty((), dtype=object), ())
"""Set where JAX is called in the caller's thread, who may have set a mesh that has nothing to do with the job."""
