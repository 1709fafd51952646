"""Topologies: cluster files, nearest links, and what jax devices tell of themselves."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest

from dynajax.errors import TopologyError
from dynajax.meshes import Topology, topology_names


@dataclass
class Device:
    """The attributes of a jax device that a topology reads, for hardware that this machine lacks."""

    platform: str
    device_kind: str
    process_index: int = 0
    slice_index: int = 0
    coords: tuple[int, ...] | None = None


def test_every_cluster_file_loads_and_says_where_its_figures_are_from():
    assert {"a800-16x8", "h100", "pcie4", "machine"} <= set(topology_names())
    for name in topology_names():
        topology = Topology.load(name, 8)
        assert topology.num_devices == 8
        assert topology.tiers[0].bytes_per_second > 0


def test_the_a800_cluster_has_nodes_of_eight_on_nvlink_and_infiniband_between():
    topology = Topology.load("a800-16x8")
    assert (topology.num_devices, topology.num_nodes) == (128, 16)
    tier = topology.between(np.array([0, 0, 0, 7, 127]), np.array([0, 1, 8, 8, 120]))
    assert [topology.tiers[t].name for t in tier] == ["memory", "nvlink", "infiniband", "infiniband", "nvlink"]
    assert [t.bytes_per_second for t in topology.tiers] == [9e11, 2e11, 2.5e10]
    assert topology.node[[0, 7, 8, 127]].tolist() == [0, 0, 1, 15]


def test_a_file_without_nodes_is_as_large_as_the_job():
    assert Topology.load("h100", 1024).num_nodes == 128
    with pytest.raises(TopologyError, match="say how many devices"):
        Topology.load("h100")


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "mine"\nnodes = 2\n'
        '[[tiers]]\nname = "memory"\ndevices = 1\ngigabytes_per_second = 1\n'
        '[[tiers]]\nname = "bus"\ndevices = 3\ngigabytes_per_second = 0.5\nlatency_us = 2\n'
    )
    topology = Topology.load(str(path))
    assert topology.num_devices == 6
    assert topology.tiers[1].latency_s == pytest.approx(2e-6)
    with pytest.raises(TopologyError, match="no link between devices 2 and 3; add a tier"):
        topology.between(np.array([0, 2]), np.array([1, 3]))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tiers = [", "cannot be read"),
        ('name = "x"', r"has no \[\[tiers\]\]"),
        ('speed = 3\n[[tiers]]\nname = "a"\ngigabytes_per_second = 1', r"unknown keys \['speed'\]"),
        ('[[tiers]]\nname = "a"', "has no gigabytes_per_second"),
        ('[[tiers]]\nname = "a"\ngigabytes_per_second = 1\nwidth = 2', r"unknown keys \['width'\]"),
        ('[[tiers]]\nname = "a"\ngigabytes_per_second = 0', "speed of 0; give more"),
        ('[[tiers]]\nname = "a"\ngigabytes_per_second = "fast"', "speed of 'fast'; give more"),
        ('[[tiers]]\nname = "a"\ngigabytes_per_second = 1\nlatency_us = -1', "latency of -1; give 0"),
        ('[[tiers]]\nname = "a"\ngigabytes_per_second = 1\ndevices = "all"', "devices = 'all'; give 1 or more"),
        ('nodes = 0\n[[tiers]]\nname = "a"\ngigabytes_per_second = 1', "nodes = 0; give 1 or more"),
        ("tiers = 3", r"has no \[\[tiers\]\]"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path, text, words):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(TopologyError, match=words) as caught:
        Topology.load(str(path), 8)
    assert "\n" not in str(caught.value)


def test_an_unknown_name_and_too_many_devices_are_refused():
    with pytest.raises(TopologyError, match="choose one of a800-16x8, h100"):
        Topology.load("a900", 8)
    with pytest.raises(TopologyError, match=r"256 devices are asked for .* has 128 .nodes: 16, of 8."):
        Topology.load("a800-16x8", 256)


def test_emulated_devices_of_one_process_are_one_node():
    topology = Topology.of_devices(jax.devices())
    assert (topology.num_devices, topology.num_nodes) == (len(jax.devices()), 1)
    assert topology.tiers[1].name == "shared memory"


def test_gpus_are_nodes_by_process_or_by_host():
    gpus = [Device("gpu", "NVIDIA H100 80GB HBM3", process_index=p) for p in (0, 0, 1, 1)]
    topology = Topology.of_devices(gpus)
    assert topology.node.tolist() == [0, 0, 1, 1]
    assert [topology.tiers[t].name for t in topology.between(np.array([0, 0]), np.array([1, 2]))] == [
        "nvlink",
        "infiniband",
    ]
    assert Topology.of_devices(gpus, hosts=["a", "a"]).num_nodes == 1


def test_a_tpu_slice_is_a_node_whatever_its_processes():
    chips = [Device("tpu", "TPU v5p", process_index=k, slice_index=k // 2, coords=(k, 0, 0)) for k in range(4)]
    topology = Topology.of_devices(chips)
    assert topology.node.tolist() == [0, 0, 1, 1]
    assert [t.name for t in topology.tiers] == ["memory", "ici", "dcn"]
