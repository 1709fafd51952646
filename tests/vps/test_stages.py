"""Pipelines with stages of any height and width."""

import numpy as np
import pytest

from dynajax.errors import LayoutError
from dynajax.meshes import Strategy
from dynajax.planner import build_plan
from dynajax.vps import Space, Stage, Tensor, staged_layout, strategy_layout

AXES = {
    "w": ("layers", "embed", "mlp"),
    "embed": ("vocab", "embed"),
    "head": ("embed", "vocab"),
}
LAST = frozenset({"head"})


def space(layers):
    shapes = {"w": (layers, 2, 4), "embed": (6, 2), "head": (2, 6)}
    return Space(tuple(Tensor(p, s, "float32", 4) for p, s in shapes.items()))


def test_even_stages_are_what_the_strategy_gives():
    tensors = space(4)
    stages = [[Stage((0, 1), (0, 2)), Stage((2, 3), (2, 4))]]
    staged = staged_layout(tensors, AXES, stages, last=LAST)
    plain = strategy_layout(tensors, AXES, Strategy.parse("pp2.tp2"), last=LAST)
    assert [t.key for t in staged.tilings] == [t.key for t in plain.tilings]


def test_every_pipeline_holds_every_layer_once():
    """Stages of 1, 10, 11 and 10 layers beside stages of 8, a narrow first stage, a device unused."""
    tensors = space(32)
    pipelines = [
        [Stage((15,), (0, 1)), Stage((2, 3), (1, 11)), Stage((12, 13), (11, 22)), Stage((6, 7), (22, 32))],
        [Stage((8, 9), (0, 8)), Stage((0, 1), (8, 16)), Stage((4, 5), (16, 24)), Stage((10, 11), (24, 32))],
    ]
    layout = staged_layout(tensors, AXES, pipelines, last=LAST)
    layout.validate()
    held = {t.path: tiling for t, tiling in zip(layout.space, layout.tilings, strict=True)}
    assert held["w"].region.volume == 2 * 32 * 2 * 4
    assert held["w"].region_of(15).hi.tolist() == [[1, 2, 4]]
    assert held["w"].region_of(3).lo.tolist() == [[1, 0, 2]]
    assert held["embed"].devices.tolist() == [8, 9, 15]
    assert held["head"].devices.tolist() == [6, 7, 10, 11]
    assert 14 not in np.concatenate([t.devices for t in layout.tilings])
    source = strategy_layout(tensors, AXES, Strategy.parse("dp4.tp2.pp2"), last=LAST)
    build_plan(source, layout, 2**60).verify()


@pytest.mark.parametrize("layers", [[(0, 2), (3, 4)], [(0, 2), (1, 4)], [(0, 2), (2, 3)], [(1, 2), (2, 4)]])
def test_stages_that_leave_or_repeat_a_layer_are_refused(layers):
    stages = [[Stage((k,), span) for k, span in enumerate(layers)]]
    with pytest.raises(LayoutError, match="do not cut 4 layers end to end"):
        staged_layout(space(4), AXES, stages, last=LAST)


@pytest.mark.parametrize(("pp", "holders"), [(1, [0, 1]), (2, [0, 1, 2, 3]), (3, [0, 1, 4, 5])])
def test_a_tied_table_is_at_both_ends_and_nowhere_between(pp, holders):
    tensors, tied = space(6), frozenset({"embed"})
    layout = strategy_layout(tensors, AXES, Strategy.parse(f"pp{pp}.tp2"), last=LAST, tied=tied)
    (table,) = (t for x, t in zip(tensors, layout.tilings, strict=True) if x.path == "embed")
    assert table.devices.tolist() == holders
    for device in holders:
        assert table.region_of(device).lo.tolist() == [[3 * (device % 2), 0]]
    borders = np.arange(pp + 1) * 6 // pp
    stages = [[Stage((2 * k, 2 * k + 1), (int(borders[k]), int(borders[k + 1]))) for k in range(pp)]]
    assert [t.key for t in staged_layout(tensors, AXES, stages, last=LAST, tied=tied).tilings] == [
        t.key for t in layout.tilings
    ]
