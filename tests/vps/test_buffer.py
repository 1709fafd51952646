"""Views of buffers, and buffers filled from whole tensors."""

import numpy as np
import pytest

from dynajax.vps import interval
from dynajax.vps.buffer import fill_buffer, view


def test_a_view_shares_memory_with_its_buffer():
    buffer = np.arange(12)
    view(buffer, 1, (4, 1), (2, 2))[...] = -1
    assert buffer.tolist() == [0, -1, -1, 3, 4, -1, -1, 7, 8, 9, 10, 11]


def test_a_view_outside_its_buffer_is_refused():
    with pytest.raises(ValueError, match="size of buffer"):
        view(np.arange(12), 6, (4, 1), (2, 3))


def test_what_no_box_covers_stays_as_it_is():
    """Padding of a buffer that is longer than its region."""
    buffer = np.full(6, -1)
    fill_buffer(buffer, np.arange(12).reshape(3, 4), interval((3, 4), 3, 7))
    assert buffer.tolist() == [3, 4, 5, 6, -1, -1]
