"""A pass of micro-batches through stacked layers that are cut over pipeline stages, as one SPMD program.

Every device runs the same scan over the ticks of a ``Timetable``; in a tick it runs one run of its layers
on what its neighbour handed on in the tick before. The scan is manual over pp alone, so that inside a
layer the compiler goes on cutting batch, tokens and heads along the other axes. The backward pass is
the transposed scan: the same pipeline, run from its end.

Memory. A tick keeps nothing but its input; its activations are computed again in the backward
pass. With ``remat`` the same holds for each layer within a tick. Micro-batches wait whole on every stage.

Uneven layers. The stored stack has a place for every layer of the longest run (``layer_order``). A
place without a layer holds zeros, is computed like the others and thrown away, so that its gradients
are exact zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from dynajax.runtime.timetable import Timetable, layer_order

Layer = Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]]
"""``layer(params, x, rows) -> (x, sums)``: one layer on one micro-batch; ``sums`` are sums over its tokens."""


def pipeline_blocks(
    layer: Layer, layers: int, stack: Any, x: jax.Array, rows: Any, mesh: Mesh, *, chunks: int = 1, remat: bool = False
) -> tuple[jax.Array, Any]:
    """Run ``layers`` layers, one after the other, on every micro-batch.

    Args:
        layer: runs one layer, on arrays that are whole but for pp.
        layers: how many there are.
        stack: parameters; leaves (places, ...) in the order of ``layer_order(layers, pp, chunks)``, cut along pp.
        x: (microbatches, batch, seq, embed).
        rows: pytree with leaves (microbatches, batch, seq), what a layer is told of each token.
        mesh: with the axis pp.
        chunks: runs of layers a pipeline stage has; more than 1 interleaves.
        remat: compute each layer again in the backward pass, not only each tick.

    Returns:
        The output, shaped as ``x`` and the same on all stages, and the sums of all micro-batches, leaves (places, ...)
        in the order of the stack and zeros where there is no layer.
    """
    pp = mesh.shape["pp"]
    real = layer_order(layers, pp, chunks).reshape(pp, chunks, -1) >= 0
    run = _Run(layer, Timetable(pp, chunks, x.shape[0]), real, remat, x.dtype)
    if pp == 1:
        return run.all_ticks(stack, x, rows, 0)
    whole, stages = PartitionSpec(), PartitionSpec("pp")
    mapped = jax.shard_map(
        run.on_stage,
        mesh=mesh,
        in_specs=(stages, whole, whole),
        out_specs=(whole, stages),
        axis_names={"pp"},
        check_vma=False,
    )
    # Arrays that all stages share cross the border as float32: their sums over stages, forth and back, have one term
    # that is not zero, and XLA's CPU compiler (jaxlib 0.10) aborts on a sum in bfloat16 over a manual axis.
    out, sums = mapped(stack, x.astype(jnp.float32), rows)
    return out.astype(x.dtype), sums


@dataclass(frozen=True, eq=False)
class _Run:
    """What does not change in a pass; ``real`` (pp, chunks, layers of a run) says which places hold a layer."""

    layer: Layer
    table: Timetable
    real: np.ndarray
    remat: bool
    dtype: Any

    def on_stage(self, stack: Any, x: jax.Array, rows: Any) -> tuple[jax.Array, Any]:
        """The part of one pipeline stage, inside ``shard_map``."""
        out, sums = self.all_ticks(stack, x.astype(self.dtype), rows, lax.axis_index("pp"))
        # Only the last stage has written to its output: the sum hands it to all, who share the work of the head.
        return lax.psum(out.astype(jnp.float32), "pp"), sums

    def all_ticks(self, stack: Any, x: jax.Array, rows: Any, stage: Any) -> tuple[jax.Array, Any]:
        """Scan over the ticks; the output is zeros on all stages but the last."""
        table = self.table
        stack = jax.tree.map(lambda w: w.reshape(table.chunks, -1, *w.shape[1:]), stack)
        one_run = partial(self.one_run, stack, rows, stage)
        if table.ticks > 1:
            one_run = jax.checkpoint(one_run)

        def tick(carry: tuple[jax.Array, jax.Array], number: jax.Array) -> tuple[Any, Any]:
            handed, out = carry
            at = table.work(number, stage)
            first = (stage == 0) & (at.chunk == 0)
            y, sums = one_run(jnp.where(first, _take(x, at.microbatch), handed), at.microbatch, at.chunk)
            done = at.counts & (stage == table.pp - 1) & (at.chunk == table.chunks - 1)
            kept = jnp.where(done, y, _take(out, at.microbatch))
            out = lax.dynamic_update_index_in_dim(out, kept, at.microbatch, 0)
            return (self.hand_on(y), out), sums

        ticks = jnp.arange(table.ticks)
        (_, out), sums = lax.scan(tick, (jnp.zeros_like(x[0]), jnp.zeros_like(x)), ticks)
        return out, self.sum_by_layer(sums, table.work(ticks, stage))

    def one_run(
        self, stack: Any, rows: Any, stage: Any, x: jax.Array, microbatch: jax.Array, chunk: jax.Array
    ) -> tuple[jax.Array, Any]:
        """One run of layers on one micro-batch; the sums are stacked by layer."""
        rows = jax.tree.map(lambda r: _take(r, microbatch), rows)
        params = jax.tree.map(lambda w: _take(w, chunk), stack)
        real = _take(_take(jnp.asarray(self.real), stage), chunk)

        def one_layer(x: jax.Array, at: tuple[Any, jax.Array]) -> tuple[jax.Array, Any]:
            params, real = at
            y, sums = self.layer(params, x, rows)
            if self.real.all():
                return y, sums
            return jnp.where(real, y, x), jax.tree.map(lambda s: jnp.where(real, s, 0), sums)

        return lax.scan(jax.checkpoint(one_layer) if self.remat else one_layer, x, (params, real))

    def hand_on(self, y: jax.Array) -> jax.Array:
        """``y`` to the next stage; the last hands on to the first only where stages take several turns."""
        pp = self.table.pp
        if pp == 1:
            return y
        return lax.ppermute(y, "pp", [(s, (s + 1) % pp) for s in range(pp if self.table.chunks > 1 else pp - 1)])

    def sum_by_layer(self, sums: Any, at: Any) -> Any:
        """From leaves (ticks, layers of a run, ...) to (places of this stage, ...), without what does not count."""
        turns = (jnp.arange(self.table.chunks)[:, None] == at.chunk) & at.counts  # (chunks, ticks)

        def by_chunk(leaf: jax.Array) -> jax.Array:
            of_chunk = turns.reshape(*turns.shape, *[1] * (leaf.ndim - 1))
            total = jnp.where(of_chunk, leaf, 0).sum(1)
            return total.reshape(-1, *total.shape[2:])

        return jax.tree.map(by_chunk, sums)


def _take(x: jax.Array, index: Any) -> jax.Array:
    return lax.dynamic_index_in_dim(x, index, 0, keepdims=False)
