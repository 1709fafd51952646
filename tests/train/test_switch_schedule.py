import pytest

from dynajax.errors import RunError, StrategyError
from dynajax.meshes import Placement
from dynajax.models import preset
from dynajax.train.candidates import Auto, read_asked, takes_documents
from dynajax.train.fit import require_fit
from dynajax.train.switch_schedule import ScheduledSwitch, SwitchSchedule, tour

SMALL, TINY = preset("small"), preset("tiny")


def schedule(first: str, *switches: str) -> SwitchSchedule:
    return SwitchSchedule(Placement.parse(first), tuple(map(ScheduledSwitch.parse, switches)))


def test_switches_are_read_and_put_in_order():
    read = schedule("dp8", "40:tp4@4-7", " 20 : fsdp8")
    assert [str(s) for s in read.switches] == ["20:fsdp8", "40:tp4@4-7"]
    assert [(str(a), str(b)) for a, b in read.moves()] == [("dp8", "fsdp8"), ("fsdp8", "tp4@4-7")]


def test_auto_is_read_with_and_without_devices():
    read = schedule("dp8", "20:auto", "30: auto@4-7")
    assert [str(s) for s in read.switches] == ["20:auto", "30:auto@4-7"]
    assert [s.target for s in read.switches] == [Auto(), Auto((4, 5, 6, 7), "auto@4-7")]
    assert [takes_documents(asked) for asked in (read.first, read.switches[0].target)] == [False, True]
    assert takes_documents(read_asked("tp4|tp4"))


@pytest.mark.parametrize("text", ["", "20", "fsdp8", "20-fsdp8", "x:fsdp8", "-3:fsdp8", "20:"])
def test_what_is_no_switch_is_refused(text: str):
    with pytest.raises(RunError, match="not STEP:STRATEGY"):
        ScheduledSwitch.parse(text)


def test_two_switches_at_one_step_are_refused():
    with pytest.raises(RunError, match="20:fsdp8 and 20:tp8 are at one step"):
        schedule("dp8", "20:fsdp8", "30:dp8", "20:tp8")
    with pytest.raises(StrategyError):
        ScheduledSwitch.parse("20:xp8")


@pytest.mark.parametrize(
    ("begin", "end", "step", "allowed"),
    [(0, 60, 0, "1 to 59"), (0, 60, 60, "1 to 59"), (20, 60, 19, "20 to 59"), (0, 1, 5, "1 to 0")],
)
def test_switches_out_of_range_are_refused(begin: int, end: int, step: int, allowed: str):
    with pytest.raises(RunError, match=f"so switch at a step from {allowed}"):
        schedule("dp8", f"{step}:tp8").require_within(begin, end)


def test_a_resumed_run_makes_the_switch_of_its_first_step_itself():
    whole = schedule("dp8", "20:fsdp8", "40:tp8")
    left = whole.since(20)  # the checkpoint is from before that switch
    assert left == schedule("dp8", "20:fsdp8", "40:tp8")
    left.require_within(20, 60)
    assert whole.since(21) == schedule("fsdp8", "40:tp8")
    assert whole.since(60) == schedule("tp8")


def test_the_tour_on_eight_devices():
    assert tour(SMALL, 8, 60) == schedule("dp2.tp4", "10:fsdp8", "20:pp2.cp2.tp2", "30:tp4@0-3", "40:dp8", "50:dp2.tp4")


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6, 7, 8, 16])
@pytest.mark.parametrize("steps", [1, 2, 5, 60])
def test_a_tour_always_fits(devices: int, steps: int):
    for model in (SMALL, TINY):
        made = tour(model, devices, steps)
        made.require_within(0, steps)
        assert isinstance(made.first, Placement)
        assert made.first.num_devices == devices
        for source, target in made.moves():
            assert isinstance(target, Placement)
            require_fit(model, target, devices)
            assert source != target
