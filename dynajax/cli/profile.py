"""``dynajax profile``: measure T(l, P) and MaxLen(P) of pipelines on this machine, for ``dynajax balance``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dynajax.balance import pipelines_of, save_profile
from dynajax.bytesize import parse_bytes
from dynajax.cli.devices import described, use_devices
from dynajax.cli.display import Display
from dynajax.cli.files import require_writable
from dynajax.errors import RunError
from dynajax.meshes import Pipeline, Strategy
from dynajax.models import LlamaConfig, preset
from dynajax.train import StepOptions
from dynajax.train.balancing import even_pipelines
from dynajax.train.profile import Measured, Measurement, measure


@dataclass(frozen=True)
class ProfileOptions:
    """Measure what pipelines cost on this machine: time by length, and the most tokens that they hold.

    The time of a micro-batch on one pipeline stage, forward and backward, is fitted as a·l² + b·l + c.
    """

    model: str = "tiny"
    """Preset that says the shape of the model."""
    strategies: str | None = None
    """Strategies separated by commas, whose pipelines are measured. Default: all that cut the model evenly."""
    lengths: str = "64,128,256,512"
    """Tokens of the rows that are measured, three or more different ones."""
    repeats: int = 5
    """Timed runs of each row; the median counts."""
    devices: int = 8
    """Devices to use; emulated on the CPU if there are not as many accelerators."""
    memory: str | None = None
    """Bytes of a device that training may take, such as 2GB. Default: nine tenths of what is free."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of activations and matrix products."""
    remat: bool = False
    """Compute each layer again in the backward pass, for less memory."""
    out: str | None = None
    """File for the profile, which dynajax balance --profile FILE reads."""
    json: bool = False
    """Print one JSON object on standard output, and all else on standard error."""


def run(options: ProfileOptions) -> int:
    """Measure as ``options`` say; the exit status.

    Raises:
        DynajaxError: it cannot work as asked; found before anything is compiled.
    """
    model, lengths = preset(options.model), _lengths(options.lengths)
    pipelines = _pipelines(options, model)
    memory = None if options.memory is None else parse_bytes(options.memory)
    require_writable("--out", options.out)
    devices, display = use_devices(options.devices), Display(options.json)
    display.note(described(devices))
    found = measure(
        options.model,
        model,
        pipelines,
        lengths,
        devices,
        repeats=options.repeats,
        memory=memory,
        options=StepOptions(dtype=jnp.dtype(options.dtype), remat=options.remat),
        tell=display.note,
    )
    if options.out:
        source = f"dynajax profile, {options.dtype}, medians of {options.repeats} runs on {described(devices)}"
        save_profile(found.profile, options.out, source)
    _show(display.console, found)
    if options.out:
        display.note(f"saved: dynajax balance --profile {options.out} --devices {len(devices)}")
    if options.json:
        print(json.dumps(_summary(options, found)))
    return 0


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise RunError(f"--lengths {text}: give numbers of tokens separated by commas, such as 64,128,256") from None


def _pipelines(options: ProfileOptions, model: LlamaConfig) -> tuple[Pipeline, ...]:
    """The different pipelines of all strategies, in the order in which they come."""
    if options.strategies is None:
        return even_pipelines(model, options.devices)
    named = [Strategy.parse(part) for part in options.strategies.split(",")]
    return tuple(dict.fromkeys(pipeline for strategy in named for pipeline in pipelines_of(strategy)))


def _show(console: Console, found: Measurement) -> None:
    table = Table("pipeline", "MaxLen", "T(l) in ms", "error", "of an unlike row", "spread", box=SIMPLE_HEAD)
    for one in found.pipelines:
        cost = one.cost
        formula = f"{cost.a:.3g}·l² + {cost.b:.3g}·l + {cost.c:.3g}"
        errors = f"{one.error:.1%}", f"{one.shared_error:+.1%}", f"{one.spread:.1%}"
        table.add_row(str(cost.pipeline), str(cost.max_len), formula, *errors)
    console.print(table)
    console.print(
        "error: largest of the fit over rows of one sequence and of equal ones; of an unlike row: price against time "
        "of the longest row, halved again and again, which the fit has not seen; spread: largest (slowest − fastest) "
        "/ median of the repeats"
    )
    for pipeline, holds in found.left_out:
        console.print(
            f"{pipeline} is left out: it holds {holds} tokens, fewer than three of the lengths", soft_wrap=True
        )


def _summary(options: ProfileOptions, found: Measurement) -> dict[str, Any]:
    return {
        "model": options.model,
        "device": found.profile.device,
        "devices": options.devices,
        "repeats": options.repeats,
        "pipelines": [_described(one) for one in found.pipelines],
        "left_out": {str(pipeline): holds for pipeline, holds in found.left_out},
        "out": options.out,
    }


def _described(one: Measured) -> dict[str, Any]:
    cost = one.cost
    points = [
        {"tokens": sum(p.lengths), "sequences": len(p.lengths), "ms": p.ms, "fitted_ms": cost.microbatch_ms(p.lengths)}
        for p in one.points
    ]
    return {
        "pipeline": str(cost.pipeline),
        "devices": cost.devices,
        "max_len": cost.max_len,
        "a": cost.a,
        "b": cost.b,
        "c": cost.c,
        "points": points,
        "error": one.error,
        "shared_error": one.shared_error,
        "spread": one.spread,
    }
