"""Parts of tensors in arrays."""

import pytest
from hypothesis import HealthCheck, settings
from jax.sharding import PartitionSpec

from dynajax.errors import LayoutError
from dynajax.vps import Block, Run, bucket_parts, fused_parts

P = PartitionSpec
AMPLE = 2**60
proof = settings(derandomize=True, deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow])


def test_parts_that_do_not_fit_are_refused():
    Block("t", (4, 3), (1, 0), (1, 3), (2,), (None, 0)).require_fits((5,))
    for bad in (
        Block("t", (4, 3), (1, 0), (1, 3), (3,), (None, 0)),
        Block("t", (4, 3), (4, 0), (1, 3), (0,), (None, 0)),
        Block("t", (4, 3), (1, 0), (2, 3), (0,), (None, 0)),
        Block("t", (4, 3), (1, 0), (1, 3), (0,), (0, 0)),
        Run("t", (4, 3), 6, 7, 0),
        Run("t", (4, 3), 0, 6, 0),
    ):
        with pytest.raises(LayoutError, match="t: "):
            bad.require_fits((5,))
    with pytest.raises(LayoutError, match="equal shares"):
        fused_parts({"q": (6, 2), "k": (4, 2)}, 4)
    with pytest.raises(LayoutError, match="too small"):
        bucket_parts({"q": (6, 2)}, [5, 6])
