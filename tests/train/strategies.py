"""Strategies of every kind for a dense model and a mixture of experts whose sizes few axes divide."""

from __future__ import annotations

import optax

from dynajax.models import LlamaConfig, MoeConfig

DENSE = LlamaConfig(layers=3, hidden=12, ffn=20, heads=4, kv_heads=2, head_dim=4, vocab=257, tied=True)
MOE = MoeConfig(
    layers=3, hidden=12, ffn=10, heads=4, kv_heads=2, head_dim=4, vocab=257, experts=5, top_k=2, z_weight=0.1
)

DENSE_STRATEGIES = [
    *("dp8", "fsdp5", "tp2", "tp3", "pp2", "cp3"),  # every axis alone
    *("dp2.tp4@7-0", "fsdp2.tp3", "pp3.tp2", "pp2.cp2", "dp5.cp3", "tp7"),  # pairs, and kv_heads fewer than tp
    *("pp2.cp2.tp2", "dp2.fsdp2.pp2", "dp2.cp2.tp3"),  # triples
    *("cp2.tp4.pp2", "tp2.cp4"),  # 16 devices to 8
]
MOE_STRATEGIES = [
    *("ep2", "ep4", "dp2.ep4", "tp2.ep4", "pp2.ep2.dp2"),  # 5 experts over 2 and 4
    *("fsdp3.ep2", "cp2.ep2.tp2", "dp4.tp2/ep2.tp2", "tp3", "pp3.dp2"),
    *("dp4.tp4/ep8", "dp7"),
]


def optimizer() -> optax.GradientTransformation:
    """Clipped, with momentum and decay: every kind of state, and no division by roots of tiny sums."""
    return optax.chain(optax.clip_by_global_norm(0.5), optax.add_decayed_weights(0.1), optax.trace(0.9), optax.sgd(0.1))
