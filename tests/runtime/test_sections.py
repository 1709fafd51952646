"""Sections of a model: they make up the model, and what waits for the backward pass is not the parameters once more."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest

from dynajax.meshes import Strategy
from dynajax.models import LlamaConfig, parameter_specs
from dynajax.runtime import ShardedModel
from dynajax.runtime.gradients import GradientPrograms, abstract_sums
from dynajax.runtime.sections import one_section, sections_of


def model(layers: int, tied: bool = False) -> LlamaConfig:
    return LlamaConfig(layers=layers, hidden=8, ffn=24, heads=2, kv_heads=2, head_dim=4, vocab=40, tied=tied)


@pytest.mark.parametrize("layers", [1, 3, 4, 10, 94])
@pytest.mark.parametrize("strategy", ["tp2", "cp2.tp2", "pp1", "pp2.tp2"])
def test_sections_make_up_the_model(layers: int, strategy: str):
    if strategy.startswith("pp2") and layers == 1:
        layers = 2
    config = model(layers)
    sections = sections_of(ShardedModel(config, Strategy.parse(strategy)), most=4)
    assert len(sections) == (1 if strategy.startswith("pp2") else min(layers, 4))
    assert [s.span[0] for s in sections] == [0, *(s.span[1] for s in sections[:-1])]
    sizes = [b - a for a, b in (s.span for s in sections)]
    assert sum(sizes) == layers
    assert max(sizes) - min(sizes) <= 1
    owned = list(itertools.chain.from_iterable(s.owns for s in sections))
    assert sorted(owned) == sorted(["embed", "head", *["blocks"] * len(sections)])


def test_a_tied_head_computes_with_what_the_first_section_owns():
    sections = sections_of(ShardedModel(model(3, tied=True), Strategy.parse("tp2")), most=3)
    assert [s.uses for s in sections] == [("embed", "blocks"), ("blocks",), ("embed", "blocks", "head")]
    assert [s.owns for s in sections] == [("embed", "blocks"), ("blocks",), ("blocks", "head")]
    assert one_section(ShardedModel(model(3, tied=True), Strategy.parse("tp2"))).uses == ("embed", "blocks", "head")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_is_kept_for_the_backward_pass_has_no_parameters(dtype: jnp.dtype):
    """Two layers of each section: stacks of parameters are told from activations by their first dim."""
    run = ShardedModel(model(8), Strategy.parse("tp2"), dtype=dtype)
    mesh = run.strategy.mesh(jax.devices()[:2])
    sections = sections_of(run, most=4)
    sums = abstract_sums([section.on(mesh) for section in sections], mesh)
    programs = GradientPrograms.compiled(run, mesh, sections, sums, 16, 2)
    parameters = {leaf.shape for leaf in jax.tree.leaves(parameter_specs(sections[0].run.config)) if leaf.size > 16}
    for section in programs.sections[:-1]:
        assert section.forward is not None
        kept = section.forward.out_info[1]
        assert not {leaf.shape for leaf in jax.tree.leaves(kept)} & parameters
    alike = [programs.sections[1], programs.sections[2]]
    assert alike[0] is alike[1]  # sections of one size run one program
