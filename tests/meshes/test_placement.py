import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynajax.errors import StrategyError
from dynajax.meshes import Strategy
from dynajax.meshes.placement import Placement


@pytest.mark.parametrize(
    ("text", "devices", "written"),
    [
        ("dp2.tp4", tuple(range(8)), "dp2.tp4"),
        ("tp4@0-3", (0, 1, 2, 3), "tp4"),
        ("tp4@4-7", (4, 5, 6, 7), "tp4@4-7"),
        ("dp2.tp4@7-0", (7, 6, 5, 4, 3, 2, 1, 0), "dp2.tp4@7-0"),
        ("tp4@0,2,4,6", (0, 2, 4, 6), "tp4@0,2,4,6"),
        ("tp4 @ 6-7, 1-0", (6, 7, 1, 0), "tp4@6-7,1-0"),
        ("dp1@5", (5,), "dp1@5"),
    ],
)
def test_text_form(text, devices, written):
    placement = Placement.parse(text)
    assert placement.devices == devices
    assert str(placement) == written


def test_equal_layouts_are_equal_keys():
    assert Placement.parse("tp4@0-3") == Placement.parse(Strategy.parse("tp4"))
    assert hash(Placement.parse("dp2.tp4")) == hash(Placement.parse("tp4.dp2@0-7"))
    assert Placement.parse("tp4") != Placement.parse("tp4@3-0")


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 70), min_size=1, max_size=24, unique=True))
def test_written_form_reads_back(numbers):
    placement = Placement(Strategy.parse(f"tp{len(numbers)}"), tuple(numbers))
    assert Placement.parse(str(placement)) == placement


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp4@0-2", "needs 4 devices and is put on 3"),
        ("tp4@0,1,1,2", "names a device twice"),
        ("tp4@", "names no devices"),
        ("tp4@a-b", "names no devices"),
        ("tpx@0-3", "not an axis"),
    ],
)
def test_bad_text_is_refused(text, said):
    with pytest.raises(StrategyError, match=said):
        Placement.parse(text)


def test_mesh_takes_the_named_devices_and_refuses_absent_ones():
    import jax

    devices = [jax.devices("cpu")[0]]
    assert list(Placement.parse("dp1").mesh(devices).devices.flat) == devices
    with pytest.raises(StrategyError, match="uses device 3, but there are 1"):
        Placement.parse("dp1@3").mesh(devices)
