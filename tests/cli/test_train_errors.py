"""What cannot work is refused in one line before anything is trained or written, with status 2 and no traceback."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax
import pytest

from dynajax.cli import main

BAD = {
    "--strategy xp8": "'xp8' is not an axis .* axes are pp, dp, fsdp, ep, cp, tp",
    "--strategy dp2.tp2": "dp2.tp2 uses 4 devices and there are 8: take --devices 4, or dp4.tp2 or dp2.tp4, dp2.tp2@0",
    "--strategy dp16": "dp16 uses 16 devices and there are 8: take --devices 16, or dp8$",
    "--strategy tp4@4-8": "tp4 needs 4 devices and is put on 5",
    "--strategy tp4@6-9": "uses device 9, but there are 8",
    "--strategy pp4.tp2": "pp = 4 leaves pipeline stages without one of the 2 layers; take pp = 2 or less",
    "--strategy dp2.tp4/ep8": "the model is dense; drop the slash",
    "--strategy tp4|tp2": "uses 6 devices and there are 8: take --devices 6, tp4|tp2@0-5 to leave some idle",
    "--strategy tp4|tp4 --seq-len 8 --longest 64": "has 64 tokens and the roomiest candidate holds 32",
    "--strategy auto@0-9": "uses device 9, but there are 8",
    "--strategy auto --tokens 64": "a sequence may have 512 tokens.* and a step 64",
    "--strategy auto --profile nowhere": "profile 'nowhere' is neither a file nor one of",
    "--strategy auto --model moe-tiny": "losses of the routers .* take balance_weight=0",
    "--strategy dp2.tp4@7-0 --switch 2:tp4@4-11": "tp4 needs 4 devices and is put on 8",
    "--switch 2:dp4.tp4": "uses device 15, but there are 8.*take one of dp2.tp4, dp4.tp2",
    "--switch 2:pp4.tp2": "pp = 4 leaves pipeline stages",
    "--switch fsdp8": "not STEP:STRATEGY",
    "--switch 4:fsdp8": "4:fsdp8 is out of range.* from 1 to 3",
    "--switch 0:fsdp8": "0:fsdp8 is out of range",
    "--switch 2:fsdp8 --switch 2:dp8": "2:fsdp8 and 2:dp8 are at one step",
    "--budget 64QB": "'64QB' is not a size",
    "--budget 0 --switch 2:fsdp8": r"budget of 0 .* is too small: .*the smallest budget that does is \d+ bytes",
    "--model huge": "no model preset is called 'huge'; choose one of tiny",
    "--model gpt3-xl --seq-len 4096": "gpt3-xl has 2048 positions",
    "--model llama2-70b": "needs about .* TB on emulated devices and .* are free",
    "--data nowhere": "cannot read the folder nowhere: No such file",
    "--steps 0": "--steps 0: give 1 or more",
    "--devices 0": "--devices 0: give 1 or more",
    "--batch 0": "batch_size is 0: give 1 or more",
    "--microbatches 0": "microbatches is 0: give 1 or more",
    "--chunks -1": "chunks is -1: give 1 or more",
    "--dtype float16": "^dynajax: invalid choice 'float16' for argument '--dtype'. Expected one of .* see dynajax",
    "--seed -1": "seed -1 is negative",
    "--lr 0": "--lr 0.0: give a rate above 0",
    "--checkpoint-every -1": "--checkpoint-every -1: give 0 or more",
    "--resume": r"has no checkpoint; leave --resume out",
    "--steps ten": "--steps.*'ten'.*see dynajax train --help",
    "--colour red": "Unrecognized options: --colour",
}


@pytest.fixture(autouse=True)
def started() -> None:
    """JAX has started with the devices of the tests before a command asks for fewer."""
    jax.devices()


@pytest.mark.parametrize("flags", BAD)
def test_bad_input(flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    status = main(["train", "--model", "tiny", "--steps", "4", "--out", "run", "--json", *flags.split()])
    out, err = capsys.readouterr()
    assert status == 2
    assert err.startswith("dynajax: ")
    assert err.count("\n") == 1
    assert json.loads(out) == {"error": err.removeprefix("dynajax: ").rstrip("\n")}
    assert list(tmp_path.iterdir()) == []
    assert re.search(BAD[flags], err.rstrip("\n")), err


def test_a_file_or_another_run_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"event": "step"}\n')
    for name, said in (("file", "is a file; name a folder"), ("run", "holds another run; go on with it by --resume")):
        assert main(["train", "--model", "tiny", "--out", str(tmp_path / name)]) == 2
        assert said in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["metrics.jsonl"]


@pytest.mark.parametrize(("words", "said"), [([], "no command given"), (["fly"], "'fly' is no command")])
def test_commands(words: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main(words) == 2
    assert f"dynajax: {said}; take one of: train" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "  train " in capsys.readouterr().out
