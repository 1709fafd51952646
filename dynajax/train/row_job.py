"""Jobs that train on batches of packed rows: one program over one mesh, the state stored as its strategy wants it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dynajax.data import Batch, pad_rows
from dynajax.errors import StrategyError
from dynajax.meshes import Placement, Strategy
from dynajax.models import LlamaConfig, Params, mean_loss, router_loss
from dynajax.runtime import ShardedModel, TokenOrder, loss_and_metrics, refined
from dynajax.runtime.rules import ROWS
from dynajax.train.elementwise import sees_padding
from dynajax.train.fit import batch_shards, require_fit
from dynajax.train.job import DEFAULT_OPTIONS, NO_MESH, Job, StepOptions
from dynajax.train.state import TrainState, abstract_arrays, state_storage, to_storage
from dynajax.train.step import Loss, Outcome, make_step, wait_ready


class RowSource(Protocol):
    """Where global batches come from; ``dynajax.data.Batches`` is one."""

    @property
    def batch_size(self) -> int:
        """RowSource of the global batch."""
        ...

    def take(self, sample: int, count: int) -> Batch:
        """RowSource ``sample`` to ``sample + count`` of one endless stream: the same whoever asks, and when."""
        ...


@dataclass(frozen=True, eq=False)
class RowJob(Job[Placement]):
    """A job that takes a global batch of rows a step, under one strategy.

    Attributes:
        batch: a global batch with ``ShapeDtypeStruct`` leaves.
    """

    batch: Batch

    @staticmethod
    def of(
        model: LlamaConfig,
        optimizer: optax.GradientTransformation,
        data: RowSource,
        devices: Sequence[jax.Device],
        options: StepOptions = DEFAULT_OPTIONS,
    ) -> RowJob:
        """The job that trains ``model`` on ``data``."""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), data.take(0, data.batch_size))
        return RowJob(model, optimizer, tuple(devices), options, shapes)

    def place(self, strategy: str | Strategy | Placement) -> Placement:
        """Read a placement and check that it fits.

        Raises:
            StrategyError: it cannot be read, or fits neither the model nor the devices.
        """
        placement = Placement.parse(strategy)
        if placement.strategy.is_homogeneous:
            placement = Placement(refined(placement.strategy), placement.devices)
        require_fit(self.model, placement, len(self.devices))
        return placement

    def sharded_model(self, strategy: Strategy) -> ShardedModel:
        """How the model is stored and run under ``strategy``."""
        pp, microbatches = strategy.size("pp"), self.options.microbatches
        if microbatches is None:
            rows = -(-self.batch.rows // batch_shards(strategy))
            microbatches = min(2 * pp, rows) if pp > 1 else 1
        return self.options.sharded_model(self.model, strategy, microbatches)

    def storage(self, strategy: Strategy) -> TrainState:
        """How the state is stored under ``strategy``: a ``Storage`` in the place of each leaf.

        Raises:
            StrategyError: a dim is padded, and the optimizer takes means over dims.
        """
        run = self.sharded_model(strategy)
        with jax.set_mesh(NO_MESH):
            storage, padded = state_storage(self.shapes, run.storage), run.padded
        if padded and self.sees_padding:
            raise StrategyError(
                f"{strategy} pads {', '.join(sorted(padded))} with zeros, which change what the optimizer does (it "
                "takes means over dims, or draws noise); take sizes that divide them, or an optimizer that treats each "
                "element alike (Adam, momentum, decay and norms do)"
            )
        return storage

    @cached_property
    def sees_padding(self) -> bool:
        """True if the optimizer does otherwise with padded tensors; found by trying it, once."""
        return sees_padding(self.optimizer, self.shapes.params)

    def layout(self, placement: Placement) -> TrainState:
        """How the state lies under a placement: an ``engine.Stored`` for each leaf."""
        mesh = placement.mesh(self.devices)
        return jax.tree.map(lambda storage: storage.on(mesh), self.storage(placement.strategy))

    def arrangement(self, placement: Placement) -> Callable[[TrainState], TrainState]:
        """Makes the stored form of whole tensors."""
        return partial(to_storage, self.storage(placement.strategy))

    def compile_step(self, placement: Placement, layout: TrainState) -> RowStep:
        """Compile the step under a placement."""
        mesh, run = placement.mesh(self.devices), self.sharded_model(placement.strategy)
        order, rows = run.token_order(self.batch.seq_len), NamedSharding(mesh, ROWS)
        shape = (self.batch.rows + -self.batch.rows % run.row_multiple, order.stored_length)
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(shape, x.dtype, sharding=rows), self.batch)
        shardings = jax.tree.map(lambda stored: stored.sharding, layout)
        jitted = jax.jit(
            make_step(mean_over_batch(run, mesh, order), self.optimizer, shardings, self.batch.rows),
            in_shardings=(shardings, rows),
            out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())),
            donate_argnums=0,
        )
        executable = jitted.lower(abstract_arrays(self.shapes, layout), batch).compile()
        return RowStep(placement, layout, run.row_multiple, order, rows, executable)


@dataclass(frozen=True, eq=False)
class RowStep:
    """A step that is ready to run under one placement.

    Attributes:
        placement: where it runs.
        layout: how the state lies, before and after.
        row_multiple: what divides the rows of a batch.
        order: where the tokens of a row are.
        rows: sharding of every leaf of a batch.
        executable: ``(state, batch) -> (state, loss)``; consumes the state.
    """

    placement: Placement
    layout: TrainState
    row_multiple: int
    order: TokenOrder
    rows: NamedSharding
    executable: jax.stages.Compiled

    def __call__(self, state: TrainState, batch: Batch, *, deadline_s: float) -> Outcome:
        """The state after one step, and the loss before it.

        Returns when all of it is computed: two programs with collectives in flight can starve each
        other of threads for ever.

        Args:
            state: consumed.
            batch: the global batch in numpy; filler rows are added here, and tokens put in order.
            deadline_s: seconds to wait.

        Raises:
            DeadlineError: the step is not done in time.
        """
        arranged = self.order.arrange(pad_rows(batch, self.row_multiple))
        after, loss = self.executable(state, jax.device_put(arranged, self.rows))
        wait_ready((after, loss), f"a step under {self.placement}", deadline_s)
        return Outcome(after, float(loss), str(self.placement))


def mean_over_batch(run: ShardedModel, mesh: Mesh, order: TokenOrder) -> Loss:
    """The training loss of stored parameters and an arranged batch under a strategy."""

    def loss(params: Params, batch: Any) -> jax.Array:
        loss_sum, weight_sum, stats = loss_and_metrics(run, mesh, params, batch, order)
        return mean_loss(loss_sum, weight_sum) + router_loss(run.config, stats)

    return loss
