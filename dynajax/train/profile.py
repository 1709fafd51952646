"""Measure what pipelines cost on the devices that are there: T(l, P) and MaxLen(P).

What is run is what training runs, in one section of all layers, on rows of one sequence and on rows that several
share. A pipeline with pp stages is given V rows at once; its program takes V + pp − 1 ticks, and in each every stage
works on one row, so that

    T(l, P) = time of the program / (pp − 1 + V)

The embedding, the loss and what a call costs at all are in it, spread over the ticks: the planner's form then
gives the time that was measured.

Each timed run follows one of the same program that is not timed. Repeats go round all pipelines and lengths, and
the median of each is kept, so that whatever else the machine does hits all alike.

MaxLen is read off compiled programs (what they take, return and need in between), without running them: the
longest row that is asked for and fits, else found by bisection. Room is left for the optimizer's state.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jax.sharding import NamedSharding, PartitionSpec

from dynajax.balance import PipelineCost, Point, Profile, Timing, measure_profile
from dynajax.balance.cost_fit import SHARED_BY, Row, rows_to_measure
from dynajax.bytesize import format_bytes
from dynajax.data import Batch, Segment, lay_out
from dynajax.errors import BalanceError, StrategyError
from dynajax.meshes import AXES, Pipeline, Placement, Strategy
from dynajax.models import LlamaConfig, count_parameters, init
from dynajax.runtime.gradients import GradientPrograms, abstract_params, abstract_sums, sums_of
from dynajax.runtime.sections import one_section
from dynajax.train.fit import require_fit
from dynajax.train.job import DEFAULT_OPTIONS, NO_MESH, StepOptions

LEAST_LENGTHS = 3
"""Lengths that a fit needs."""

_AXES = ("tp", "pp", "cp")
_OPTIMIZER_BYTES = 16  # a parameter's float32 value, two moments and pushed gradient, cut over all devices
_USABLE = 0.9  # of the free memory: allocators cannot use all of it
_RESOLUTION = 16  # bisection stops when MaxLen is known to a 16th

Tell = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Measured:
    """A pipeline's price, and what it was made from.

    Attributes:
        cost: the price list.
        error: largest relative error of the fit.
        points: rows of one sequence, and of equal ones, with their median times.
        shared: the longest row that was timed, halved again and again into sequences: the fit has not seen it.
        spread: largest (slowest − fastest) / median of the repeats of a row.
    """

    cost: PipelineCost
    error: float
    points: tuple[Point, ...]
    shared: Point
    spread: float

    @property
    def shared_error(self) -> float:
        """(price − time) / time of ``shared``: how well a·Σl² + b·Σl + c suits sequences that share a row."""
        return self.cost.microbatch_ms(self.shared.lengths) / self.shared.ms - 1


@dataclass(frozen=True, eq=False)
class Measurement:
    """A profile with what is known about its making.

    Attributes:
        profile: to be saved, and planned with.
        pipelines: those in the profile.
        left_out: pipelines that hold too few of the lengths, with the longest that they hold (0 for none).
    """

    profile: Profile
    pipelines: tuple[Measured, ...]
    left_out: tuple[tuple[Pipeline, int], ...]


def measure(
    name: str,
    model: LlamaConfig,
    pipelines: Sequence[Pipeline],
    lengths: Sequence[int],
    devices: Sequence[jax.Device],
    *,
    repeats: int = 5,
    memory: int | None = None,
    options: StepOptions = DEFAULT_OPTIONS,
    tell: Tell = lambda _: None,
) -> Measurement:
    """Measure ``pipelines`` on the first of ``devices``.

    Args:
        name: of the profile.
        model: shape of the decoder.
        pipelines: what to measure; axes tp, pp and cp.
        lengths: tokens at which to measure; at least three different ones.
        devices: all that will train: they share the optimizer's state.
        repeats: timed runs of each row.
        memory: bytes of a device that training may take; None for nine tenths of what is free.
        options: how a step runs; stages are not interleaved.
        tell: is told what is being done.

    Raises:
        BalanceError: too few lengths or repeats, a length beyond the learned positions, or no pipeline holds
            three of the lengths.
        StrategyError: a pipeline does not fit the model or the devices.
    """
    asked = tuple(sorted(set(lengths)))
    _check(model, pipelines, asked, devices, repeats)
    optimizer = count_parameters(model) * _OPTIMIZER_BYTES // len(devices)
    room = (free_bytes(devices) if memory is None else memory) - optimizer
    if room <= 0:
        raise BalanceError(
            f"the optimizer's state alone takes {format_bytes(optimizer)} a device, and there are "
            f"{format_bytes(optimizer + room)}: take a smaller model, more devices or more memory"
        )
    benches: list[_Bench] = []
    left_out: list[tuple[Pipeline, int]] = []
    for pipeline in dict.fromkeys(pipelines):
        tell(f"compiling {pipeline}")
        bench = _Bench(model, pipeline, devices, options, asked, room)
        if len(bench.lengths) < LEAST_LENGTHS:
            left_out.append((pipeline, bench.max_len))
        else:
            bench.prepare()
            benches.append(bench)
    if not benches:
        raise BalanceError(
            f"no pipeline holds {LEAST_LENGTHS} of {', '.join(map(str, asked))} tokens in {format_bytes(room)} "
            "a device beside the optimizer's state: give shorter lengths, larger pipelines or more devices"
        )
    for number in range(repeats):
        tell(f"timing, {number + 1} of {repeats}")
        for bench in benches:
            bench.run()
    of = {bench.pipeline: bench for bench in benches}
    profile = measure_profile(
        name,
        devices[0].device_kind,
        tuple(of),
        asked,
        lambda pipeline, row: of[pipeline].point(row).ms,
        lambda pipeline: of[pipeline].max_len,
    )
    measured = tuple(of[timing.pipeline].measured(timing) for timing in profile.timings)
    return Measurement(profile, measured, tuple(left_out))


def free_bytes(devices: Sequence[jax.Device]) -> int:
    """Bytes that can be used on the fullest device; devices emulated on the CPU share what the host has.

    Raises:
        BalanceError: the devices do not say what is free.
    """
    if devices[0].platform == "cpu":
        return int(_USABLE * psutil.virtual_memory().available / len(devices))
    found = [device.memory_stats() or {} for device in devices]
    if not all({"bytes_limit", "bytes_in_use"} <= stats.keys() for stats in found):
        raise BalanceError(f"{devices[0].device_kind} does not say how much memory is free: give the memory to use")
    return int(_USABLE * min(stats["bytes_limit"] - stats["bytes_in_use"] for stats in found))


def _check(
    model: LlamaConfig,
    pipelines: Sequence[Pipeline],
    lengths: Sequence[int],
    devices: Sequence[jax.Device],
    repeats: int,
) -> None:
    if len(lengths) < LEAST_LENGTHS or lengths[0] < SHARED_BY or repeats < 1:
        raise BalanceError(
            f"lengths {', '.join(map(str, lengths)) or 'none'} and {repeats} repeats: give {LEAST_LENGTHS} or more "
            f"different lengths of {SHARED_BY} tokens or more, and 1 repeat or more"
        )
    if 0 < model.learned_positions < lengths[-1]:
        raise BalanceError(
            f"{lengths[-1]} tokens: the model has {model.learned_positions} positions; give shorter lengths"
        )
    if not pipelines:
        raise BalanceError("no pipelines to measure: give at least one")
    for pipeline in pipelines:
        if any(pipeline.size(axis) > 1 for axis in AXES if axis not in _AXES) or pipeline.experts:
            raise StrategyError(f"{pipeline}: pipelines have the axes {', '.join(_AXES)}; copies cost the same")
        require_fit(model, Placement.parse(Strategy((pipeline,))), len(devices))


class _Bench:
    """A pipeline with the programs, rows and times of its measurement.

    Args:
        model: shape of the decoder.
        pipeline: what is measured.
        devices: runs on the first of them.
        options: how a step runs.
        asked: tokens of rows, increasing.
        room: bytes of a device that a program may take.
    """

    def __init__(
        self,
        model: LlamaConfig,
        pipeline: Pipeline,
        devices: Sequence[jax.Device],
        options: StepOptions,
        asked: Sequence[int],
        room: int,
    ) -> None:
        self.pipeline = pipeline
        strategy = Strategy((pipeline,))
        self._run = replace(options, chunks=1).of_pipeline(model, strategy)
        self._mesh = Placement.parse(strategy).mesh(devices)
        self._programs: dict[int, GradientPrograms] = {}
        self._rows: list[tuple[Row, GradientPrograms, Batch]] = []
        self._ms: dict[Row, list[float]] = {}
        self.max_len = self._longest(asked, room)
        self.lengths = tuple(tokens for tokens in asked if tokens <= self.max_len)

    def prepare(self) -> None:
        """Put the rows that are fitted, and the one that checks the fit, on the devices."""
        for sizes in (*self._fitted, self._shared):
            program = self._programs[sum(sizes)]
            self._rows.append((sizes, program, jax.device_put(self._batch(sizes, program), program.rows)))
            self._ms[sizes] = []
        self._programs.clear()

    def run(self) -> None:
        """Time every row once. Parameters exist meanwhile only, so that one pipeline at a time takes memory."""
        with jax.set_mesh(NO_MESH):
            params, sums = self._arrays()
        one = jax.device_put(jnp.float32(1), NamedSharding(self._mesh, PartitionSpec()))
        for sizes, program, batch in self._rows:
            took = 0.0
            for _ in range(2):  # the second is the one that counts
                began = time.perf_counter()
                sums, _ = jax.block_until_ready(program.sections[0].backward(params, sums, None, batch, one))
                took = time.perf_counter() - began
            self._ms[sizes].append(took * 1e3 / (self.pipeline.size("pp") - 1 + self._run.microbatches))

    @property
    def _fitted(self) -> list[Row]:
        return [row for tokens in self.lengths for row in rows_to_measure(tokens)]

    @property
    def _shared(self) -> Row:
        """The longest row as sequences of a half, a quarter, an eighth and so on of it."""
        left, sizes = self.lengths[-1], []
        for _ in range(SHARED_BY - 1):
            sizes.append(left - left // 2)
            left //= 2
        return tuple(size for size in (*sizes, left) if size)

    def point(self, sizes: Row) -> Point:
        """The median time of a row."""
        return Point(sizes, statistics.median(self._ms[sizes]))

    def measured(self, timing: Timing) -> Measured:
        """What there is to say of the price that was fitted."""
        cost = PipelineCost(timing.pipeline, timing.a, timing.b, timing.c, self.max_len)
        points = tuple(map(self.point, self._fitted))
        spread = max((max(times) - min(times)) / statistics.median(times) for times in self._ms.values())
        return Measured(cost, timing.error or 0.0, points, self.point(self._shared), spread)

    def _longest(self, asked: Sequence[int], room: int) -> int:
        """Most tokens of a row whose program fits in ``room``, at most the last of ``asked``.

        Where too few of those fit for a price, it is the last of them that does.
        """
        low = 0
        for number, tokens in enumerate(asked):
            if self._bytes(tokens) > room:
                return low if number < LEAST_LENGTHS else self._between(low, tokens, room)
            low = tokens
        return low

    def _between(self, low: int, high: int, room: int) -> int:
        """Most tokens that fit, by bisection; ``low`` do and ``high`` do not."""
        while high - low > max(high // _RESOLUTION, 1):
            middle = (low + high) // 2
            low, high = (middle, high) if self._bytes(middle) <= room else (low, middle)
        return low

    def _bytes(self, tokens: int) -> int:
        """Bytes of a device that the program of a row needs."""
        stats = self._program(tokens).sections[0].backward.memory_analysis()
        if stats is None:
            raise BalanceError(f"{self._mesh.devices.flat[0].device_kind} does not say what a program needs")
        return int(
            stats.argument_size_in_bytes
            + stats.output_size_in_bytes
            - stats.alias_size_in_bytes
            + stats.temp_size_in_bytes
            + stats.generated_code_size_in_bytes
        )

    def _program(self, tokens: int) -> GradientPrograms:
        if tokens not in self._programs:
            with jax.set_mesh(NO_MESH):
                self._programs[tokens] = GradientPrograms.compiled(
                    self._run, self._mesh, [one_section(self._run)], self._sums, tokens, SHARED_BY
                )
        return self._programs[tokens]

    def _batch(self, sizes: Sequence[int], program: GradientPrograms) -> Batch:
        """The same row for each micro-batch, of random text."""
        rng = np.random.default_rng(0)
        row = [Segment(0, 0, size, rng.integers(0, 256, size + 1, np.uint8)) for size in sizes]
        return program.order.arrange(lay_out([row] * self._run.row_multiple, program.row_length, SHARED_BY))

    @cached_property
    def _layout(self) -> Any:
        with jax.set_mesh(NO_MESH):
            return one_section(self._run).on(self._mesh)

    @property
    def _sums(self) -> Any:
        return abstract_sums([self._layout], self._mesh)

    @cached_property
    def _arrays(self) -> jax.stages.Compiled:
        """Makes random parameters and the sums that a program adds to."""
        run, layout = self._run, self._layout
        params, sums = abstract_params(layout, run.dtype), sums_of(one_section(run), 0, self._sums)

        def made() -> Any:
            tensors = init(run.config, jax.random.key(0))
            stored = jax.tree.map(lambda s, x: s.to_storage(x).astype(run.dtype), run.storage, tensors)
            return stored, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)

        return jax.jit(made, out_shardings=jax.tree.map(lambda x: x.sharding, (params, sums))).lower().compile()
