"""A pipeline among others: its links to the optimizer layout and its compiled programs, on devices of its own.

All processes of a job pull for it and push, in one order. Only those that have devices of it run its programs; to the
others its sums are arrays of which they have no shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dynajax.data import Segment
from dynajax.engine import Report
from dynajax.runtime.gradients import GradientPrograms, abstract_sums, from_host, sums_of, zeros_of
from dynajax.runtime.links import Link
from dynajax.runtime.sections import Section, sections_of
from dynajax.runtime.sharded_model import ShardedModel


@dataclass(frozen=True, eq=False)
class PipelineRunner:
    """What is compiled and planned for one pipeline on its devices.

    Attributes:
        run: model and strategy.
        mesh: its devices.
        sections: of the model.
        links: of each section to the optimizer layout.
        zeros: makes the sums that gradients are added to.
        programs: by row length; none where no device is of this process.
    """

    run: ShardedModel
    mesh: Mesh
    sections: tuple[Section, ...]
    links: tuple[Link, ...]
    zeros: Callable[[], Any]
    programs: Mapping[int, GradientPrograms]

    @staticmethod
    def of(run: ShardedModel, mesh: Mesh, flat: Mesh, row_lengths: Sequence[int], max_segments: int) -> PipelineRunner:
        """Compile and plan all that the pipeline will need; no array is made.

        Args:
            run: model and strategy; ``run.microbatches`` go through the pipeline in one call.
            mesh: of the strategy.
            flat: mesh of the optimizer layout.
            row_lengths: of the rows that will come.
            max_segments: most documents of a row.
        """
        sections = sections_of(run)
        links = tuple(Link.of(section, run.config.layers, flat, mesh, run.dtype) for section in sections)
        sums = abstract_sums([link.stored for link in links], mesh)
        lengths = row_lengths if mesh.local_devices else ()
        compiled = {n: GradientPrograms.compiled(run, mesh, sections, sums, n, max_segments) for n in lengths}
        return PipelineRunner(run, mesh, sections, links, zeros_of(sums), compiled)

    @property
    def is_here(self) -> bool:
        """True if this process has devices of it."""
        return bool(self.mesh.local_devices)

    def pull(self, params: Any, section: int) -> tuple[Any, Report]:
        """Parameters of a section as this pipeline computes with them, from the optimizer layout."""
        return self.links[section].pull(params)

    def push(self, sums: Any, section: int) -> tuple[Any, Report]:
        """Gradients of a section to the optimizer layout; waits for them."""
        return self.links[section].push(self.sections[section].own(sums, section))

    def begin(self, rows: Sequence[tuple[int, Sequence[Segment]]], scale: float) -> Passes:
        """The passes of some micro-batches, of which none is begun.

        Those that go through the pipeline in one call are padded to the longest of them, so they go by length.

        Args:
            rows: row length and documents of each micro-batch, at least one.
            scale: what each loss is multiplied by in the gradients.
        """
        at_once, calls = self.run.row_multiple, []
        ordered = sorted(rows, key=lambda row: -row[0]) if self.is_here else []
        for start in range(0, len(ordered), at_once):
            call = ordered[start : start + at_once]
            programs = self.programs[call[0][0]]
            calls.append(_Call(programs, programs.batch([segments for _, segments in call])))
        factor = from_host(np.asarray(scale, np.float32), NamedSharding(self.mesh, PartitionSpec()))
        pulled_by_programs = any(link.pulls.path == "xla" for link in self.links)
        return Passes(self.sections, calls, factor, self.zeros(), hold=pulled_by_programs)


class Passes:
    """The passes of one pipeline in one step. Nothing here waits for what is computed.

    Args:
        sections: of the model.
        calls: their micro-batches.
        scale: float32[], what each loss is multiplied by in the gradients.
        sums: zeros.
        hold: whether all passes but the first are to wait for ``run_rest``.

    Attributes:
        sums: gradients by part of the tree of parameters, "blocks" by section, and "loss".
        left: micro-batches whose passes are not begun.
    """

    def __init__(
        self, sections: Sequence[Section], calls: Sequence[_Call], scale: jax.Array, sums: Any, *, hold: bool
    ) -> None:
        self._sections, self._scale, self._hold = sections, scale, hold
        self.sums, self.left = sums, list(calls)
        self._params: dict[str, Any] = {"blocks": []}

    def run(self, pulled: Any) -> None:
        """Begin to compute with the parameters of the next section, and of all passes with those of the last.

        Pulls that are programs come after what their devices were given before. So that others need not wait for the
        whole of this pipeline, only its first pass is begun then.
        """
        number = len(self._params["blocks"])
        self._params |= pulled | {"blocks": [*self._params["blocks"], pulled["blocks"]]}
        for call in self.left[:1]:
            self._forward(call, number)
        if number < len(self._sections) - 1:
            return
        for call in self.left[:1]:
            self._backward(call)
        self.left = self.left[1:]
        if not self._hold:
            self.run_rest()

    def run_rest(self) -> None:
        """Begin the passes that are left."""
        for call in self.left:
            for section in range(len(self._sections)):
                self._forward(call, section)
            self._backward(call)
        self.left = []

    def _forward(self, call: _Call, number: int) -> None:
        section, programs = self._sections[number], call.programs.sections[number]
        params, x = section.of(self._params, number), call.stream[-1]
        if programs.forward is None:
            sums = sums_of(section, number, self.sums)
            sums, call.back = programs.backward(params, sums, x, call.batch, self._scale)
            self._take(number, sums)
        else:
            y, kept = programs.forward(params, x, call.batch)
            call.stream.append(y)
            call.kept.append(kept)

    def _backward(self, call: _Call) -> None:
        """Through all sections but the last, whose one program was forward and backward."""
        call.stream.pop()
        for number in reversed(range(len(self._sections) - 1)):
            section = self._sections[number]
            x, kept = call.stream.pop(), call.kept.pop()
            params, sums = section.of(self._params, number), sums_of(section, number, self.sums)
            sums, call.back = call.programs.sections[number].backward(params, sums, x, kept, call.back)
            self._take(number, sums)
        call.back = None

    def _take(self, number: int, sums: dict[str, Any]) -> None:
        """Put the new sums of a section where the old ones were."""
        blocks = list(self.sums["blocks"])
        blocks[number] = sums["blocks"]
        self.sums = self.sums | sums | {"blocks": blocks}


class _Call:
    """Micro-batches that go through the model together.

    Attributes:
        programs: for the length of their rows.
        batch: the rows, on the devices.
        stream: what goes into each section, as far as it is known: None into the first.
        kept: what the backward pass of each section needs.
        back: gradient of what the last section that was gone back through took.
    """

    def __init__(self, programs: GradientPrograms, batch: Any) -> None:
        self.programs, self.batch = programs, batch
        self.stream: list[Any] = [None]
        self.kept: list[Any] = []
        self.back: Any = None
