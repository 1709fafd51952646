"""A donated move in a process of its own: ``python resident.py PATH BUDGET``. Run by test_resident_peak.py.

Prints the bytes of the state, and the resident bytes above the larger of before and after at the fullest moment.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dynajax.engine import prepare_reshard
from dynajax.engine.transport import Path as Way

LEAVES, SHAPE = 16, (1024, 2048)


def resident(field: str) -> int:
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(field))
    return int(line.split()[1]) * 1024


def main(way: Way, budget: str) -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = Mesh(np.asarray(jax.devices()), ("x",))
    rows, columns = (NamedSharding(mesh, spec) for spec in (PartitionSpec("x"), PartitionSpec(None, "x")))
    make = jax.jit(lambda k: jax.numpy.full(SHAPE, k, np.float32), out_shardings=rows)

    def state() -> Any:
        return jax.block_until_ready([make(np.float32(k)) for k in range(LEAVES)])

    move = prepare_reshard(state(), columns, donate=True, budget=budget, path=way)
    move(state())  # what is made once in a process
    tree = state()
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    moved, _ = move(tree)
    high = resident("VmHWM")
    del tree
    gc.collect()
    after = resident("VmRSS")
    assert all((np.asarray(x[:1, :1]) == k).all() for k, x in enumerate(moved))
    print(json.dumps([LEAVES * 4 * int(np.prod(SHAPE)), high - max(before, after)]))


if __name__ == "__main__":
    main(cast(Way, sys.argv[1]), sys.argv[2])
