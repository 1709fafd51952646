"""The cost model: published figures, the joint price of a micro-batch, memory, profiles as files."""

import json

import numpy as np
import pytest
from balance.price_lists import LARGE, MIDDLE, SMALL, price

from dynajax.balance.cost import Timing, costs_of, data_parallel, pipelines_of, short_text
from dynajax.balance.profiles import DATA, load_profile, published_candidates, save_profile
from dynajax.errors import BalanceError
from dynajax.meshes import Strategy

MAX_LEN_32B = {
    "tp4": 7_808,
    "tp4.pp2": 12_416,
    "tp8": 21_888,
    "tp8.pp4": 27_904,
    "tp16": 43_520,
    "tp2.pp4": 6_272,
    "pp4": 1_920,
}


def pipeline(text: str):
    return Strategy.parse(text).pipelines[0]


def test_published_profile_gives_the_published_max_len():
    costs = load_profile("32b").costs(pipeline("tp16.dp4"))
    found = {str(cost.pipeline): cost.max_len for cost in costs}
    assert {name: found[name] for name in MAX_LEN_32B} == MAX_LEN_32B
    assert not found.keys() & {"pp2", "tp2"}  # neither fits in memory


@pytest.mark.parametrize("name", ["7b", "13b", "32b", "7b_A100"])
def test_published_profiles_load_as_they_are(name):
    raw = json.loads((DATA / "hydraulis_profiles.json").read_text())["profiles"][name]
    profile = load_profile(name)
    assert [(t.pipeline.size("tp"), t.pipeline.size("pp"), t.a, t.b, t.c) for t in profile.timings] == [
        (s["tp"], s["pp"], s["a"], s["b"], s["c"]) for s in raw["schemes"]
    ]


def test_memory_is_the_published_formula():
    memory = load_profile("32b").memory
    assert memory is not None
    hidden, layers, vocab = 6656, 60, 30592
    state = layers / 4 * hidden**2 / 8 * 201 * 0.25 + hidden * vocab / 8 * 16 * 0.25
    state += layers * hidden**2 / 16 * 201 * 0.75 / 4 + hidden * vocab / 16 * 32 * 0.75 / 4
    assert memory.state_bytes(pipeline("tp8.pp4"), pipeline("tp16.dp4")) == pytest.approx(state, rel=1e-12)
    assert memory.activation_bytes(1000, pipeline("tp8.pp4")) == pytest.approx(layers * 1000 * hidden / 8 * 42)
    assert memory.activation_bytes(1000, pipeline("tp8.cp2")) == pytest.approx(layers * 500 * hidden / 8 * 42)
    with pytest.raises(BalanceError, match=r"tp32 were not measured"):
        memory.activation_bytes(1, pipeline("tp32"))


def test_time_is_quadratic_and_infinite_beyond_max_len():
    assert SMALL.times([0, 10, 3_000]).tolist() == pytest.approx([0, 4e-4 + 2.5, 36 + 750])
    assert SMALL.times([3_001]).tolist() == [np.inf]


def test_price_of_a_micro_batch_is_joint():
    apart = SMALL.microbatch_ms([100]) + SMALL.microbatch_ms([200])
    together = SMALL.microbatch_ms([100, 200])
    assert together == pytest.approx(apart - SMALL.c)
    assert together < SMALL.microbatch_ms([300])  # masked attention: less than one sequence of as many tokens
    assert SMALL.microbatch_ms([100, 200], padded=512) == pytest.approx(together + SMALL.b * 212)


def test_homogeneous_is_the_smallest_that_holds_the_longest():
    profile = load_profile("32b")
    assert str(profile.homogeneous(64, 32_768).pipeline) == "tp16"
    assert str(profile.homogeneous(64, 20_000).pipeline) == "tp8"
    with pytest.raises(BalanceError, match=r"holds 60000 tokens, the best holds 43520"):
        profile.homogeneous(64, 60_000)


def test_copies_over_dp_are_pipelines():
    strategy = Strategy.parse("dp2.tp4|tp8")
    assert [str(p) for p in pipelines_of(strategy)] == ["tp4", "tp4", "tp8"]
    assert data_parallel(pipeline("tp4.pp2"), 32) == pipeline("dp4.pp2.tp4")
    assert short_text(Strategy.parse("tp8|tp4|tp4|tp4")) == "tp8|3*tp4"
    with pytest.raises(BalanceError, match=r"do not divide 10"):
        data_parallel(pipeline("tp4"), 10)


def test_a_pipeline_without_a_price_is_named():
    assert costs_of(Strategy.parse("2*tp1|tp2"), (SMALL, MIDDLE, LARGE)) == (SMALL, SMALL, MIDDLE)
    with pytest.raises(BalanceError, match=r"tp1\|tp4: tp4 is not in the profile.*there are tp1, tp2"):
        costs_of(Strategy.parse("tp1|tp4"), (SMALL, MIDDLE))


@pytest.mark.parametrize("name", ["32b", "7b"])
def test_saved_profiles_load_again(tmp_path, name):
    profile = load_profile(name)
    save_profile(profile, tmp_path / "p.json", "a test")
    again = load_profile(str(tmp_path / "p.json"))
    assert again == profile
    assert again.costs(pipeline("tp16")) == profile.costs(pipeline("tp16"))


def test_measured_profiles_need_no_memory_model(tmp_path):
    measured = Timing(pipeline("cp2.tp2"), 1e-6, 0.1, 5.0, max_len=4096, error=0.02)
    path = tmp_path / "mine.json"
    path.write_text(
        json.dumps({"profiles": {"a": {"schemes": []}, "b": {"schemes": [
            {"tp": 2, "cp": 2, "a": 1e-6, "b": 0.1, "c": 5.0, "max_len": 4096, "error": 0.02}
        ]}}})
    )  # fmt: skip
    assert load_profile(f"{path}:b").timings == (measured,)
    assert load_profile(f"{path}:b").costs(pipeline("tp2"))[0].max_len == 4096
    with pytest.raises(BalanceError, match=r"holds the profiles a, b: choose one as .*:NAME"):
        load_profile(str(path))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("no json", "is not a profile"),
        ("{}", "is not a profile"),
        ('{"profiles": {"x": {"schemes": [{}]}}}', "'tp'|'a'"),
    ],
)
def test_broken_profiles_are_refused(tmp_path, content, said):
    (tmp_path / "broken.json").write_text(content)
    with pytest.raises(BalanceError, match=said):
        load_profile(str(tmp_path / "broken.json"))


def test_unknown_profiles_are_refused():
    with pytest.raises(BalanceError, match=r"'70b' is neither a file nor one of 7b, 13b, 32b"):
        load_profile("70b")


def test_published_candidates_are_copied_over_the_devices():
    costs = load_profile("32b").costs(pipeline("tp16.dp4"))
    at_64 = [short_text(s) for s in published_candidates(64, costs)]
    assert at_64[0] == "4*tp16"
    assert len(at_64) == 7
    at_1024 = published_candidates(1024, costs)
    assert short_text(at_1024[3]) == "16*tp16|192*tp4"
    assert {s.num_devices for s in at_1024} == {1024}
    with pytest.raises(BalanceError, match=r"no published candidate fits 48 devices"):
        published_candidates(48, costs)


def test_impossible_prices_are_refused():
    with pytest.raises(BalanceError, match=r"cost of tp2: .* must be 0 or more"):
        price("tp2", -1e-6, 0.1, 1, 100)
