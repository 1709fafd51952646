"""Experts over devices: tokens are gathered where their experts may be, and outputs summed on the way back.

Each device holds some experts, or slices of some. The devices that share all experts between them gather
one another's tokens, each runs the choices that fall on its own experts as grouped products, and the
weighted outputs are summed back to where the tokens came from. Nothing is dropped, no buffer has to
guess a load, and the work of a device is that of the tokens its experts were chosen for. What is sent is
every token once to every group of experts, against once for each of its choices with an all-to-all, whose
uneven sizes XLA has on few backends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from dynajax.models import Arithmetic, Choices, ExpertKernels, Experts, sorted_experts
from dynajax.runtime.ambient import ambient_mesh
from dynajax.runtime.rules import BATCH_AXES, ExpertAxes

TOKEN_AXES = (*BATCH_AXES, "cp")
"""Mesh axes that cut the tokens of a batch."""


def exchange_experts(mesh: Mesh, axes: ExpertAxes) -> Experts:
    """Run experts that are cut over the mesh; takes the place of ``sorted_experts`` in an ``Execution``.

    Args:
        mesh: with all axes of a strategy; rows of tokens are cut along ``TOKEN_AXES``.
        axes: how the kernels are cut; dims of kernels that these do not divide are padded with zeros.
    """
    tokens, kernel_up = PartitionSpec(BATCH_AXES, "cp"), PartitionSpec(axes.expert or None, None, axes.mlp or None)
    kernel_down = PartitionSpec(axes.expert or None, axes.mlp or None)

    def experts(x: jax.Array, choices: Choices, kernels: ExpertKernels, run: Arithmetic) -> jax.Array:
        cut: Any = (kernel_up, kernel_down, None if kernels.gate is None else kernel_up)
        mapped: Any = jax.shard_map(
            partial(_own_experts, axes, run),
            mesh=ambient_mesh(mesh),
            in_specs=(tokens, tokens, tokens, ExpertKernels(*cut)),
            out_specs=tokens,
            axis_names={*TOKEN_AXES, "tp"},
            check_vma=False,
        )
        # Sums over devices are float32 here and in the backward pass: partial sums of one token are added up, and
        # XLA's CPU compiler (jaxlib 0.10) aborts on a sum in bfloat16 over a manual axis.
        return mapped(x.astype(jnp.float32), choices.experts, choices.gates, kernels).astype(run.dtype)

    return experts


def _own_experts(
    axes: ExpertAxes,
    run: Arithmetic,
    x: jax.Array,
    chosen: jax.Array,
    gates: jax.Array,
    kernels: ExpertKernels,
) -> jax.Array:
    """What this device's experts add to the tokens of its group, summed; float32 in and out."""
    cut = (*axes.expert, *axes.mlp)
    gathered = tuple(a for a in cut if a in TOKEN_AXES and lax.axis_size(a) > 1)
    summed = tuple(a for a in cut if a not in TOKEN_AXES and lax.axis_size(a) > 1)

    def gather(rows: jax.Array) -> jax.Array:
        return lax.all_gather(rows, gathered, axis=0, tiled=True) if gathered else rows

    count = kernels.up.shape[0]
    local = gather(chosen) - _index(axes.expert) * count
    # The choices of others get the number after the last expert here: none runs them, and they are sorted to the end.
    local = jnp.where((local >= 0) & (local < count), local, count)
    choices = Choices(local, gather(gates))
    out = sorted_experts(gather(x).astype(run.dtype), choices, kernels, run).astype(jnp.float32)
    out = lax.psum(out, summed) if summed else out
    return lax.psum_scatter(out, gathered, scatter_dimension=0, tiled=True) if gathered else out


def _index(axes: Sequence[str]) -> jax.Array:
    """This device's place along several axes at once, the first running slowest."""
    sizes = [lax.axis_size(a) for a in axes]
    places = [lax.axis_index(a) * math.prod(sizes[n + 1 :]) for n, a in enumerate(axes)]
    return sum(places, jnp.int32(0))
