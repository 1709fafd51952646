"""Moves between the devices of several processes: dynajax, a jit identity and bare TCP, interleaved.

    python benchmarks/processes.py [--jobs 2x4,4x2] [--megabytes 128] [--rounds 5] [--json]

A job is so many processes of so many emulated devices each, on this machine; they talk over its loopback. dynajax is
prepared and the jit identity compiled before. "TCP" is two processes that send each other as many bytes as the move
sends between the two halves of the job, each way at the same time, from and to memory that was written before: what the
wire itself takes. A round is over when its slowest process is done. Printed are minimum, median and maximum.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dynajax.engine import prepare_reshard

P = PartitionSpec
LEAVES, COLUMNS, BUDGET = 8, 2048, "64MB"


def cases() -> dict[str, tuple[NamedSharding, NamedSharding]]:
    """Source and target of each move; half of the devices are one half of the job."""
    line = np.asarray(jax.devices())
    row, pairs = Mesh(line, ("x",)), Mesh(line.reshape(2, -1), ("x", "y"))
    swapped = Mesh(np.roll(line, len(line) // 2), ("x",))
    return {
        "row->column": (NamedSharding(row, P("x")), NamedSharding(row, P(None, "x"))),
        "dp2->tp": (NamedSharding(pairs, P(None, "y")), NamedSharding(row, P(None, "x"))),
        "tp->dp2": (NamedSharding(row, P(None, "x")), NamedSharding(pairs, P(None, "y"))),
        "halves swapped": (NamedSharding(row, P("x")), NamedSharding(swapped, P("x"))),
    }


class Wire:
    """A TCP connection between the first process of each half of the job; others have none."""

    def __init__(self, rank: int, count: int, port: int) -> None:
        self._socket: socket.socket | None = None
        if rank == 0:
            with socket.create_server(("127.0.0.1", port)) as server:
                self._socket, _ = server.accept()
        elif rank == count // 2:
            self._socket = _connected(port)

    def trade(self, sent: memoryview, received: memoryview) -> None:
        """Send and receive at the same time."""
        if self._socket is not None:
            sender = threading.Thread(target=self._socket.sendall, args=(sent,))
            sender.start()
            at = 0
            while at < len(received):
                at += self._socket.recv_into(received[at:])
            sender.join()


def _connected(port: int) -> socket.socket:
    """The connection to a server that may not listen yet."""
    end = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def measured(rank: int, count: int, port: int, megabytes: int, rounds: int) -> list[dict[str, Any]]:
    """Milliseconds of this process, round by round, of every way and case."""
    shape, made = (megabytes * 2**20 // (4 * LEAVES * COLUMNS), COLUMNS), []
    wire, process = Wire(rank, count, port), np.array([d.process_index for d in jax.devices()])
    for name, (source, target) in cases().items():
        new = jax.jit(lambda k: jnp.zeros(shape, jnp.float32) + k, out_shardings=source)
        like = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=source) for _ in range(LEAVES)]
        move = prepare_reshard(like, target, budget=BUDGET, donate=True, path="xla")
        crosses = [0, 0]
        for tensor in move.plan.moves:
            copies, half = tensor.copies, process * 2 // count
            ends = half[copies.source], half[copies.target]
            for k in (0, 1):
                crosses[k] += int(copies.volumes[(ends[0] == k) & (ends[1] != k)].sum()) * tensor.tensor.itemsize
        sent, received = (memoryview(bytearray(os.urandom(1 << 10) * (max(crosses) >> 10))) for _ in range(2))
        ways: dict[str, Callable[[list[jax.Array]], Any]] = {
            "dynajax": lambda tree, move=move: move(tree)[0],
            "TCP": lambda tree, s=sent, r=received: (wire.trade(s, r), tree)[1],
        }
        if name != "halves swapped":  # jit refuses another order of the devices
            identity = jax.jit(lambda t: [jnp.copy(x) for x in t], out_shardings=target, donate_argnums=0)
            ways["jit identity"] = identity.lower(like).compile()
        milliseconds: dict[str, list[float]] = {way: [] for way in ways}
        shuffled = random.Random(0)
        for turn in range(1 + rounds):
            for way in shuffled.sample(list(ways), len(ways)):
                tree = jax.block_until_ready([new(np.float32(k)) for k in range(LEAVES)])
                multihost_utils.sync_global_devices(f"{name} {turn} {way}")
                start = time.perf_counter()
                moved = jax.block_until_ready(ways[way](tree))
                if turn:  # the first one makes connections
                    milliseconds[way].append((time.perf_counter() - start) * 1e3)
                for k, x in enumerate(moved):
                    assert all((np.asarray(shard.data) == k).all() for shard in x.addressable_shards)
        made.append({"case": name, "crosses": crosses, "ms": milliseconds})
    return made


def child(options: list[str]) -> None:
    """One process of a job."""
    warnings.filterwarnings("ignore", "Some donated buffers")
    address, rank, count, devices, port, megabytes, rounds = options
    jax.config.update("jax_num_cpu_devices", int(devices))
    jax.distributed.initialize(address, int(count), int(rank), initialization_timeout=60)
    print(json.dumps(measured(int(rank), int(count), int(port), int(megabytes), int(rounds))))
    jax.distributed.shutdown()


def job(processes: int, devices: int, megabytes: int, rounds: int) -> list[dict[str, Any]]:
    """Start a job, and take for each round the time of its slowest process."""
    told = [str(x) for x in (processes, devices, _free_port(), megabytes, rounds)]
    address = f"127.0.0.1:{_free_port()}"
    started = [
        subprocess.Popen(
            [sys.executable, __file__, "--child", address, str(rank), *told],
            env=os.environ | {"NPROC": str(4 * devices)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("a process of the job failed")
    every = [json.loads(output.splitlines()[-1]) for output in outputs]
    made = []
    for rows in zip(*every, strict=True):
        slowest = {way: [max(t) for t in zip(*(r["ms"][way] for r in rows), strict=True)] for way in rows[0]["ms"]}
        times = {way: [min(t), statistics.median(t), max(t)] for way, t in slowest.items()}
        made.append(
            {"job": f"{processes}x{devices}", "case": rows[0]["case"], "crosses": rows[0]["crosses"], "ms": times}
        )
    return made


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default="2x4,4x2", help="processes x devices of each, separated by commas")
    parser.add_argument("--megabytes", type=int, default=128, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for text in args.jobs.split(","):
        processes, devices = map(int, text.split("x"))
        rows += job(processes, devices, args.megabytes, args.rounds)
    if args.json:
        print(json.dumps(rows))
        return
    for r in rows:
        times = "  ".join(f"{way} {'/'.join(f'{t:.0f}' for t in ms)} ms" for way, ms in r["ms"].items())
        crosses = " and ".join(f"{n / 2**20:.0f}" for n in r["crosses"])
        print(f"{r['job']:4} {r['case']:15} {crosses} MB cross  {times}")


if __name__ == "__main__":
    main()
