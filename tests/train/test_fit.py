import pytest

from dynajax.errors import StrategyError
from dynajax.meshes import Placement, Strategy
from dynajax.models import preset
from dynajax.train.fit import batch_shards, fits_evenly, require_fit, similar, surprises

TINY, SMALL, MOE = preset("tiny"), preset("small"), preset("moe-tiny")


@pytest.mark.parametrize(
    "text", ["dp2.tp4", "fsdp8", "tp8", "tp4", "tp4@4-7", "dp8", "dp2.tp4@7-0", "pp2.tp2.cp2", "cp8", "pp4.dp2"]
)
def test_small_fits_evenly(text):
    require_fit(SMALL, Placement.parse(text), 8)
    assert fits_evenly(SMALL, Placement.parse(text), 8)


@pytest.mark.parametrize(
    ("model", "text", "said"),
    [
        (TINY, "tp8", "4 kv_heads are fewer than tp = 8, and each rank of tp computes them all"),
        (TINY, "fsdp7", "embed is stored as 70, not 64, to be cut in equal parts"),
        (SMALL, "tp3.dp2", "heads is stored as 18, not 16"),
        (SMALL, "pp3.dp2", "layers is stored as 6, not 4"),
        (SMALL, "dp2.ep4", "the model has no experts, so that ep = 4 is data parallel"),
        (MOE, "ep3", "expert is stored as 9, not 8"),
    ],
)
def test_what_does_not_divide_fits_and_is_told(model, text, said):
    placement = Placement.parse(text)
    require_fit(model, placement, 8)
    assert any(line.startswith(said) for line in surprises(model, placement.strategy))
    assert not fits_evenly(model, placement, 8)


@pytest.mark.parametrize(
    ("model", "text", "said"),
    [
        (SMALL, "dp4.tp4", "uses device 15, but there are 8.*take one of dp2.tp4, dp4.tp2"),
        (SMALL, "tp4@5-8", "uses device 8, but there are 8"),
        (SMALL, "pp8", "pp = 8 leaves pipeline stages without one of the 4 layers; take pp = 4 or less"),
        (SMALL, "tp4|tp4", "several pipelines share documents, not rows"),
        (SMALL, "dp2.tp4/ep8", "the model is dense; drop the slash"),
        (MOE, "tp4.dp2/ep2.tp2", "cannot be made of the axes before it"),
    ],
)
def test_misfit_says_what_to_change(model, text, said):
    with pytest.raises(StrategyError, match=said):
        require_fit(model, Placement.parse(text), 8)
    assert not fits_evenly(model, Placement.parse(text), 8)


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
