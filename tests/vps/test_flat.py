"""Flat layouts, against arrays that are really flattened, padded and cut."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vps.buffers import addressed_buffer

from dynajax.vps import Space, Tensor, flat_layout


@settings(max_examples=100)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.booleans(),
    st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True),
)
def test_every_device_has_an_equal_part_of_every_layer(shape, is_stack, devices):
    space = Space((Tensor("t", tuple(shape), "float32", 4),))
    layout = flat_layout(space, {"t": ("layers" if is_stack else None,)}, np.asarray(devices))
    (tiling,) = layout.tilings
    whole = np.arange(np.prod(shape)).reshape(shape)
    rows = whole.reshape(shape[0] if is_stack else 1, -1)
    rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % len(devices))), constant_values=-1)
    assert tiling.devices.tolist() == sorted(devices)
    for device, part in zip(devices, np.split(rows, len(devices), axis=1), strict=True):
        assert tiling.room == part.size
        np.testing.assert_array_equal(addressed_buffer(whole, tiling.region_of(device), part.size), part.ravel())


@pytest.mark.parametrize("count", [1, 3])
def test_tensors_alike_share_a_tiling(count):
    space = Space(tuple(Tensor(f"t{k}", (4, 2), "float32", 4) for k in range(count)))
    layout = flat_layout(space, {}, np.arange(3))
    assert len({id(tiling) for tiling in layout.tilings}) == 1
