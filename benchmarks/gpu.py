"""Packing, exchanging and unpacking on accelerators, as ratios to a copy on the device and from device to device.

    python benchmarks/gpu.py [--platform gpu] [--megabytes 256] [--rounds 5] [--json]

Every program fills or empties the buckets of all devices once: an area of ``--megabytes`` a device. Packing and
unpacking, whose grains lie in random order, are measured against a copy of the area on its device; the exchange, with a
bucket for every round, against ``jax.device_put`` of each area to the next device. Grains are given in words of four
bytes. Without an accelerator the script says so in a line and exits with 2; ``--platform cpu`` runs it on emulated
devices, to try the script.
"""

from __future__ import annotations

import os

os.environ.setdefault("NPROC", "64")

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dynajax.engine import programs
from dynajax.engine.words import Words

GRAINS = (1, 16, 256, 4096)
Run = Callable[[], Any]
Made = tuple[Run, int]
"""What is timed, and the temporary bytes that it needs on all devices."""


def timed(run: Run) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


class Area:
    """What the programs work on: buckets, a shard as large, and a table of grains in random order."""

    def __init__(self, devices: tuple[jax.Device, ...], words: int) -> None:
        count = 1 << (len(devices) - 1).bit_length()
        self.devices, self.buckets = devices, programs.Buckets(count, words // count)
        self.rounds = programs.tell(devices, np.arange(count)), programs.tell(devices, count)
        self.shard = self._random()
        self.area = self._random()
        self.copy = jax.jit(jnp.copy)

    def _random(self) -> jax.Array:
        rows = np.random.default_rng(0).integers(0, 2**32, (len(self.devices), self.buckets.total), np.uint32)
        return jax.block_until_ready(programs.place(self.devices, rows, self.devices))

    def pack(self, grain: int) -> Made:
        program = programs.pack(self.devices, self._hold(grain), self.buckets, self.buckets.words)
        table = self._table(grain)
        return lambda: self._into("area", program(self.area, self.shard, table)), self._temporary(program)

    def unpack(self, grain: int) -> Made:
        program = programs.unpack(self.devices, self._hold(grain), self.buckets, self.buckets.words)
        table = self._table(grain)
        return lambda: self._into("shard", program(self.shard, self.area, table)), self._temporary(program)

    def exchange(self) -> Made:
        program = programs.exchange(self.devices, self.buckets)
        return lambda: self._into("area", program(self.area, *self.rounds)), self._temporary(program)

    def copied(self) -> Run:
        return lambda: self.copy(self.area)

    def sent(self) -> Run:
        shards = [s.data for s in self.area.addressable_shards]
        return lambda: jax.device_put(shards, [*self.devices[1:], self.devices[0]])

    def _hold(self, grain: int) -> programs.Hold:
        return programs.Hold((self.buckets.total,), Words(np.dtype(np.uint32)), grain)

    def _table(self, grain: int) -> jax.Array:
        order = np.random.default_rng(1).permutation(self.buckets.total // grain).astype(np.int32)
        rows = np.tile(order, (len(self.devices), 1))
        return jax.block_until_ready(programs.place(self.devices, rows, self.devices))

    def _temporary(self, program: Any) -> int:
        return len(self.devices) * program.memory_analysis().temp_size_in_bytes

    def _into(self, name: str, made: jax.Array) -> jax.Array:
        setattr(self, name, made)
        return made


def measured(name: str, method: str, made: Made, floor: Callable[[], Run], rounds: int) -> dict[str, Any]:
    """Times of a program between those of its floor."""
    run, temporary = made
    timed(run)
    timed(floor())
    seconds, ratios = [], []
    for _ in range(rounds):
        before = timed(floor())
        seconds.append(timed(run))
        ratios.append(seconds[-1] / statistics.mean((before, timed(floor()))))
    spread = {"min": min(ratios), "median": statistics.median(ratios), "max": max(ratios)}
    return {
        "case": name,
        "method": method,
        "ratio": spread,
        "seconds_median": statistics.median(seconds),
        "peak_extra_bytes": temporary,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default="gpu", help="gpu, tpu, or cpu to try the script")
    parser.add_argument("--megabytes", type=int, default=256, help="area of a device")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 4)
    try:
        devices = list(jax.devices(args.platform))
    except RuntimeError:
        parser.exit(2, f"no {args.platform} here: JAX finds {jax.default_backend()} devices only\n")
    area = Area(tuple(devices), args.megabytes << 18)
    rows = [
        measured(f"{name}, grains of {grain}", name, getattr(area, name)(grain), area.copied, args.rounds)
        for name in ("pack", "unpack")
        for grain in GRAINS
    ]
    if len(devices) > 1:
        rows.append(measured("exchange, every round", "exchange", area.exchange(), area.sent, args.rounds))
    if args.json:
        machine = f"{platform.machine()}, {len(devices)} x {devices[0].device_kind}"
        print(json.dumps({"machine": machine, "cases": rows}))
        return
    print(f"{len(devices)} x {devices[0].device_kind}, {args.megabytes} MB a device")
    for r in rows:
        q = r["ratio"]
        print(
            f"  {r['case']:<24}{q['min']:>8.2f}{q['median']:>8.2f}{q['max']:>8.2f}{r['seconds_median'] * 1e3:>10.2f} ms"
        )


if __name__ == "__main__":
    main()
