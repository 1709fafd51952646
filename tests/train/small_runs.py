"""A job that trains in milliseconds, independent references for it, and ways to look at states."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from dense_experts import dense_experts

from dynajax import models
from dynajax.data import Batch, Batches, DocumentSteps, MemoryDocuments
from dynajax.meshes import Placement
from dynajax.train import Trainer, TrainState
from dynajax.train.row_job import RowJob

MODEL = models.LlamaConfig(layers=2, hidden=16, ffn=32, heads=8, kv_heads=8, head_dim=4, vocab=256, tied=True)
DOCUMENTS = tuple((f"def f{i}(x):\n    return x * {i}\n" * (1 + i % 5)).encode() for i in range(40))
ROWS = 6
ALL_EXPERTS = models.Execution(experts=dense_experts)

PLACEMENTS = ["dp2.tp4", "fsdp8", "tp8", "tp4@4-7", "dp8", "dp2.fsdp2.tp2@7-0", "dp3@1-3", "dp1@5"]
"""Every axis alone and in products, parts of the devices, the reverse order, and batches that need filler rows."""


def data(rows: int = ROWS, seed: int = 0) -> Batches:
    return Batches(MemoryDocuments(DOCUMENTS), batch_size=rows, seq_len=32, seed=seed)


def adam() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-3, 1e-2, 4)))


def trainer(strategy: str = "dp2.tp4", optimizer: optax.GradientTransformation | None = None, **more: Any) -> Trainer:
    return Trainer(MODEL, optimizer or adam(), strategy, data(), devices=jax.devices()[:8], **more)


def job(optimizer: optax.GradientTransformation | None = None) -> RowJob:
    return RowJob.of(MODEL, optimizer or adam(), data(), jax.devices()[:8])


def random_values(job: Any) -> TrainState:
    """A state of whole tensors whose every number is another one, so that nothing can be lost unnoticed."""
    rng = np.random.default_rng(0)

    def fill(shape: Any) -> Any:
        if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
            return jax.random.key(rng.integers(2**31))
        values = rng.integers(1, 2**20, shape.shape) if shape.dtype.kind in "iu" else rng.normal(size=shape.shape)
        return np.asarray(values, shape.dtype)

    return jax.tree.map(fill, job.shapes)


def placed(job: Any, values: TrainState, placement: Placement) -> TrainState:
    """Whole tensors put on devices without the engine."""
    stored = job.arrangement(placement)(values)
    return jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), stored, job.layout(placement))


def random_state(job: RowJob, placement: Placement) -> TrainState:
    """``random_values`` as they lie under a placement."""
    return placed(job, random_values(job), placement)


def bits(tree: Any) -> list[Any]:
    """Path, dtype and bytes of every leaf."""

    def plain(leaf: jax.Array) -> np.ndarray:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path), str(leaf.dtype), plain(leaf).tobytes()) for path, leaf in leaves]


def reference_losses(steps: int, optimizer: optax.GradientTransformation | None = None) -> list[float]:
    """Losses of ``MODEL`` trained on one device."""
    return [step.loss for step in train_on_one_device(MODEL, optimizer or adam(), steps)]


class Step(NamedTuple):
    """A step, whoever took it: the loss before it, its gradient as the optimizer got it, parameters after it."""

    loss: float
    gradient: Any
    params: Any


def train_on_one_device(
    model: models.LlamaConfig,
    optimizer: optax.GradientTransformation,
    steps: int,
    batches: Any = None,
    *,
    start: Any = None,
    run: models.Execution = ALL_EXPERTS,
) -> list[Step]:
    """Steps in plain JAX: no shardings, no donation, no filler rows, every expert run on every token.

    Args:
        model: what is trained.
        optimizer: in float32.
        steps: how many.
        batches: by step, those of ``data()`` by default.
        start: parameters before the first step, those of seed 0 by default.
        run: parameters are rounded to its dtype before they are computed with.
    """
    batches = data() if batches is None else batches
    params = models.init(model, jax.random.split(jax.random.key(0))[0]) if start is None else start
    opt_state, taken = optimizer.init(params), []

    @jax.jit
    @jax.value_and_grad
    def differentiated(params: Any, batch: Any) -> jax.Array:
        at = batch.tokens, batch.segment_ids, batch.positions
        logits, stats = models.forward_with_stats(model, params, *at, run)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.targets[..., None], axis=-1)[..., 0]
        return -(chosen * batch.weights).sum() / batch.weights.sum() + models.router_loss(model, stats)

    @jax.jit
    def update(params: Any, opt_state: Any, gradient: Any) -> Any:
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for number in range(steps):
        rounded = jax.tree.map(lambda p: np.asarray(p).astype(run.dtype).astype(np.float32), params)
        value, gradient = differentiated(rounded, batches[number])
        params, opt_state = update(params, opt_state, gradient)
        taken.append(Step(float(value), *jax.tree.map(np.asarray, (gradient, params))))
    return taken


def one_a_row(documents: DocumentSteps, steps: int) -> list[Batch]:
    """The documents of each step, each in a row of its own; as many rows in all steps."""
    taken = [documents[number].segments for number in range(steps)]
    batches, shape = [], (max(map(len, taken)), documents.longest)
    positions = np.broadcast_to(np.arange(documents.longest, dtype=np.int32), shape)
    for segments in taken:
        tokens, targets, inside = (np.zeros(shape, np.int32) for _ in range(3))
        for row, segment in enumerate(segments):
            tokens[row, : segment.length] = segment.text[: segment.length]
            targets[row, : segment.text.size - 1] = segment.text[1:]
            inside[row, : segment.length] = 1
        batches.append(Batch(tokens, targets, (targets > 0) * np.float32(1), inside, positions, 1))
    return batches


def largest_difference(losses: list[float], wanted: list[float]) -> float:
    return float(np.max(np.abs(np.subtract(losses, wanted)) / np.abs(wanted)))


def closed_walk(count: int) -> list[tuple[int, int]]:
    """A walk that takes each ordered pair of ``count`` nodes once: an Euler circuit, by Hierholzer's algorithm."""
    left = {node: [n for n in range(count) if n != node] for node in range(count)}
    stack, path = [0], []
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            path.append(stack.pop())
    return list(zip(path[::-1], path[-2::-1], strict=False))
