"""The fallback for devices that share no memory, carried out on CPU devices as if they did not."""

from __future__ import annotations

import importlib

import jax
import pytest
from engine.states import PLACEMENTS, assert_same_bits, host_state, shardings, state

import dynajax as dj
from dynajax.engine import device_put


@pytest.mark.parametrize("target", PLACEMENTS)
@pytest.mark.parametrize("donate", [False, True])
def test_every_bit_arrives(target: str, donate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("dynajax.engine.reshard")  # the name in the package is the function
    monkeypatch.setattr(module, "_transport", lambda places, watch: device_put.DevicePut(watch))
    want = {k: v for k, v in host_state().items() if k not in ("empty", "int4")}
    before = {k: v for k, v in state("fsdp4.tp2").items() if k in want}
    goal = {k: v for k, v in shardings(target).items() if k in want}
    after, _ = dj.reshard(before, goal, donate=donate, check=True)
    assert_same_bits(after, want)
    assert jax.tree.map(lambda x: x.sharding, after) == goal
    if donate:
        assert all(a.is_deleted() or a is b for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True))
    else:
        assert_same_bits(before, want)
