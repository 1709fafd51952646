"""A Llama-like decoder in Flax NNX whose layers are one stack.

The parameters of all blocks lie in one ``DecoderBlock`` with a leading dim "layers", and a scan runs over
that dim. Compile time does not grow with depth, and a pipeline stage is a slice of the stack.

Parameters (Touvron et al., 2023, with heads and head_dim kept apart)::

    embed/tokens (vocab, embed)           [embed/positions (n, embed)]
    blocks/attention_norm/scale, blocks/mlp_norm/scale (layers, embed)
    blocks/attention/q (layers, embed, heads, head_dim), k and v with kv_heads, o (layers, heads, head_dim, embed)
    blocks/mlp/up, [gate] (layers, embed, mlp), down (layers, mlp, embed)
    [blocks/mlp/router (layers, embed, n), and the kernels above with a dim "expert" after "layers"]
    head/norm/scale (embed)               [head/kernel (embed, vocab)]
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

from dynajax.models.config import LlamaConfig, MoeConfig
from dynajax.models.execution import Execution
from dynajax.models.layers import HIDDEN, Embedding, Head, Mlp, RMSNorm, Rotary, SelfAttention, rotary_table
from dynajax.models.moe import MoeMlp, RouterStats


class DecoderBlock(nnx.Module):
    """Attention and MLP, each behind a norm and added to the residual stream; all layers stacked."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        norm = (config.layers, config.hidden), ("layers", "embed"), config.norm_eps
        self.attention_norm = RMSNorm(*norm)
        self.attention = SelfAttention(config, rngs)
        self.mlp_norm = RMSNorm(*norm)
        self.mlp = MoeMlp(config, rngs) if isinstance(config, MoeConfig) else Mlp(config, rngs)

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array, positions: jax.Array, rotary: Rotary | None, run: Execution
    ) -> tuple[jax.Array, RouterStats | None]:
        """One layer on ``x`` (batch, seq, embed), once the scan has taken its slice of the stack."""
        x = x + self.attention(self.attention_norm(x), segment_ids, positions, rotary, run)
        x = run.constrain(x, HIDDEN)
        if isinstance(self.mlp, MoeMlp):
            out, stats = self.mlp(self.mlp_norm(x), segment_ids, run)
        else:
            out, stats = self.mlp(self.mlp_norm(x), run), None
        return run.constrain(x + out, HIDDEN), stats


def scan_blocks(
    config: LlamaConfig,
    blocks: DecoderBlock,
    x: jax.Array,
    segment_ids: jax.Array,
    positions: jax.Array,
    run: Execution,
) -> tuple[jax.Array, RouterStats | None]:
    """Run the layers that ``blocks`` holds, few or all of the model's, one after the other.

    Args:
        config: of the whole model.
        blocks: a stack of any number of layers.
        x: (batch, seq, embed).
        segment_ids: (batch, seq) int32.
        positions: (batch, seq) int32.
        run: how to run.

    Returns:
        (batch, seq, embed), and the routers' sums with a leading dim of the layers run; None if dense.
    """
    graph, stack = nnx.split(blocks)
    rotary = None if config.learned_positions else rotary_table(config, positions)

    def layer(x: jax.Array, params: nnx.State) -> tuple[jax.Array, RouterStats | None]:
        return nnx.merge(graph, params)(x, segment_ids, positions, rotary, run)

    return jax.lax.scan(jax.checkpoint(layer) if run.remat else layer, x, stack)


class Llama(nnx.Module):
    """The decoder: tokens to logits.

    Example:
        >>> model = Llama(preset("tiny"), nnx.Rngs(0))
        >>> logits = model(tokens, segment_ids, positions)
    """

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embedding(config, rngs)
        self.blocks = DecoderBlock(config, rngs)
        self.head = Head(config, rngs)

    def __call__(
        self, tokens: ArrayLike, segment_ids: ArrayLike, positions: ArrayLike, run: Execution | None = None
    ) -> jax.Array:
        """Logits of the next token at every place.

        Args:
            tokens: (batch, seq) int32 ids below ``config.vocab``.
            segment_ids: (batch, seq) int32; equal within a document, 0 for padding.
            positions: (batch, seq) int32, counted from 0 in each document.
            run: how to run; plain attention, float32 and no constraints if None.

        Returns:
            (batch, seq, vocab) float32.
        """
        return self.with_stats(tokens, segment_ids, positions, run)[0]

    def with_stats(
        self, tokens: ArrayLike, segment_ids: ArrayLike, positions: ArrayLike, run: Execution | None = None
    ) -> tuple[jax.Array, RouterStats | None]:
        """Logits, and what ``router_loss`` needs: sums over these tokens with a leading dim "layers"; None if dense."""
        run = run or Execution()
        tokens, segment_ids, positions = jnp.asarray(tokens), jnp.asarray(segment_ids), jnp.asarray(positions)
        x = self.embed(tokens, positions, run)
        x, stats = scan_blocks(self.config, self.blocks, x, segment_ids, positions, run)
        return self.head(x, self.embed.tokens[...], run), stats
