"""Named shapes, read from ``presets.toml`` beside this file."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any

from dynajax.errors import ModelError
from dynajax.models.config import LlamaConfig, MoeConfig

_NOT_CONFIG = ("source", "params_b")


def preset_table() -> dict[str, dict[str, Any]]:
    """Every preset as it is written in the file, with its ``source`` and published ``params_b``."""
    return tomllib.loads((files("dynajax.models") / "presets.toml").read_text(encoding="utf-8"))


def preset_names() -> tuple[str, ...]:
    """Names that ``preset`` knows, the smallest first within each family."""
    return tuple(preset_table())


def preset(name: str) -> LlamaConfig:
    """The shape called ``name``, a MoeConfig if it has experts.

    Raises:
        ModelError: no preset has that name.
    """
    table = preset_table()
    if name not in table:
        raise ModelError(f"no model preset is called {name!r}; choose one of {', '.join(table)}")
    fields = {key: value for key, value in table[name].items() if key not in _NOT_CONFIG}
    return MoeConfig(**fields) if "experts" in fields else LlamaConfig(**fields)
