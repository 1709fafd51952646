"""``dynajax balance``: candidates for a length distribution, and what they make of batches of it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dynajax.balance.compare import Baselines, Setting, baselines, setting
from dynajax.balance.cost import short_text
from dynajax.balance.gantt import gantt_text
from dynajax.balance.html import write_html
from dynajax.balance.iteration import IterationOptions, IterationPlan, Planner
from dynajax.balance.lengths import LengthBatches, read_lengths
from dynajax.balance.microbatching import MicrobatchOptions
from dynajax.balance.profiles import load_profile, published_candidates
from dynajax.balance.propose import enough_samples, propose
from dynajax.balance.shapes import Shapes
from dynajax.cli.files import require_writable
from dynajax.data.packing import Overlong
from dynajax.errors import BalanceError
from dynajax.meshes import Strategy

_SAMPLES_FROM = 1_000_000  # batches to propose from are numbered from here, those to plan from 0
_SHOWN = 12
_CHARTS = 3
_WIDTH_WITHOUT_TERMINAL = 110
_TIMES = ("padding", "fixed", "balanced", "best", "bound")


@dataclass(frozen=True)
class BalanceOptions:
    """Choose strategies for uneven sequences, dispatch and pack batches of them, and compare.

    No devices are needed: times are simulated with a measured profile.
    """

    profile: str = "32b"
    """Measured costs: 7b, 13b, 32b, 7b_A100, or a file (FILE or FILE:NAME)."""
    devices: int = 64
    """Devices of every strategy."""
    tokens: int = 200_000
    """Tokens of a batch."""
    lengths: str = "wikipedia"
    """Lengths of documents: wikipedia, stdlib, lognormal:MEDIAN:SIGMA, or a file (one a line, or JSON)."""
    candidates: str = "propose"
    """propose, published (the case study's, for the 32b profile), or strategies separated by commas."""
    iterations: int = 10
    """Batches to plan."""
    longest: int = 32_768
    """Most tokens of a sequence."""
    overlong: Literal["truncate", "split", "error"] = "truncate"
    """What becomes of longer documents."""
    most: int = 12
    """Most candidates to propose."""
    buckets: int = 0
    """Row lengths that are compiled for a pipeline, at most; 0 for rows as long as their sequences."""
    max_segments: int = 256
    """Most sequences of a row, if there are buckets."""
    microbatches: int | None = None
    """Micro-batches of every pipeline. Default: those with the earliest end."""
    seed: int = 0
    """Of the draw of the lengths."""
    html: str | None = None
    """File for a page with Gantt charts (needs plotly)."""
    json: bool = False
    """Print one JSON object on standard output."""


@dataclass(frozen=True)
class _Planned:
    """An iteration: its plan, what the plan took to make in ms, its sequences and its baselines."""

    plan: IterationPlan
    plan_ms: float
    sequences: int
    longest: int
    cut_documents: int
    dropped_tokens: int
    baselines: Baselines


@dataclass(frozen=True)
class _Summary:
    """What ``--json`` prints; times are means over the iterations, ``plan_ms`` is the median."""

    profile: str
    lengths: str
    devices: int
    tokens: int
    iterations: int
    candidates: list[str]
    chosen: list[int]
    ms: dict[str, float]
    published_ms: float
    speedup: float
    idle_share: float
    plan_ms: float
    cut_documents: int
    dropped_tokens: int


def run(options: BalanceOptions) -> int:
    """Do what ``options`` ask for, print it, and return the exit status.

    Raises:
        BalanceError: the options do not fit together.
    """
    if min(options.devices, options.tokens, options.iterations, options.longest) < 1 or options.buckets < 0:
        raise BalanceError("--devices, --tokens, --iterations and --longest must be 1 or more, --buckets 0 or more")
    require_writable("--html", options.html)
    batches = LengthBatches(
        read_lengths(options.lengths), options.tokens, options.longest, Overlong(options.overlong), options.seed
    )
    shared = setting(load_profile(options.profile), options.devices, options.longest)
    planner = _planner(options, shared, batches)
    planned = [_plan(planner, shared, batches, iteration) for iteration in range(options.iterations)]
    summary = _summary(options, planner, planned)
    if options.html:
        write_html(options.html, [p.plan for p in planned[:_CHARTS]], _facts(options, shared, summary))
    if options.json:
        print(json.dumps(asdict(summary)))
    else:
        _show(Console(highlight=False), shared, planned, summary)
    return 0


def _planner(options: BalanceOptions, shared: Setting, batches: LengthBatches) -> Planner:
    shapes = Shapes(options.buckets, options.max_segments) if options.buckets else None
    how = IterationOptions(MicrobatchOptions(shapes, microbatches=options.microbatches))
    return Planner(_candidates(options, shared, batches, how), shared.costs, how)


def _candidates(
    options: BalanceOptions, shared: Setting, batches: LengthBatches, how: IterationOptions
) -> tuple[Strategy, ...]:
    if options.candidates == "published":
        return published_candidates(options.devices, shared.costs)
    if options.candidates == "propose":
        count = enough_samples(options.tokens)
        samples = [batches.batch(_SAMPLES_FROM + number).tokens for number in range(count)]
        found = propose(samples, shared.costs, options.devices, options.longest, most=options.most, options=how)
        return found.candidates
    named = tuple(Strategy.parse(part) for part in options.candidates.split(","))
    for strategy in named:
        if strategy.num_devices != options.devices:
            raise BalanceError(
                f"candidate {short_text(strategy)} has {strategy.num_devices} devices, not {options.devices}"
            )
    return named


def _plan(planner: Planner, shared: Setting, batches: LengthBatches, iteration: int) -> _Planned:
    drawn = batches.batch(iteration)
    start = time.perf_counter()
    plan = planner.plan(drawn.tokens)
    took = (time.perf_counter() - start) * 1e3
    longest = int(drawn.tokens.max())
    over = drawn.cut_documents, drawn.dropped_tokens
    return _Planned(plan, took, drawn.tokens.size, longest, *over, baselines(drawn.tokens, shared))


def _summary(options: BalanceOptions, planner: Planner, planned: Sequence[_Planned]) -> _Summary:
    times = [asdict(p.baselines) | {"best": p.plan.ms} for p in planned]
    ms = {name: float(np.mean([each[name] for each in times])) for name in _TIMES}
    return _Summary(
        profile=options.profile,
        lengths=options.lengths,
        devices=options.devices,
        tokens=options.tokens,
        iterations=options.iterations,
        candidates=[short_text(candidate.strategy) for candidate in planner.candidates],
        chosen=[p.plan.candidate for p in planned],
        ms=ms,
        published_ms=float(np.mean([p.plan.published_ms for p in planned])),
        speedup=ms["fixed"] / ms["best"],
        idle_share=float(np.mean([p.plan.idle_share for p in planned])),
        plan_ms=float(np.median([p.plan_ms for p in planned])),
        cut_documents=sum(p.cut_documents for p in planned),
        dropped_tokens=sum(p.dropped_tokens for p in planned),
    )


def _facts(options: BalanceOptions, shared: Setting, summary: _Summary) -> dict[str, str]:
    return {
        "profile": options.profile,
        "devices": str(options.devices),
        "batches": f"{options.iterations} of {options.tokens} tokens, {options.lengths} lengths to {options.longest}",
        "baseline": short_text(shared.homogeneous.strategy),
        "speed-up over fixed-length packing": f"{summary.speedup:.2f}",
        "idle share": f"{summary.idle_share:.1%}",
    }


def _show(console: Console, shared: Setting, planned: Sequence[_Planned], summary: _Summary) -> None:
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH_WITHOUT_TERMINAL)
    candidates = Table("#", "candidate", "chosen", box=SIMPLE_HEAD)
    for index, name in enumerate(summary.candidates):
        candidates.add_row(str(index), name, str(summary.chosen.count(index)))
    iterations = Table("iteration", "sequences", "longest", "chosen", "ms", "idle", "plan ms", box=SIMPLE_HEAD)
    for number, p in enumerate(planned[:_SHOWN]):
        cells = (number, p.sequences, p.longest, p.plan.candidate, f"{p.plan.ms:.0f}")
        iterations.add_row(*map(str, cells), f"{p.plan.idle_share:.1%}", f"{p.plan_ms:.1f}")
    homogeneous = short_text(shared.homogeneous.strategy)
    named = {
        "padding": f"{homogeneous}, padded to the longest sequence",
        "fixed": f"{homogeneous}, fixed-length packs, round robin",
        "balanced": f"{homogeneous}, balanced by the planner",
        "best": "best candidate of each iteration",
        "bound": "no strategy can be faster (bubbles and constants free)",
    }
    times = Table("mean over the iterations", "ms", "speed-up", box=SIMPLE_HEAD)
    for name, meaning in named.items():
        times.add_row(meaning, f"{summary.ms[name]:.0f}", f"{summary.ms['fixed'] / summary.ms[name]:.2f}")
    for part in (candidates, iterations, times):
        console.print(part)
    console.print(
        f"iteration 0 on {summary.candidates[planned[0].plan.candidate]}:\n{gantt_text(planned[0].plan)}", markup=False
    )
    idle, plan_ms = f"{summary.idle_share:.1%}", f"{summary.plan_ms:.1f}"
    console.print(f"idle {idle} of device time; a plan over all candidates takes {plan_ms} ms (median)")
    if summary.cut_documents:
        console.print(
            f"{summary.cut_documents} documents were over the limit of {shared.longest} tokens and cut; "
            f"{summary.dropped_tokens} tokens were dropped"
        )
