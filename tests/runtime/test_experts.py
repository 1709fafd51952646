"""Experts over devices against every expert on every token on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_experts import dense_experts
from jax.sharding import NamedSharding, PartitionSpec
from runtime.packed_rows import assert_close

from dynajax.errors import StrategyError
from dynajax.meshes import Strategy
from dynajax.models import Choices, Execution, ExpertKernels
from dynajax.runtime import ExpertAxes, exchange_experts, expert_axes

BATCH, SEQ, EMBED, MLP, TOP_K = 4, 6, 8, 6, 2


def arguments(count, dtype=np.float32):
    rng = np.random.default_rng(0)
    chosen = np.argsort(rng.random((BATCH, SEQ, count)))[..., :TOP_K].astype(np.int32)
    gates = rng.random((BATCH, SEQ, TOP_K)).astype(np.float32) * (rng.random((BATCH, SEQ, 1)) > 0.2)
    x = rng.normal(size=(BATCH, SEQ, EMBED)).astype(dtype)
    up, gate = jnp.asarray(rng.normal(size=(2, count, EMBED, MLP)), jnp.float32)
    down = jnp.asarray(rng.normal(size=(count, MLP, EMBED)), jnp.float32)
    return x, chosen, gates, ExpertKernels(up, down, gate)


def padded(kernels, experts, mlp):
    """Kernels with zeros after the last expert and the last place of an expert's width."""
    more, wider = experts - kernels.up.shape[0], mlp - MLP
    up, gate = (jnp.pad(k, ((0, more), (0, 0), (0, wider))) for k in (kernels.up, kernels.gate))
    return ExpertKernels(up, jnp.pad(kernels.down, ((0, more), (0, wider), (0, 0))), gate)


def values(experts, chosen, run):
    """Output, and gradients of tokens, gates and kernels."""

    def loss(x, gates, kernels):
        out = experts(x, Choices(chosen, gates), kernels, run)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

    return lambda x, gates, kernels: jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(x, gates, kernels)


@pytest.mark.parametrize(
    ("strategy", "count"),
    [
        ("dp2", 4),
        ("ep2", 5),
        ("ep4", 8),
        ("ep2.tp2", 4),
        ("dp2.ep2.cp2.tp2", 4),
        ("dp2.tp4/ep4.tp2", 8),
        ("tp2.cp2/ep4", 6),
    ],
)
def test_values_and_gradients_are_those_of_dense_experts(strategy, count):
    strategy = Strategy.parse(strategy)
    mesh, axes = strategy.mesh(jax.devices()[: strategy.num_devices]), expert_axes(strategy)
    parts = [int(np.prod([mesh.shape[a] for a in along])) for along in (axes.expert, axes.mlp)]
    x, chosen, gates, kernels = arguments(count)
    stored = padded(kernels, *(-(-size // n) * n for size, n in zip((count, MLP), parts, strict=True)))
    run = Execution(experts=exchange_experts(mesh, axes))
    tokens = NamedSharding(mesh, PartitionSpec(("dp", "fsdp", "ep"), "cp"))
    placed = jax.device_put((x, gates), tokens)
    (value, out), (dx, d_gates, d_kernels) = jax.jit(values(run.experts, chosen, run))(*placed, stored)
    (want, want_out), wanted = values(dense_experts, chosen, Execution())(x, gates, kernels)
    trimmed = ExpertKernels(
        d_kernels.up[:count, :, :MLP], d_kernels.down[:count, :MLP], d_kernels.gate[:count, :, :MLP]
    )
    assert_close((value, out, dx, d_gates, trimmed), (want, want_out, *wanted))
    assert all(
        np.array_equal(np.asarray(a), np.asarray(b))
        for a, b in zip(padded(trimmed, *stored.up.shape[::2]), d_kernels, strict=True)
    )


def test_bfloat16_is_near_float32():
    mesh = Strategy.parse("ep2.tp2").mesh(jax.devices()[:4])
    x, chosen, gates, kernels = arguments(4)
    run = Execution(experts=exchange_experts(mesh, ExpertAxes(("ep",), ("tp",))), dtype=jnp.bfloat16)
    (_, out), grads = jax.jit(values(run.experts, chosen, run))(x.astype(jnp.bfloat16), gates, kernels)
    (_, want), wanted = values(dense_experts, chosen, Execution())(x, gates, kernels)
    assert out.dtype == jnp.bfloat16
    assert_close(out.astype(jnp.float32), want, rtol=2e-2)
    assert_close(grads[2], wanted[2], rtol=0.2)


@pytest.mark.parametrize(
    ("strategy", "expert", "mlp"),
    [
        ("dp2.ep4.tp2", ("ep",), ("tp",)),
        ("tp4.pp8.dp4/ep16", ("dp", "tp"), ()),
        ("tp4.dp2/ep4.tp2", ("tp",), ("dp",)),
        ("dp4.tp2/ep4.tp2", ("dp",), ("tp",)),
        ("dp4.tp2/ep1", (), ()),
    ],
)
def test_an_expert_layout_is_folded_over_whole_axes(strategy, expert, mlp):
    assert expert_axes(Strategy.parse(strategy)) == ExpertAxes(expert, mlp)


def test_an_expert_layout_that_would_split_an_axis_is_refused():
    with pytest.raises(
        StrategyError, match=r"ep8.tp1 after the slash .* take products of different axes out of tp4, dp4"
    ):
        expert_axes(Strategy.parse("tp4.pp8.dp4/ep8"))
