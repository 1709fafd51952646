"""A pipeline among others: its link to the optimizer layout and its compiled programs, on devices of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dynajax.data import Segment
from dynajax.engine import Report
from dynajax.runtime.gradients import GradientProgram, abstract_sums
from dynajax.runtime.links import Link
from dynajax.runtime.propagation import Propagation


@dataclass(frozen=True, eq=False)
class PipelineRunner:
    """What is compiled and planned for one pipeline on its devices.

    Attributes:
        run: model and strategy.
        mesh: its devices.
        link: to the optimizer layout.
        zeros: makes the sums that gradients are added to.
        programs: by row length.
    """

    run: Propagation
    mesh: Mesh
    link: Link
    zeros: jax.stages.Compiled
    programs: Mapping[int, GradientProgram]

    @staticmethod
    def of(
        run: Propagation, mesh: Mesh, optimizer: Any, row_lengths: Sequence[int], max_segments: int
    ) -> PipelineRunner:
        """Compile and plan all that the pipeline will need; no array is made.

        Args:
            run: model and strategy; ``run.microbatches`` go through the pipeline in one call.
            mesh: of the strategy.
            optimizer: a ``Bundle`` for each parameter, the optimizer layout.
            row_lengths: of the rows that will come.
            max_segments: most documents of a row.
        """
        layout = jax.tree.map(lambda storage: storage.on(mesh), run.storage)
        sums = abstract_sums(layout, mesh)
        shardings = jax.tree.map(lambda x: x.sharding, sums)
        zeros = jax.jit(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums), out_shardings=shardings)
        compiled = {n: GradientProgram.compiled(run, mesh, layout, n, max_segments) for n in row_lengths}
        return PipelineRunner(run, mesh, Link.of(optimizer, layout, run.dtype), zeros.lower().compile(), compiled)

    def pull(self, params: Any) -> tuple[Any, Report]:
        """Parameters as this pipeline computes with them, from the optimizer layout."""
        return self.link.pull(params)

    def push(self, sums: Any) -> tuple[Any, Report]:
        """Gradients to the optimizer layout; waits for them."""
        return self.link.push(sums[0])

    def dispatch(self, params: Any, rows: Sequence[tuple[int, Sequence[Segment]]], scale: float) -> Any:
        """Start the passes of some micro-batches; returns before they are computed.

        Those that go through the pipeline in one call are padded to the longest of them, so they go by length.

        Args:
            params: pulled.
            rows: row length and documents of each micro-batch.
            scale: what each loss is multiplied by in the gradients.

        Returns:
            Gradients, and the sum of losses.
        """
        at_once, sums = self.run.row_multiple, self.zeros()
        ordered = sorted(rows, key=lambda row: -row[0])
        factor = jax.device_put(jnp.float32(scale), NamedSharding(self.mesh, PartitionSpec()))
        for start in range(0, len(ordered), at_once):
            call = ordered[start : start + at_once]
            sums = self.programs[call[0][0]](params, sums, [segments for _, segments in call], factor)
        return sums
