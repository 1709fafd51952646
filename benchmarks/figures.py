"""Figures of the benchmarks: rows of ratios with their spread, and the machine they were taken on."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from typing import Any

import jax

from dynajax.bytesize import format_bytes

Row = dict[str, Any]


def row(
    case: str, method: str, ratios: Sequence[float], seconds: Sequence[float], peak: int | None = None, **more: Any
) -> Row:
    """One method in one case; ``more`` is for figures of one benchmark alone."""
    spread = {"min": min(ratios), "median": statistics.median(ratios), "max": max(ratios)}
    median = statistics.median(seconds) if seconds else None
    return {"case": case, "method": method, "ratio": spread, "seconds_median": median, "peak_extra_bytes": peak, **more}


def machine() -> str:
    """Processor, cores and devices."""
    return f"{platform.machine()}, {os.cpu_count()} cores, {jax.default_backend()} x {jax.device_count()}"


def show(rows: Sequence[Row], baseline: str) -> None:
    """Print the rows of one case."""
    print(f"\n{rows[0]['case']:<22}{f'ratio to {baseline}: min':>26}{'median':>9}{'max':>9}{'seconds':>10}", end="")
    print(f"{'peak extra':>13}")
    for r in rows:
        q, peak = r["ratio"], r["peak_extra_bytes"]
        print(
            f"  {r['method']:<20}{q['min']:>26.2f}{q['median']:>9.2f}{q['max']:>9.2f}{r['seconds_median']:>10.3f}"
            f"{'' if peak is None else format_bytes(peak):>13}",
            flush=True,
        )
