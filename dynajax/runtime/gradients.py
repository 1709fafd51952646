"""The programs of a pipeline: gradients of the losses of some micro-batches, added to those that are there.

Each section of the model has two programs: forward, which keeps what the backward pass needs, and backward. The last
section has one for both. Nothing in them knows of other pipelines. The loss of a token is divided by the weight of the
whole global batch, which the caller knows from the data, so that gradients of all pipelines simply add up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dynajax.data import Batch, Segment, lay_out, pad_rows
from dynajax.runtime.order import TokenOrder
from dynajax.runtime.rules import BATCH_AXES, ROWS
from dynajax.runtime.sections import Section
from dynajax.runtime.sharded_loss import section_output
from dynajax.runtime.sharded_model import ShardedModel


@dataclass(frozen=True, eq=False)
class SectionPrograms:
    """What a section runs on rows of one length. What came out of the section before is ``x``, None for the first.

    Attributes:
        forward: ``(params, x, batch) -> (y, kept)``; None for the last section.
        backward: ``(params, sums, x, kept, dy) -> (sums, dx)``; consumes ``sums``, the section's gradients. Of the last
            section ``(params, sums, x, batch, scale) -> (sums, dx)``, and "loss" is one of the sums.
    """

    forward: jax.stages.Compiled | None
    backward: jax.stages.Compiled


@dataclass(frozen=True, eq=False)
class GradientPrograms:
    """What a pipeline runs on rows of one length.

    Attributes:
        run: model and strategy of the pipeline.
        row_length: tokens of a row before they are put in order.
        max_segments: most documents of a row.
        order: where the tokens of a row are.
        rows: sharding of a batch.
        sections: programs of each section of the model.
    """

    run: ShardedModel
    row_length: int
    max_segments: int
    order: TokenOrder
    rows: NamedSharding
    sections: tuple[SectionPrograms, ...]

    @staticmethod
    def compiled(
        run: ShardedModel, mesh: Mesh, sections: Sequence[Section], sums: Any, row_length: int, max_segments: int
    ) -> GradientPrograms:
        """Compile them from shapes alone.

        Args:
            run: its ``row_multiple`` is the number of rows of a call.
            mesh: of the pipeline.
            sections: of ``run``.
            sums: of ``abstract_sums``.
            row_length: tokens of a row.
            max_segments: most documents of a row.
        """
        order, rows = run.token_order(row_length), NamedSharding(mesh, ROWS)
        empty = lay_out([[]] * run.row_multiple, order.stored_length, max_segments)
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), empty)
        known: dict[Section, SectionPrograms] = {}
        programs: list[SectionPrograms] = []
        for number, section in enumerate(sections):
            like = Section(section.run, 0, section.is_first, section.is_last)  # wherever its layers are in the model
            if like not in known:
                known[like] = _Trace(section, mesh, order, batch).compiled(sums_of(section, number, sums))
            programs.append(known[like])
        return GradientPrograms(run, row_length, max_segments, order, rows, tuple(programs))

    def batch(self, microbatches: Sequence[Sequence[Segment]]) -> Any:
        """A batch on the devices.

        Args:
            microbatches: the documents of each row, at most ``run.row_multiple`` rows; rows that are missing weigh 0.
        """
        batch = pad_rows(lay_out(microbatches, self.row_length, self.max_segments), self.run.row_multiple)
        return from_host(self.order.arrange(batch), self.rows)


def sums_of(section: Section, number: int, sums: Any) -> Any:
    """The sums that the programs of section ``number`` add to."""
    return section.of(sums, number) | ({"loss": sums["loss"]} if section.is_last else {})


@dataclass(frozen=True, eq=False)
class _Trace:
    """What the programs of a section are made of."""

    section: Section
    mesh: Mesh
    order: TokenOrder
    batch: Any

    def compiled(self, sums: Any) -> SectionPrograms:
        """Compile them.

        Args:
            sums: float32 ``ShapeDtypeStruct`` leaves.
        """
        run, section = self.section.run, self.section
        params = {name: jax.tree.map(lambda x: _like(x, run.dtype), sums[name]) for name in section.uses}
        between = self.between
        x, stream = None if section.is_first else between, None if section.is_first else between.sharding
        summed = jax.tree.map(lambda s: s.sharding, sums), stream
        if section.is_last:
            scale = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(self.mesh, PartitionSpec()))
            closing = jax.jit(self.close, out_shardings=summed, donate_argnums=1)
            return SectionPrograms(None, closing.lower(params, sums, x, self.batch, scale).compile())
        lowered = jax.jit(self.forward, out_shardings=(between.sharding, None)).lower(params, x, self.batch)
        forward = lowered.compile()
        kept = jax.tree.map(
            lambda info, sharding: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding),
            lowered.out_info[1],
            forward.output_shardings[1],
        )
        backward = jax.jit(self.backward, out_shardings=summed, donate_argnums=1)
        return SectionPrograms(forward, backward.lower(params, sums, x, kept, between).compile())

    @property
    def between(self) -> jax.ShapeDtypeStruct:
        """What sections hand on: (micro-batches, rows, seq, embed)."""
        run, (rows, tokens) = self.section.run, self.batch.tokens.shape
        shape = run.microbatches, rows // run.microbatches, tokens, run.config.hidden
        cut = NamedSharding(self.mesh, PartitionSpec(None, BATCH_AXES, "cp"))
        return jax.ShapeDtypeStruct(shape, run.dtype, sharding=cut)

    def forward(self, params: Any, x: Any, batch: Batch) -> tuple[jax.Array, Any]:
        """See ``SectionPrograms.forward``."""
        with jax.default_matmul_precision("highest"):
            y, kept = jax.vjp(self.output(batch), _exact(params), x)
        kept.args_res = []  # the caller has them: what is kept need not hold copies
        return y, kept

    def backward(self, params: Any, sums: Any, x: Any, kept: Any, dy: jax.Array) -> tuple[Any, Any]:
        """See ``SectionPrograms.backward``."""
        kept.args_res = [_exact(params), x]
        with jax.default_matmul_precision("highest"):
            grads, dx = kept(dy)
        return jax.tree.map(jnp.add, sums, grads), dx

    def close(self, params: Any, sums: Any, x: Any, batch: Batch, scale: jax.Array) -> tuple[Any, Any]:
        """See ``SectionPrograms.backward``, of the last section."""

        def loss(params: Any, x: Any) -> tuple[jax.Array, jax.Array]:
            loss_sum = self.output(batch)(params, x)
            return loss_sum * scale, loss_sum

        with jax.default_matmul_precision("highest"):
            (grads, dx), loss_sum = jax.grad(loss, argnums=(0, 1), has_aux=True)(_exact(params), x)
        return jax.tree.map(jnp.add, sums, grads | {"loss": loss_sum}), dx

    def output(self, batch: Batch) -> Callable[[Any, Any], jax.Array]:
        """``(params, x) -> y``, or the sum of losses."""
        return lambda params, x: section_output(self.section.run, self.mesh, params, x, batch, self.order)


def _exact(params: Any) -> Any:
    """Parameters as float32, so that their gradients are."""
    return jax.tree.map(lambda p: p.astype(jnp.float32), params)


def _like(x: jax.ShapeDtypeStruct, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)


def abstract_params(layout: Any, dtype: Any) -> Any:
    """Parameters as ``ShapeDtypeStruct`` leaves."""
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.array_shape, dtype, sharding=s.sharding), layout)


def abstract_sums(layouts: Sequence[Any], mesh: Mesh) -> dict[str, Any]:
    """Gradients and the sum of losses as ``ShapeDtypeStruct`` leaves, all float32; "blocks" has an entry a section.

    Args:
        layouts: a ``Stored`` for each parameter that a section owns.
        mesh: of the pipeline.
    """
    loss = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    return join_sections([abstract_params(layout, jnp.float32) for layout in layouts]) | {"loss": loss}


def zeros_of(shapes: Any) -> Callable[[], Any]:
    """What makes zeros like ``ShapeDtypeStruct`` leaves, without shards where no device is of this process."""
    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    if not all(sharding.addressable_devices for sharding in jax.tree.leaves(shardings)):
        return lambda: jax.tree.map(
            lambda x: jax.make_array_from_single_device_arrays(x.shape, x.sharding, [], dtype=x.dtype), shapes
        )
    made = jax.jit(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), out_shardings=shardings)
    return made.lower().compile()


def from_host(tree: Any, sharding: NamedSharding) -> Any:
    """Numpy arrays that every process has, on the devices: each process fills its own, and asks no other."""
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index], dtype=x.dtype), tree
    )


def join_sections(owned: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What sections own as one tree, in which "blocks" has an entry for each section."""
    return {name: tree for part in owned for name, tree in part.items()} | {"blocks": [p["blocks"] for p in owned]}
