"""Forward and loss of a global batch under any strategy: what a step differentiates.

One SPMD program over one mesh whose axes are Auto. Embedding, final norm and head are left to the
compiler, with tables cut over tp and pp jointly; the blocks run in a pipeline that is manual over pp; attention
goes round the ring of cp and experts exchange tokens, each manual over the axes that it needs.

Parameters come as they are stored (see ``storage``). Each layer gathers the dims that fsdp cuts when it is its
turn, and its gradients go back cut; the other dims are computed with as they are stored, zeros included:

- mlp, heads: a zero column up and a zero row down add zero, and their gradients are zero.
- kv_heads: padding goes with whole groups of query heads, so that the grouping stays as it is.
- experts: no router knows a number beyond the last.
- vocab: logits beyond the vocabulary are masked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dynajax.data import Batch
from dynajax.errors import LayoutError
from dynajax.meshes import spec
from dynajax.models import (
    Attention,
    Execution,
    LlamaConfig,
    MoeConfig,
    Params,
    RouterStats,
    embed,
    project,
    run_blocks,
    token_loss,
)
from dynajax.runtime.ambient import ambient_sharding, constrained
from dynajax.runtime.attention import ring_attention
from dynajax.runtime.experts import exchange_experts
from dynajax.runtime.order import TokenOrder
from dynajax.runtime.rules import BATCH_AXES, activation_rules, expert_axes
from dynajax.runtime.sharded_model import ShardedModel
from dynajax.runtime.spmd_pipeline import Layer, pipeline_blocks
from dynajax.runtime.storage import CutLayers, Storage

T = TypeVar("T")
_MASKED = -1e30


def loss_and_metrics(
    model: ShardedModel, mesh: Mesh, params: Params, batch: Batch, order: TokenOrder
) -> tuple[jax.Array, jax.Array, RouterStats | None]:
    """The loss of a global batch as sums; call it inside ``jax.jit`` and differentiate it.

    The mean loss is ``mean_loss(loss_sum, weight_sum) + router_loss(config, stats)``. It depends on the
    strategy in the order of sums alone, and gradients of padding in the parameters are exact zeros.

    Example:
        >>> run = ShardedModel(config, strategy, microbatches=4)
        >>> order = run.token_order(batch.seq_len)
        >>> params = jax.tree.map(lambda s, p: s.to_storage(p), run.storage, params)
        >>> batch = order.arrange(pad_rows(batch, run.row_multiple))
        >>> loss_sum, weight_sum, stats = loss_and_metrics(run, mesh, params, batch, order)

    Args:
        model: model and strategy.
        mesh: ``model.strategy.mesh(devices)``.
        params: float32, as ``model.storage`` says.
        batch: rows a multiple of ``model.row_multiple``, arranged in ``order``, cut along rows and tokens.
        order: where the tokens of a row are.

    Returns:
        Sum of weighted losses in nats, sum of weights, and the routers' sums over the batch with a leading dim of
        the layers (None for a dense model).

    Raises:
        LayoutError: the batch or a parameter does not have the shape that it should.
    """
    _require(model, params, batch, order)
    return _Step(model, mesh, order).loss(params, batch)


def section_output(
    model: ShardedModel, mesh: Mesh, params: Params, x: jax.Array | None, batch: Batch, order: TokenOrder
) -> jax.Array:
    """Some neighbouring layers of a model, with what comes before its first or behind its last.

    Args:
        model: a model of just these layers, under a strategy.
        mesh: as for ``loss_and_metrics``.
        params: "blocks"; "embed" too if the section is the first; "head" too if it is the last, and then "embed" if
            the head is tied to it.
        x: what came out of the layers before, (micro-batches, rows, seq, embed); None for the first section.
        batch: as for ``loss_and_metrics``.
        order: where the tokens of a row are.

    Returns:
        What the next section takes, or the sum of losses if the section is the last.
    """
    step = _Step(model, mesh, order)
    x, _ = step.blocks(params["blocks"], step.enter(params["embed"], batch) if x is None else x, batch)
    return step.leave(params, x, batch)[0] if "head" in params else x


def _require(model: ShardedModel, params: Params, batch: Batch, order: TokenOrder) -> None:
    strategy, cp = model.strategy, model.strategy.size("cp")
    if batch.rows % model.row_multiple:
        raise LayoutError(
            f"{batch.rows} rows do not divide over {strategy} in {model.microbatches} micro-batches; "
            f"use pad_rows(batch, {model.row_multiple})"
        )
    if batch.seq_len != order.stored_length or batch.seq_len % cp:
        raise LayoutError(
            f"rows of {batch.seq_len} tokens over cp = {cp} are not in an order of {order.stored_length} places; "
            f"use model.token_order(length).arrange(batch)"
        )

    def check(path: Any, storage: Storage, array: jax.Array) -> None:
        if array.shape != storage.shape:
            raise LayoutError(
                f"{jax.tree_util.keystr(path, simple=True, separator='/')} has shape {array.shape} and is stored as "
                f"{storage.shape} under {strategy}; use model.storage[...].to_storage"
            )

    jax.tree_util.tree_map_with_path(check, model.storage, params)


@dataclass(frozen=True, eq=False)
class _Step:
    """What the parts of one step share while it is traced."""

    model: ShardedModel
    mesh: Mesh
    order: TokenOrder

    def loss(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array, RouterStats | None]:
        """See ``loss_and_metrics``."""
        x, stats = self.blocks(params["blocks"], self.enter(params["embed"], batch), batch)
        layers = CutLayers("pp", self.model.chunks).store(self.model.config.layers, self.mesh.shape)
        return *self.leave(params, x, batch), jax.tree.map(lambda s: layers.to_logical(s, 0), stats)

    def enter(self, table: Params, batch: Batch) -> jax.Array:
        """What the first layer takes: (micro-batches, rows, seq, embed)."""
        table = self.computed(self.model.storage["embed"], table)
        x = embed(self.model.config, table, batch.tokens, batch.positions, self.execution)
        return self.in_microbatches(x)

    def blocks(self, stack: Params, x: jax.Array, batch: Batch) -> tuple[jax.Array, Any]:
        """What comes out of the layers, and the routers' sums of each place of the stack."""
        run = self.model
        rows = self.in_microbatches((batch.segment_ids, batch.positions))
        return pipeline_blocks(
            self.thrifty_layer, run.config.layers, stack, x, rows, self.mesh, chunks=run.chunks, remat=run.remat
        )

    def leave(self, params: Params, x: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Sums of losses and weights; the table of the embedding is needed if the head is tied to it."""
        names = ("embed", "head") if self.model.config.tied else ("head",)
        tables = {name: self.computed(self.model.storage[name], params[name]) for name in names}
        return self.head_loss(tables, x, *self.in_microbatches((batch.targets, batch.weights)))

    def in_microbatches(self, tree: T) -> T:
        """Leaves (rows, ...) as (micro-batches, rows of one, ...): neighbours on a device go to different ones."""
        parts, cut = self.model.microbatches, PartitionSpec(None, BATCH_AXES, "cp")

        def split(x: jax.Array) -> jax.Array:
            return constrained(jnp.moveaxis(x.reshape(-1, parts, *x.shape[1:]), 1, 0), self.mesh, cut)

        return jax.tree.map(split, tree)

    @property
    def thrifty_layer(self) -> Layer:
        """``layer``, that with fsdp keeps no parameter whole: the backward pass gathers it again.

        Of what is computed it keeps the products with parameters, and computes the cheap rest again.
        """
        if self.mesh.shape["fsdp"] == 1 or self.model.remat:
            return self.layer
        return jax.checkpoint(self.layer, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)

    def layer(self, params: Params, x: jax.Array, rows: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, Any]:
        """One block on one micro-batch, with its parameters as they are stored."""
        storage = jax.tree.map(lambda s: s.without(0), self.model.storage["blocks"])
        stack = jax.tree.map(lambda w: w[None], self.computed(storage, params))
        x, stats = run_blocks(self.block_config, stack, x, *rows, self.execution)
        return x, jax.tree.map(lambda s: s[0], stats)

    def head_loss(
        self, tables: Params, x: jax.Array, targets: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Sums of losses and weights; the logits of one micro-batch exist at a time."""
        config = self.model.config

        def part(x: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
            embedding = tables["embed"]["tokens"] if config.tied else None
            logits = project(config, tables["head"], x, embedding, self.execution)
            ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
            return token_loss(jnp.where(ids < config.vocab, logits, _MASKED), targets, weights)

        if self.model.microbatches == 1:
            return part(x[0], targets[0], weights[0])

        def add(sums: Any, at: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, jax.checkpoint(part)(*at)), None

        return jax.lax.scan(add, (jnp.zeros(()), jnp.zeros(())), (x, targets, weights))[0]

    def computed(self, storage: Any, params: Any) -> Any:
        """Parameters as a step computes with them: gathered along what fsdp cuts, and trimmed there."""

        def gather(storage: Storage, x: jax.Array) -> jax.Array:
            here, there = (ambient_sharding(self.mesh, s) for s in (storage.spec, storage.computed_spec))
            return storage.trim(_gather(here, there, x))

        return jax.tree.map(gather, storage, params)

    @cached_property
    def execution(self) -> Execution:
        """How the parts of the model run; each layer is rematerialised by the pipeline, not by the model."""
        rules = activation_rules(self.model.config, self.model.strategy)

        def constrain(x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
            return constrained(x, self.mesh, spec(axes, rules))

        experts = exchange_experts(self.mesh, expert_axes(self.model.strategy))
        return Execution(self.attention, constrain, experts, self.model.dtype)

    @property
    def attention(self) -> Attention:
        """Round the ring of cp, which may be one device."""
        attention = ring_attention(self.mesh)
        return partial(self.spread_attention, attention) if "kv_heads" in self.model.replicated else attention

    def spread_attention(
        self,
        attention: Attention,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment_ids: jax.Array,
        positions: jax.Array,
    ) -> jax.Array:
        """Attention whose kv_heads are whole on each rank of tp: each takes copies of those that its heads read."""
        group, heads = self.model.config.group, q.shape[2]
        together = math.gcd(group, heads // self.mesh.shape["tp"])  # neighbours on one rank with one kv_head

        def spread(x: jax.Array) -> jax.Array:
            x = jnp.repeat(x, group // together, axis=2)
            x = jnp.pad(x, [(0, 0), (0, 0), (0, heads // together - x.shape[2]), (0, 0)])
            return constrained(x, self.mesh, PartitionSpec(BATCH_AXES, "cp", "tp"))

        return attention(q, spread(k), spread(v), segment_ids, positions)

    @cached_property
    def block_config(self) -> LlamaConfig:
        """The config with an expert capacity that is the one of a row without the padding of its order."""
        config, padded = self.model.config, self.order.stored_length
        limit = config.capacity(self.order.length) if isinstance(config, MoeConfig) else None
        if limit is None or not isinstance(config, MoeConfig):
            return config
        # Half a choice below the limit, so that rounding up gives the limit however the product is rounded.
        return replace(config, capacity_factor=(limit - 0.5) * config.experts / (config.top_k * padded))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(stored: NamedSharding, computed: NamedSharding, x: jax.Array) -> jax.Array:
    """A parameter cut as ``computed``; its gradient is summed straight into parts cut as ``stored``."""
    return jax.lax.with_sharding_constraint(x, computed)


def _gather_forward(stored: NamedSharding, computed: NamedSharding, x: jax.Array) -> tuple[jax.Array, None]:
    return _gather(stored, computed, x), None


def _gather_backward(stored: NamedSharding, computed: NamedSharding, _: None, dx: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.with_sharding_constraint(dx, stored),)


_gather.defvjp(_gather_forward, _gather_backward)
