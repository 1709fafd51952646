import json
from typing import Any

from dynajax.train.record import Record, StepReport, SwitchReport, as_event, drop_since

STEP_FIELDS = {"event", "step", "loss", "tokens", "samples", "strategy", "step_s"}
SWITCH_FIELDS = {
    *("event", "step", "from", "to", "pause_s", "prepared"),
    *("plan_s", "compile_s", "group_s", "pack_s", "move_s", "unpack_s", "verify_s", "free_s", "total_s"),
    *(
        "bytes_moved",
        "bytes_travelled",
        "bytes_retained",
        "bytes_lower_bound",
        "bytes_by_tier",
        "peak_extra_bytes",
        "budget_bytes",
    ),
    *("stages", "leaves", "path", "commit", "snapshot"),
}


def step(number: int) -> StepReport:
    return StepReport(number, 5.5 - number, 96, 6, "dp8", 0.1)


def switch(number: int) -> SwitchReport:
    moved: dict[str, Any] = dict.fromkeys(SWITCH_FIELDS - {"event", "from", "to"}, 8)
    named = {"source": "dp8", "target": "tp8", "step": number, "prepared": True, "bytes_by_tier": {"process": 8}}
    return SwitchReport(**moved | named)


def test_events_have_the_promised_fields():
    assert set(as_event(step(0))) == STEP_FIELDS
    event = as_event(switch(3))
    assert set(event) == SWITCH_FIELDS
    assert (event["event"], event["from"], event["to"], event["prepared"]) == ("switch", "dp8", "tp8", True)


def test_a_run_that_goes_on_replaces_what_came_after_its_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    drop_since(path, 0)  # a new run has no record yet
    with Record(path) as record:
        for event in (step(0), step(1), switch(2), step(2), step(3)):
            record.write(as_event(event))
    with path.open("a") as file:
        file.write('{"event": "step", "st')  # killed while it wrote
    drop_since(path, 2)
    with Record(path) as record:
        record.write(as_event(step(2)))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["event"], line["step"]) for line in lines] == [("step", 0), ("step", 1), ("step", 2)]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
