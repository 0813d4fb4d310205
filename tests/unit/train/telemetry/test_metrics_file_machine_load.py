"""Test the rates of the reporting rank's machine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megalite.train.telemetry import metrics_file
from megalite.train.telemetry.metrics_file import MachineLoad

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Stop the clock at the only element."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def _write_port(folder: Path, device: str, received: int, sent: int) -> None:
    counters = folder / device / "ports" / "1" / "counters"
    counters.mkdir(parents=True, exist_ok=True)
    (counters / "port_rcv_data").write_text(f"{received}\n")
    (counters / "port_xmit_data").write_text(f"{sent}\n")


def test_infiniband_counts_words_of_all_ports(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_file, "_psutil", lambda: None)
    _write_port(tmp_path, "mlx5_0", 1000, 2000)
    _write_port(tmp_path, "mlx5_1", 0, 0)
    load = MachineLoad(CPU, tmp_path)
    _write_port(tmp_path, "mlx5_0", 1000 + 5_000_000, 2000)
    _write_port(tmp_path, "mlx5_1", 5_000_000, 1_000_000)
    clock[0] += 2.0
    assert load.rates() == {
        "infiniband_receive_mb_per_second": 20.0,  # 10 million words of 4 bytes in 2 s
        "infiniband_send_mb_per_second": 2.0,
    }
    clock[0] += 2.0
    assert set(load.rates().values()) == {0.0}


def test_disk_and_network(tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimpleNamespace(read_bytes=0, write_bytes=10**6)
    fake = SimpleNamespace(
        cpu_percent=lambda: 50.0,
        disk_io_counters=lambda: disk,
        net_io_counters=lambda: None,  # a container without interfaces
    )
    monkeypatch.setattr(metrics_file, "_psutil", lambda: fake)
    load = MachineLoad(CPU, tmp_path)
    disk.read_bytes, clock[0] = 3 * 10**6, 101.5
    assert load.rates() == {
        "cpu_percent": 50.0,
        "disk_read_mb_per_second": 2.0,
        "disk_write_mb_per_second": 0.0,
    }


def test_counters_that_cannot_be_read_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise NotImplementedError("no /proc/diskstats")

    fake = SimpleNamespace(cpu_percent=lambda: 1.0, disk_io_counters=refuse, net_io_counters=refuse)
    monkeypatch.setattr(metrics_file, "_psutil", lambda: fake)
    _write_port(tmp_path, "mlx5_0", 1, 1)
    (tmp_path / "mlx5_0" / "ports" / "1" / "counters" / "port_rcv_data").write_text("broken")
    assert set(MachineLoad(CPU, tmp_path).rates()) == {"cpu_percent", "infiniband_send_mb_per_second"}


def test_this_machine() -> None:
    psutil = pytest.importorskip("psutil")
    assert psutil.net_io_counters() is None or "network_send_mb_per_second" in MachineLoad(CPU).rates()


def test_a_gpu_without_its_package_has_no_utilization(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> int:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "utilization", fail)
    assert "gpu_percent" not in MachineLoad(torch.device("cuda", 0)).rates()
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 97)
    assert MachineLoad(torch.device("cuda", 0)).rates()["gpu_percent"] == 97.0
