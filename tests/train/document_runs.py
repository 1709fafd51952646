"""Jobs on documents that train in milliseconds, and plain JAX on one device to compare them with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import optax
from train.small_runs import Step, one_a_row, train_on_one_device

from dynajax.data import DocumentSteps, MemoryDocuments
from dynajax.models import LlamaConfig
from dynajax.planner import verify
from dynajax.train import StepReport, Trainer, TrainState
from dynajax.train.balancing import Balancing
from dynajax.train.candidates import Candidates
from dynajax.train.document_job import DocumentJob

MODEL = LlamaConfig(layers=3, hidden=12, ffn=20, heads=4, kv_heads=2, head_dim=4, vocab=256, tied=True)
LONGEST = 40


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
    made.job, made.compile_cache = shared().job, shared().compile_cache
    made.placement = made.job.place(strategy)
    return made


def job_and_place(running: Trainer) -> tuple[DocumentJob, Candidates]:
    assert isinstance(running.job, DocumentJob)
    assert isinstance(running.placement, Candidates)
    return running.job, running.placement


def take(running: Trainer) -> tuple[Step, StepReport]:
    """Take a step with ``optimizer``."""
    report, state = running.step(), running.whole_state()
    return Step(report.loss, *jax.tree.map(np.array, (state.opt_state[0].trace, state.params))), report


def alone(
    data: DocumentSteps, steps: int, optimizer: optax.GradientTransformation, model: LlamaConfig = MODEL, **more: Any
) -> list[Step]:
    """Steps on one device, each document in a row of its own."""
    return train_on_one_device(model, optimizer, steps, one_a_row(data, steps), **more)


@cache
def reference() -> list[Step]:
    """The first steps on ``documents``."""
    return alone(documents(), 50, optimizer())


def reference_losses(steps: int) -> list[float]:
    return [step.loss for step in reference()[:steps]]


def assert_alike(step: Step, wanted: Step) -> None:
    """Each element of a tensor within 1e-5 of the largest one of that tensor."""
    ours, theirs = jax.tree.leaves(step), jax.tree.leaves(wanted)
    assert [np.shape(x) for x in ours] == [np.shape(x) for x in theirs]
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
                verify(plan)
                assert plan.bytes_moved == plan.bytes_lower_bound
            assert moved == sum(plan.bytes_moved for plan in plans) > 0


def addresses(state: TrainState) -> list[int]:
    """Where in memory parameters and moments are, shard by shard."""
    leaves = jax.tree.leaves((state.params, state.opt_state))
    return [shard.data.unsafe_buffer_pointer() for leaf in leaves for shard in leaf.addressable_shards]
