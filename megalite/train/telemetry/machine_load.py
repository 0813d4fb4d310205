"""Measure how busy the machine of the reporting rank is: GPU, CPU, disk, network and InfiniBand."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import torch

_INFINIBAND = Path("/sys/class/infiniband")
_INFINIBAND_WORD = 4
"""Bytes per unit of an InfiniBand port's data counters."""
_UNREADABLE = (OSError, RuntimeError, ValueError)
"""Errors raised for counters that this machine or container does not have."""


class MachineLoad:
    """Rates between two calls, over all processes of the machine.

    CPU, disk and network need psutil; a GPU's utilization needs nvidia-ml-py. Without a package its values
    are missing. InfiniBand's counters are files in /sys.

    Args:
        device: this rank's device.
        infiniband: folder of the InfiniBand devices.
    """

    def __init__(self, device: torch.device, infiniband: Path = _INFINIBAND) -> None:
        self._device = device
        self._infiniband = infiniband
        self._psutil = _psutil()
        self._bytes, self._time = dict(self._counters()), time.monotonic()
        if self._psutil is not None:
            self._psutil.cpu_percent()  # its next call measures from here

    def rates(self) -> dict[str, float]:
        """Return the mean rates since the last call: MB/s (10^6 bytes), and percent of all cores.

        The GPU's utilization is the share of the last sample period (up to a second) in which a kernel ran.
        """
        now, counters = time.monotonic(), dict(self._counters())
        seconds = max(now - self._time, 1e-9)
        rates = {
            f"{name}_mb_per_second": round((counters[name] - self._bytes[name]) / seconds / 1e6, 3)
            for name in counters.keys() & self._bytes.keys()
        }
        self._bytes, self._time = counters, now
        if self._psutil is not None:
            rates["cpu_percent"] = self._psutil.cpu_percent()
        if (utilization := _gpu_utilization(self._device)) is not None:
            rates["gpu_percent"] = utilization
        return dict(sorted(rates.items()))

    def _counters(self) -> Iterator[tuple[str, int]]:
        """Yield the bytes transferred since the machine started."""
        if self._psutil is not None:
            with suppress(*_UNREADABLE):
                if disk := self._psutil.disk_io_counters():
                    yield from (("disk_read", disk.read_bytes), ("disk_write", disk.write_bytes))
            with suppress(*_UNREADABLE):
                if network := self._psutil.net_io_counters():
                    yield from (("network_receive", network.bytes_recv), ("network_send", network.bytes_sent))
        for name, counter in (("receive", "port_rcv_data"), ("send", "port_xmit_data")):
            with suppress(*_UNREADABLE):
                ports = list(self._infiniband.glob(f"*/ports/*/counters/{counter}"))
                if ports:
                    words = sum(int(port.read_text()) for port in ports)
                    yield f"infiniband_{name}", words * _INFINIBAND_WORD


def _psutil() -> ModuleType | None:
    try:
        import psutil
    except ImportError:
        return None
    return psutil


def _gpu_utilization(device: torch.device) -> float | None:
    """Return a GPU's utilization in percent; None for a CPU, or if the driver does not report it."""
    if device.type != "cuda":
        return None
    try:
        return float(torch.cuda.utilization(device))
    except Exception:  # nvidia-ml-py is missing, or raised an error; its errors have no narrower base
        return None
