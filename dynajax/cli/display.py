"""What people see of a run: progress with the loss, a line for each switch, and at the end a table of the switches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from dynajax.bytesize import format_bytes
from dynajax.train import StepReport, SwitchReport

_BARS = "▁▂▃▄▅▆▇█"
_LINES_WITHOUT_TERMINAL = 10
_WIDTH_WITHOUT_TERMINAL = 110


class Display:
    """Writes to standard output, or to standard error if that is for machines.

    Args:
        machine: standard output belongs to JSON.
    """

    def __init__(self, machine: bool) -> None:
        self.console = Console(stderr=machine, highlight=False)
        if not self.console.is_terminal:
            self.console.width = max(self.console.width, _WIDTH_WITHOUT_TERMINAL)
        self._noted: set[str] = set()

    def note(self, text: str) -> None:
        """Say something once."""
        if text not in self._noted:
            self._noted.add(text)
            self.console.print(text, soft_wrap=True, markup=False)

    @contextmanager
    def progress(self, title: str, begin: int, steps: int) -> Iterator[Progressing]:
        """Show a bar that runs from ``begin`` to ``steps``."""
        columns = (
            TextColumn(title),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}  {task.fields[strategy]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console) as bar:
            task = bar.add_task(title, total=steps, completed=begin, loss="", strategy="compiling the first step")
            every = 0 if self.console.is_terminal else max(1, (steps - begin) // _LINES_WITHOUT_TERMINAL)
            yield Progressing(bar, task, title, every)

    def losses(self, losses: Sequence[float]) -> None:
        """Show how the loss went, in a line."""
        if losses:
            self.console.print(f"loss {losses[0]:.4f} → {losses[-1]:.4f}  {_sparkline(losses)}")

    def switches(self, switches: Sequence[SwitchReport]) -> None:
        """Show the table of the switches; moving includes grouping, packing and unpacking."""
        if not switches:
            return
        budget = format_bytes(switches[0].budget_bytes)
        table = Table(
            title="switches",
            caption=f"times in ms; bound: the least that could be moved; extra: peak memory, of a budget of {budget}",
            box=SIMPLE_HEAD,
            padding=0,
        )
        for name in ("step", "from", "to"):
            table.add_column(name, no_wrap=True)
        for name in ("kept", "moved", "bound", "plan", "compile", "move", "pause", "extra"):
            table.add_column(name, justify="right", no_wrap=True)
        for s in switches:
            sizes = map(format_bytes, (s.bytes_retained, s.bytes_moved, s.bytes_lower_bound))
            moving = s.group_s + s.pack_s + s.move_s + s.unpack_s
            times = (f"{seconds * 1e3:.0f}" for seconds in (s.plan_s, s.compile_s, moving, s.pause_s))
            table.add_row(str(s.step), s.source, s.target, *sizes, *times, format_bytes(s.peak_extra_bytes))
        self.console.print(table)

    def pipelines(self, steps: Sequence[StepReport]) -> None:
        """Show what pipelines that ran side by side did in each step."""
        if not any(step.pipelines for step in steps):
            return
        table = Table(title="documents and tokens by pipeline", box=SIMPLE_HEAD, padding=0)
        for name in ("step", "strategy", "pipelines: documents/tokens"):
            table.add_column(name)
        for name in ("idle", "ms"):
            table.add_column(name, justify="right")
        for step in steps:
            shares = "  ".join(f"{s.pipeline}: {s.sequences}/{s.tokens}" for s in step.pipelines)
            idle = "" if step.idle_share is None else f"{step.idle_share:.0%}"
            table.add_row(str(step.step), step.strategy, shares, idle, f"{step.step_s * 1e3:.0f}")
        self.console.print(table)


class Progressing:
    """A bar on its way."""

    def __init__(self, bar: Progress, task: TaskID, title: str, every: int) -> None:
        self._bar, self._task, self._title, self._every = bar, task, title, every

    def stepped(self, step: int, loss: float, strategy: str) -> None:
        """A step was taken."""
        self._bar.update(self._task, completed=step + 1, loss=f"loss {loss:.4f}", strategy=strategy)
        if self._every and (step + 1) % self._every == 0:
            self._bar.console.print(f"{self._title} step {step + 1}  loss {loss:.4f}  {strategy}")

    def happened(self, report: StepReport | SwitchReport) -> None:
        """A step was taken or a switch was made."""
        if isinstance(report, StepReport):
            self.stepped(report.step, report.loss, report.strategy)
        else:
            self._bar.console.print(
                f"switch at step {report.step}: {report.source} → {report.target}, "
                f"{format_bytes(report.bytes_moved)} moved, paused {report.pause_s * 1e3:.0f} ms"
            )


def _sparkline(values: Sequence[float], width: int = 40) -> str:
    picked = [values[i * len(values) // width] for i in range(width)] if len(values) > width else list(values)
    low, high = min(picked), max(picked)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in picked)
