"""Files that a command is asked to write, looked at before it works."""

from __future__ import annotations

from pathlib import Path

from dynajax.errors import RunError


def require_writable(flag: str, path: str | None) -> None:
    """Refuse a file that cannot be written; None is no file.

    Raises:
        RunError: its folder does not exist, or it is a folder itself.
    """
    if path is None:
        return
    if not Path(path).absolute().parent.is_dir():
        raise RunError(f"{flag} {path}: there is no folder {Path(path).parent}; make it first")
    if Path(path).is_dir():
        raise RunError(f"{flag} {path} is a folder; name a file")
