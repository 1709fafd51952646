"""``dynajax profile`` from end to end, small: measured here, read by ``dynajax balance``; one line for bad input."""

import json
import os
import subprocess
import sys

import jax
import pytest

from dynajax.cli import main

QUICK = ["--model", "tiny", "--devices", "2", "--lengths", "16,32,64", "--repeats", "2"]


def test_a_fresh_process_measures_and_balance_plans_with_it(tmp_path, capsys):
    out = str(tmp_path / "here.json")
    command = [sys.executable, "-m", "dynajax", "profile", *QUICK, "--strategies", "tp1,2*tp1,pp2", "--out", out]
    environment = {name: value for name, value in os.environ.items() if name != "NPROC"}
    done = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, env=environment, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [one["pipeline"] for one in told["pipelines"]] == ["tp1", "pp2"]
    for one in told["pipelines"]:
        assert one["max_len"] == 64
        assert [(point["tokens"], point["sequences"]) for point in one["points"]] == [
            (tokens, sequences) for tokens in (16, 32, 64) for sequences in (1, 8)
        ]
        assert min(point["ms"] for point in one["points"]) > 0
        worst = max(abs(point["fitted_ms"] / point["ms"] - 1) for point in one["points"])
        assert one["error"] == pytest.approx(worst)
        assert f"{one['error']:.1%}" in done.stderr
    assert "Traceback" not in done.stderr

    flags = ["--profile", out, "--devices", "2", "--longest", "64", "--tokens", "1000", "--lengths", "lognormal:20:1"]
    assert main(["balance", *flags, "--iterations", "2", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert set(planned["candidates"]) <= {"2*tp1", "pp2"}
    assert planned["ms"]["best"] > 0


def test_a_table_for_people_and_pipelines_by_default(capsys):
    jax.devices()
    assert main(["profile", *QUICK, "--devices", "1"]) == 0
    said = capsys.readouterr().out
    for part in ("dp1", "·l²", "MaxLen", "error"):
        assert part in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model", "huge"], "no model preset is called 'huge'"),
        (["--strategies", "tq2"], "is not an axis"),
        (["--strategies", "tp4"], "there are 2"),
        (["--strategies", "fsdp2"], "pipelines have the axes"),
        (["--lengths", "16,32"], "give 3 or more different lengths"),
        (["--lengths", "16,x"], "give numbers of tokens separated by commas"),
        (["--repeats", "0"], "1 repeat or more"),
        (["--memory", "much"], "much"),
        (["--out", "no/such/folder/x.json"], "there is no folder no/such/folder"),
        (["--devices", "0"], "give 1 or more"),
    ],
)
def test_bad_input_is_one_line_and_status_2(flags, said, capsys):
    jax.devices()
    assert main(["profile", *QUICK, *flags, "--json"]) == 2
    printed = capsys.readouterr()
    assert said in json.loads(printed.out)["error"]
    assert printed.err.count("\n") <= 2
    assert said in printed.err.splitlines()[-1]
