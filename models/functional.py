"""The model as pure functions over a nested dict of arrays, which is what a trainer holds.

``params`` is a plain dict, so that nothing below the model knows Flax, and a move of the state
needs no model. Each function rebuilds the NNX modules from the config while it is traced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

from dynajax.models.attention import packed_attention
from dynajax.models.config import LlamaConfig
from dynajax.models.execution import Attention, Constrain, Execution, unconstrained
from dynajax.models.experts import Experts, sorted_experts
from dynajax.models.llama import Llama, scan_blocks
from dynajax.models.moe import RouterStats

Params = dict[str, Any]
"""Nested dict with arrays (or ParameterSpecs) as leaves."""


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter without its values; a leaf of any pytree.

    Attributes:
        shape: sizes of its dims.
        dtype: numpy dtype.
        axes: the logical axis of each dim; None for a dim that is never cut.
    """

    shape: tuple[int, ...]
    dtype: jnp.dtype
    axes: tuple[str | None, ...]

    @property
    def size(self) -> int:
        """Number of elements, exact beyond 2**32."""
        return math.prod(self.shape)


def parameter_specs(config: LlamaConfig) -> Params:
    """The parameters of ``config`` as ParameterSpecs, in the tree that ``init`` fills with arrays.

    Nothing is allocated, so the shapes of 70 billion parameters are a matter of milliseconds.
    """
    return nnx.to_pure_dict(nnx.state(_abstract(config)), _spec)


def count_parameters(config: LlamaConfig) -> int:
    """Number of parameters, a tied embedding counted once."""
    return sum(spec.size for spec in jax.tree.leaves(parameter_specs(config)))


def init(config: LlamaConfig, key: jax.Array) -> Params:
    """Draw the parameters.

    Values depend on the key alone, not on how they are sharded: under ``jax.jit(...,
    out_shardings=...)`` each device makes its own shards and no device ever holds the whole.

    Args:
        config: shape of the model.
        key: a typed PRNG key (threefry).
    """
    return split(Llama(config, nnx.Rngs(params=key)))[1]


def split(model: Llama) -> tuple[nnx.GraphDef[Llama], Params]:
    """Take a model apart into its static part and a plain dict of arrays."""
    graph, state = nnx.split(model)
    return graph, nnx.to_pure_dict(state)


def merge(graph: nnx.GraphDef[Llama], params: Params) -> Llama:
    """Put together what ``split`` took apart."""
    return nnx.merge(graph, params)


def forward(
    config: LlamaConfig,
    params: Params,
    tokens: ArrayLike,
    segment_ids: ArrayLike,
    positions: ArrayLike,
    *,
    attention: Attention = packed_attention,
    constrain: Constrain = unconstrained,
    experts: Experts = sorted_experts,
    dtype: Any = jnp.float32,
    remat: bool = False,
) -> jax.Array:
    """Float32 logits (batch, seq, vocab); see ``Llama.__call__`` and ``Execution`` for the arguments."""
    run = Execution(attention, constrain, experts, dtype, remat)
    return forward_with_stats(config, params, tokens, segment_ids, positions, run)[0]


def forward_with_stats(
    config: LlamaConfig,
    params: Params,
    tokens: ArrayLike,
    segment_ids: ArrayLike,
    positions: ArrayLike,
    run: Execution | None = None,
) -> tuple[jax.Array, RouterStats | None]:
    """Logits as from ``forward``, and what ``router_loss`` needs of a mixture of experts; None if dense."""
    return merge(nnx.graphdef(_abstract(config)), params).with_stats(tokens, segment_ids, positions, run)


def embed(config: LlamaConfig, params: Params, tokens: jax.Array, positions: jax.Array, run: Execution) -> jax.Array:
    """What comes before the blocks: ``params["embed"]`` and tokens to (batch, seq, embed)."""
    return _module(config, "embed", params)(tokens, positions, run)


def run_blocks(
    config: LlamaConfig, params: Params, x: jax.Array, segment_ids: jax.Array, positions: jax.Array, run: Execution
) -> tuple[jax.Array, RouterStats | None]:
    """The blocks whose stacked parameters are given: all of ``params["blocks"]`` or a slice of its layers.

    Returns:
        (batch, seq, embed), and the routers' sums with a leading dim of the layers run; None if dense.
    """
    return scan_blocks(config, _module(config, "blocks", params), x, segment_ids, positions, run)


def project(
    config: LlamaConfig, params: Params, x: jax.Array, embedding: jax.Array | None, run: Execution
) -> jax.Array:
    """What comes after the blocks: ``params["head"]`` and (batch, seq, embed) to float32 logits.

    Args:
        config: shape of the model.
        params: ``params["head"]``.
        x: output of the last block.
        embedding: ``params["embed"]["tokens"]``, needed if the head is tied.
        run: how to run.
    """
    return _module(config, "head", params)(x, embedding, run)


def _abstract(config: LlamaConfig) -> Llama:
    return nnx.eval_shape(lambda: Llama(config, nnx.Rngs(params=jax.random.key(0))))


def _module(config: LlamaConfig, part: str, params: Mapping[str, Any]) -> Any:
    return nnx.merge(nnx.graphdef(getattr(_abstract(config), part)), params)


def _spec(variable: Any) -> ParameterSpec:
    return ParameterSpec(tuple(variable.shape), jnp.dtype(variable.dtype), variable.get_metadata()["logical_axes"])
