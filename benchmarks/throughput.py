"""Tokens per second on documents of very unlike lengths: four ways to share them out, side by side in one run.

    python benchmarks/throughput.py [--steps 6] [--pipelines dp1,tp2,tp4] [--plans-only] [--json]

The setting is the published one of Hydraulis (32B, 64 devices, 200K tokens a step, contexts of 32K) in small: lengths
and tokens over 32, devices over 4. So 6,250 tokens a step, documents up to 1,024, and 16 emulated devices that hold 256
tokens of a row each: as there, a device (there tp4) holds a quarter of the longest document, which needs tp4 (there
tp16). Pipelines are cut along tp, as there; ``--pipelines dp1,tp2,tp4,cp4`` allows another, cheaper for long documents.
Documents: of every file of Python's standard library the first part of 128, so that lengths have the distribution of
the files' lengths, and those over 1,024 bytes are split. Every method trains the same model on the same documents, step
by step in turn; after each step all must have the same loss.

- padding: one document a row, each row as long as the longest document may be; rows in turn to copies of one pipeline.
- fixed: packed first-fit to that length, in turn. The baseline: ratios are (tokens per second) / (those of fixed).
- balanced: the same pipelines, filled and dispatched by the planner, rows of a few lengths.
- auto: a mix of pipelines chosen for each step.

The pipeline of the first three is the one with which fixed takes least by simulation.

``wall`` is the clock. The devices on few cores take as long as their work together, however it is shared out, so the
clock shows less work and not less waiting. ``simulated`` shows both: the ends of the very plans that run, priced with a
profile measured here at the start. It takes a pipeline's processor seconds over its devices, as if each had a core of
its own and never waited for another. That flatters large pipelines, and so the baseline. Pull, push and update are not
in it. ``work`` is what the devices are busy by simulation, over that of fixed: a gain is less waiting times less work.
``--plans-only`` makes the plans and runs none of them, which compiles less and affords more steps.
"""

from __future__ import annotations

import os

os.environ.setdefault("NPROC", "64")

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from figures import Row, machine, row, show

from dynajax.balance import IterationPlan, MicroBatch, PipelineCost, PipelinePlan, Planner, Profile, short_text
from dynajax.balance.baselines import first_fit
from dynajax.balance.cost_fit import measure_profile, rows_to_measure
from dynajax.balance.simulate import published_ms, simulated_ms
from dynajax.data import DocumentSteps, MemoryDocuments, Segment, stdlib_documents
from dynajax.meshes import Pipeline, Placement, Strategy
from dynajax.models import LlamaConfig, init
from dynajax.runtime import ShardedModel
from dynajax.runtime.optimizer_layout import flat_mesh, flatten, optimizer_layout
from dynajax.runtime.pipeline_runner import PipelineRunner
from dynajax.train.balancing import Balancing
from dynajax.train.candidates import Candidates
from dynajax.train.document_job import DocumentJob
from dynajax.train.job import DEFAULT_OPTIONS
from dynajax.train.state import TrainState
from dynajax.train.trainer import step_report

DEVICES = 16
LONGEST, DEVICE_TOKENS, TOKENS = 1_024, 256, 6_250
MEASURED = (64, 128, 256, 512, 1_024)
SHARE = 128  # of a file's bytes, one part is read
SEGMENTS = 256  # more than a row ever has
PIPELINES = "dp1,tp2,tp4"
MODEL = LlamaConfig(layers=2, hidden=64, ffn=192, heads=4, kv_heads=4, head_dim=16, vocab=256)
METHODS = ("padding", "fixed", "balanced", "auto")
Pack = Callable[[Sequence[int]], list[list[int]]]


