"""Where the time and the bytes of a transition went."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from dynajax.bytesize import format_bytes
from dynajax.planner import Plan

PHASES = ("plan", "compile", "group", "pack", "move", "unpack", "verify", "free")


@dataclass(frozen=True)
class Report:
    """What a finished move did; times in seconds, sizes in bytes summed over devices.

    Attributes:
        plan_s: making the plan, or checking a given one against the state.
        compile_s: compiling programs.
        group_s: setting up what moves the bytes: threads, views of the source buffers.
        pack_s: gathering pieces into contiguous buffers (0 where copies are direct).
        move_s: copying from buffer to buffer.
        unpack_s: making arrays of the buffers.
        verify_s: comparing, with ``check=True``.
        free_s: giving up the source.
        total_s: from call to return.
        bytes_moved: what devices needed and did not hold.
        bytes_travelled: what crossed from device to device for that, padding included; sums of parts count each part.
        bytes_retained: what they held already.
        bytes_lower_bound: the least that any plan must move.
        bytes_by_tier: bytes moved by the nearest kind of link that joins sender and receiver: the tiers of the
            topology that the plan was made for, or else "device" (between its memories), "process" and "network".
        peak_extra_bytes: the most that a device held above its base (see ``dynajax.reshard``).
        budget_bytes: what it was allowed to hold above its base.
        stages: steps that the budget made of the move.
        leaves: array leaves in the tree; each was moved or retained.
        path: what carried the bytes.
        commit: when the source was given up: "staged", "safe", or "kept" if it was not.
        snapshot: what the caller said it would fall back to.
    """

    plan_s: float
    compile_s: float
    group_s: float
    pack_s: float
    move_s: float
    unpack_s: float
    verify_s: float
    free_s: float
    total_s: float
    bytes_moved: int
    bytes_travelled: int
    bytes_retained: int
    bytes_lower_bound: int
    bytes_by_tier: dict[str, int]
    peak_extra_bytes: int
    budget_bytes: int
    stages: int
    leaves: int
    path: str
    commit: str
    snapshot: str | None

    def summary(self) -> str:
        """The report in a line."""
        parts = ", ".join(f"{p} {getattr(self, p + '_s') * 1e3:.1f}" for p in PHASES if getattr(self, p + "_s") > 0)
        moved, least = format_bytes(self.bytes_moved), format_bytes(self.bytes_lower_bound)
        tiers = "".join(f"; {tier} {format_bytes(n)}" for tier, n in self.bytes_by_tier.items() if n)
        return (
            f"moved {moved} by {self.path} (lower bound {least}{tiers}), retained {format_bytes(self.bytes_retained)}, "
            f"peak +{format_bytes(self.peak_extra_bytes)} of {format_bytes(self.budget_bytes)}, "
            f"{self.total_s * 1e3:.1f} ms ({parts})"
        )


@dataclass
class Stopwatch:
    """Adds up the seconds of each phase."""

    began: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the body's time towards the phase ``name``."""
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start

    @contextmanager
    def compiling(self, programs_compiled: Callable[[], int]) -> Iterator[None]:
        """Count the body's time as compiling; finding what was compiled before is setting up."""
        start, before = time.perf_counter(), programs_compiled()
        yield
        self.seconds["group" if programs_compiled() == before else "compile"] += time.perf_counter() - start

    def report(self, plan: Plan, **facts: Any) -> Report:
        """The report of a finished move: times, the plan's bytes, and the facts that only the engine knows."""
        return Report(
            **{f"{name}_s": s for name, s in self.seconds.items()},
            total_s=time.perf_counter() - self.began,
            bytes_moved=plan.bytes_moved,
            bytes_retained=plan.bytes_retained,
            bytes_lower_bound=plan.bytes_lower_bound,
            budget_bytes=plan.budget,
            stages=len(plan.stages),
            **facts,
        )
