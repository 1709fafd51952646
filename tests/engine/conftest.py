"""What the tests of this folder run with: each path that can carry bytes."""

import pytest

from dynajax.engine.transport import PATHS


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    """The path to move by."""
    return request.param
