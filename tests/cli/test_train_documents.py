"""``dynajax train`` with pipelines side by side: fixed, chosen for each step, switched, resumed and compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax

from dynajax.cli import main

SIZES = ["--model", "tiny", "--seq-len", "16", "--longest", "32", "--tokens", "160", "--lr", "0.01", "--devices", "4"]


def test_a_run_that_chooses_switches_stops_and_goes_on_elsewhere(texts: str, tmp_path: Path, capsys: Any):
    jax.devices()
    out = tmp_path / "run"
    flags = ["train", *SIZES, "--data", texts, "--strategy", "auto"]
    assert main([*flags, "--switch", "2:tp2|dp2@3-0", "--steps", "4", "--out", str(out), "--verify", "--json"]) == 0
    printed, said = capsys.readouterr()
    summary = json.loads(printed)
    assert summary["verify"]["max_rel_loss_diff"] < 1e-5
    assert "documents and tokens by pipeline" in said
    (switch,) = summary["switches"]
    assert (switch["from"], switch["to"], switch["bytes_moved"]) == ("auto", "tp2|dp2@3-0", switch["bytes_lower_bound"])
    steps = [event for event in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if "loss" in event]
    assert [step["strategy"] for step in steps[2:]] == ["tp2|2*dp1"] * 2
    for step in steps:
        assert sum(share["sequences"] for share in step["pipelines"]) == step["samples"]
        assert 0 < step["idle_share"] < 1
    assert main(["train", "--out", str(out), "--resume", "--strategy", "tp3@1-3", "--steps", "6", "--verify"]) == 0
    assert "tp3@1-3: heads is stored as 12, not 8" in capsys.readouterr().out


def test_twenty_devices_under_three_unlike_pipelines(texts: str, tmp_path: Path, capsys: Any):
    """Eight, eight and four devices, compared with one pipeline."""
    jax.devices()
    out = tmp_path / "run"
    sizes = ["--model", "tiny", "--seq-len", "16", "--longest", "16", "--tokens", "80", "--devices", "20"]
    flags = ["train", *sizes, "--data", texts, "--strategy", "tp8|pp2.tp4|tp4", "--steps", "2", "--out", str(out)]
    assert main([*flags, "--verify", "--json"]) == 0
    printed, said = capsys.readouterr()
    assert json.loads(printed)["verify"]["max_rel_loss_diff"] < 1e-5
    steps = [event for event in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if "loss" in event]
    assert "documents and tokens by pipeline" in said
    assert [step["step"] for step in steps] == [0, 1]
    for step in steps:
        named = [(share["pipeline"], share["devices"]) for share in step["pipelines"]]
        assert named == [("tp8", 8), ("pp2.tp4", 8), ("tp4", 4)]
        assert all(share["sequences"] for share in step["pipelines"])
