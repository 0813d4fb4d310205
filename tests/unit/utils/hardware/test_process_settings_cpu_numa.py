"""Binding to the NUMA node of a GPU, with a folder in place of /sys."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megalite.config import ParallelConfig
from megalite.train import setup
from megalite.utils.hardware import process_settings

ADDRESS = "0001:dc:00.0"
DEVICE = torch.device("cuda", 0)


def machine(folder: Path, nodes: dict[int, str], node_of_gpu: str | None) -> Path:
    """Describe a machine as Linux does."""
    for node, cores in nodes.items():
        path = folder / f"devices/system/node/node{node}"
        path.mkdir(parents=True)
        (path / "cpulist").write_text(f"{cores}\n")
    if node_of_gpu is not None:
        gpu = folder / "bus/pci/devices" / ADDRESS
        gpu.mkdir(parents=True)
        (gpu / "numa_node").write_text(f"{node_of_gpu}\n")
    return folder


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The cores to which threads are bound; the process may run on 8 cores."""
    found: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cores: found.append(cores))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xDC, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return found


TWO = {0: "0-1,4-5", 1: "2-3,6,7", 2: ""}
"""Two nodes with cores, and one with memory alone."""


def test_a_rank_is_bound_to_the_cores_of_its_gpu(
    tmp_path: Path, bound: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "listdir", lambda folder: {"/proc/self/task": ["7", "8", "9"]}[folder])
    found = process_settings.bind_to_gpu(DEVICE, machine(tmp_path, TWO, "1"))
    assert found == f"the 4 cores of NUMA node 1, which has the GPU at {ADDRESS}"
    assert bound == [{2, 3, 6, 7}] * 3


@pytest.mark.parametrize(
    ("nodes", "node_of_gpu", "reason"),
    [
        ({0: "0-7"}, "0", "one NUMA node"),
        ({0: "0-7", 1: ""}, "0", "one NUMA node"),
        ({}, "0", "one NUMA node"),
        (TWO, "-1", "is not known"),
        (TWO, None, "is not known"),
        (TWO, "2", "is not known"),
        ({0: "0-7", 1: "8-15"}, "1", "8 cores, to which the launcher has bound the rank"),
    ],
)
def test_a_rank_is_left_alone(
    tmp_path: Path, bound: list[set[int]], nodes: dict[int, str], node_of_gpu: str | None, reason: str
) -> None:
    assert reason in process_settings.bind_to_gpu(DEVICE, machine(tmp_path, nodes, node_of_gpu))
    assert bound == []


@pytest.mark.parametrize(
    ("device", "flag", "expected"), [("cuda", True, 1), ("cuda", False, 0), ("cpu", True, 0)]
)
def test_only_gpu_ranks_are_bound(
    monkeypatch: pytest.MonkeyPatch, device: str, flag: bool, expected: int
) -> None:
    calls: list[torch.device] = []
    monkeypatch.setattr(setup, "bind_to_gpu", lambda device: calls.append(device) or "")
    setup.bind_to_cores(ParallelConfig(numa_binding=flag), torch.device(device))
    assert len(calls) == expected


BIND = """
import os, sys, threading
from pathlib import Path
from unittest import mock
import torch
from megalite.utils.hardware import process_settings

def affinity_in_a_new_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
    thread.start()
    thread.join()
    return found[0]

may_end, own = threading.Event(), os.sched_getaffinity(0)
older = threading.Thread(target=may_end.wait)
older.start()
with mock.patch.object(process_settings, "_pci_address", lambda device: sys.argv[2]):
    process_settings.bind_to_gpu(torch.device("cuda", 0), Path(sys.argv[1]))
bound = {max(own)}
assert os.sched_getaffinity(older.native_id) == affinity_in_a_new_thread() == os.sched_getaffinity(0) == bound
assert torch.get_num_threads() == 1
may_end.set()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_older_and_later_threads_run_on_the_cores(tmp_path: Path) -> None:
    *others, last = sorted(os.sched_getaffinity(0))
    system = machine(tmp_path, {0: ",".join(map(str, others)), 1: str(last)}, "1")
    subprocess.run([sys.executable, "-c", BIND, system, ADDRESS], check=True, timeout=600)
