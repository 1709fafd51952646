"""Plan uneven batches: simulated gain over fixed-length packing, quality against bounds, and planning time.

    python benchmarks/balance.py [--iterations 40] [--parts gain quality time] [--json]

Gain: times of an iteration are simulated, event by event, with the published profiles (measured on A800), the same
batches for all methods. The ratio is fixed / method, fixed being the first homogeneous layout that holds 32,768 tokens,
packed first-fit to that length, round robin, its padding not charged. ``bound`` is what no strategy can beat (work at
its cheapest, no bubbles, no constants of micro-batches). ``speedup`` is the ratio of the means. Candidates are proposed
from other batches than those that are timed.

Quality: the ratio is what was found / a lower bound or the exact optimum, as the case says.

Time: wall-clock seconds here; the ratio is to the limit that the case names. ``cpu_seconds_median`` is what the process
used, which a busy machine does not change much.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from figures import Row, row

from dynajax.balance.bound import any_strategy_ms
from dynajax.balance.compare import Setting, setting
from dynajax.balance.cost import PipelineCost, costs_of, short_text
from dynajax.balance.dispatch import dispatch
from dynajax.balance.estimate import PUBLISHED
from dynajax.balance.iteration import Planner
from dynajax.balance.lengths import LengthBatches, shipped_lengths
from dynajax.balance.pack import balanced
from dynajax.balance.profiles import load_profile, published_candidates
from dynajax.balance.propose import enough_samples, propose
from dynajax.meshes import Strategy

sys.path.append(str(Path(__file__).parents[1]))  # the referees are those of the tests

from dynajax.types import Ints
from tests.balance.dispatch_bounds import lp_staged_ms
from tests.balance.referee import exact_dispatch, exact_packing, lightest_ms, milp_dispatch

LONGEST = 32_768
TOKENS_PER_DEVICE = 3_125  # 200K on 64 devices, 3.2M on 1,024
SAMPLES_FROM = 1_000_000


def batches_of(lengths: str, devices: int) -> LengthBatches:
    return LengthBatches(shipped_lengths(lengths), TOKENS_PER_DEVICE * devices, LONGEST)


def own_candidates(shared: Setting, batches: LengthBatches) -> tuple[Strategy, ...]:
    samples = [batches.batch(SAMPLES_FROM + i).tokens for i in range(enough_samples(batches.tokens))]
    return propose(samples, shared.costs, shared.devices, shared.longest).candidates


def gain(model: str, lengths: str, devices: int, iterations: int) -> list[Row]:
    shared, batches = setting(load_profile(model), devices, LONGEST), batches_of(lengths, devices)
    drawn = [batches.batch(i).tokens for i in range(iterations)]
    same = shared.homogeneous
    planners = {
        f"balanced {short_text(same.strategy)}": Planner([same.strategy], [same.cost]),
        "own candidates": Planner(own_candidates(shared, batches), shared.costs),
    }
    if model == "32b":  # the published candidates are of this profile
        planners["published candidates"] = Planner(published_candidates(devices, shared.costs), shared.costs)
    times: dict[str, list[float]] = {
        "padding": [same.padding_ms(tokens) for tokens in drawn],
        f"fixed {short_text(same.strategy)}": [same.fixed_ms(tokens, LONGEST) for tokens in drawn],
    }
    more: dict[str, Row] = {}
    for name, planner in planners.items():
        plans = [planner.plan(tokens) for tokens in drawn]
        times[name] = [plan.ms for plan in plans]
        more[name] = {
            "idle_share": statistics.fmean(plan.idle_share for plan in plans),
            "candidates": len(planner.candidates),
            "used": len({plan.candidate for plan in plans}),
        }
    times["bound"] = [any_strategy_ms(tokens, shared.costs, devices) for tokens in drawn]
    fixed = times[f"fixed {short_text(same.strategy)}"]
    case = f"{model}, {lengths}, {devices} devices"
    return [
        row(
            case,
            name,
            [f / ms for f, ms in zip(fixed, each, strict=True)],
            [ms / 1e3 for ms in each],
            speedup=statistics.fmean(fixed) / statistics.fmean(each),
            **more.get(name, {}),
        )
        for name, each in times.items()
    ]


def packing_quality() -> Iterator[Row]:
    cost = next(c for c in setting(load_profile("32b"), 64, LONGEST).costs if str(c.pipeline) == "tp8.pp4")
    for count in (25, 50, 100, 200, 400):
        ratios, seconds = [], []
        for seed in range(20):
            batch = LengthBatches(shipped_lengths("wikipedia"), 1_200 * count, cost.max_len // 2, seed=seed).batch(0)
            tokens = batch.tokens[:count]
            packs_wanted = max(2, -(-int(tokens.sum() * 1.05) // cost.max_len))
            times = cost.times(tokens)
            start = time.perf_counter()
            packs = balanced(times.tolist(), tokens.tolist(), packs_wanted, cost.max_len, count)
            seconds.append(time.perf_counter() - start)
            assert packs is not None
            ratios.append(max(times[pack].sum() for pack in packs) / lightest_ms(times, packs_wanted))
        mean = statistics.fmean(ratios)
        yield row(f"packing {count} sequences / lower bound", "balanced", ratios, seconds, mean=mean)


def dispatch_quality() -> Iterator[Row]:
    shared, batches = setting(load_profile("32b"), 64, LONGEST), batches_of("wikipedia", 64)
    for strategy in published_candidates(64, shared.costs):
        costs = costs_of(strategy, shared.costs)
        deep, room = any(cost.pp > 1 for cost in costs), max(cost.max_len for cost in costs)
        drawn = [batches.batch(iteration).tokens for iteration in range(8 if deep else 40)]
        yield judged(strategy, costs, [tokens for tokens in drawn if tokens.max() <= room], "LP bound", lp_staged_ms)
        if deep:
            few = costs[: 3 if costs[0].devices > 8 else 4]
            drawn = [LengthBatches(batches.lengths, 40_000, room, seed=seed).batch(0).tokens for seed in range(6)]
            named = Strategy(tuple(cost.pipeline for cost in few))
            yield judged(named, few, drawn, "LP bound, 40,000 tokens", lp_staged_ms)
            yield judged(named, few, drawn, "HiGHS after 10 s, 40,000 tokens", highs_ms)


def judged(
    strategy: Strategy,
    costs: Sequence[PipelineCost],
    drawn: Sequence[Ints],
    referee: str,
    bound: Callable[[Ints, Sequence[PipelineCost], float], float],
) -> Row:
    """Dispatch of every batch against what ``bound`` says that none can beat."""
    ratios, seconds = [], []
    for tokens in drawn:
        start = time.perf_counter()
        found = float(dispatch(tokens, costs, estimate=PUBLISHED).ms.max())
        seconds.append(time.perf_counter() - start)
        ratios.append(found / bound(tokens, costs, found))
    return row(
        f"dispatch on {short_text(strategy)} / {referee}", "dispatch", ratios, seconds, mean=statistics.fmean(ratios)
    )


def highs_ms(tokens: Ints, costs: Sequence[PipelineCost], _: float) -> float:
    """What HiGHS proves of whole sequences: the optimum, if it is done in time."""
    return milp_dispatch(tokens, costs, seconds=10.0).bound


def exact_quality() -> Iterator[Row]:
    """Small random cases, all assignments tried."""
    rng = np.random.default_rng(0)
    costs_there = {str(c.pipeline): c for c in setting(load_profile("32b"), 64, LONGEST).costs}
    kinds = [costs_there[text] for text in ("tp2.pp2", "tp4", "tp4.pp2", "tp8", "tp8.pp3", "tp16")]
    dispatched, packed = [], []
    while len(dispatched) < 240:
        costs = [kinds[i] for i in rng.integers(len(kinds), size=rng.integers(2, 4))]
        count = int(rng.integers(4, 8 if len(costs) == 3 else 11))
        tokens = rng.lognormal(6.9, 1.3, count).astype(np.int64).clip(1, max(cost.max_len for cost in costs))
        exact = exact_dispatch(tokens, costs).ms
        dispatched.append(dispatch(tokens, costs, estimate=PUBLISHED).ms.max() / exact)
        cost = kinds[-1]
        times = cost.times(tokens)
        packs = balanced(times.tolist(), tokens.tolist(), len(costs), cost.max_len * 2, count)
        assert packs is not None
        best = exact_packing(times, tokens, len(costs), cost.max_len * 2).ms
        packed.append(max(times[pack].sum() for pack in packs) / best)
    yield row("dispatch, 240 small cases / exact", "dispatch", dispatched, [], mean=statistics.fmean(dispatched))
    yield row("packing, 240 small cases / exact", "balanced", packed, [], mean=statistics.fmean(packed))


def timed(case: str, method: str, limit_s: float, jobs: Sequence[Callable[[], Any]]) -> Row:
    wall, cpu = [], []
    jobs[0]()
    for job in jobs:
        start, used = time.perf_counter(), time.process_time()
        job()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - used)
    case = f"{case} / limit of {limit_s:g} s"
    return row(case, method, [s / limit_s for s in wall], wall, cpu_seconds_median=statistics.median(cpu))


def planning_time() -> Iterator[Row]:
    for devices, limit_s, count in ((64, 0.05, 40), (1024, 1.0, 8)):
        shared, batches = setting(load_profile("32b"), devices, LONGEST), batches_of("wikipedia", devices)
        planner = Planner(published_candidates(devices, shared.costs), shared.costs)
        drawn = [batches.batch(i).tokens for i in range(count)]
        case = f"plan {batches.tokens} tokens on {devices} devices, {len(planner.candidates)} published candidates"
        yield timed(case, "Planner.plan", limit_s, [lambda t=t, p=planner: p.plan(t) for t in drawn])
    for model in ("32b", "13b", "7b"):
        shared, batches = setting(load_profile(model), 1024, LONGEST), batches_of("wikipedia", 1024)
        samples = [batches.batch(SAMPLES_FROM + i).tokens for i in range(enough_samples(batches.tokens))]
        job = lambda s=shared, d=samples: propose(d, s.costs, 1024, LONGEST)  # noqa: E731
        yield timed(f"propose for 1024 devices, {model}", "propose", 5.0, [job] * 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=40, help="batches on 64 devices; an eighth on 1,024")
    parser.add_argument("--parts", nargs="+", choices=("gain", "quality", "time"), default=("gain", "quality", "time"))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows: list[Row] = []
    if "time" in args.parts:  # first, while nothing else has warmed or filled the machine
        rows += planning_time()
    if "gain" in args.parts:
        for model in ("32b", "13b", "7b"):
            for lengths in ("wikipedia", "stdlib"):
                rows += gain(model, lengths, 64, args.iterations)
                rows += gain(model, lengths, 1024, max(args.iterations // 8, 1))
    if "quality" in args.parts:
        rows += [*packing_quality(), *dispatch_quality(), *exact_quality()]
    if args.json:
        machine = f"{platform.machine()}, {os.cpu_count()} cores, numpy {np.__version__}"
        print(json.dumps({"machine": machine, "cases": rows}))
    else:
        show(rows)


def show(rows: Sequence[Row]) -> None:
    case = ""
    for each in rows:
        if each["case"] != case:
            case = each["case"]
            print(f"\n{case}")
        ratio = each["ratio"]
        line = f"  {each['method']:<24} ratio {ratio['median']:8.4f} ({ratio['min']:.4f} to {ratio['max']:.4f})"
        for name in ("speedup", "mean"):
            line += f"  {name} {each[name]:.4f}" if name in each else ""
        line += f"  {each['seconds_median'] * 1e3:10.1f} ms" if each["seconds_median"] is not None else ""
        line += f"  cpu {each['cpu_seconds_median'] * 1e3:.1f} ms" if "cpu_seconds_median" in each else ""
        if "idle_share" in each:
            line += f"  idle {each['idle_share']:.1%}, {each['used']} of {each['candidates']} candidates used"
        print(line)


if __name__ == "__main__":
    main()
