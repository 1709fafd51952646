"""One of several processes that train on documents: ``python many_processes.py ADDRESS COUNT RANK REFERENCE``.

Run by test_many_processes.py. Each has two devices; pipelines lie in one process or across two. All take the same
steps, and print a line of JSON with what each says of them. The last one dies in the middle of a step more.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parents[1]))
from started import join, raised

from dynajax.data import DocumentBatch, DocumentSteps, MemoryDocuments
from dynajax.models import LlamaConfig
from dynajax.runtime.pipeline_runner import Passes
from dynajax.train import Trainer
from dynajax.train.balancing import Balancing
from dynajax.train.candidates import Candidates
from dynajax.train.document_job import DocumentJob
from dynajax.train.document_step import _Plans
from dynajax.train.plan_ahead import PlanAhead, TakenPlan

MODEL = LlamaConfig(layers=2, hidden=8, ffn=12, heads=2, kv_heads=2, head_dim=4, vocab=128, tied=True)
LONGEST = 24
STRATEGIES = ["tp4|pp2", "tp2|cp2|pp2", "tp4|pp2", "2*dp1|pp2.tp2", "2*dp1|pp2.tp2"]
"""Of each step: a pipeline across two processes and one without work, one in each process, both with work, and two in
one process beside one with stages in two; that again, with a plan that is late in one process.
"""


def documents() -> DocumentSteps:
    """Steps of 1, 85, 86 and 95 documents, and again in another order."""
    rng = np.random.default_rng(0)
    lengths = [LONGEST] * 2 + [*rng.integers(2, 4, 265)]
    texts = tuple(rng.integers(97, 123, n).astype(np.uint8).tobytes() for n in lengths)
    return DocumentSteps(MemoryDocuments(texts), token_budget=240, longest=LONGEST, seed=8)


def optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(0.5), optax.add_decayed_weights(0.1), optax.sgd(0.1, 0.9))


@cache
def trainer() -> Trainer:
    balancing = Balancing(LONGEST, buckets=1, max_segments=1, align=8)  # each document in a row of its own
    return Trainer(MODEL, optimizer(), STRATEGIES[0], documents(), balancing=balancing, deadline_s=60)


def take_steps(reference: str) -> dict[str, Any]:
    """A step under each strategy: what it says, and that nothing moved between them."""
    running, reports = trainer(), []
    for number, strategy in enumerate(STRATEGIES):
        if number == len(STRATEGIES) - 1 and jax.process_index() == 1:
            PlanAhead._timely = late
        if strategy != str(running.placement):
            assert running.switch(strategy).bytes_moved == 0
        report = running.step()
        order = [(e.what, e.pipeline, e.section) for e in sorted(running.trace, key=lambda e: e.begin_s)]
        reports.append(asdict(report) | {"order": order, "least": least_bytes()})
        assert_parameters(np.load(reference), len(reports))
    PlanAhead._timely = TIMELY
    return {"steps": reports}


TIMELY = PlanAhead._timely


def late(self: PlanAhead, lengths: Any, future: Any, last: int) -> TakenPlan:
    """In place of ``PlanAhead._timely``: as if the plan were never made."""
    self._patience_s = 0
    return TIMELY(self, lengths, Future(), last)


def one_plans_otherwise() -> str:
    """The error of a step for which process 1 has another plan; the next step is taken as if nothing had been."""
    take = _Plans.take
    if jax.process_index() == 1:
        _Plans.take = lambda self, step: replace(plan := take(self, step), pipelines=plan.pipelines[::-1])
    try:
        return raised(trainer().step)
    finally:
        _Plans.take = take


def one_has_other_documents() -> str:
    """The error of a step whose documents are as long in process 1 as in the others, and have another text."""
    take = DocumentSteps.take

    def other(self: DocumentSteps, sample: int, count: int) -> DocumentBatch:
        segments = take(self, sample, count).segments
        return DocumentBatch(tuple(replace(segment, text=segment.text ^ 1) for segment in segments))

    if jax.process_index() == 1:
        DocumentSteps.take = other
    try:
        return raised(trainer().step)
    finally:
        DocumentSteps.take = take


def least_bytes() -> list[list[int]]:
    """The lower bounds of what each pipeline pulls and pushes."""
    running = trainer()
    place, job = running.placement, running.job
    assert isinstance(place, Candidates)
    assert isinstance(job, DocumentJob)
    links = [job._runner(place, pipeline).links for pipeline in place.pipelines(0)]
    return [
        [sum(move.plan.bytes_lower_bound for move in moves) for moves in ([x.pulls for x in s], [x.pushes for x in s])]
        for s in links
    ]


def assert_parameters(reference: Any, steps: int) -> None:
    """The parameters that are here are those of one device."""
    params = trainer().state.params
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        want = reference[f"{steps}{jax.tree_util.keystr(path)}"]
        assert x.shape == want.shape
        for shard in x.addressable_shards:
            # Rows of letters sum a thousand terms of either sign: what rounds otherwise there grows threefold a step.
            assert np.abs(np.asarray(shard.data) - want[shard.index]).max() <= 1e-4 * np.abs(want).max(), (steps, path)


@contextmanager
def warnings() -> Iterator[list[str]]:
    """What dynajax warns of."""
    found: list[str] = []
    log = logging.Handler(logging.WARNING)
    log.emit = lambda record: found.append(record.getMessage())  # pyright: ignore[reportAttributeAccessIssue]
    logging.getLogger("dynajax").addHandler(log)
    yield found
    logging.getLogger("dynajax").removeHandler(log)


def meet(folder: Path, name: str) -> None:
    """Wait for the other processes, which may compile for longer than a collective waits."""
    folder.joinpath(f"{name}-{jax.process_index()}").touch()
    while len(list(folder.glob(f"{name}-*"))) < jax.process_count():
        time.sleep(0.02)


def main(address: str, count: str, rank: str, folder: str) -> None:
    join(address, count, rank)
    running, there = trainer(), Path(folder)
    for strategy in STRATEGIES:
        running.prepare(strategy).wait()
    meet(there, "compiled")
    said: dict[str, Any] = {
        "one plans otherwise": one_plans_otherwise(),
        "one has other documents": one_has_other_documents(),
    }
    with warnings() as said["warnings"]:
        said |= take_steps(str(there / "reference.npz"))
    said["one left out"] = raised(lambda: running.switch("tp2|cp2@0-3"))
    if jax.process_index() == jax.process_count() - 1:
        print(json.dumps(said), flush=True)
        Passes.run_rest = lambda self: os._exit(0)
    said["one dies"] = raised(running.step)
    assert not any(x.is_deleted() for x in jax.tree.leaves(running.state))
    print(json.dumps(said), flush=True)
    os._exit(0)  # the end of a job without one of its processes would wait for it, and abort


if __name__ == "__main__":
    main(*sys.argv[1:])
