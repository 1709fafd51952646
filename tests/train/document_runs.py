"""Jobs on documents that train in milliseconds, and plain JAX on one device to compare them with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dynajax import models
from dynajax.data import DocumentSteps, MemoryDocuments
from dynajax.models import Execution, LlamaConfig
from dynajax.train import StepReport, Trainer, TrainState
from dynajax.train.balancing import Balancing
from dynajax.train.candidates import Candidates
from dynajax.train.documents import DocumentJob

MODEL = LlamaConfig(layers=3, hidden=12, ffn=20, heads=4, kv_heads=2, head_dim=4, vocab=256, tied=True)
LONGEST = 40
FLOAT32 = Execution()


def written(lengths: Sequence[int], token_budget: int, longest: int = LONGEST, seed: int = 0) -> DocumentSteps:
    """Documents of random letters."""
    rng = np.random.default_rng(seed)
    texts = tuple(rng.integers(97, 123, n).astype(np.uint8).tobytes() for n in lengths)
    return DocumentSteps(MemoryDocuments(texts), token_budget, longest)


def documents() -> DocumentSteps:
    """Sixteen documents in the first step, some of two tokens and some of ``LONGEST``."""
    return written([2, 3, LONGEST, LONGEST, *np.random.default_rng(0).integers(2, LONGEST, 60)], token_budget=300)


def optimizer() -> optax.GradientTransformation:
    """Clips, decays and has momentum; keeps the gradient as it came, so that it can be compared."""
    keeps = optax.trace(decay=0.0)
    moves = optax.clip_by_global_norm(0.5), optax.add_decayed_weights(0.1), optax.trace(0.9), optax.sgd(0.1)
    return optax.chain(keeps, *moves)


def balancing(**more: Any) -> Balancing:
    return replace(Balancing(LONGEST, buckets=1, max_segments=8, align=8), **more)


def trainer(strategy: str, *, data: DocumentSteps | None = None, devices: int = 16, **more: Any) -> Trainer:
    options: dict[str, Any] = {"model": MODEL, "optimizer": optimizer(), "balancing": balancing()} | more
    return Trainer(strategy=strategy, data=data or documents(), devices=jax.devices()[:devices], **options)


@cache
def shared() -> Trainer:
    """Keeps what is compiled for one test for the next."""
    return trainer("8*dp1")


def on(strategy: str) -> Trainer:
    """A trainer at its first step that shares what is compiled."""
    made = trainer("8*dp1")
    made.job, made.workshop = shared().job, shared().workshop
    made.placement = made.job.place(strategy)
    return made


def job_and_place(running: Trainer) -> tuple[DocumentJob, Candidates]:
    assert isinstance(running.job, DocumentJob)
    assert isinstance(running.placement, Candidates)
    return running.job, running.placement


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Step:
    """A step, whoever took it: the loss before it, its gradient as the optimizer got it, parameters after it."""

    loss: np.ndarray
    gradient: Any
    params: Any


def take(running: Trainer) -> tuple[Step, StepReport]:
    """Take a step with ``optimizer``."""
    report, state = running.step(), running.whole_state()
    return Step(np.array(report.loss), *jax.tree.map(np.array, (state.opt_state[0].trace, state.params))), report


def on_one_device(
    data: DocumentSteps,
    steps: int,
    *,
    model: LlamaConfig = MODEL,
    made: optax.GradientTransformation | None = None,
    start: Any = None,
    run: Execution = FLOAT32,
) -> list[Step]:
    """Steps in plain JAX, each document in a row of its own, with parameters rounded to ``run.dtype``."""
    params = models.init(model, jax.random.split(jax.random.key(0))[0]) if start is None else start
    made, taken = made or optimizer(), []
    opt_state = made.init(params)
    most = max(data.lengths(number).size for number in range(steps))

    def loss(params: Any, tokens: jax.Array, targets: jax.Array, inside: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(data.longest), tokens.shape)
        logits, _ = models.forward_with_stats(model, params, tokens, inside, positions, run)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
        weights = (targets > 0) * 1.0
        return -(chosen * weights).sum() / weights.sum()

    differentiated = jax.jit(jax.value_and_grad(loss))

    @jax.jit
    def update(params: Any, opt_state: Any, grads: Any) -> Any:
        updates, opt_state = made.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for number in range(steps):
        rows = np.zeros((3, most, data.longest), np.int32)
        for row, segment in enumerate(data[number].segments):
            rows[0, row, : segment.length] = segment.text[: segment.length]
            rows[1, row, : segment.text.size - 1] = segment.text[1:]
            rows[2, row, : segment.length] = 1
        rounded = jax.tree.map(lambda p: np.asarray(p).astype(run.dtype).astype(np.float32), params)
        value, grads = differentiated(rounded, *rows)
        params, opt_state = update(params, opt_state, grads)
        taken.append(Step(*jax.tree.map(np.array, (value, grads, params))))
    return taken


@cache
def reference() -> list[Step]:
    """The first steps on ``documents``."""
    return on_one_device(documents(), 50)


def reference_losses(steps: int) -> list[float]:
    return [float(taken.loss) for taken in reference()[:steps]]


def assert_alike(step: Step, wanted: Step) -> None:
    """Each element of a tensor within 1e-5 of the largest one of that tensor."""
    ours, theirs = jax.tree.leaves(step), jax.tree.leaves(wanted)
    assert [x.shape for x in ours] == [x.shape for x in theirs]
    assert max(np.abs(x - y).max() / np.abs(y).max() for x, y in zip(ours, theirs, strict=True)) < 1e-5


def assert_least_is_moved(running: Trainer, report: StepReport) -> None:
    """What a step of one strategy pulled and pushed is what its plans say, and no plan could say less."""
    job, place = job_and_place(running)
    for pipeline, share in zip(place.pipelines(0), report.pipelines, strict=True):
        links = job._runner(place, pipeline).links
        for plans, moved in (
            ([link.pulls.plan for link in links], share.bytes_pulled),
            ([link.pushes.plan for link in links], share.bytes_pushed),
        ):
            for plan in plans:
                plan.verify()
                assert plan.bytes_moved == plan.bytes_lower_bound
            assert moved == sum(plan.bytes_moved for plan in plans) > 0


def addresses(state: TrainState) -> list[int]:
    """Where in memory parameters and moments are, shard by shard."""
    leaves = jax.tree.leaves((state.params, state.opt_state))
    return [shard.data.unsafe_buffer_pointer() for leaf in leaves for shard in leaf.addressable_shards]
