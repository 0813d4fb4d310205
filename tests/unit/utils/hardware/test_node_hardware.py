"""Test what a rank finds out about its node, with a fake CUDA driver and fake system files."""

from __future__ import annotations

import resource
from ctypes import c_int
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.utils.errors import UserError
from megalite.utils.hardware import node_hardware
from megalite.utils.hardware.gpu_query import list_gpus
from megalite.utils.hardware.gpus import GPUS, gpu_of_device
from megalite.utils.hardware.host_memory import total_bytes
from megalite.utils.hardware.node_hardware import CPU, NodeHardware, inspect_node, weakest

GPU = {
    "name": "NVIDIA H100 80GB HBM3",
    "memory_bytes": 84_929_937_408,
    "num_sms": 132,
    "has_peer_access": True,
}


class FakeDriver:
    """Answers as libcuda does for some equal GPUs."""

    def __init__(self, count: int, *, peers: bool = True, status: int = 0) -> None:
        self.count, self.peers, self.status = count, peers, status

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.count
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = ordinal
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: c_int) -> int:
        name.value = GPU["name"].encode()
        return 0

    def cuDeviceTotalMem_v2(self, memory: Any, device: c_int) -> int:
        memory._obj.value = GPU["memory_bytes"]
        return 0

    def cuDeviceGetAttribute(self, number: Any, attribute: int, device: c_int) -> int:
        number._obj.value = {16: GPU["num_sms"]}[attribute]
        return 0

    def cuDeviceCanAccessPeer(self, can: Any, device: c_int, other: c_int) -> int:
        assert device.value != other.value
        can._obj.value = self.peers
        return 0


def test_the_driver_lists_the_gpus() -> None:
    assert list_gpus(FakeDriver(2)) == [GPU] * 2
    assert list_gpus(FakeDriver(1, peers=False)) == [GPU]
    assert list_gpus(FakeDriver(2, peers=False)) == [{**GPU, "has_peer_access": False}] * 2
    assert list_gpus(FakeDriver(0)) == list_gpus(FakeDriver(1, status=100)) == []


def test_a_rank_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(node_hardware, "_gpus", lambda: [GPU, {**GPU, "memory_bytes": 40e9}])
    node = inspect_node("auto", 1, 2)
    assert (node.device, node.device_type, node.memory_bytes) == (GPU["name"], "cuda", 40e9)
    assert inspect_node("auto", 4, 5, shares_gpus=True).memory_bytes == GPU["memory_bytes"] / 3
    assert inspect_node("gloo", 1, 2).device == CPU
    monkeypatch.setattr(node_hardware, "_gpus", lambda: [])
    assert inspect_node("auto", 1, 2).device == CPU


def test_a_machine_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "query.py").write_text("import ctypes; ctypes.CDLL('lib-that-does-not-exist.so')")
    monkeypatch.setattr(node_hardware, "_QUERY", tmp_path / "query.py")
    assert node_hardware._gpus() == []


def test_cpu_ranks_share_the_memory_up_to_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert inspect_node("gloo", 0, 4).memory_bytes == total_bytes() / 4
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (3_000_000, 3_000_000))
    assert inspect_node("gloo", 0, 4).memory_bytes == 3_000_000


def test_the_limit_of_a_control_group(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step\n")
    group = tmp_path / "sys/fs/cgroup/job"
    (group / "step").mkdir(parents=True)
    assert total_bytes(tmp_path) == total_bytes()
    (group / "step/memory.max").write_text("max\n")
    (group / "memory.max").write_text("5000000\n")
    assert total_bytes(tmp_path) == 5_000_000


def test_network_adapters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, rate, state in (("a", "200 Gb/sec (4X HDR)", "4: ACTIVE"), ("b", "400 Gb/sec", "1: DOWN")):
        port = tmp_path / name / "ports/1"
        port.mkdir(parents=True)
        (port / "rate").write_text(f"{rate}\n")
        (port / "state").write_text(f"{state}\n")
    monkeypatch.setattr(node_hardware, "_ADAPTERS", tmp_path)
    assert inspect_node("gloo", 0, 4).network_gbps == 200 / 8 / 4
    monkeypatch.setattr(node_hardware, "_ADAPTERS", tmp_path / "none")
    assert inspect_node("gloo", 0, 4).network_gbps is None


def test_the_weakest_of_the_nodes() -> None:
    node = NodeHardware(GPU["name"], 80e9, 132, True, 50.0, 2e12, 8)
    other = replace(node, memory_bytes=40e9, num_sms=108, has_peer_access=False, num_ranks=4)
    slow = replace(node, network_gbps=None, host_bytes=1e12)
    assert weakest([node, other, slow]) == replace(other, host_bytes=1e12)
    with pytest.raises(UserError, match="some ranks find a GPU and others none"):
        weakest([node, replace(node, device=CPU)])


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80"),
        ("NVIDIA A100-SXM4-40GB", "a100-80"),
        ("NVIDIA GH200 480GB", "gh200-96"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Tesla V100-SXM2-32GB", "v100-32"),
    ],
)
def test_the_rates_of_a_device(name: str, row: str) -> None:
    assert gpu_of_device(name) == GPUS[row]


def test_a_device_without_a_row() -> None:
    assert gpu_of_device("NVIDIA L40") is None
