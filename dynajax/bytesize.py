"""Byte counts as people write them: ``"64MB"``; K, M, G and T are powers of 1024."""

import re

from dynajax.errors import DynajaxError

_FACTORS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?\s*", re.IGNORECASE)


def parse_bytes(size: int | str) -> int:
    """Bytes in ``size``: a non-negative int, or text such as ``"64MB"``, ``"1.5 GiB"``, ``"4096"``.

    Raises:
        DynajaxError: the text is not a size, or the number is negative.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise DynajaxError(f"a size of {size} bytes is negative: give 0 or more")
        return size
    match = _PATTERN.fullmatch(str(size))
    if match is None:
        raise DynajaxError(f"{size!r} is not a size: write a number of bytes or text such as '64MB' or '1.5GB'")
    return int(float(match[1]) * _FACTORS[match[2].upper()])


def format_bytes(size: float) -> str:
    """``size`` bytes for people, three digits: ``"1.50 GB"``."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.4g} TB"
