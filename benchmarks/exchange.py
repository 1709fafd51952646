"""Four ways to exchange messages between devices, interleaved: what the engine does, and what it might do instead.

    python benchmarks/exchange.py [--megabytes 64] [--rounds 5] [--json]

Only the exchange is timed: the messages lie packed where each way wants them. Ratios are to the floor, two threads that
copy just the bytes sent, contiguously and into fresh pages. ``peak_extra_bytes`` is what a way allocates on all devices
together while it runs, what it receives included: outputs that do not take the place of inputs, and temporary memory.

- xor: the engine's program. In round s device i trades a bucket with i ^ s; the rounds are data.
- xor, unrolled: the same rounds for each plan, compiled into it.
- all-to-all: one collective of slots as large as the largest message.
- direct: one ``jax.device_put`` a message, all in flight together.
- jit identity: ``jax.jit`` with ``out_shardings`` from rows to columns, which is the balanced case; it has packing and
  unpacking in it, which the others have before and behind them.
"""

from __future__ import annotations

import os

os.environ.setdefault("NPROC", "64")

import argparse
import functools
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from floor import copy_seconds
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dynajax.bytesize import format_bytes
from dynajax.engine import programs
from dynajax.engine.waves import NOWHERE, Grains, Wave, longest_of, waves_of
from dynajax.engine.xla import buckets_within
from dynajax.vps.tiling import segment_sum

DEVICES = 8
BUDGET = 16 << 20
P = PartitionSpec


@dataclass(frozen=True)
class Case:
    """Messages: words from device to device, shape (devices, devices)."""

    name: str
    words: np.ndarray[Any, Any]

    @property
    def nbytes(self) -> int:
        return int(self.words.sum()) * 4

    @property
    def messages(self) -> list[tuple[int, int, int]]:
        return [(int(i), int(j), int(self.words[i, j])) for i, j in np.argwhere(self.words)]


@dataclass(frozen=True)
class Ready:
    """A way made ready for a case: what is timed, a check of what it returned, and the bytes that it allocates."""

    run: Callable[[], Any]
    check: Callable[[Any], None]
    peak_extra: int


