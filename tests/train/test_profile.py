"""Pipelines measured on emulated devices: real runs, MaxLen against compiled programs, what reads the profile."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from train.small_runs import DOCUMENTS, MODEL

from dynajax.balance import MicroBatch, Planner, load_profile, save_profile
from dynajax.balance.cost_fit import SHARED_BY
from dynajax.data import DocumentSteps, MemoryDocuments
from dynajax.errors import BalanceError, StrategyError
from dynajax.meshes import Strategy
from dynajax.models import LlamaConfig, count_parameters
from dynajax.runtime import ShardedModel
from dynajax.runtime.gradients import GradientPrograms, abstract_sums
from dynajax.runtime.sections import one_section
from dynajax.train.balancing import Balancing
from dynajax.train.profile import free_bytes, measure

LENGTHS = (16, 32, 64)


def pipelines(*texts):
    return tuple(Strategy.parse(text).pipelines[0] for text in texts)


def program_bytes(text, tokens):
    """What a device needs for the program of a row, compiled here."""
    strategy = Strategy.parse(text)
    run = ShardedModel(MODEL, strategy, microbatches=2 * strategy.size("pp") if strategy.size("pp") > 1 else 1)
    mesh = strategy.mesh(jax.devices()[: strategy.num_devices])
    layout = one_section(run).on(mesh)
    sums = abstract_sums([layout], mesh)
    programs = GradientPrograms.compiled(run, mesh, [one_section(run)], sums, tokens, SHARED_BY)
    stats = programs.sections[0].backward.memory_analysis()
    assert stats is not None
    kept = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return kept + stats.temp_size_in_bytes + stats.generated_code_size_in_bytes


@pytest.fixture(scope="module")
def measured():
    told = []
    asked = pipelines("tp1", "pp2.cp2", "tp1")
    found = measure("mine", MODEL, asked, LENGTHS, jax.devices()[:4], repeats=3, tell=told.append)
    assert told == ["compiling tp1", "compiling pp2.cp2", *(f"timing, {n} of 3" for n in (1, 2, 3))]
    return found


def test_every_pipeline_is_run_at_every_length(measured):
    assert [str(one.cost.pipeline) for one in measured.pipelines] == ["tp1", "pp2.cp2"]
    assert not measured.left_out
    for one in measured.pipelines:
        assert [point.lengths for point in one.points] == [(16,), (2,) * 8, (32,), (4,) * 8, (64,), (8,) * 8]
        assert one.shared.lengths == (32, 16, 8, 4, 2, 1, 1)
        assert min(point.ms for point in (*one.points, one.shared)) > 0
        assert one.cost.max_len == 64
        assert one.spread >= 0


def test_the_error_is_that_of_the_fit(measured):
    for one, timing in zip(measured.pipelines, measured.profile.timings, strict=True):
        a, b, c = timing.a, timing.b, timing.c
        prices = [c + sum(a * n * n + b * n for n in point.lengths) for point in one.points]
        errors = [abs(price / point.ms - 1) for price, point in zip(prices, one.points, strict=True)]
        assert one.error == timing.error == pytest.approx(max(errors))
        price = a * (32**2 + 16**2 + 8**2 + 4**2 + 2**2 + 2) + b * 64 + c
        assert one.shared_error == pytest.approx(price / one.shared.ms - 1)


def test_time_is_divided_by_the_ticks_of_the_program(monkeypatch):
    """By a clock that says 5 s for every run: pp2 with 4 rows takes 5 ticks."""
    reads = iter(np.arange(0, 1000, 5.0))
    monkeypatch.setattr("dynajax.train.profile.time.perf_counter", lambda: next(reads))
    found = measure("clock", MODEL, pipelines("tp1", "pp2.cp2"), LENGTHS, jax.devices()[:4], repeats=1)
    assert [point.ms for one in found.pipelines for point in one.points] == pytest.approx([5_000] * 6 + [1_000] * 6)


def test_the_profile_goes_through_a_file_to_plans_and_to_training(measured, tmp_path):
    save_profile(measured.profile, tmp_path / "mine.json", "a test")
    profile = load_profile(str(tmp_path / "mine.json"))
    assert profile == measured.profile
    costs = profile.costs(profile.timings[0].pipeline)
    assert costs == tuple(one.cost for one in measured.pipelines)
    plan = Planner([Strategy.parse("4*tp1"), Strategy.parse("pp2.cp2")], costs).plan([60, 3, 20, 64])
    rows = [mb for pipeline in plan.pipelines for mb in pipeline.microbatches]
    assert all(isinstance(mb, MicroBatch) and mb.ms > 0 for mb in rows)

    balancing = Balancing(device_tokens=1, align=8, profile=profile)
    assert balancing.costs(MODEL, pipelines("pp2.cp2", "cp4", "tp1")) == (costs[1], costs[0])
    data = DocumentSteps(MemoryDocuments(DOCUMENTS), token_budget=256, longest=64)
    for strategy in balancing.propose(MODEL, data, 4):
        assert {str(pipeline) for pipeline in strategy.pipelines} <= {"tp1", "pp2.cp2"}


def test_max_len_is_the_longest_row_whose_program_fits():
    devices = jax.devices()[:4]
    optimizer = count_parameters(MODEL) * 16 // 4
    room = (program_bytes("tp1", 128) + program_bytes("tp1", 256)) // 2
    memory = optimizer + room
    found = measure("small", MODEL, pipelines("tp1"), (32, 64, 128, 256), devices, repeats=1, memory=memory)
    longest = found.pipelines[0].cost.max_len
    assert 128 <= longest < 256
    assert [sum(point.lengths) for point in found.pipelines[0].points] == [32, 32, 64, 64, 128, 128]
    assert program_bytes("tp1", longest) <= room < program_bytes("tp1", longest + 16)

    # One that holds fewer than three of the lengths is left out, and refused where there is no other.
    assert program_bytes("pp2.cp2", 256) <= room
    both, lengths = pipelines("tp1", "pp2.cp2"), (32, 64, 256)
    found = measure("small", MODEL, both, lengths, devices, repeats=1, memory=memory)
    assert [str(one.cost.pipeline) for one in found.pipelines] == ["pp2.cp2"]
    assert found.left_out == ((both[0], 64),)
    with pytest.raises(BalanceError, match="no pipeline holds 3 of 32, 64, 256 tokens"):
        measure("small", MODEL, both[:1], lengths, devices, repeats=1, memory=memory)


def test_emulated_devices_share_the_memory_of_the_host():
    one, four = (free_bytes(jax.devices()[:count]) for count in (1, 4))
    assert 0 < four < one
    assert four == pytest.approx(one / 4, rel=0.3)


FEW = LlamaConfig(
    layers=2, hidden=16, ffn=32, heads=8, kv_heads=8, head_dim=4, vocab=256, tied=True, learned_positions=64
)


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"lengths": (16, 32, 16)}, BalanceError, "lengths 16, 32 .* give 3 or more different lengths"),
        ({"lengths": (0, 32, 16)}, BalanceError, "of 8 tokens or more"),
        ({"repeats": 0}, BalanceError, "0 repeats"),
        ({"pipelines": ()}, BalanceError, "no pipelines to measure"),
        ({"model": FEW, "lengths": (16, 32, 65)}, BalanceError, "65 tokens: the model has 64 positions"),
        ({"pipelines": pipelines("tp4")}, StrategyError, "tp4 uses device 3, but there are 2"),
        ({"pipelines": pipelines("pp3")}, StrategyError, "uses device 2"),
        ({"pipelines": pipelines("fsdp2")}, StrategyError, "pipelines have the axes tp, pp, cp"),
        ({"memory": 1000}, BalanceError, "the optimizer's state alone takes"),
    ],
)
def test_bad_input_is_refused(change, kind, said):
    asked = {"model": MODEL, "pipelines": pipelines("tp1"), "lengths": LENGTHS, "repeats": 1, "memory": None} | change
    with pytest.raises(kind, match=said):
        measure("bad", devices=jax.devices()[:2], **asked)
