"""Start the processes of a job, each with two devices, and read what they print."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from dynajax.errors import DynajaxError

ALL_OF_IT_S = 600


def run_processes(script: Path, count: int, *told: str, wait_s: int) -> list[str]:
    """What the processes of a job print, of which each waits ``wait_s`` for the others in a collective.

    Each is started as ``python SCRIPT ADDRESS COUNT RANK TOLD...``. All have to end well.
    """
    environment = dict(os.environ)
    environment["XLA_FLAGS"] += f" --xla_cpu_collective_timeout_seconds={wait_s}"
    command = [sys.executable, str(script), f"127.0.0.1:{_free_port()}", str(count)]
    running = [
        subprocess.Popen(
            [*command, str(rank), *told], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in range(count)
    ]
    try:
        ends = [process.communicate(timeout=ALL_OF_IT_S) for process in running]
    finally:
        for process in running:
            process.kill()
    errors = "\n".join(f"process {rank}: {error[-1500:]}" for rank, (_, error) in enumerate(ends))
    assert [process.returncode for process in running] == [0] * count, errors
    return [out for out, _ in ends]


def join(address: str, count: str, rank: str) -> None:
    """Become one of the processes."""
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(address, int(count), int(rank), initialization_timeout=60)


def raised(call: Callable[[], Any]) -> str:
    """The error of a call, which has to raise one."""
    try:
        call()
    except DynajaxError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error")


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
