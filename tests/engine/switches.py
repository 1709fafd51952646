"""Many random switches in a process of its own, as a job would make them: ``python switches.py PATH COUNT SEED``.

Run by test_switches.py without any setting of threads. Prints the number of switches made.
"""

from __future__ import annotations

import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import dynajax as dj

DEVICES = 16
SPECS = [
    PartitionSpec("x", "y"),
    PartitionSpec("y"),
    PartitionSpec(None, "x"),
    PartitionSpec(("x", "y")),
    PartitionSpec(),
]


def main(path: str, count: int, seed: int) -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES)
    rng = np.random.default_rng(seed)
    # On the path that allocates them by itself, shards are large enough that XLA has to.
    side, budget = (512, "2MB") if path == "shared memory" else (64, "64KB")
    whole = {"w": rng.standard_normal((side, side)).astype(np.float32), "step": np.int32(3)}

    # Few sets of devices, so that programs are seen again, in any order and shape.
    groups = [rng.permutation(DEVICES)[:n] for n in (16, 6)]

    def layout() -> dict[str, NamedSharding]:
        numbers = rng.permutation(groups[rng.integers(len(groups))])
        rows = int(rng.choice([n for n in (1, 2, 4) if len(numbers) % n == 0]))
        on = Mesh(np.asarray(jax.devices())[numbers].reshape(rows, -1), ("x", "y"))
        return {k: NamedSharding(on, _fitting(on, v.shape, rng)) for k, v in whole.items()}

    state = jax.block_until_ready(jax.device_put(whole, layout()))
    for _ in range(count):
        donate = bool(rng.integers(2))
        state, _ = dj.reshard(state, layout(), donate=donate, budget=budget, path=path)  # pyright: ignore
        for k, x in state.items():
            for shard in x.addressable_shards:
                assert np.array_equal(shard.data, whole[k][shard.index]), k
    print(count)


def _fitting(on: Mesh, shape: tuple[int, ...], rng: np.random.Generator) -> PartitionSpec:
    """A random spec that cuts the shape evenly."""
    fits = []
    for spec in SPECS:
        ways = [np.prod([on.shape[axis] for axis in np.atleast_1d(axes)]) if axes else 1 for axes in spec]
        if len(ways) <= len(shape) and all(size % n == 0 for size, n in zip(shape, ways, strict=False)):
            fits.append(spec)
    return fits[rng.integers(len(fits))]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
