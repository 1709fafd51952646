"""Profiles as files: the published ones that ship with the package, and measured ones.

A file holds ``{"source": …, "profiles": {name: …}}``, the form in which the published coefficients
came. A measured profile adds ``cp``, ``max_len`` and ``error`` to its schemes and needs no memory model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from dynajax.balance.cost import MemoryModel, PipelineCost, Profile, Timing, pipelines_of
from dynajax.errors import BalanceError
from dynajax.meshes import Strategy

DATA = files("dynajax.balance") / "data"


def load_profile(name: str) -> Profile:
    """A profile by name (``7b``, ``13b``, ``32b``, ``7b_A100``), or from a file: ``FILE`` or ``FILE:NAME``.

    Raises:
        BalanceError: there is no such profile or file, or the file is not a profile.
    """
    published = json.loads((DATA / "hydraulis_profiles.json").read_text())["profiles"]
    if name in published:
        return _read(name, published[name])
    path, wanted = (name, "") if Path(name).is_file() else (name.rpartition(":")[0], name.rpartition(":")[2])
    if not Path(path).is_file():
        raise BalanceError(f"profile {name!r} is neither a file nor one of {', '.join(published)}")
    try:
        held = dict(json.loads(Path(path).read_text())["profiles"])
    except (ValueError, KeyError, TypeError) as error:
        raise BalanceError(f'{path} is not a profile: expected {{"profiles": {{name: …}}}}, got {error!r}') from error
    if wanted not in held and (wanted or len(held) != 1):
        raise BalanceError(f"{path} holds the profiles {', '.join(held) or 'none'}: choose one as {path}:NAME")
    chosen = wanted or next(iter(held))
    return _read(chosen, held[chosen])


def save_profile(profile: Profile, path: str | Path, source: str) -> None:
    """Write ``profile`` to ``path``, where ``load_profile`` reads it.

    Args:
        profile: what to write.
        path: the file.
        source: how it was measured, for the reader.
    """
    text = json.dumps({"source": source, "profiles": {profile.name: _written(profile)}}, indent=1)
    Path(path).write_text(text + "\n")


def published_candidates(devices: int, costs: tuple[PipelineCost, ...]) -> tuple[Strategy, ...]:
    """The published strategies that ``devices`` are a multiple of, copied over them all.

    Strategies with a pipeline that is not in ``costs`` are left out.

    Raises:
        BalanceError: none is left.
    """
    known = {cost.pipeline for cost in costs}
    found: list[Strategy] = []
    for entry in json.loads((DATA / "hydraulis_candidates.json").read_text())["candidates"]:
        copies, left = divmod(devices, entry["devices"])
        strategy = Strategy.parse(entry["strategy"])
        if copies and not left and known.issuperset(pipelines_of(strategy)):
            found.append(Strategy(tuple(p for p in strategy.pipelines for _ in range(copies))))
    if not found:
        raise BalanceError(
            f"no published candidate fits {devices} devices and this profile (they are for 64 devices and "
            "multiples, and pipelines of the 32b profile): propose candidates instead"
        )
    return tuple(found)


def _read(name: str, entry: Mapping[str, Any]) -> Profile:
    try:
        timings = tuple(_timing(scheme) for scheme in entry["schemes"])
        return Profile(name, str(entry.get("gpu", "")), timings, _memory(entry) if "A" in entry else None)
    except (KeyError, TypeError, ValueError) as error:
        raise BalanceError(f"profile {name!r} cannot be read: {error!r}") from error


def _timing(scheme: Mapping[str, Any]) -> Timing:
    text = ".".join(f"{axis}{scheme[axis]}" for axis in ("tp", "cp", "pp") if scheme.get(axis, 1) > 1)
    pipeline = Strategy.parse(text or "tp1").pipelines[0]
    a, b, c = (float(scheme[key]) for key in "abc")
    return Timing(pipeline, a, b, c, scheme.get("max_len"), scheme.get("error"))


def _memory(entry: Mapping[str, Any]) -> MemoryModel:
    shape = entry["model"]
    return MemoryModel(
        layers=shape["layers"],
        hidden=shape["hidden"],
        vocab=shape["vocab"],
        available=entry["gpu_memory_bound"] - entry["safe_bound"] - entry["gap"],
        activation=tuple((int(tp), float(factor)) for tp, factor in entry["A"].items()),
        state=float(entry["B"]),
        sharded=float(entry["alpha"]),
    )


def _written(profile: Profile) -> dict[str, Any]:
    schemes = [
        {axis: t.pipeline.size(axis) for axis in ("tp", "cp", "pp")}
        | {"a": t.a, "b": t.b, "c": t.c}
        | ({} if t.max_len is None else {"max_len": t.max_len})
        | ({} if t.error is None else {"error": t.error})
        for t in profile.timings
    ]
    written: dict[str, Any] = {"gpu": profile.device, "schemes": schemes}
    if profile.memory is None:
        return written
    memory = profile.memory
    return written | {
        "model": {"hidden": memory.hidden, "layers": memory.layers, "vocab": memory.vocab},
        "gpu_memory_bound": memory.available,
        "safe_bound": 0,
        "gap": 0,
        "A": {str(tp): factor for tp, factor in memory.activation},
        "B": memory.state,
        "alpha": memory.sharded,
    }
