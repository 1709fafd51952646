"""Ctrl-C, or a request to terminate, ends a run between two steps with everything written.

A second one ends it at once.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """While it is entered, signals are remembered; call it to ask whether one came.

    Attributes:
        number: of the signal that came, or None.
    """

    number: int | None = None

    def __call__(self) -> bool:
        """True once a signal came."""
        return self.number is not None

    def __enter__(self) -> Stop:
        self._before = {number: signal.signal(number, self._remember) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
