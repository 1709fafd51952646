"""The program of a pipeline: gradients of the losses of some micro-batches, added to those that are there.

Nothing in it knows of other pipelines. The loss of a token is divided by the weight of the whole global batch,
which the caller knows from the data, so that gradients of all pipelines simply add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dynajax.data import Batch, Segment, lay_out, pad_rows
from dynajax.runtime.order import TokenOrder
from dynajax.runtime.propagate import loss_and_metrics
from dynajax.runtime.propagation import Propagation
from dynajax.runtime.rules import ROWS


@dataclass(frozen=True, eq=False)
class GradientProgram:
    """What a pipeline runs on rows of one length.

    Attributes:
        run: model and strategy of the pipeline.
        row_length: tokens of a row before they are put in order.
        max_segments: most documents of a row.
        order: where the tokens of a row are.
        rows: sharding of a batch.
        executable: ``(params, sums, batch, scale) -> sums``; consumes ``sums``, a pair of gradients and loss.
    """

    run: Propagation
    row_length: int
    max_segments: int
    order: TokenOrder
    rows: NamedSharding
    executable: jax.stages.Compiled

    @staticmethod
    def compiled(run: Propagation, mesh: Mesh, layout: Any, row_length: int, max_segments: int) -> GradientProgram:
        """Compile it from shapes alone.

        Args:
            run: its ``row_multiple`` is the number of rows of a call.
            mesh: of the pipeline.
            layout: a ``Stored`` for each parameter.
            row_length: tokens of a row.
            max_segments: most documents of a row.
        """
        order = run.token_order(row_length)
        rows = NamedSharding(mesh, ROWS)
        whole = NamedSharding(mesh, PartitionSpec())
        params, sums = abstract_params(layout, run.dtype), abstract_sums(layout, mesh)
        shardings = jax.tree.map(lambda x: x.sharding, sums)
        empty = lay_out([[]] * run.row_multiple, order.stored_length, max_segments)
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), empty)

        def add_gradients(params: Any, sums: Any, batch: Batch, scale: jax.Array) -> Any:
            def loss(params: Any) -> tuple[jax.Array, jax.Array]:
                loss_sum, *_ = loss_and_metrics(run, mesh, params, batch, order)
                return loss_sum * scale, loss_sum

            with jax.default_matmul_precision("highest"):
                exact = jax.tree.map(lambda p: p.astype(jnp.float32), params)
                grads, loss_sum = jax.grad(loss, has_aux=True)(exact)
            return jax.tree.map(jnp.add, sums, (grads, loss_sum))

        jitted = jax.jit(add_gradients, out_shardings=shardings, donate_argnums=1)
        scale = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
        executable = jitted.lower(params, sums, batch, scale).compile()
        return GradientProgram(run, row_length, max_segments, order, rows, executable)

    def __call__(self, params: Any, sums: Any, microbatches: Sequence[Sequence[Segment]], scale: jax.Array) -> Any:
        """Add the gradients of some micro-batches; returns before they are computed.

        Args:
            params: as they were pulled.
            sums: gradients and the sum of losses so far; consumed.
            microbatches: the documents of each row, at most ``run.row_multiple`` rows; rows that are missing weigh 0.
            scale: float32[], what each loss is multiplied by in the gradients.
        """
        batch = pad_rows(lay_out(microbatches, self.row_length, self.max_segments), self.run.row_multiple)
        return self.executable(params, sums, jax.device_put(self.order.arrange(batch), self.rows), scale)


def abstract_params(layout: Any, dtype: Any) -> Any:
    """Parameters as ``ShapeDtypeStruct`` leaves."""
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.array_shape, dtype, sharding=s.sharding), layout)


def abstract_sums(layout: Any, mesh: Mesh) -> tuple[Any, jax.ShapeDtypeStruct]:
    """Gradients and the sum of losses as ``ShapeDtypeStruct`` leaves, all float32."""
    whole = NamedSharding(mesh, PartitionSpec())
    return abstract_params(layout, jnp.float32), jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
