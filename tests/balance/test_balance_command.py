"""The balance command: what machines read, what people read, and its errors."""

import json
from dataclasses import replace

import pytest

from dynajax.balance.cost_fit import measure_profile
from dynajax.balance.profiles import save_profile
from dynajax.cli.balance import BalanceOptions, run
from dynajax.errors import DynajaxError
from dynajax.meshes import Strategy

QUICK = BalanceOptions(iterations=3, candidates="published", json=True)
KEYS = {"devices", "tokens", "iterations", "candidates", "chosen", "ms", "speedup", "idle_share", "plan_ms"}


def told(options: BalanceOptions, capsys) -> dict:
    assert run(options) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    return json.loads(lines[0])


def test_json_has_the_promised_keys(capsys):
    found = told(QUICK, capsys)
    assert found.keys() >= KEYS
    assert list(found["ms"]) == ["padding", "fixed", "balanced", "best", "bound"]
    assert (
        found["ms"]["padding"]
        > found["ms"]["fixed"]
        > found["ms"]["balanced"]
        >= found["ms"]["best"]
        > found["ms"]["bound"]
    )
    assert found["speedup"] == pytest.approx(found["ms"]["fixed"] / found["ms"]["best"])
    assert found["candidates"][2] == "tp16|6*tp8"
    assert len(found["chosen"]) == 3
    assert set(found["chosen"]) <= set(range(7))
    assert 0 <= found["idle_share"] < 1


def test_all_but_the_clock_is_the_same_every_time(capsys):
    first, second = (told(QUICK, capsys) for _ in range(2))
    assert first | {"plan_ms": 0} == second | {"plan_ms": 0}
    assert told(replace(QUICK, seed=1), capsys)["ms"] != first["ms"]


def test_tables_for_people(capsys):
    assert run(replace(QUICK, json=False)) == 0
    said = capsys.readouterr().out
    for part in ("tp16|12*tp4", "fixed-length packs, round robin", "no strategy can be faster", "0 tp", "idle"):
        assert part in said


def test_own_strategies_buckets_and_code_lengths(capsys):
    options = replace(QUICK, candidates="4*tp16,tp16|6*tp8", lengths="stdlib", buckets=8)
    found = told(options, capsys)
    assert found["candidates"] == ["4*tp16", "tp16|6*tp8"]


def test_a_measured_profile_and_proposed_candidates(capsys, tmp_path):
    pipelines = [Strategy.parse(text).pipelines[0] for text in ("tp1", "tp2", "tp4")]
    profile = measure_profile(
        "mine", "here", pipelines, (64, 256, 512),
        lambda p, row: sum(1e-5 * n * n + 0.1 * n for n in row) / p.num_devices**0.8 + 1,
        lambda p: 512 * p.num_devices,
    )  # fmt: skip
    save_profile(profile, tmp_path / "mine.json", "a test")
    options = BalanceOptions(
        str(tmp_path / "mine.json"), devices=8, tokens=20_000, lengths="lognormal:200:1.2", longest=2_048,
        iterations=2, json=True,
    )  # fmt: skip
    found = told(options, capsys)
    assert {Strategy.parse(text).num_devices for text in found["candidates"]} == {8}
    assert found["speedup"] > 1


def test_over_long_documents_are_counted(capsys, tmp_path):
    (tmp_path / "lengths.txt").write_text("100\n" * 9 + "5000\n")
    options = replace(QUICK, lengths=str(tmp_path / "lengths.txt"), longest=2_000, tokens=30_000, candidates="4*tp16")
    cut, split = (told(replace(options, overlong=overlong), capsys) for overlong in ("truncate", "split"))
    assert cut["cut_documents"] > 0
    assert cut["dropped_tokens"] == 3_000 * cut["cut_documents"]
    assert (split["cut_documents"] > 0, split["dropped_tokens"]) == (True, 0)
    assert run(replace(options, json=False)) == 0
    assert f"{cut['cut_documents']} documents were over the limit of 2000 tokens" in capsys.readouterr().out


def test_as_many_micro_batches_as_asked_for(capsys):
    """More of them than suit cost a constant each, so that a hundred take longer than the number that is chosen."""
    options = replace(QUICK, profile="7b", lengths="lognormal:100:0.3", longest=1_000, tokens=300_000, iterations=1)
    options = replace(options, candidates="16*tp4")
    assert told(replace(options, microbatches=100), capsys)["ms"]["best"] > told(options, capsys)["ms"]["best"]


@pytest.mark.parametrize(
    ("text", "said"), [("", "one length or more"), ("5 -1", "of 1 token or more"), ("x", "one length a line")]
)
def test_lengths_that_cannot_be_are_refused(text, said, tmp_path):
    (tmp_path / "lengths.txt").write_text(text)
    with pytest.raises(DynajaxError, match=said):
        run(replace(QUICK, lengths=str(tmp_path / "lengths.txt")))


def test_html(capsys, tmp_path):
    told(replace(QUICK, iterations=1, html=str(tmp_path / "page.html")), capsys)
    assert "4*tp16" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"profile": "99b"}, "neither a file nor one of"),
        ({"devices": 0}, "must be 1 or more"),
        ({"devices": 48}, "no published candidate fits 48 devices"),
        ({"candidates": "tp16"}, "has 16 devices, not 64"),
        ({"candidates": "tq16"}, "is not an axis"),
        ({"lengths": "nowhere"}, "neither a file nor"),
        ({"overlong": "error", "longest": 2_000}, "choose truncate or split"),
        ({"longest": 200_000}, "holds 200000 tokens"),
        ({"html": "no/such/folder/page.html"}, "there is no folder no/such/folder"),
        ({"html": "."}, "is a folder"),
        ({"microbatches": 0}, "microbatches=0"),
    ],
)
def test_bad_options_are_one_error(change, said):
    with pytest.raises(DynajaxError, match=said):
        run(replace(QUICK, **change))
