"""How many arrays one call of a program handles, so that many small leaves share calls and few programs do."""

from __future__ import annotations

_MOST_PER_CALL = 16


def batches(count: int) -> list[int]:
    """How many arrays each call handles, ``count`` in all: powers of two, so that few programs serve every count."""
    most, left = divmod(count, _MOST_PER_CALL)
    return [_MOST_PER_CALL] * most + [1 << k for k in range(left.bit_length()) if left >> k & 1]
