"""A model in sections: neighbouring layers that are pulled, run and pushed together.

While the first section computes, the parameters of the next are pulled; while gradients are computed in the sections
before, those of a later one are pushed. The embedding goes with the first section and the head with the last. A
pipeline with stages is one section: its stages run different layers at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh

from dynajax.runtime.optimizer_layout import Span
from dynajax.runtime.sharded_model import ShardedModel

MOST = 2
"""Sections at most. Of n sections an nth of a pull is not hidden; n = 2 runs three programs where one would do."""


@dataclass(frozen=True)
class Section:
    """Neighbouring layers of a model.

    Attributes:
        run: a model of just these layers, under the strategy of the pipeline.
        first_layer: number of its first layer.
        is_first, is_last: whether the embedding or the head belongs to it.
    """

    run: ShardedModel
    first_layer: int
    is_first: bool
    is_last: bool

    @property
    def span(self) -> Span:
        """Its first layer and the one past its last."""
        return self.first_layer, self.first_layer + self.run.config.layers

    @property
    def owns(self) -> tuple[str, ...]:
        """The parts of the tree of parameters that are pulled and pushed with it."""
        return (*["embed"] * self.is_first, "blocks", *["head"] * self.is_last)

    @property
    def uses(self) -> tuple[str, ...]:
        """The parts that it computes with: a tied head uses what the first section owns."""
        tied = self.is_last and not self.is_first and self.run.config.tied
        return (*["embed"] * tied, *self.owns)

    def on(self, mesh: Mesh) -> dict[str, Any]:
        """How the pipeline's mesh stores the parameters that it owns: a ``Stored`` for each."""
        owned = {name: self.run.storage[name] for name in self.owns}
        return jax.tree.map(lambda storage: storage.on(mesh), owned)

    def own(self, trees: Mapping[str, Any], number: int) -> dict[str, Any]:
        """What it owns of parameters or gradients; see ``of``."""
        used = self.of(trees, number)
        return {name: used[name] for name in self.owns}

    def of(self, trees: Mapping[str, Any], number: int) -> dict[str, Any]:
        """What it uses of parameters or gradients: "embed", "head", and "blocks" by the ``number`` of the section."""
        return {name: trees[name][number] if name == "blocks" else trees[name] for name in self.uses}


def one_section(run: ShardedModel) -> Section:
    """A model as one section."""
    return Section(run, 0, True, True)


def sections_of(run: ShardedModel, most: int = MOST) -> tuple[Section, ...]:
    """The sections of a model under the strategy of a pipeline, at most so many."""
    layers = run.config.layers
    count = 1 if run.strategy.size("pp") > 1 else min(most, layers)
    borders = [layers * k // count for k in range(count + 1)]
    return tuple(
        Section(replace(run, config=replace(run.config, layers=stop - start)), start, start == 0, stop == layers)
        for start, stop in itertools.pairwise(borders)
    )
