"""Links between the optimizer layout and the pipelines: pull parameters before a pass, push gradients after it.

Both are plans of the one planner, made once for a pipeline and run by the one engine. A pull copies each
element to the devices of the pipeline that need it, cast before it moves. A push copies the gradients of a
pipeline, summed within it by its own program, to where the optimizer has these elements; the sum over pipelines is
taken there, one pipeline after the other in an order that the plan says, so that it does not depend on who ends first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from dynajax.engine import Report, plan_reshard, reshard
from dynajax.planner import Plan
from dynajax.runtime.gradients import abstract_params


@dataclass(frozen=True, eq=False)
class Link:
    """Between the optimizer layout and one pipeline.

    Attributes:
        optimizer: a ``Bundle`` for each parameter.
        propagation: a ``Stored`` for each.
        pulls: the plan of a pull.
        pushes: the plan of a push.
    """

    optimizer: Any
    propagation: Any
    pulls: Plan
    pushes: Plan

    @staticmethod
    def of(optimizer: Any, propagation: Any, dtype: Any) -> Link:
        """Plan both ways; needs no arrays.

        Args:
            optimizer: see above.
            propagation: see above.
            dtype: that parameters are pulled in; gradients are float32.
        """
        flat, cut = (abstract_params(layout, d) for layout, d in ((optimizer, dtype), (propagation, jnp.float32)))
        return Link(
            optimizer,
            propagation,
            plan_reshard(flat, propagation, stored=optimizer),
            plan_reshard(cut, optimizer, stored=propagation),
        )

    def pull(self, params: Any) -> tuple[Any, Report]:
        """Parameters as the pipeline computes with them.

        Args:
            params: flat, of the dtype that the link was made for; left as they are.
        """
        return reshard(params, self.propagation, stored=self.optimizer, plan=self.pulls)

    def push(self, grads: Any) -> tuple[Any, Report]:
        """A pipeline's gradients in the optimizer layout.

        Args:
            grads: float32, as the pipeline stores parameters; waited for.
        """
        return reshard(grads, self.optimizer, stored=self.propagation, plan=self.pushes)
