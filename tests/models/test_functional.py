import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from packing import pack

from dynajax.meshes import ACTIVATION_RULES, PARAMETER_RULES, Strategy, spec
from dynajax.models import (
    Llama,
    ParameterSpec,
    forward,
    init,
    merge,
    parameter_specs,
    preset,
    preset_names,
    split,
    token_loss,
)

CONFIG = preset("tiny")
BATCH = pack([[list(range(9)), [5] * 7], [list(range(3, 15))], [[1, 2]], []], rows=4, seq=16)


@functools.cache
def params(seed=3):
    return jax.jit(init, static_argnums=0)(CONFIG, jax.random.key(seed))


def shardings(mesh):
    return jax.tree.map(lambda p: NamedSharding(mesh, spec(p.axes, PARAMETER_RULES)), parameter_specs(CONFIG))


def test_specs_describe_what_init_makes():
    specs = parameter_specs(CONFIG)
    assert jax.tree.structure(specs) == jax.tree.structure(params())
    for described, made in zip(jax.tree.leaves(specs), jax.tree.leaves(params()), strict=True):
        assert (described.shape, described.dtype) == (made.shape, made.dtype)


@pytest.mark.parametrize("name", preset_names())
def test_logical_axes_name_every_dim_that_rules_know(name):
    for leaf in jax.tree.leaves(parameter_specs(preset(name))):
        assert isinstance(leaf, ParameterSpec)
        assert len(leaf.axes) == len(leaf.shape)
        assert leaf.dtype == jnp.float32
        assert len(spec(leaf.axes, PARAMETER_RULES)) == len(leaf.shape)


def test_blocks_are_stacked_and_nothing_else_is():
    for path, leaf in jax.tree.leaves_with_path(parameter_specs(CONFIG)):
        inside = path[0] == jax.tree_util.DictKey("blocks")
        assert ("layers" in leaf.axes) == inside
        assert not inside or (leaf.axes[0] == "layers" and leaf.shape[0] == CONFIG.layers)


def test_metadata_of_the_module_is_what_the_specs_say():
    model = Llama(CONFIG, nnx.Rngs(0))
    assert model.blocks.attention.q.get_metadata()["logical_axes"] == ("layers", "embed", "heads", "head_dim")


def test_params_are_plain_dicts_of_arrays():
    def walk(node):
        if type(node) is dict:
            for child in node.values():
                walk(child)
        else:
            assert isinstance(node, jax.Array)

    walk(params())


def test_init_depends_on_the_key_alone():
    again, other = params.__wrapped__(3), params(4)
    jax.tree.map(np.testing.assert_array_equal, params(), again)
    assert not np.array_equal(params()["blocks"]["mlp"]["up"], other["blocks"]["mlp"]["up"])


def test_no_two_kernels_and_no_two_layers_start_equal():
    blocks = params()["blocks"]
    assert not np.array_equal(blocks["mlp"]["up"], blocks["mlp"]["gate"])
    assert not np.array_equal(blocks["mlp"]["up"][0], blocks["mlp"]["up"][1])


def test_module_and_pure_function_agree():
    graph, state = split(Llama(CONFIG, nnx.Rngs(params=jax.random.key(3))))
    # Not compiled as a whole, the drawing rounds differently in the last bit.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params(), state)
    model = merge(graph, params())
    alone = jax.jit(lambda batch: forward(CONFIG, params(), *batch))(BATCH)
    np.testing.assert_allclose(nnx.jit(Llama.__call__)(model, *BATCH), alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("strategy", ["fsdp8", "fsdp2.tp2.dp2"])
def test_born_sharded_equals_born_on_one_device(strategy):
    mesh = Strategy.parse(strategy).mesh(jax.devices()[:8])
    born = jax.jit(init, static_argnums=0, out_shardings=shardings(mesh))(CONFIG, jax.random.key(3))
    jax.tree.map(np.testing.assert_array_equal, born, params())
    for leaf, sharding in zip(jax.tree.leaves(born), jax.tree.leaves(shardings(mesh)), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


@pytest.mark.parametrize("strategy", ["fsdp4.tp2", "tp4.dp2"])
def test_sharded_loss_and_gradients_equal_those_of_one_device(strategy):
    mesh = Strategy.parse(strategy).mesh(jax.devices()[:8])

    def constrain(x, logical_axes):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(logical_axes, ACTIVATION_RULES)))

    def loss(params, batch, constrain):
        logits = forward(CONFIG, params, *batch, constrain=constrain)
        return token_loss(logits, batch[0], batch[1] != 0)[0]

    placed = jax.device_put(params(), shardings(mesh))
    rows = jax.device_put(BATCH, NamedSharding(mesh, spec(("batch", "seq"), ACTIVATION_RULES)))
    sharded = jax.jit(jax.value_and_grad(lambda p, b: loss(p, b, constrain)))(placed, rows)
    alone = jax.jit(jax.value_and_grad(lambda p, b: loss(p, b, lambda x, _: x)))(params(), BATCH)
    for a, b in zip(jax.tree.leaves(sharded), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(np.abs(b).max()))
