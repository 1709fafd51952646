"""How documents are balanced over pipelines, and what a pipeline is taken to cost where nobody has measured it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from dynajax.balance import IterationOptions, MicrobatchOptions, PipelineCost, Profile, Shapes, propose
from dynajax.data import DocumentSteps
from dynajax.errors import StrategyError
from dynajax.meshes import AXES, Pipeline, Strategy
from dynajax.models import LlamaConfig
from dynajax.train.fit import surprises

_FLOPS_PER_MS = 1e8
_EFFICIENCY = 0.9  # of a pipeline for every doubling of tp or cp
_MICROBATCH_MS = 0.05
_SAMPLES = 64
_AXES = ("pp", "cp", "tp")


@dataclass(frozen=True)
class Balancing:
    """How each step shares its documents out.

    Attributes:
        device_tokens: most tokens of a row that a device holds; a pipeline holds pp·cp·tp times as many.
        buckets: row lengths of each pipeline; a program is compiled for each.
        max_segments: most documents of a row.
        align: row lengths are multiples of this.
        candidates: strategies to choose from with ``auto``, at most.
        profile: measured times of pipelines; None to guess them from the shape of the model.
    """

    device_tokens: int
    buckets: int = 3
    max_segments: int = 32
    align: int = 16
    candidates: int = 4
    profile: Profile | None = None

    @staticmethod
    def holding(longest: int) -> Balancing:
        """Each device holds a row of ``longest`` tokens."""
        return Balancing(-(-longest // Balancing.align) * Balancing.align)

    @property
    def options(self) -> IterationOptions:
        """How iterations are planned."""
        return IterationOptions(MicrobatchOptions(self.shapes))

    @property
    def shapes(self) -> Shapes:
        """Row lengths that are compiled."""
        return Shapes(self.buckets, self.max_segments, self.align)

    def costs(self, model: LlamaConfig, pipelines: Sequence[Pipeline]) -> tuple[PipelineCost, ...]:
        """Price lists of ``pipelines``: measured ones where there is a profile, which may lack some."""
        if self.profile is None:
            return tuple(guessed_cost(model, pipeline, self.device_tokens) for pipeline in pipelines)
        measured = {cost.pipeline: cost for cost in self.profile.costs(pipelines[0])}
        return tuple(measured[p] for p in pipelines if p in measured)

    def propose(self, model: LlamaConfig, data: DocumentSteps, devices: int) -> tuple[Strategy, ...]:
        """Candidates for ``data`` on ``devices`` devices, the most useful first.

        Raises:
            BalanceError: no pipeline holds the longest document.
        """
        samples = [data.lengths(step) for step in range(min(data.steps_per_epoch, _SAMPLES))]
        costs = self.costs(model, even_pipelines(model, devices))
        found = propose(samples, costs, devices, data.longest, most=self.candidates, options=self.options)
        return found.candidates


def even_pipelines(model: LlamaConfig, devices: int) -> tuple[Pipeline, ...]:
    """Pipelines of 1, 2, 4, ... devices in pp, cp and tp that pad and copy nothing of ``model``."""
    powers = [2**k for k in range(devices.bit_length())]
    found: list[Pipeline] = []
    for sizes in itertools.product(powers, repeat=len(_AXES)):
        if math.prod(sizes) <= devices and sizes[0] <= model.layers:
            of: dict[str, int] = dict(zip(_AXES, sizes, strict=True))
            pipeline = Pipeline(tuple(of.get(axis, 1) for axis in AXES))
            if not surprises(model, Strategy((pipeline,))):
                found.append(pipeline)
    return tuple(found)


def guessed_cost(model: LlamaConfig, pipeline: Pipeline, device_tokens: int) -> PipelineCost:
    """A price list from counted operations: right in its proportions, not in its milliseconds.

    6 operations a parameter and token, forward and backward, and 6 a token pair for each element of the query heads
    under a causal mask, spread over the devices at an efficiency that falls with tp and cp.
    """
    if pipeline.size("fsdp") > 1:
        raise StrategyError(
            f"{pipeline}: pipelines side by side keep parameters and moments cut over all devices as it is; drop fsdp"
        )
    inner = model.heads + 2 * model.kv_heads + model.heads
    block = model.hidden * inner * model.head_dim + (3 if model.gated else 2) * model.hidden * model.ffn
    tokens = 6 * (model.layers * block + model.vocab * model.hidden)
    pairs = 6 * model.layers * model.heads * model.head_dim
    spread = math.log2(pipeline.size("tp") * pipeline.size("cp"))
    rate = _FLOPS_PER_MS * pipeline.num_devices * _EFFICIENCY**spread
    room = device_tokens * math.prod(pipeline.size(axis) for axis in _AXES)
    return PipelineCost(pipeline, pairs / rate, tokens / rate, _MICROBATCH_MS, room)
