"""The shape of a decoder as a frozen value: what it holds, not how it runs.

Llama, GPT-3 and Qwen3 shapes are all one decoder here. They differ in the width of each part, in
whether the MLP has a gate, in how positions enter, and in whether queries and keys are normed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dynajax.errors import ModelError


@dataclass(frozen=True)
class LlamaConfig:
    """Shape of a dense decoder.

    Attributes:
        layers: number of decoder blocks.
        hidden: width of the residual stream, the logical axis "embed".
        ffn: width of the MLP, the logical axis "mlp"; of one expert's MLP in a mixture of experts.
        heads: query heads.
        kv_heads: key and value heads; divides ``heads``.
        head_dim: width of one head; ``heads * head_dim`` need not be ``hidden``.
        vocab: rows of the embedding.
        tied: the head reuses the embedding.
        gated: SwiGLU with gate, up and down kernels; without it GELU with up and down.
        learned_positions: rows of a learned table of positions; 0 means rotary embeddings.
        rope_theta: base of the rotary frequencies.
        norm_eps: what RMSNorm adds to the mean square.
        qk_norm: RMSNorm on each query and key head before the rotary embedding, as in Qwen3.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    gated: bool = True
    learned_positions: int = 0
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    qk_norm: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab"):
            require_positive(self, name)
        if self.heads % self.kv_heads:
            raise ModelError(
                f"{self.heads} heads cannot share {self.kv_heads} kv_heads evenly; choose a divisor of {self.heads}"
            )
        if not self.learned_positions and self.head_dim % 2:
            raise ModelError(f"head_dim {self.head_dim} is odd and rotary embeddings turn pairs; choose an even one")

    @property
    def group(self) -> int:
        """Query heads that share one key and value head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, kw_only=True)
class MoeConfig(LlamaConfig):
    """Shape of a decoder whose MLPs are mixtures of experts; ``ffn`` is the width of one expert.

    Attributes:
        experts: number of experts, the logical axis "expert".
        top_k: experts that each token is sent to.
        normalize_top_k: make the gates of the chosen experts add up to 1.
        capacity_factor: an expert takes at most ``ceil(capacity_factor * top_k * seq / experts)`` choices
            of one row and drops the later ones; None means that nothing is dropped.
        balance_weight: weight of the load-balance loss in the training loss.
        z_weight: weight of the router's z-loss in the training loss.
    """

    experts: int
    top_k: int
    normalize_top_k: bool = True
    capacity_factor: float | None = None
    balance_weight: float = 0.01
    z_weight: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("experts", "top_k"):
            require_positive(self, name)
        if self.top_k > self.experts:
            raise ModelError(
                f"top_k {self.top_k} is more than the {self.experts} experts; choose at most {self.experts}"
            )
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise ModelError(
                f"capacity_factor {self.capacity_factor} leaves no room; choose above 0, or None to drop nothing"
            )

    def capacity(self, seq: int) -> int | None:
        """Choices that one expert takes of a row of ``seq`` tokens; None if there is no limit."""
        if self.capacity_factor is None:
            return None
        return min(seq, math.ceil(self.capacity_factor * self.top_k * seq / self.experts))


def require_positive(config: object, name: str) -> None:
    """Refuse a size that is not a whole number above zero."""
    value = getattr(config, name)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{type(config).__name__}.{name} is {value!r}; it must be a whole number of at least 1")
