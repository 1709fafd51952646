"""What a pipeline costs: time of a sequence and of a micro-batch, memory, and the longest micro-batch.

One stage of a pipeline P works on a sequence of l tokens, forward and backward, for
``T(l, P) = a·l² + b·l`` milliseconds, and each micro-batch costs ``c`` more. Sequences that share a
micro-batch do not attend to each other, so its price is joint: ``a·Σl² + b·Σl + c``, which is neither
the price of one sequence of Σl tokens nor the sum of the prices of its parts.

The form and the published coefficients are those of Hydraulis (arXiv 2412.07894, and its code in
Hetu); ``data/hydraulis_profiles.json`` is read as it was published.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
from numpy.typing import ArrayLike

from dynajax.errors import BalanceError
from dynajax.meshes import AXES, Pipeline, Strategy
from dynajax.types import Floats


@dataclass(frozen=True)
class PipelineCost:
    """The price list of one kind of pipeline.

    Attributes:
        pipeline: how it is cut; axes tp, pp and cp.
        a: ms per token², of one pipeline stage.
        b: ms per token, of one pipeline stage.
        c: ms per micro-batch, of one pipeline stage.
        max_len: most tokens of one micro-batch, MaxLen(P).
    """

    pipeline: Pipeline
    a: float
    b: float
    c: float
    max_len: int

    def __post_init__(self) -> None:
        numbers = (self.a, self.b, self.c, self.max_len)
        if not all(np.isfinite(numbers)) or min(numbers) < 0:
            raise BalanceError(f"cost of {self.pipeline}: a, b, c, max_len = {numbers}; all must be 0 or more")

    @cached_property
    def devices(self) -> int:
        """Devices of the pipeline."""
        return self.pipeline.num_devices

    @cached_property
    def pp(self) -> int:
        """Pipeline stages."""
        return self.pipeline.size("pp")

    def times(self, lengths: ArrayLike) -> Floats:
        """T(l, P) of every length in ms, ``c`` not included; infinite above ``max_len``."""
        tokens = np.asarray(lengths, np.float64)
        return np.where(tokens <= self.max_len, (self.a * tokens + self.b) * tokens, np.inf)

    def microbatch_ms(self, lengths: ArrayLike, padded: int = 0) -> float:
        """Price of one micro-batch on one pipeline stage, in ms.

        Args:
            lengths: tokens of each sequence in it.
            padded: tokens of the row that is computed, if it is longer than the sequences together.
                Padding passes through the matrices but is masked in attention, so it costs ``b``.
        """
        tokens = np.asarray(lengths, np.float64)
        return float(self.a * (tokens @ tokens) + self.b * max(tokens.sum(), padded) + self.c)


def pipelines_of(strategy: Strategy) -> tuple[Pipeline, ...]:
    """The pipelines of a strategy, ``dp`` copies counted one by one: dp2.tp4 is two pipelines tp4."""
    return tuple(_with_dp(pipeline, 1) for pipeline in strategy.pipelines for _ in range(pipeline.size("dp")))


def costs_of(strategy: Strategy, costs: Iterable[PipelineCost]) -> tuple[PipelineCost, ...]:
    """The price list of each pipeline of ``strategy``.

    Raises:
        BalanceError: a pipeline that ``costs`` does not have.
    """
    known = {cost.pipeline: cost for cost in costs}
    missing = [str(p) for p in pipelines_of(strategy) if p not in known]
    if missing:
        raise BalanceError(
            f"strategy {short_text(strategy)}: {missing[0]} is not in the profile, or does not fit in memory or in the "
            f"buckets; there are {', '.join(str(p) for p in known) or 'none'}"
        )
    return tuple(known[p] for p in pipelines_of(strategy))


@dataclass(frozen=True)
class Timing:
    """Measured times of one kind of pipeline, as a profile keeps them.

    Attributes:
        pipeline: how it is cut.
        a: ms per token².
        b: ms per token.
        c: ms per micro-batch.
        max_len: most tokens of a micro-batch as measured; None if a memory model gives it.
        error: largest relative error of the fit at the measured points; None if not known.
    """

    pipeline: Pipeline
    a: float
    b: float
    c: float
    max_len: int | None = None
    error: float | None = None


@dataclass(frozen=True)
class MemoryModel:
    """Bytes on one device, in the published form.

    Attributes:
        layers: transformer layers.
        hidden: model width.
        vocab: rows of the embedding.
        available: bytes of a device that state and activations may take.
        activation: (tp, A) pairs; a token takes A·hidden/tp bytes in each layer.
        state: bytes per hidden² of a layer's parameters, gradients and optimizer.
        sharded: share of the state that the optimizer layout cuts; the rest follows the pipeline.
        granularity: MaxLen is rounded down to a multiple of this.
    """

    layers: int
    hidden: int
    vocab: int
    available: int
    activation: tuple[tuple[int, float], ...]
    state: float
    sharded: float
    granularity: int = 128

    def state_bytes(self, pipeline: Pipeline, optimizer: Pipeline) -> float:
        """Parameters, gradients and optimizer on a device, the optimizer laid out as ``optimizer``."""

        def held(part: Pipeline, share: float) -> float:
            tp, pp = part.size("tp"), part.size("pp")
            layers = self.layers / pp * (self.hidden**2 / tp) * self.state
            embedding = (self.hidden * self.vocab / tp) * (32 if pp == 1 else 16)
            return (layers + embedding) * share

        return held(optimizer, self.sharded / optimizer.size("dp")) + held(pipeline, 1 - self.sharded)

    def activation_bytes(self, tokens: float, pipeline: Pipeline) -> float:
        """Activations of micro-batches of ``tokens`` on the fullest device.

        A pipeline stage holds 1/pp of the layers for up to pp micro-batches, so pp does not appear.
        """
        factors = dict(self.activation)
        tp = pipeline.size("tp")
        if tp not in factors:
            raise BalanceError(f"{pipeline}: activations of tp{tp} were not measured, only tp {sorted(factors)}")
        return self.layers * (tokens * self.hidden / (tp * pipeline.size("cp"))) * factors[tp]

    def max_len(self, pipeline: Pipeline, optimizer: Pipeline) -> int:
        """Most tokens of a micro-batch; 0 if not even the state fits."""
        left = self.available - self.state_bytes(pipeline, optimizer)
        tokens = int(left // self.activation_bytes(1, pipeline)) if left > 0 else 0
        return tokens // self.granularity * self.granularity


@dataclass(frozen=True)
class Profile:
    """Measured times of the pipelines of one model on one kind of device.

    Attributes:
        name: what it is called.
        device: what it was measured on.
        timings: the measured pipelines.
        memory: gives MaxLen where a timing does not say it.
    """

    name: str
    device: str
    timings: tuple[Timing, ...]
    memory: MemoryModel | None = None

    def costs(self, optimizer: Pipeline) -> tuple[PipelineCost, ...]:
        """Price lists of all pipelines that fit in memory, the optimizer laid out as ``optimizer``."""
        listed = ((timing, self._max_len(timing, optimizer)) for timing in self.timings)
        return tuple(PipelineCost(t.pipeline, t.a, t.b, t.c, longest) for t, longest in listed if longest > 0)

    def homogeneous(self, devices: int, longest: int) -> PipelineCost:
        """The first pipeline that, copied over all devices, holds a sequence of ``longest`` tokens.

        First means fewest devices, then fewest pipeline stages. Its copies are also the optimizer layout.

        Raises:
            BalanceError: none does.
        """
        best = 0
        for timing in sorted(self.timings, key=lambda t: (t.pipeline.num_devices, t.pipeline.size("pp"))):
            if devices % timing.pipeline.num_devices == 0:
                max_len = self._max_len(timing, data_parallel(timing.pipeline, devices))
                best = max(best, max_len)
                if max_len >= longest:
                    return PipelineCost(timing.pipeline, timing.a, timing.b, timing.c, max_len)
        raise BalanceError(
            f"profile {self.name}: no pipeline that divides {devices} devices holds {longest} tokens, "
            f"the best holds {best}; cut sequences to that or add devices"
        )

    def _max_len(self, timing: Timing, optimizer: Pipeline) -> int:
        if timing.max_len is not None:
            return timing.max_len
        if self.memory is None:
            raise BalanceError(f"profile {self.name}: {timing.pipeline} has no max_len and there is no memory model")
        return self.memory.max_len(timing.pipeline, optimizer)


def data_parallel(pipeline: Pipeline, devices: int) -> Pipeline:
    """``pipeline`` with as many ``dp`` copies as fill ``devices``: the homogeneous layout.

    Raises:
        BalanceError: it does not divide them.
    """
    copies, left = divmod(devices, pipeline.num_devices)
    if left or not copies:
        raise BalanceError(f"{pipeline} takes {pipeline.num_devices} devices, which do not divide {devices}")
    return _with_dp(pipeline, copies)


def _with_dp(pipeline: Pipeline, copies: int) -> Pipeline:
    if pipeline.size("dp") == copies:
        return pipeline
    sizes = tuple(copies if axis == "dp" else size for axis, size in zip(AXES, pipeline.sizes, strict=True))
    return Pipeline(sizes, pipeline.experts)


def short_text(strategy: Strategy) -> str:
    """The text form with equal neighbours counted: ``tp16|12*tp4``."""
    runs = [(str(p), len(list(same))) for p, same in groupby(strategy.pipelines)]
    return "|".join(f"{count}*{text}" if count > 1 else text for text, count in runs)
