"""Links between the optimizer layout and the pipelines: pull parameters before a pass, push gradients after it.

Both are plans of the one planner, made once for each section of a pipeline's model and run by the one engine. A pull
copies each element to the devices of the pipeline that need it, cast before it moves. A push copies the gradients of a
pipeline, summed within it by its own program, to where the optimizer has these elements; the sum over pipelines is
taken there, one pipeline after the other in an order that the plan says, so that it does not depend on who ends first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from dynajax.engine import Compiled, Report, prepare_reshard
from dynajax.models import parameter_specs
from dynajax.runtime.gradients import abstract_params
from dynajax.runtime.optimizer_layout import optimizer_layout
from dynajax.runtime.sections import Section


@dataclass(frozen=True, eq=False)
class Link:
    """Between the optimizer layout and one section of a pipeline.

    Attributes:
        names: parts of the tree of parameters that the section owns.
        stored: how the pipeline stores them, a ``Stored`` for each.
        target: how their gradients lie in the optimizer layout, where stacks have the layers of the section.
        pulls, pushes: the moves, planned once for all iterations.
    """

    names: tuple[str, ...]
    stored: Any
    target: Any
    pulls: Compiled
    pushes: Compiled

    @staticmethod
    def of(section: Section, layers: int, flat: Mesh, mesh: Mesh, dtype: Any) -> Link:
        """Plan both ways; needs no arrays.

        Args:
            section: of the pipeline's model.
            layers: of the whole model.
            flat: mesh of the optimizer layout.
            mesh: of the pipeline.
            dtype: that parameters are pulled in; gradients are float32.
        """
        specs = parameter_specs(section.run.config)
        shapes = {name: specs[name] for name in section.owns}
        # Parameters lie in stacks of all layers of the model, gradients in stacks of the section's.
        source, target = optimizer_layout(shapes, flat, section.first_layer, layers), optimizer_layout(shapes, flat)
        stored = section.on(mesh)
        flat_params, grads = abstract_params(source, dtype), abstract_params(stored, jnp.float32)
        return Link(
            section.owns,
            stored,
            target,
            prepare_reshard(flat_params, stored, stored=source, donatable=False),
            prepare_reshard(grads, target, stored=stored, donatable=False),
        )

    def pull(self, params: Any) -> tuple[Any, Report]:
        """Parameters of the section as the pipeline computes with them.

        Args:
            params: all of the model, flat, of the dtype that the link was made for; left as they are.
        """
        return self.pulls({name: params[name] for name in self.names})

    def push(self, grads: Any) -> tuple[Any, Report]:
        """The section's gradients in the optimizer layout.

        Args:
            grads: float32, as the pipeline stores parameters; waited for.
        """
        return self.pushes(grads)
