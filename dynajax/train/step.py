"""One optimizer step: a pure function of state and global batch, and what all kinds of steps have in common.

The loss is a sum over the tokens of the global batch divided by the sum of their weights. It does not
depend on how rows are spread, filler rows weigh nothing, and a shard with nothing to learn from adds 0.

Products are computed in full float32. Strategies then differ only in the order in which partial
sums are added, which is what lets a switched run be compared with one that was not switched.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import optax

from dynajax.arrays.dtypes import is_key
from dynajax.data import Batch
from dynajax.errors import DeadlineError
from dynajax.models import Params
from dynajax.train.record import PipelineShare
from dynajax.train.state import TrainState

_POLL_S = 0.0002

Loss = Callable[[Params, Batch], jax.Array]
"""Mean loss of a global batch as a function of the parameters."""


@dataclass(frozen=True)
class TraceEvent:
    """Something that happened in a step.

    Attributes:
        what: pull, dispatch, compute, push or update.
        pipeline: number of the pipeline in its strategy; None where it was all devices.
        section: number of the section of the model; None where it was all of it.
        begin_s, end_s: seconds since the step began.
    """

    what: str
    pipeline: int | None
    section: int | None
    begin_s: float
    end_s: float


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a step leaves.

    Attributes:
        state: after it, computed.
        loss: mean loss over the weighted tokens of the global batch, before the update.
        strategy: what ran.
        shares: what each pipeline did, where several run side by side.
        trace: what happened when, where several run side by side.
    """

    state: TrainState
    loss: float
    strategy: str
    shares: tuple[PipelineShare, ...] = ()
    trace: tuple[TraceEvent, ...] = ()


class CompiledStep(Protocol):
    """A step that is ready to run at one placement."""

    @property
    def layout(self) -> TrainState:
        """How the state lies, before and after."""
        ...

    def __call__(self, state: TrainState, batch: Any, *, deadline_s: float) -> Outcome:
        """Take it; consumes ``state``.

        Raises:
            DeadlineError: it is not done in time.
        """
        ...


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
            return apply_gradients(optimizer, state, grads, samples), value

    return step


def apply_gradients(optimizer: optax.GradientTransformation, state: TrainState, grads: Any, samples: int) -> TrainState:
    """The state after an update.

    Args:
        optimizer: as above.
        state: before it.
        grads: in the tree of ``state.params``.
        samples: as above.
    """
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params: Any = optax.apply_updates(state.params, updates)
    rng = jax.random.split(state.rng, 1)[0]  # each step has a key of its own, for models that draw
    return TrainState(params, opt_state, state.step + 1, rng, state.cursor + samples)


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
