import jax
import jax.numpy as jnp
import pytest

from dynajax.errors import LayoutError
from dynajax.vps import Space, Tensor


def test_the_order_in_which_a_dict_was_filled_does_not_matter():
    a, b = jax.ShapeDtypeStruct((2, 3), jnp.bfloat16), jax.ShapeDtypeStruct((), jnp.int32)
    space = Space.of({"b": b, "a": {"x": a}})
    assert space == Space.of({"a": {"x": a}, "b": b})
    assert [(t.path, t.shape, t.dtype, t.nbytes) for t in space] == [
        ("['a']['x']", (2, 3), "bfloat16", 12),
        ("['b']", (), "int32", 4),
    ]
    assert space.nbytes == 16


def test_a_path_names_one_tensor():
    with pytest.raises(LayoutError, match="names w twice"):
        Space((Tensor("w", (1,), "int8", 1), Tensor("w", (2,), "int8", 1)))


def test_bytes_past_four_gib_are_exact():
    """BIG-1."""
    assert Tensor("w", (70_000, 70_000), "float32", 4).nbytes == 19_600_000_000