def cases(nbytes: int) -> list[Case]:
    """Messages of about ``nbytes`` in all."""
    rng, eye = np.random.default_rng(0), np.eye(DEVICES, dtype=bool)
    shares = {
        "balanced": ~eye * 1.0,
        "skewed": ~eye * rng.lognormal(0, 1, (DEVICES, DEVICES)),
        "one to all": ~eye * (np.arange(DEVICES) == 0)[:, None] * 1.0,
        "permuted": np.eye(DEVICES)[[3, 0, 6, 1, 7, 5, 2, 4]],
        "halves": np.eye(DEVICES, k=DEVICES // 2),
    }
    # Whole kilowords, so that every way sends the same words.
    return [
        Case(name, (share / share.sum() * nbytes / 4).astype(np.int64) >> 10 << 10) for name, share in shares.items()
    ]


def _word(sender: Any, receiver: Any) -> Any:
    """What every word of a message holds."""
    return np.asarray(sender, np.uint32) * 256 + np.asarray(receiver, np.uint32) + 1


def _mesh() -> Mesh:
    return Mesh(np.asarray(jax.devices()), ("device",))


def _on_devices(rows: np.ndarray[Any, Any]) -> jax.Array:
    return jax.block_until_ready(programs.place(tuple(jax.devices()), rows, jax.devices()))


def _temporary(program: Any) -> int:
    """Bytes that a program allocates on all devices."""
    m = program.memory_analysis()
    return DEVICES * (m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes)


def _waves(case: Case, buckets: programs.Buckets) -> list[Wave]:
    """The engine's waves, a kiloword a grain; the number of a grain says whom it is from and for."""
    sender, receiver, words = (np.asarray(column) for column in zip(*case.messages, strict=True))
    sender, receiver = np.repeat(sender, words >> 10), np.repeat(receiver, words >> 10)
    grains = Grains(sender, receiver, _word(sender, receiver).astype(np.int64), np.arange(len(sender)))
    sent = segment_sum(sender * DEVICES + receiver, np.ones_like(sender), DEVICES**2).reshape(DEVICES, DEVICES)
    return list(waves_of(grains, longest_of(sent), np.arange(DEVICES), buckets.count, buckets.words >> 10))


def _check_wave(wave: Wave, area: np.ndarray[Any, Any]) -> None:
    came = area.reshape(DEVICES, -1, 1 << 10)
    for receiver in range(DEVICES):
        for place in np.flatnonzero(wave.target[receiver] != NOWHERE).tolist():
            step = int(wave.rounds[place * 1024 // (area.size // DEVICES // len(wave.rounds))])
            assert (came[receiver, place] == _word(receiver ^ step, receiver)).all()


def xor(case: Case) -> Ready:
    devices, buckets = tuple(jax.devices()), buckets_within(BUDGET, DEVICES)
    waves = _waves(case, buckets)
    areas = [_on_devices(np.repeat(w.source.astype(np.uint32), 1 << 10, axis=1)) for w in waves]
    told = [(programs.tell(devices, w.rounds), programs.tell(devices, w.count)) for w in waves]
    program = programs.exchange(devices, buckets)

    def run() -> list[jax.Array]:
        return [jax.block_until_ready(program(area, *t)) for area, t in zip(areas, told, strict=True)]

    def check(came: list[jax.Array]) -> None:
        for wave, area in zip(waves, came, strict=True):
            _check_wave(wave, np.asarray(area))

    return Ready(run, check, _temporary(program))


def unrolled(case: Case) -> Ready:
    buckets = buckets_within(BUDGET, DEVICES)
    waves = _waves(case, buckets)
    areas = [_on_devices(np.repeat(w.source.astype(np.uint32), 1 << 10, axis=1)) for w in waves]
    compiled = [_unrolled_program(tuple(w.rounds[: w.count].tolist()), buckets) for w in waves]

    def run() -> list[jax.Array]:
        return [jax.block_until_ready(program(area)) for area, program in zip(areas, compiled, strict=True)]

    def check(came: list[jax.Array]) -> None:
        for wave, area in zip(waves, came, strict=True):
            _check_wave(wave, np.asarray(area))

    return Ready(run, check, max(map(_temporary, compiled)))


@functools.cache
def _unrolled_program(rounds: tuple[int, ...], buckets: programs.Buckets) -> Any:
    def body(area: jax.Array) -> jax.Array:
        for k, step in enumerate(rounds):
            if step:
                pairs = [(i, i ^ step) for i in range(DEVICES)]
                at = slice(k * buckets.words, (k + 1) * buckets.words)
                area = area.at[at].set(jax.lax.ppermute(area[at], "device", pairs))
        return area

    return _compiled(body, DEVICES * buckets.total)


def _compiled(body: Any, words: int) -> Any:
    program = jax.shard_map(body, mesh=_mesh(), in_specs=P("device"), out_specs=P("device"), check_vma=False)
    shape = jax.ShapeDtypeStruct((words,), np.uint32, sharding=NamedSharding(_mesh(), P("device")))
    return jax.jit(program, donate_argnums=0).lower(shape).compile()


@functools.cache
def _all_to_all_program(slot: int) -> Any:
    return _compiled(
        lambda x: jax.lax.all_to_all(x.reshape(DEVICES, slot), "device", 0, 0).reshape(-1), DEVICES**2 * slot
    )


def all_to_all(case: Case) -> Ready:
    slot = int(case.words.max())
    sent = _word(*np.indices((DEVICES, DEVICES)))
    area = _on_devices(np.repeat(sent, slot, axis=1))
    program = _all_to_all_program(slot)

    def check(came: jax.Array) -> None:
        assert (np.asarray(came).reshape(DEVICES, DEVICES, slot) == sent.T[:, :, None]).all()

    return Ready(lambda: jax.block_until_ready(program(area)), check, _temporary(program))


def direct(case: Case) -> Ready:
    devices = jax.devices()
    make = jax.jit(lambda value, words: jnp.full((words,), value), static_argnums=1)
    with_ends = [(i, j, jax.device_put(make(_word(i, j), n), devices[i])) for i, j, n in case.messages]
    sent = jax.block_until_ready([x for _, _, x in with_ends])
    targets = [devices[j] for _, j, _ in with_ends]

    def check(came: list[jax.Array]) -> None:
        for (i, j, _), x in zip(with_ends, came, strict=True):
            assert x.devices() == {devices[j]}
            assert (np.asarray(x) == _word(i, j)).all()

    return Ready(lambda: jax.block_until_ready(jax.device_put(sent, targets)), check, case.nbytes)


def identity(case: Case) -> Ready:
    width = int(case.words.max())
    side = NamedSharding(_mesh(), P("device")), NamedSharding(_mesh(), P(None, "device"))
    whole = np.arange(DEVICES**2 * width, dtype=np.uint32).reshape(DEVICES, DEVICES * width)
    x = jax.block_until_ready(jax.device_put(whole, side[0]))
    program = _identity_program(whole.shape)

    def check(came: jax.Array) -> None:
        assert came.sharding == side[1]
        assert np.array_equal(came, whole)

    return Ready(lambda: jax.block_until_ready(program(x)), check, _temporary(program))


@functools.cache
def _identity_program(shape: tuple[int, ...]) -> Any:
    x = jax.ShapeDtypeStruct(shape, np.uint32, sharding=NamedSharding(_mesh(), P("device")))
    out = NamedSharding(_mesh(), P(None, "device"))
    return jax.jit(jnp.copy, out_shardings=out, donate_argnums=0).lower(x).compile()


WAYS: dict[str, Callable[[Case], Ready]] = {
    "xor": xor,
    "xor, unrolled": unrolled,
    "all-to-all": all_to_all,
    "direct": direct,
    "jit identity": identity,
}


def run_case(case: Case, rounds: int) -> list[dict[str, Any]]:
    ways = [name for name in WAYS if name != "jit identity" or case.name == "balanced"]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    ratios: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, int] = {}
    source = np.ones(case.nbytes, np.uint8)
    for number in range(rounds + 1):  # the first warms up and is checked
        for name in ways:
            gc.collect()
            ready = WAYS[name](case)
            around = [copy_seconds([[source[: case.nbytes // 2]]] * 2, case.nbytes // 2)]
            start = time.perf_counter()
            came = ready.run()
            took = time.perf_counter() - start
            around.append(copy_seconds([[source[: case.nbytes // 2]]] * 2, case.nbytes // 2))
            if number:
                seconds[name].append(took)
                ratios[name].append(took / statistics.mean(around))
            else:
                ready.check(came)
                peaks[name] = ready.peak_extra
            del ready, came
    return [
        {
            "case": case.name,
            "method": name,
            "ratio": {"min": min(ratios[name]), "median": statistics.median(ratios[name]), "max": max(ratios[name])},
            "seconds_median": statistics.median(seconds[name]),
            "peak_extra_bytes": peaks[name],
        }
        for name in ways
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64, help="bytes that all messages of a case have together")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    rows: list[dict[str, Any]] = []
    for case in cases(args.megabytes << 20):
        rows += run_case(case, args.rounds)
        if not args.json:
            _show(case, rows[-sum(r["case"] == case.name for r in rows) :])
    if args.json:
        machine = f"{platform.machine()}, {os.cpu_count()} cores, {jax.default_backend()} x {jax.device_count()}"
        print(json.dumps({"machine": machine, "cases": rows}))


def _show(case: Case, rows: list[dict[str, Any]]) -> None:
    sent = f"{case.name}, {format_bytes(case.nbytes)}"
    print(f"\n{sent:<22}{'ratio to floor: min':>20}{'median':>9}{'max':>9}{'seconds':>10}{'peak extra':>13}")
    for r in rows:
        q = r["ratio"]
        print(
            f"  {r['method']:<20}{q['min']:>20.2f}{q['median']:>9.2f}{q['max']:>9.2f}{r['seconds_median']:>10.3f}"
            f"{format_bytes(r['peak_extra_bytes']):>13}",
            flush=True,
        )


if __name__ == "__main__":
    main()
