"""Topology: which links join the devices of a cluster, and how fast they are.

Devices sit in nested domains: a device, a node, a fabric. Each tier is a kind of link and the domains
that it joins; two devices talk over the first tier that has them in one domain. Clusters are TOML files
beside this one, or are read off jax devices. Speeds are those of one device, in one direction::

    name = "a800-16x8"
    source = "where the figures are from"
    nodes = 16                      # left out: as many as a job asks for

    [[tiers]]                       # the first tier is the device itself: copies in its own memory
    name = "memory"
    devices = 1
    gigabytes_per_second = 900
    latency_us = 5

    [[tiers]]                       # the second tier is the node
    name = "nvlink"
    devices = 8
    gigabytes_per_second = 200
    latency_us = 10

    [[tiers]]                       # without "devices": joins all
    name = "infiniband"
    gigabytes_per_second = 25
    latency_us = 20
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynajax.errors import TopologyError

_KEYS = {"name", "source", "nodes", "device_kinds", "tiers"}
_TIER_KEYS = {"name", "devices", "gigabytes_per_second", "latency_us"}


@dataclass(frozen=True)
class Tier:
    """A kind of link.

    Attributes:
        name: what people call it.
        bytes_per_second: what one device sends, and at the same time receives, over it.
        latency_s: seconds before the first byte of a message.
    """

    name: str
    bytes_per_second: float
    latency_s: float


@dataclass(frozen=True, eq=False)
class Topology:
    """The devices of a cluster, numbered from 0, and the links between them.

    Attributes:
        name: for people.
        tiers: kinds of links, the nearest first; tier 0 is the memory of a device, tier 1 joins a node.
        domains: domain of each device in each tier, shape (tiers, devices); −1 for a device that the tier misses.
    """

    name: str
    tiers: tuple[Tier, ...]
    domains: NDArray[np.int64]

    @property
    def num_devices(self) -> int:
        """Devices that the topology knows."""
        return self.domains.shape[1]

    @cached_property
    def node(self) -> NDArray[np.int64]:
        """Node of each device, shape (devices,)."""
        return self.domains[min(1, len(self.domains) - 1)]

    @property
    def num_nodes(self) -> int:
        """Nodes with at least one device."""
        return len(np.unique(self.node))

    @property
    def key(self) -> bytes:
        """Equal for topologies that say the same."""
        return repr(self.tiers).encode() + self.domains.tobytes()

    def require_devices(self, count: int) -> None:
        """Refuse to speak of devices that the topology does not know.

        Raises:
            TopologyError: there are fewer than ``count``.
        """
        if self.num_devices < count:
            raise TopologyError(
                f"the layouts use device {count - 1} and topology {self.name!r} has {self.num_devices} devices, "
                "numbered from 0; use a larger topology"
            )

    def between(self, a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.int64]:
        """The nearest tier that joins devices ``a[k]`` and ``b[k]``.

        Raises:
            TopologyError: two devices have no link.
        """
        tier = np.full(len(a), -1, np.int64)
        for level in range(len(self.tiers) - 1, -1, -1):
            there = self.domains[level]
            tier[(there[a] == there[b]) & (there[a] >= 0)] = level
        if len(tier) and tier.min() < 0:
            k = int(np.argmin(tier))
            raise TopologyError(
                f"topology {self.name!r} has no link between devices {int(a[k])} and {int(b[k])}; "
                "add a tier that joins them, or use devices that are joined"
            )
        return tier

    @staticmethod
    def regular(name: str, tiers: Sequence[tuple[Tier, int]], devices: int) -> Topology:
        """Domains of equal size, one after the other.

        Args:
            name: for people.
            tiers: each tier with the devices of one of its domains, 0 for all devices.
            devices: how many devices there are.
        """
        number = np.arange(devices)
        domains = np.stack([number // (span or max(devices, 1)) for _, span in tiers])
        return Topology(name, tuple(tier for tier, _ in tiers), domains)

    @staticmethod
    def load(cluster: str, devices: int | None = None) -> Topology:
        """Read a cluster file.

        Args:
            cluster: a name that ``topology_names`` knows, or the path of a TOML file.
            devices: how many of its devices to use, in order; needed if the file does not say how many nodes there are.

        Raises:
            TopologyError: the file is unknown, unreadable or incomplete, or has fewer devices.
        """
        return _read(_table(cluster), cluster, devices)

    @staticmethod
    def of_devices(devices: Sequence[Any], hosts: Sequence[str] | None = None) -> Topology:
        """The topology that jax devices tell of themselves; reads their attributes and nothing else.

        Devices of one TPU slice are a node, since its links reach across hosts; other devices are a node if their
        process, or its host, is the same. Speeds come from the cluster file that names their kind, or else from the
        file of their platform: they are published figures, not measured ones.

        Args:
            devices: in the order in which plans number them.
            hosts: host of each process, by process index, where several processes share a host.
        """
        first = devices[0]
        table = _table_of_kind(str(getattr(first, "device_kind", "")), str(first.platform))
        node = [_island(d, hosts) for d in devices]
        labels = {name: k for k, name in enumerate(dict.fromkeys(node))}
        number = np.arange(len(devices))
        island = np.asarray([labels[name] for name in node], np.int64)
        domains = [number, island, np.zeros_like(number)][: len(table["tiers"])]
        if len(labels) == 1:
            domains = domains[:2]
        if len(labels) > 1 and len(domains) < 3:
            raise TopologyError(
                f"{table['name']} is one machine and the devices are on {len(labels)}; give a topology file with a "
                "tier that joins them"
            )
        tiers = tuple(_tier(t, table["name"]) for t in table["tiers"][: len(domains)])
        return Topology(f"{len(devices)} x {getattr(first, 'device_kind', first.platform)}", tiers, np.stack(domains))


def topology_names() -> tuple[str, ...]:
    """Names of the cluster files that come with dynajax."""
    return tuple(sorted(f.name[: -len(".toml")] for f in files("dynajax.meshes").iterdir() if f.name.endswith(".toml")))


def _table(cluster: str) -> dict[str, Any]:
    if cluster in topology_names():
        return tomllib.loads((files("dynajax.meshes") / f"{cluster}.toml").read_text(encoding="utf-8"))
    path = Path(cluster)
    if not path.is_file():
        raise TopologyError(
            f"there is no topology {cluster!r}; choose one of {', '.join(topology_names())} or give the path of a file"
        )
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise TopologyError(f"topology {cluster!r} cannot be read: {error}") from None


def _read(table: Mapping[str, Any], cluster: str, devices: int | None) -> Topology:
    unknown = set(table) - _KEYS
    tables = table.get("tiers")
    if unknown or not tables or not isinstance(tables, list):
        wrong = f"has the unknown keys {sorted(unknown)}" if unknown else "has no [[tiers]]"
        raise TopologyError(f"topology {cluster!r} {wrong}; it may have {', '.join(sorted(_KEYS))}")
    tiers = [(_tier(t, cluster), _count(t, "devices", cluster)) for t in tables]
    node = tiers[min(1, len(tiers) - 1)][1]
    there = _count(table, "nodes", cluster) * node if "nodes" in table else None
    if devices is None and there is None:
        raise TopologyError(f"topology {cluster!r} has no number of nodes; say how many devices to use")
    count = devices if devices is not None else there
    if there is not None and devices is not None and devices > there:
        raise TopologyError(
            f"{devices} devices are asked for and topology {cluster!r} has {there} (nodes: {table['nodes']}, of "
            f"{node}); use a smaller strategy or a larger topology"
        )
    return Topology.regular(str(table.get("name", cluster)), tiers, int(count or 0))


def _tier(table: Mapping[str, Any], cluster: str) -> Tier:
    unknown, missing = set(table) - _TIER_KEYS, {"name", "gigabytes_per_second"} - set(table)
    if unknown or missing:
        wrong = f"the unknown keys {sorted(unknown)}" if unknown else f"no {' and no '.join(sorted(missing))}"
        raise TopologyError(f"a tier of topology {cluster!r} has {wrong}; it may have {', '.join(sorted(_TIER_KEYS))}")
    speed, latency = table["gigabytes_per_second"], table.get("latency_us", 0)
    if not isinstance(speed, (int, float)) or not speed > 0:
        raise TopologyError(f"tier {table['name']!r} of {cluster!r} has a speed of {speed!r}; give more than 0 GB/s")
    if not isinstance(latency, (int, float)) or not latency >= 0:
        raise TopologyError(f"tier {table['name']!r} of {cluster!r} has a latency of {latency!r}; give 0 µs or more")
    return Tier(str(table["name"]), speed * 1e9, latency * 1e-6)


def _count(table: Mapping[str, Any], key: str, cluster: str) -> int:
    """A whole number of a file, 0 if it is left out."""
    count = table.get(key, 0)
    if not isinstance(count, int) or isinstance(count, bool) or count < (key in table):
        raise TopologyError(f"topology {cluster!r} has {key} = {count!r}; give 1 or more, or leave it out")
    return count


def _island(device: Any, hosts: Sequence[str] | None) -> object:
    """What joins a device to its neighbours: a TPU slice, else a host."""
    if getattr(device, "coords", None) is not None:
        return "slice", getattr(device, "slice_index", 0)
    return "host", hosts[device.process_index] if hosts else device.process_index


def _table_of_kind(kind: str, platform: str) -> dict[str, Any]:
    tables = [_table(name) for name in topology_names()]
    for wanted in (kind, platform):
        for table in tables:
            if wanted in table.get("device_kinds", ()):
                return table
    return next(t for t in tables if "cpu" in t.get("device_kinds", ()))