def documents() -> DocumentSteps:
    files = stdlib_documents()
    texts = tuple(files.read(n, 0, int(size) // SHARE).tobytes() for n, size in enumerate(files.lengths))
    return DocumentSteps(MemoryDocuments(texts), token_budget=TOKENS, longest=LONGEST)


def measured_profile(devices: Sequence[jax.Device], pipelines: str) -> Profile:
    """Coefficients of each kind of pipeline on this machine; compiles and runs its programs.

    Repeats go round all rows of all pipelines, so that whatever else the machine does hits all alike.
    """
    params, mesh = init(MODEL, jax.random.key(0)), flat_mesh(devices)
    cut = jax.tree.map(lambda bundle: bundle.sharding, optimizer_layout(params, mesh))
    flat = jax.jit(lambda p: flatten(p, len(devices)), out_shardings=cut)(params)
    timed: dict[tuple[Pipeline, tuple[int, ...]], Callable[[], float]] = {}
    for kind in (Strategy.parse(text).pipelines[0] for text in pipelines.split(",")):
        placed = Placement(Strategy((kind,)), tuple(range(kind.num_devices)))
        rows = [n for n in MEASURED if n <= room(kind)]
        runner = PipelineRunner.of(ShardedModel(MODEL, placed.strategy), placed.mesh(devices), mesh, rows, SEGMENTS)
        pulled = [runner.pull(flat, k)[0] for k in range(len(runner.sections))]
        for sizes in (sizes for n in rows for sizes in rows_to_measure(n)):
            timed[kind, sizes] = partial(processor_ms, runner, pulled, sizes)
    rounds = [{key: once() for key, once in timed.items()} for _ in range(8)][1:]

    def measure(pipeline: Pipeline, sizes: tuple[int, ...]) -> float:
        return statistics.median(times[pipeline, sizes] for times in rounds) / pipeline.num_devices

    return measure_profile("this machine", machine(), [*dict.fromkeys(k for k, _ in timed)], MEASURED, measure, room)


def processor_ms(runner: PipelineRunner, pulled: Sequence[Any], sizes: Sequence[int]) -> float:
    """Processor time of a row, the mean of four that follow one another."""
    row = [Segment(0, 0, size, np.zeros(size + 1, np.uint8)) for size in sizes]
    start = time.process_time()
    passes = runner.begin([(sum(sizes), row)] * 4, 1.0)
    for section in pulled:
        passes.run(section)
    jax.block_until_ready(passes.sums)
    return (time.process_time() - start) * 1e3 / 4


def room(pipeline: Pipeline) -> int:
    """Most tokens of a row."""
    return DEVICE_TOKENS * pipeline.num_devices


@dataclass(frozen=True)
class InTurn:
    """Plans as people make them without a planner: packs of one row length, in turn to equal pipelines."""

    cost: PipelineCost
    copies: int
    pack: Pack

    def plan(self, lengths: Any, only: int | None = None) -> IterationPlan:
        sizes = np.asarray(lengths).tolist()
        packs = [self._microbatch(members, [sizes[n] for n in members]) for members in self.pack(sizes)]
        plans = [self._pipeline(tuple(packs[start :: self.copies])) for start in range(self.copies)]
        strategy = Strategy((self.cost.pipeline,) * self.copies)
        return IterationPlan(0, strategy, tuple(plans), max(plan.ms for plan in plans), ())

    def _microbatch(self, members: Sequence[int], sizes: Sequence[int]) -> MicroBatch:
        return MicroBatch(tuple(members), sum(sizes), LONGEST, self.cost.microbatch_ms(sizes, LONGEST))

    def _pipeline(self, packs: tuple[MicroBatch, ...]) -> PipelinePlan:
        times = [pack.ms for pack in packs]
        return PipelinePlan(
            self.cost.pipeline, packs, simulated_ms(times, self.cost.pp), published_ms(times, self.cost.pp)
        )


def one_a_row(sizes: Sequence[int]) -> list[list[int]]:
    return [[n] for n in range(len(sizes))]


def first_fitting(sizes: Sequence[int]) -> list[list[int]]:
    """Positions in packs as ``first_fit`` makes them of lengths."""
    left = {size: [n for n, each in enumerate(sizes) if each == size][::-1] for size in sizes}
    return [[left[size].pop() for size in pack] for pack in first_fit(sizes, LONGEST)]


@dataclass(frozen=True, eq=False)
class InTurnJob(DocumentJob):
    """A job whose documents are packed by ``pack`` and shared out in turn."""

    pack: Pack

    def planner(self, placement: Candidates) -> Any:
        pipelines = placement.strategies[0].pipelines
        (cost,) = self.balancing.costs(self.model, pipelines[:1])
        return InTurn(cost, len(pipelines), self.pack)


class Run:
    """One method: its job, its plans, and its state once it is compiled."""

    def __init__(self, name: str, job: DocumentJob, strategy: str) -> None:
        self.name, self.job, self.placement = name, job, job.place(strategy)
        self.planner: Planner | InTurn = job.planner(self.placement)
        self.used: set[str] = set()

    def compile(self) -> None:
        self.step = self.job.compile_step(self.placement, self.job.layout(self.placement))
        self.state: TrainState = self.job.initial_state(self.placement, 0)
        self.take(0)  # warms up what is compiled on first use

    def plan(self, number: int) -> dict[str, float]:
        """What step ``number`` takes by simulation."""
        lengths = self.job.data.lengths(number)
        plan = self.planner.plan(lengths)
        self.used.add(short_text(plan.strategy))
        took = plan.ms / 1e3
        busy = 1 - plan.idle_share
        return {"simulated": took, "simulated idle": 1 - busy, "work": took * busy, "tokens": float(sum(lengths))}

    def take(self, number: int) -> dict[str, float]:
        """Take step ``number``: what it takes by the clock, beside ``plan``."""
        start = time.perf_counter()
        batch = self.job.data.take(number, 1)
        outcome = self.step(self.state, batch, deadline_s=120)
        seconds = time.perf_counter() - start
        report = step_report(number, outcome, batch.num_targets, batch.samples, seconds)
        self.state = outcome.state
        assert report.strategy in self.used
        return {"loss": report.loss, "wall": seconds, "wall idle": report.idle_share or 0.0}


def runs(data: DocumentSteps, devices: Sequence[jax.Device], profile: Profile) -> list[Run]:
    """The four methods."""
    common = MODEL, optax.adam(1e-3), tuple(devices), DEFAULT_OPTIONS, data
    few, one = (Balancing(DEVICE_TOKENS, n, SEGMENTS, profile=profile) for n in (3, 1))
    fits = [c for c in profile.costs(profile.timings[0].pipeline) if c.max_len >= LONGEST]
    samples = [data.lengths(step) for step in range(16)]

    def fixed_ms(cost: PipelineCost) -> float:
        return sum(InTurn(cost, DEVICES // cost.devices, first_fitting).plan(tokens).ms for tokens in samples)

    best = min(fits, key=fixed_ms)
    same = f"{DEVICES // best.devices}*{best.pipeline}"
    return [
        Run("padding", InTurnJob(*common, one, one_a_row), same),
        Run("fixed", InTurnJob(*common, one, first_fitting), same),
        Run("balanced", DocumentJob(*common, few), same),
        Run("auto", DocumentJob(*common, few), "auto"),
    ]


def compare(steps: int, pipelines: str, kinds: Sequence[str]) -> tuple[list[Row], Profile]:
    devices, data = jax.devices(), documents()
    profile = measured_profile(devices, pipelines)
    made = runs(data, devices, profile)
    numbers = range(1, steps + 1)
    taken = {run.name: [run.plan(number) for number in numbers] for run in made}
    if "wall" in kinds:
        for run in made:
            run.plan(0)
            run.compile()
        for number in numbers:
            for run in made:
                taken[run.name][number - 1] |= run.take(number)
            losses = [taken[run.name][number - 1]["loss"] for run in made]
            assert max(losses) - min(losses) < 1e-4 * min(losses), f"step {number}: losses are {losses}"
    rows = []
    for kind in kinds:
        for run in made:
            mine, base = taken[run.name], taken["fixed"]
            ratios = [b[kind] / m[kind] for m, b in zip(mine, base, strict=True)]
            more = {
                "tokens_per_second": sum(m["tokens"] for m in mine) / sum(m[kind] for m in mine),
                "idle_share": statistics.mean(m[f"{kind} idle"] for m in mine),
                "work": sum(m["work"] for m in mine) / sum(b["work"] for b in base),
                "strategies": sorted(run.used),
            }
            rows.append(row(kind, run.name, ratios, [m[kind] for m in mine], **more))
    return rows, profile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--pipelines", default=PIPELINES)
    parser.add_argument("--plans-only", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    kinds = ("simulated",) if args.plans_only else ("wall", "simulated")
    rows, profile = compare(args.steps, args.pipelines, kinds)
    if args.json:
        print(json.dumps({"machine": machine(), "cases": rows}))
        return
    for t in profile.timings:
        print(f"{t.pipeline!s:<8} {t.a:.3g} ms/token² {t.b:.3g} ms/token {t.c:.3g} ms/row, worst error {t.error:.1%}")
    for kind in kinds:
        mine = [r for r in rows if r["case"] == kind]
        show(mine, "fixed")
        for r in mine:
            used = ", ".join(r["strategies"])
            speed, idle, work = r["tokens_per_second"], r["idle_share"], r["work"]
            print(f"  {r['method']:<20}{speed:10.0f} tokens/s, idle {idle:.0%}, work {work:.2f}: {used}")


if __name__ == "__main__":
    main()
