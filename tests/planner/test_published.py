"""The published switches: the whole list plans, is proved and priced, and its volumes are those of others."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "published_switches.py"


@pytest.fixture
def published(monkeypatch):
    """The benchmark as a module."""
    spec = importlib.util.spec_from_file_location("published_switches", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("roles", "together"), [("fixed", "groups"), ("assigned", "groups"), ("assigned", "tp")])
def test_every_published_switch_is_planned_proved_and_priced(roles, together, published):
    outcomes = [published.run(case, roles, 2**31, together) for case in published.cases()]
    assert len(outcomes) == 49
    assert sum(bool(o.case.volumes) for o in outcomes) == 12
    for outcome in outcomes:
        assert not outcome.faults, f"{outcome.case.source} to {outcome.case.target}: {outcome.faults}"
        assert outcome.plan.bytes_moved == outcome.plan.bytes_lower_bound
        assert outcome.plan.bytes_inter_node == outcome.plan.bytes_inter_node_lower_bound
        assert outcome.plan.peak_extra_bytes <= 2**31
        assert outcome.price.seconds >= outcome.price.floor_s
