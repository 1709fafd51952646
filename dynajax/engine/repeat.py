"""One move made again and again, of data that changes between layouts that do not.

All that depends on shapes and shardings alone is worked out once: the plan, and which boxes of buffers are copied.
What comes out is used and dropped before the next time, so its memory is laid out for few copies, not for donation.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.tree_util as jtu

from dynajax.engine.execute import execute, peak_extra
from dynajax.engine.places import Places
from dynajax.engine.processes import Processes
from dynajax.engine.recipe import Recipes
from dynajax.engine.regroup import read
from dynajax.engine.report import Report, Stopwatch
from dynajax.engine.reshard import plan_reshard
from dynajax.engine.shared_memory import SharedMemory
from dynajax.engine.tree import Leaf
from dynajax.engine.xla import Xla
from dynajax.errors import TargetError
from dynajax.planner import Plan

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Repeat:
    """A move that is planned once; a call carries it out, and leaves its source as it is.

    Attributes:
        plan: what every call does.
    """

    plan: Plan
    _like: Sequence[Any]
    _before: jtu.PyTreeDef
    _after: jtu.PyTreeDef
    _leaves: Sequence[Leaf]
    _places: Places
    _recipes: Recipes

    @staticmethod
    def of(tree: Any, shardings: Any, *, stored: Any = None) -> Repeat:
        """Plan the move.

        Args:
            tree: arrays, or ``jax.ShapeDtypeStruct`` with shardings, that are like those of every call.
            shardings, stored: as for ``reshard``.

        Raises:
            TargetError: the targets do not fit the tree.
        """
        leaves, _, after = read(tree, shardings, stored)
        like, before = jtu.tree_flatten(tree)
        plan = plan_reshard(tree, shardings, stored=stored)
        if len(plan.moves) < len(leaves) or not all(hasattr(x, "sharding") for x in like):
            raise TargetError("a move to repeat is of arrays, each at one place of the tree; take others out of it")
        places = Places.of_leaves(leaves)
        if not places.are_here:
            raise TargetError("a move to repeat is between devices of this process; use reshard between processes")
        return Repeat(plan, like, before, after, leaves, places, Recipes(places, donatable=False))

    def __call__(self, tree: Any) -> tuple[Any, Report]:
        """Move arrays like those that the move was planned for.

        Returns:
            The moved tree and a report, as of ``reshard``.

        Raises:
            TargetError: an array is deleted, or unlike what was planned for.
        """
        watch = Stopwatch()
        with watch.phase("plan"):
            leaves = self._with_data(tree)
        on_cpu = all(device.platform == "cpu" for device in self._places.devices)
        transport = (
            SharedMemory(self._places, watch, self._recipes)
            if on_cpu
            else Xla(self._places, Processes(self._places.devices), watch, self.plan.budget, leaves)
        )
        try:
            moved = execute(self.plan, leaves, transport, watch, share=False, check=False)
        finally:
            transport.close()
        report = watch.report(
            self.plan,
            bytes_by_tier=self._bytes_by_tier,
            peak_extra_bytes=peak_extra(self.plan, transport.overhead),
            leaves=len(leaves),
            path=transport.name,
            commit="kept",
            snapshot=None,
        )
        _log.info("%s", report.summary())
        return jtu.tree_unflatten(self._after, [moved[k] for k in range(len(moved))]), report

    @cached_property
    def _bytes_by_tier(self) -> dict[str, int]:
        return self._places.by_tier(self.plan)

    def _with_data(self, tree: Any) -> list[Leaf]:
        """The leaves of the plan with arrays in them, which are waited for."""
        arrays, structure = jtu.tree_flatten(tree)
        if structure != self._before:
            raise TargetError(f"the move was planned for a tree {self._before} and is given {structure}")
        for k, (array, like) in enumerate(zip(arrays, self._like, strict=True)):
            alike = array.shape == like.shape and array.dtype == like.dtype and array.sharding == like.sharding
            if not alike or array.is_deleted():
                path = jtu.keystr(jtu.tree_leaves_with_path(tree)[k][0])
                found = "a deleted array" if alike else f"{array.dtype}{list(array.shape)} in {array.sharding}"
                raise TargetError(f"{path}: the move was planned for {like}, and is given {found}")
        jax.block_until_ready(arrays)
        return [
            replace(leaf, sources=tuple(replace(held, array=arrays[held.index]) for held in leaf.sources))
            for leaf in self._leaves
        ]
