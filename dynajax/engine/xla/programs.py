"""The XLA programs of an exchange: compiled once for what they do, and loaded for other devices that do the same."""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import PartitionSpec

from dynajax.arrays import _jax_private as private
from dynajax.arrays.spmd import Devices, Shape, mesh_of, over, spec_of
from dynajax.engine.xla import bodies
from dynajax.engine.xla.bitcast import from_wire
from dynajax.engine.xla.bodies import Given
from dynajax.planner.exchanges.exchange import Exchange, Message
from dynajax.planner.exchanges.part import wire_dtype

_KEPT = 1 << 14


class Step(Enum):
    """What of an exchange a program does."""

    ALL = "exchange"
    CUT = "cut"
    SEND = "send"
    PLACE = "place"
    ZEROS = "zeros"
    CLOSE = "close"


@dataclass(frozen=True)
class ProgramSpec:
    """What a program does, wherever it runs. Its arguments and results are lists, in this order.

    - ALL: source shards, if not onward; target shards, if carried; shifts; read and filled chunks -> target shards
    - CUT: source shards, shifts, read chunks -> a payload for each message
    - SEND: a payload for each message that travels -> what came
    - PLACE: a payload for each message; target shards, if carried; shifts; filled chunks -> target shards
    - ZEROS: nothing -> a target shard, open
    - CLOSE: an open target shard -> that, as what it is

    Attributes:
        step: what of the exchange.
        exchange: of the devices that it runs on.
        count: arrays alike that it does it to.
        carried: whether it takes over target shards that are filled in part, which are open.
        is_open: whether target shards stay as elements travel, since more is to come.
        is_onward: whether the source is what the target has so far.
        shifts: how many shifts it is given; see ``Given``.
        layout: order of the dims of source shards in memory; None if row-major.
    """

    step: Step
    exchange: Exchange
    count: int = 1
    carried: bool = False
    is_open: bool = False
    is_onward: bool = False
    shifts: int = 0
    layout: Shape | None = None


@dataclass(frozen=True, eq=False)
class Loaded:
    """A program on its devices.

    Attributes:
        devices: these.
        compiled: what runs it.
        temporary: bytes that it needs on each device beside what goes in and comes out, as XLA says.
        is_new: whether it was compiled, and can be loaded for other devices.
    """

    devices: Devices
    compiled: jax.stages.Compiled
    temporary: int
    is_new: bool

    def __call__(self, arguments: Sequence[jax.Array]) -> list[jax.Array]:
        """Run it."""
        return private.run_compiled(self.compiled, arguments)


def load(program: ProgramSpec, devices: Devices) -> Loaded:
    """The program on some devices, of which one at least is of this process; compiled if nothing alike was before."""
    return _on(program, devices).get(lambda known: known or _made(program, devices))


def exchanges_compiled() -> int:
    """Programs compiled since the process began, or loaded for other devices."""
    return _on.cache_info().misses


