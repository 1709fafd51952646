import pytest

from dynajax.errors import StrategyError
from dynajax.meshes import Placement, Strategy
from dynajax.models import parameter_specs, preset
from dynajax.train.fit import batch_shards, fits, require_fit, similar

TINY, SMALL = parameter_specs(preset("tiny")), parameter_specs(preset("small"))


@pytest.mark.parametrize(
    "text", ["dp2.tp4", "fsdp8", "tp8", "tp4", "tp4@4-7", "dp8", "dp2.tp4@7-0", "dp2.fsdp2.tp2", "dp3"]
)
def test_small_fits(text):
    require_fit(SMALL, Placement.parse(text), 8)


@pytest.mark.parametrize(
    ("model", "text", "devices", "said"),
    [
        (TINY, "tp8", 8, "tp8: tp = 8 does not divide kv_heads = 4 .*attention/k.*take tp = 1 or 2 or 4"),
        (SMALL, "fsdp7", 8, "fsdp = 7 does not divide embed = 128 .*take fsdp = 4 or 8 or 16|fsdp = 7"),
        (SMALL, "tp3.dp2", 8, "tp = 3 does not divide"),
        (SMALL, "dp4.tp4", 8, "uses device 15, but there are 8.*take one of dp2.tp4, dp4.tp2"),
        (SMALL, "tp4@5-8", 8, "uses device 8, but there are 8"),
        (SMALL, "pp2.tp4", 8, "pp is not in this version; use dp, fsdp, tp"),
        (SMALL, "cp2.tp4", 8, "cp is not in this version"),
        (SMALL, "dp2.ep4", 8, "ep is not in this version"),
        (SMALL, "tp4|tp4", 8, "several pipelines .* not in this version"),
    ],
)
def test_misfit_says_what_to_change(model, text, devices, said):
    with pytest.raises(StrategyError, match=said):
        require_fit(model, Placement.parse(text), devices)
    assert not fits(model, Placement.parse(text), devices)


@pytest.mark.parametrize(
    ("text", "devices", "expected"),
    [
        ("dp2.tp2", 8, ["dp4.tp2", "dp2.tp4"]),
        ("dp3.tp2", 8, ["dp4.tp2"]),
        ("fsdp3.tp3", 8, ["fsdp8"]),
        ("dp1", 4, ["dp4"]),
        ("dp2.tp4", 1, ["dp1"]),
    ],
)
def test_similar_strategies_use_all_devices(text, devices, expected):
    assert similar(Strategy.parse(text), devices) == [Strategy.parse(s) for s in expected]


def test_batch_shards():
    assert [batch_shards(Strategy.parse(s)) for s in ("dp2.tp4", "fsdp8", "tp8", "dp2.fsdp2.tp2")] == [2, 8, 1, 4]
