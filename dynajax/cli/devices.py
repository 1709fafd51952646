"""Devices to run on: accelerators if there are enough of them, else emulated on the CPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import jax

from dynajax.errors import RunError

_THREADS = "64"


def use_devices(count: int) -> tuple[jax.Device, ...]:
    """``count`` devices. Call it before anything else uses JAX.

    Raises:
        RunError: the number makes no sense, or JAX has already started with fewer devices.
    """
    if count < 1:
        raise RunError(f"--devices {count}: give 1 or more")
    # Each emulated device holds a thread while it waits in a collective for the others. With the default pool,
    # of one thread a core, programs starve each other and the process dies after 40 s.
    os.environ.setdefault("NPROC", _THREADS)
    with contextlib.suppress(RuntimeError):  # JAX has started: what it started with is looked at below
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices()
    if len(devices) < count and devices[0].platform != "cpu":
        devices = jax.devices("cpu")
    if len(devices) < count:
        raise RunError(
            f"--devices {count}: JAX started with {len(devices)} before they could be emulated; "
            f"run this in a fresh process, or take --devices {len(devices)}"
        )
    return tuple(devices[:count])


def described(devices: Sequence[jax.Device]) -> str:
    """The devices in a few words."""
    if devices[0].platform == "cpu":
        return f"{len(devices)} devices, emulated on the CPU"
    return f"{len(devices)} devices, {devices[0].device_kind}"
