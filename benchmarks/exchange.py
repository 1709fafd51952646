"""How moves by XLA programs scale with devices: dynajax against a jit identity and device_put, interleaved.

    python benchmarks/exchange.py [--devices 8,16,32,64] [--megabytes 16] [--rounds 5] [--json]

Each number of devices is measured in a process of its own. dynajax is prepared, and moves by path "xla" under a budget
of 64 MB; the jit identity is compiled before, for the whole tree. ``travels`` is what crosses links, padding included,
over what has to be moved.
"""

from __future__ import annotations

import os

os.environ.setdefault("NPROC", "128")

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dynajax.arrays import _jax_private as private
from dynajax.engine import prepare_reshard

P = PartitionSpec
LEAVES, BUDGET = 8, "64MB"


def cases(devices: int) -> dict[str, tuple[NamedSharding, NamedSharding]]:
    """Source and target of each move."""
    line = np.asarray(jax.devices()[:devices])
    pairs = Mesh(line.reshape(2, -1), ("x", "y"))
    row, half = Mesh(line, ("x",)), Mesh(line[: devices // 2], ("x",))
    mixed = Mesh(line[np.random.default_rng(0).permutation(devices)], ("x",))
    return {
        "row->column": (NamedSharding(row, P("x")), NamedSharding(row, P(None, "x"))),
        "dp2->tp": (NamedSharding(pairs, P(None, "y")), NamedSharding(row, P(None, "x"))),
        "permuted": (NamedSharding(row, P("x")), NamedSharding(mixed, P("x"))),
        "half->all": (NamedSharding(half, P("x")), NamedSharding(row, P("x"))),
    }


def measured(devices: int, megabytes: int, rounds: int) -> list[dict[str, Any]]:
    """Milliseconds of every way, case by case."""
    jax.config.update("jax_num_cpu_devices", devices)
    shape, made = (megabytes * 2**20 // (4 * LEAVES * 2048), 2048), []
    for name, (source, target) in cases(devices).items():
        new = jax.jit(lambda k: jnp.zeros(shape, jnp.float32) + k, out_shardings=source)
        like = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=source) for _ in range(LEAVES)]
        began = time.perf_counter()
        move = prepare_reshard(like, target, budget=BUDGET, donate=True, path="xla")
        prepare_s = time.perf_counter() - began
        ways: dict[str, Callable[[list[jax.Array]], Any]] = {
            "dynajax": lambda tree, move=move: move(tree)[0],
            "device_put": lambda tree, target=target: [jax.block_until_ready(jax.device_put(x, target)) for x in tree],
        }
        if private.device_order(source) == private.device_order(target):
            identity = jax.jit(lambda t: [jnp.copy(x) for x in t], out_shardings=target, donate_argnums=0)
            ways["jit identity"] = identity.lower(like).compile()
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        shuffled, report = random.Random(0), None
        for _ in range(rounds):
            for way in shuffled.sample(list(ways), len(ways)):
                tree = jax.block_until_ready([new(np.float32(k)) for k in range(LEAVES)])
                start = time.perf_counter()
                moved = jax.block_until_ready(ways[way](tree))
                seconds[way].append((time.perf_counter() - start) * 1e3)
                assert all(float(x[0, 0]) == k for k, x in enumerate(moved))
        _, report = move(jax.block_until_ready([new(np.float32(k)) for k in range(LEAVES)]))
        times = {way: [min(s), statistics.median(s), max(s)] for way, s in seconds.items()}
        travels = report.bytes_travelled / max(report.bytes_moved, 1)
        made.append({"devices": devices, "case": name, "ms": times, "travels": travels, "prepare_s": prepare_s})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="8,16,32,64", help="numbers of devices, separated by commas")
    parser.add_argument("--megabytes", type=int, default=16, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "Some donated buffers")
    if args.child:
        print(json.dumps(measured(int(args.devices), args.megabytes, args.rounds)))
        return
    rows: list[dict[str, Any]] = []
    for devices in args.devices.split(","):
        options = ["--devices", devices, "--megabytes", str(args.megabytes), "--rounds", str(args.rounds), "--child"]
        done = subprocess.run([sys.executable, __file__, *options], check=True, capture_output=True, text=True)
        rows += json.loads(done.stdout.splitlines()[-1])
    if args.json:
        print(json.dumps(rows))
        return
    for r in rows:
        times = "  ".join(f"{way} {'/'.join(f'{t:.0f}' for t in ms)} ms" for way, ms in r["ms"].items())
        print(
            f"{r['devices']:4} {r['case']:12} travels {r['travels']:.2f}  prepared in {r['prepare_s']:.2f} s  {times}"
        )


if __name__ == "__main__":
    main()