class _Slot:
    """A place for one program, which is made by whoever asks first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.loaded: Loaded | None = None

    def get(self, make: Callable[[Loaded | None], Loaded]) -> Loaded:
        """What ``make`` makes of the program that is there, which it may be itself."""
        with self.lock:
            self.loaded = make(self.loaded)
            return self.loaded


@functools.lru_cache(maxsize=_KEPT)
def _on(program: ProgramSpec, devices: Devices) -> _Slot:
    """For the program on its devices."""
    return _Slot()


@functools.lru_cache(maxsize=_KEPT)
def _anywhere(program: ProgramSpec, client: Any, kind: str) -> _Slot:
    """For the program where it was compiled last."""
    return _Slot()


def _made(program: ProgramSpec, devices: Devices) -> Loaded:
    def compiled(known: Loaded | None) -> Loaded:
        return (
            known if known is not None and (known.is_new or known.devices == devices) else _compiled(program, devices)
        )

    first = _anywhere(program, devices[0].client, devices[0].device_kind).get(compiled)
    if first.devices == devices:
        return first
    return replace(first, devices=devices, compiled=private.loaded_for(first.compiled, first.devices, devices))


def _compiled(program: ProgramSpec, devices: Devices) -> Loaded:
    groups = _arguments(program)
    blocks = [over(devices, *block) for group in groups.values() for block in group]
    shardings: list[Any] = [x.sharding for x in blocks]
    if program.layout is not None:
        for k in range(program.count):
            shardings[k] = Format(Layout(program.layout), shardings[k])
    ends = list(itertools.accumulate(map(len, groups.values()), initial=0))
    spans = {name: range(*span) for name, span in zip(groups, itertools.pairwise(ends), strict=True)}

    def body(*given: jax.Array) -> list[jax.Array]:
        return _run(program, {name: [given[k] for k in span] for name, span in spans.items()})

    body.__name__ = body.__qualname__ = f"dynajax_{program.step.value}"
    mapped = jax.shard_map(
        body,
        mesh=mesh_of(devices),
        in_specs=tuple(x.sharding.spec for x in blocks),
        out_specs=[spec_of(shape) for shape in _results(program)],
        check_vma=False,
    )
    jitted = jax.jit(mapped, in_shardings=tuple(shardings), donate_argnums=tuple(spans["targets"]))
    compiled, is_new = private.compiled(jitted.lower(*blocks))
    analysis = compiled.memory_analysis()
    return Loaded(devices, compiled, 0 if analysis is None else analysis.temp_size_in_bytes, is_new)


def _arguments(program: ProgramSpec) -> dict[str, list[tuple[Any, ...]]]:
    """Shape and dtype of the blocks that a program is given, and how they lie if that is not the usual way."""
    exchange, step, count = program.exchange, program.step, program.count
    dtype, wire = np.dtype(exchange.dtype), wire_dtype(exchange.dtype)
    reads, fills = step in (Step.ALL, Step.CUT), step in (Step.ALL, Step.PLACE)
    chunks = sum(message.chunks for message in exchange.messages)
    table = ((chunks,), np.dtype(np.int32))
    messages = [m for m in exchange.messages if step is Step.PLACE or m.pairs]
    payloads = [(payload_shape(m, exchange.chunk, count), wire) for m in messages]
    takes = step is Step.CLOSE or (fills and program.carried)
    return {
        "sources": [(exchange.source, dtype)] * count * (reads and not program.is_onward),
        "payloads": payloads * (step in (Step.SEND, Step.PLACE)),
        "targets": [(exchange.target, wire)] * count * takes,
        "shifts": [((program.shifts,), np.dtype(np.int32), PartitionSpec())] * (reads or fills) * bool(program.shifts),
        "read": [table] * (reads and chunks > 0),
        "filled": [table] * (fills and chunks > 0),
    }


def _results(program: ProgramSpec) -> list[Shape]:
    """Shapes of the blocks that a program gives."""
    exchange = program.exchange
    if program.step in (Step.CUT, Step.SEND):
        messages = [m for m in exchange.messages if program.step is Step.CUT or m.pairs]
        return [payload_shape(m, exchange.chunk, program.count) for m in messages]
    return [exchange.target] * program.count


def payload_shape(message: Message, chunk: int, count: int) -> Shape:
    """Shape of what a device has for a message, of ``count`` arrays."""
    if message.chunks:
        shapes: list[Shape] = [(message.chunks, chunk)]
    else:
        shapes = [cut.read.size for cut in message.boxes]
    return shapes[0] if len(shapes) * count == 1 else (sum(map(math.prod, shapes)) * count,)


def _run(program: ProgramSpec, blocks: dict[str, list[jax.Array]]) -> list[jax.Array]:
    """What a program computes on a device."""
    exchange, targets = program.exchange, blocks["targets"] or None
    given = Given(*(blocks[name][0] if blocks[name] else None for name in ("shifts", "read", "filled")))
    if program.step is Step.CUT:
        return bodies.cut_out(exchange, blocks["sources"], given)
    if program.step is Step.SEND:
        messages = [m for m in exchange.messages if m.pairs]
        return [bodies.sent(m, payload) for m, payload in zip(messages, blocks["payloads"], strict=True)]
    if program.step is Step.ZEROS:
        return [jnp.zeros(exchange.target, wire_dtype(exchange.dtype))] * program.count
    if program.step is Step.PLACE:
        made = bodies.placed(exchange, blocks["payloads"], targets, given, program.count)
    elif program.step is Step.CLOSE:
        made = blocks["targets"]
    else:
        sources = blocks["targets"] if program.is_onward else blocks["sources"]
        made = bodies.exchanged(exchange, sources, targets, given)
    return made if program.is_open else [from_wire(x, exchange.dtype) for x in made]
