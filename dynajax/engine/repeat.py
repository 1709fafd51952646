"""One move made again and again, of data that changes between layouts that do not.

All that depends on shapes and shardings alone is worked out once: the plan, what is compiled for it, and which boxes of
buffers are copied. What comes out is used and dropped before the next time, so its memory is laid out for few copies,
not for donation.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.tree_util as jtu

from dynajax.bytesize import parse_bytes
from dynajax.engine.execute import execute, peak_extra
from dynajax.engine.paths import DEFAULT_BUDGET, Path, checked_path, plan_within, prepare, transport_of, with_fit_budget
from dynajax.engine.places import Places
from dynajax.engine.processes import Agreement, Processes
from dynajax.engine.recipe import Recipes
from dynajax.engine.regroup import read
from dynajax.engine.report import Report, Stopwatch
from dynajax.engine.tree import Leaf
from dynajax.errors import TargetError
from dynajax.planner import Plan

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Repeat:
    """A move that is planned once; a call carries it out, and leaves its source as it is.

    Between processes each plans for itself, which is no call that others wait for, and may be done in any order; the
    first call finds out whether they planned the same. All of them then call alike, also those that hold nothing of it.
    An array that is unlike is an error where it lies; the others wait for that process until their deadline.

    Attributes:
        plan: what every call does.
        path: what carries the bytes.
    """

    plan: Plan
    path: Path
    _like: Sequence[Any]
    _before: jtu.PyTreeDef
    _after: jtu.PyTreeDef
    _leaves: list[Leaf]
    _places: Places
    _recipes: Recipes

    @staticmethod
    def of(tree: Any, shardings: Any, *, stored: Any = None, path: Path | None = None) -> Repeat:
        """Plan the move, and compile what it needs.

        Args:
            tree: arrays, or ``jax.ShapeDtypeStruct`` with shardings, that are like those of every call.
            shardings, stored, path: as for ``reshard``.

        Raises:
            TargetError: the targets do not fit the tree.
            BudgetError: the exchange of the XLA path finds no room.
        """
        leaves, _, after = read(tree, shardings, stored)
        like, before = jtu.tree_flatten(tree)
        if len(set(map(id, like))) < len(like) or not all(hasattr(x, "sharding") for x in like):
            raise TargetError("a move to repeat is of arrays, each at one place of the tree; take others out of it")
        places = Places.of_leaves(leaves)
        path = checked_path(path, places)
        plan = plan_within(parse_bytes(DEFAULT_BUDGET), leaves, places, False, path)
        plan = with_fit_budget(plan, path, leaves, places)
        recipes = Recipes(places, donatable=False)
        prepare(plan, leaves, path, places, recipes)
        return Repeat(plan, path, like, before, after, leaves, places, recipes)

    def __call__(self, tree: Any) -> tuple[Any, Report]:
        """Move arrays like those that the move was planned for.

        Args:
            tree: where this process has no device of an array, a ``jax.ShapeDtypeStruct`` may stand for it.

        Returns:
            The moved tree and a report, as of ``reshard``.

        Raises:
            TargetError: an array is deleted, or unlike what was planned for.
            AgreementError: in the first call, that processes planned different moves.
            DeadlineError: another process did not come, or died.
        """
        watch = Stopwatch()
        with watch.phase("plan"):
            leaves = self._with_data(tree)
        transport = transport_of(
            self.path, self._places, self._processes, watch, self.plan.budget, leaves, self._recipes
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
            path=self.path,
            commit="kept",
            snapshot=None,
        )
        _log.info("%s", report.summary())
        return jtu.tree_unflatten(self._after, [moved[k] for k in range(len(moved))]), report

    @cached_property
    def _bytes_by_tier(self) -> dict[str, int]:
        return self._places.by_tier(self.plan)

    @cached_property
    def _processes(self) -> Processes:
        """Those that the move is between, once they have agreed on it."""
        processes = Processes(self._places.devices)
        with Agreement(processes) as agreement:
            agreement.on(lambda: self.plan.digest)
        return processes

    def _with_data(self, tree: Any) -> list[Leaf]:
        """The leaves of the plan with arrays in them, which are waited for."""
        arrays, structure = jtu.tree_flatten(tree)
        if structure != self._before:
            raise TargetError(f"the move was planned for a tree {self._before} and is given {structure}")
        for k, (array, like) in enumerate(zip(arrays, self._like, strict=True)):
            if found := _unlike(array, like):
                path = jtu.keystr(jtu.tree_leaves_with_path(tree)[k][0])
                raise TargetError(f"{path}: the move was planned for {like}, and is given {found}")
        jax.block_until_ready(arrays)
        return [
            replace(leaf, sources=tuple(replace(held, array=arrays[held.index]) for held in leaf.sources))
            for leaf in self._leaves
        ]


def _unlike(array: Any, like: Any) -> str:
    """Why an array cannot be moved as the one that was planned for; empty if it can."""
    if array.shape != like.shape or array.dtype != like.dtype or array.sharding != like.sharding:
        return f"{array.dtype}{list(array.shape)} in {array.sharding}"
    if not array.sharding.addressable_devices:
        return ""
    if not isinstance(array, jax.Array):
        return f"a {type(array).__name__} without data"
    return "a deleted array" if array.is_deleted() else ""
