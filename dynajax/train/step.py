"""One optimizer step: a pure function of state and global batch, compiled for one placement.

The loss is a sum over the tokens of the global batch divided by the sum of their weights. It does not
depend on how rows are spread, filler rows weigh nothing, and a shard with nothing to learn from adds 0.

Products are computed in full float32. Strategies then differ only in the order in which partial
sums are added, which is what lets a switched run be compared with one that was not switched.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dynajax.data import Batch, pad_rows
from dynajax.engine.keys import is_key
from dynajax.errors import DeadlineError
from dynajax.meshes import ACTIVATION_RULES, Placement, spec
from dynajax.models import Params, mean_loss, router_loss
from dynajax.runtime import Propagation, TokenOrder, loss_and_metrics
from dynajax.train.job import Job
from dynajax.train.state import TrainState, abstract

_POLL_S = 0.0002

Loss = Callable[[Params, Batch], jax.Array]
"""Mean loss of a global batch as a function of the parameters."""


@dataclass(frozen=True, eq=False)
class CompiledStep:
    """A step that is ready to run under one placement.

    Attributes:
        placement: where it runs.
        layout: how the state lies, before and after: an ``engine.Stored`` for each leaf.
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

    def __call__(self, state: TrainState, batch: Batch, *, deadline_s: float) -> tuple[TrainState, jax.Array]:
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
        after = self.executable(state, jax.device_put(arranged, self.rows))
        wait_ready(after, f"a step under {self.placement}", deadline_s)
        return after


def compile_step(job: Job, placement: Placement, layout: TrainState) -> CompiledStep:
    """Compile the step of ``job`` for ``placement`` from shapes alone; no array is made or touched.

    Args:
        job: what is trained.
        placement: where.
        layout: ``job.layout(placement)``.
    """
    mesh, run = placement.mesh(job.devices), job.propagation(placement.strategy)
    order, rows = run.token_order(job.batch.seq_len), NamedSharding(mesh, ROWS)
    shape = (job.batch.rows + -job.batch.rows % run.row_multiple, order.stored_length)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(shape, x.dtype, sharding=rows), job.batch)
    shardings = jax.tree.map(lambda stored: stored.sharding, layout)
    jitted = jax.jit(
        make_step(mean_over_batch(run, mesh, order), job.optimizer, shardings, job.batch.rows),
        in_shardings=(shardings, rows),
        out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())),
        donate_argnums=0,
    )
    executable = jitted.lower(abstract(job.shapes, layout), batch).compile()
    return CompiledStep(placement, layout, run.row_multiple, order, rows, executable)


def mean_over_batch(run: Propagation, mesh: Mesh, order: TokenOrder) -> Loss:
    """The training loss of stored parameters and an arranged batch under a strategy."""

    def loss(params: Params, batch: Batch) -> jax.Array:
        loss_sum, weight_sum, stats = loss_and_metrics(run, mesh, params, batch, order)
        return mean_loss(loss_sum, weight_sum) + router_loss(run.config, stats)

    return loss


def make_step(
    loss: Loss, optimizer: optax.GradientTransformation, shardings: TrainState, samples: int
) -> Callable[[TrainState, Batch], tuple[TrainState, jax.Array]]:
    """The step as a function of state and batch.

    Args:
        loss: of the whole global batch.
        optimizer: sees gradients of global arrays, so that its norms count each element once. Where a strategy pads
            parameters it sees the padding, with gradients of 0.
        shardings: of the state; gradients are summed straight into those of the parameters.
        samples: rows that a step takes from the data stream.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        with jax.default_matmul_precision("highest"):
            value, grads = jax.value_and_grad(loss)(state.params, batch)
            grads = jax.lax.with_sharding_constraint(grads, shardings.params)
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        rng = jax.random.split(state.rng, 1)[0]  # each step has a key of its own, for models that draw
        return TrainState(params, opt_state, state.step + 1, rng, state.cursor + samples), value

    return step


ROWS = spec(("batch", "seq"), ACTIVATION_RULES)
"""How the leaves of a batch are cut."""


def wait_ready(arrays: Any, what: str, deadline_s: float) -> None:
    """Return when ``arrays`` are computed on every device.

    Raises:
        DeadlineError: they are not in time; names ``what`` and the devices that are late.
    """
    limit = time.monotonic() + deadline_s
    plain = [x for x in jax.tree.leaves(arrays) if not is_key(x)]
    shards = [s for x in plain for s in x.addressable_shards]  # keys cannot be asked whether they are ready
    for shard in shards:
        while not shard.data.is_ready():
            if time.monotonic() > limit:
                late = sorted({s.device.id for s in shards if not s.data.is_ready()})
                raise DeadlineError(f"{what} is not done after {deadline_s:g} s; devices {late} are late")
            time.sleep(_POLL_S)
    jax.block_until_ready(arrays)  # all are there: this raises what a computation failed with
