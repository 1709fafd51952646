"""The decoder again, in float64 numpy, one document and one head at a time: the reference of the tests."""

from typing import Any

import numpy as np

from dynajax.models import LlamaConfig


def to_float64(tree) -> Any:
    if isinstance(tree, dict):
        return {name: to_float64(child) for name, child in tree.items()}
    return np.asarray(tree, np.float64)


def norm(x, scale, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def turn(x, theta):
    """Rotary embedding of (seq, head_dim) as a product of complex numbers."""
    seq, dim = x.shape
    pairs = x[:, : dim // 2] + 1j * x[:, dim // 2 :]
    speeds = np.array([theta ** (-2 * i / dim) for i in range(dim // 2)])
    pairs = pairs * np.exp(1j * np.arange(seq)[:, None] * speeds)
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def attention(config: LlamaConfig, p, layer, x):
    out = np.zeros_like(x)
    for head in range(config.heads):
        kv = head // (config.heads // config.kv_heads)
        q, k, v = x @ p["q"][layer, :, head], x @ p["k"][layer, :, kv], x @ p["v"][layer, :, kv]
        if config.qk_norm:
            q = norm(q, p["q_norm"]["scale"][layer], config.norm_eps)
            k = norm(k, p["k_norm"]["scale"][layer], config.norm_eps)
        if not config.learned_positions:
            q, k = turn(q, config.rope_theta), turn(k, config.rope_theta)
        for i in range(len(x)):
            scores = np.array([q[i] @ k[j] for j in range(i + 1)]) / np.sqrt(config.head_dim)
            weights = np.exp(scores - scores.max())
            out[i] += (weights / weights.sum()) @ v[: i + 1] @ p["o"][layer, head]
    return out


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def mlp(config: LlamaConfig, p, layer, x):
    up = x @ p["up"][layer]
    if not config.gated:
        return gelu(up) @ p["down"][layer]
    gate = x @ p["gate"][layer]
    return gate / (1 + np.exp(-gate)) * up @ p["down"][layer]


def decode(config: LlamaConfig, params, tokens, feed_forward=mlp):
    """Logits (len(tokens), vocab) of one document."""
    p = to_float64(params)
    x = p["embed"]["tokens"][tokens]
    if config.learned_positions:
        x = x + p["embed"]["positions"][: len(tokens)]
    blocks = p["blocks"]
    for layer in range(config.layers):
        x = x + attention(
            config, blocks["attention"], layer, norm(x, blocks["attention_norm"]["scale"][layer], config.norm_eps)
        )
        x = x + feed_forward(config, blocks["mlp"], layer, norm(x, blocks["mlp_norm"]["scale"][layer], config.norm_eps))
    x = norm(x, p["head"]["norm"]["scale"], config.norm_eps)
    return x @ (p["embed"]["tokens"].T if config.tied else p["head"]["kernel"])


def cross_entropy(logits, targets):
    """Sum of -log p(target) over one document."""
    shifted = logits - logits.max(-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return -log_p[np.arange(len(targets)), targets].sum()


def route(config, router, x):
    """For each token of x: chosen experts, gates, probabilities and the log of the normaliser."""
    for token in x:
        scores = np.exp(token @ router)
        probabilities = scores / scores.sum()
        chosen = np.argsort(-probabilities)[: config.top_k]
        gates = probabilities[chosen] / (probabilities[chosen].sum() if config.normalize_top_k else 1)
        yield chosen, gates, probabilities, np.log(scores.sum())


def moe(config, p, layer, x, counted=None):
    """A mixture of experts on the tokens of one row, one token after the other.

    Returns what comes out, and the sums of the router: chosen, probability, z, tokens, dropped.
    """
    out = np.zeros_like(x)
    taken = np.zeros(config.experts)
    sums = {"chosen": np.zeros(config.experts), "probability": np.zeros(config.experts), "z": 0.0, "tokens": 0.0}
    dropped = 0
    for i, (chosen, gates, probabilities, log_sum) in enumerate(route(config, p["router"][layer], x)):
        if counted is not None and not counted[i]:
            continue
        sums["chosen"][chosen] += 1
        sums["probability"] += probabilities
        sums["z"] += log_sum**2
        sums["tokens"] += 1
        for expert, gate in zip(chosen, gates, strict=True):
            taken[expert] += 1
            limit = config.capacity(len(x))
            if limit is not None and taken[expert] > limit:
                dropped += 1
                continue
            kernels = {name: p[name][layer] for name in ("up", "down", "gate") if name in p}
            out[i] += gate * mlp(config, kernels, expert, x[i])
    return out, sums | {"dropped": dropped}
