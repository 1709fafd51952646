"""``dynajax train`` from end to end, small: what it prints, what it writes, and how a run goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import pytest

from dynajax.cli import main

SMALL = ["--model", "tiny", "--seq-len", "32", "--batch", "6", "--lr", "0.01"]
STEP = {"event", "step", "loss", "tokens", "samples", "strategy", "step_s"}
SWITCH = {
    *("event", "step", "from", "to", "pause_s", "prepared"),
    *("plan_s", "compile_s", "group_s", "pack_s", "move_s", "unpack_s", "verify_s", "free_s", "total_s"),
    *("bytes_moved", "bytes_retained", "bytes_lower_bound", "bytes_by_tier"),
    *("bytes_travelled", "peak_extra_bytes", "budget_bytes", "stages", "leaves", "path", "commit", "snapshot"),
}


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [event["loss"] for event in events(folder) if event["event"] == "step"]


def test_a_fresh_process_trains_switches_and_verifies(texts: str, tmp_path: Path):
    """The command sets up its own devices: the process starts with whatever JAX makes of this machine."""
    out = tmp_path / "run"
    switches = ["--switch", "2:fsdp8", "--switch", "4:tp4@4-7", "--switch", "6:dp2.tp4@7-0"]
    flags = [*SMALL, "--data", texts, "--strategy", "dp2.tp4", *switches, "--steps", "8", "--budget", "256KB"]
    environment = {name: value for name, value in os.environ.items() if name != "NPROC"}
    command = [sys.executable, "-m", "dynajax", "train", *flags, "--out", str(out), "--verify", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert set(summary) == {"steps", "first_loss", "last_loss", "samples", "tokens", "switches", "verify", "out"}
    assert (summary["steps"], summary["samples"], summary["out"]) == (8, 48, str(out))
    assert summary["last_loss"] < summary["first_loss"] - 0.5
    assert summary["verify"]["max_rel_loss_diff"] <= 1e-5

    written = events(out)
    steps = [e for e in written if e["event"] == "step"]
    moves = [e for e in written if e["event"] == "switch"]
    assert all(set(e) == STEP for e in steps)
    assert all(set(e) == SWITCH for e in moves)
    assert moves == summary["switches"]
    assert [e["step"] for e in steps] == list(range(8))
    assert [(e["step"], e["from"], e["to"]) for e in moves] == [
        (2, "dp2.tp4", "fsdp8"),
        (4, "fsdp8", "tp4@4-7"),
        (6, "tp4@4-7", "dp2.tp4@7-0"),
    ]
    for move in moves:
        assert move["bytes_moved"] == move["bytes_lower_bound"] > 0
        assert move["peak_extra_bytes"] <= move["budget_bytes"] == 256 * 1024
        assert (move["prepared"], move["compile_s"]) == (True, 0)
    assert [e["strategy"] for e in steps[::2]] == ["dp2.tp4", "fsdp8", "tp4@4-7", "dp2.tp4@7-0"]

    compared = [json.loads(line) for line in (out / "verify.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in compared] == losses(out)
    assert max(line["rel_diff"] for line in compared) == summary["verify"]["max_rel_loss_diff"]
    assert "tp4@4-7 runs on 4 of the 8 devices" in done.stderr
    assert done.stderr.count("2 filler rows of weight 0 are added") == 1
    assert "Traceback" not in done.stderr


def test_a_run_goes_on_under_another_strategy_as_if_it_had_not_stopped(texts: str, tmp_path: Path, capsys: Any):
    jax.devices()
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = ["train", *SMALL, "--data", texts, "--strategy", "dp2.tp4"]
    assert main([*flags, "--steps", "7", "--out", str(whole)]) == 0
    assert main([*flags, "--steps", "4", "--switch", "2:fsdp8", "--out", str(parts), "--checkpoint-every", "3"]) == 0
    assert sorted(p.name for p in (parts / "checkpoints").iterdir()) == ["3", "4"]
    capsys.readouterr()
    resume = ["train", "--out", str(parts), "--resume"]
    assert main([*resume, "--json"]) == 2
    assert "has taken 4 steps: give 5 or more" in capsys.readouterr().err
    assert main([*resume, "--strategy", "tp4@4-7", "--steps", "7", "--verify"]) == 0
    assert "unswitched twin" in capsys.readouterr().out
    assert [e["strategy"] for e in events(parts) if e["event"] == "step"][3:] == ["fsdp8"] + ["tp4@4-7"] * 3
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-5)
    written = {p: p.read_bytes() for p in parts.iterdir() if p.is_file()}
    assert main([*resume, "--seed", "1", "--steps", "9"]) == 2
    assert "give the same seed" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in parts.iterdir() if p.is_file()} == written


def test_a_run_cut_short_makes_the_switches_that_were_left(texts: str, tmp_path: Path):
    """Stopped by Ctrl-C between two steps, everything is written; going on needs no flag but the folder."""
    out = tmp_path / "run"
    flags = [*SMALL, "--data", texts, "--strategy", "dp2.tp4", "--switch", "100000:fsdp8", "--steps", "100001"]
    command = [sys.executable, "-m", "dynajax", "train", *flags, "--out", str(out), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not ((out / "metrics.jsonl").exists() and len(events(out)) > 3):
            assert process.poll() is None, process.communicate()
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        printed, said = process.communicate(timeout=600)
    assert process.returncode == 128 + signal.SIGINT, said
    taken = json.loads(printed)["steps"]
    assert f"stopped before step {taken}, go on with --resume" in said
    assert "Traceback" not in said
    assert len(losses(out)) == taken
    assert [p.name for p in (out / "checkpoints").iterdir()] == [str(taken)]

    jax.devices()
    config = json.loads((out / "config.json").read_text())
    config |= {"switch": [f"{taken + 1}:fsdp8"], "steps": taken + 3}
    (out / "config.json").write_text(json.dumps(config))
    assert main(["train", "--out", str(out), "--resume"]) == 0
    assert [e["strategy"] for e in events(out) if e["event"] == "step"][taken:] == ["dp2.tp4", "fsdp8", "fsdp8"]
