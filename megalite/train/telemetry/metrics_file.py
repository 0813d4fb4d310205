"""Append a run's metrics to a file of JSON lines, with the load of the machine; a full disk ends no run."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from megalite.train.telemetry.metrics import (
    ExpertUse,
    IterationMetrics,
    MetricsWriter,
    TaskScores,
    ValidationMetrics,
)
from megalite.train.telemetry.timers import TimesByRank
from megalite.utils.errors import UserError
from megalite.utils.log import THIS_RANK, log

MAX_HELD_BYTES = 16 * 2**20
"""Bytes of records that are kept in memory while the disk is full; further records are lost."""


class OutputFile:
    """File of complete records, which keeps records in memory while they cannot be written.

    A full disk may cut off a record. The rest of it is written first once there is space, so the file stays
    readable. Failures are not raised; the log shows when they begin and end.

    Args:
        flag: the option that names the file, for messages.

    Raises:
        UserError: the file cannot be opened.
    """

    def __init__(self, path: Path, flag: str) -> None:
        self._path = path
        self._name = f"{flag} {path}"
        self._records: deque[bytes] = deque()
        self._num_held_bytes = 0
        self._num_written = 0  # bytes of the first record
        self._num_lost = 0
        self._is_failing = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            raise UserError(f"{self._name} cannot be written ({error.strerror}): pass another file") from None

    def write(self, record: bytes) -> None:
        """Add a record, which `flush` writes."""
        if self._num_held_bytes + len(record) > MAX_HELD_BYTES:
            self._num_lost += 1
            return
        self._records.append(record)
        self._num_held_bytes += len(record)

    def flush(self) -> None:
        """Write the pending records; if that fails, they stay pending."""
        try:
            if self._is_failing:
                self._reopen()
            while self._records:
                self._write_some()
        except OSError as error:
            if not self._is_failing:
                log.warning(
                    "%s cannot be written (%s): training continues; up to %d MiB of records are kept, and "
                    "written once there is space",
                    self._name,
                    error.strerror,
                    MAX_HELD_BYTES >> 20,
                    extra=THIS_RANK,
                )
            self._is_failing = True
            return
        if self._is_failing:
            lost = f"; {self._num_lost} records were lost" if self._num_lost else ""
            log.warning("%s is written again%s", self._name, lost, extra=THIS_RANK)
        self._is_failing, self._num_lost = False, 0

    def close(self) -> None:
        """Write the pending records, or log how many are lost, and close the file."""
        self.flush()
        if num_lost := self._num_lost + len(self._records):
            log.warning("%s: the last %d records are lost", self._name, num_lost, extra=THIS_RANK)
        try:
            self._file.close()
        except OSError as error:  # NFS reports only here that a quota is exceeded
            log.warning("%s: its last records may be lost (%s)", self._name, error.strerror, extra=THIS_RANK)

    def _write_some(self) -> None:
        """Write the rest of the first record, or as much of it as fits on the disk."""
        record = self._records[0]
        self._num_written += self._file.write(record[self._num_written :])
        self._size = self._file.tell()
        if self._num_written == len(record):
            self._records.popleft()
            self._num_held_bytes -= len(record)
            self._num_written = 0

    def _open(self) -> None:
        self._file = self._path.open("ab", buffering=0)
        self._size = self._file.tell()

    def _reopen(self) -> None:
        """Reopen the file: it may have been deleted to make space, or its file system remounted."""
        size = self._size
        self._file.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._open()
        if self._size != size:
            self._num_written = 0  # the beginning of a cut record is lost


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


class MetricsFile(MetricsWriter):
    """File of one JSON object per line: the metrics of an interval, or of an evaluation.

    An evaluation is ``{"validation": {...}}``, or ``{"tasks": {...}}`` for benchmark tasks. The tokens of
    experts are ``{"experts": {...}}``, a change of the layout is ``{"layout_change": {...}}``.

    Floats keep their full precision. JSON cannot represent floats that are not finite: they are the strings
    "NaN", "Infinity" and "-Infinity". `wall_time` is the time at which the line was written, and `start_time`
    the time at which the process began to write, both in seconds since 1970 by this host's clock: they show
    restarts and pauses. Each line is passed to the operating system before the next iteration starts, or kept
    in memory if the disk is full (see `OutputFile`). Lines of an earlier run are kept, so a resumed run
    continues the same file. An iteration that ran again, because the run ended without a checkpoint, has two
    lines; use the later one.

    Args:
        load: measures the machine's load for each line of an interval; None for lines without it.

    Raises:
        UserError: the file cannot be written.
    """

    def __init__(self, path: Path, load: MachineLoad | None = None) -> None:
        self._start = time.time()
        self._load = load
        self._file = OutputFile(path, "--metrics-file")
        if _ends_in_broken_line(path):
            self._file.write(b"\n")  # otherwise the half-written line of a killed run corrupts the first line

    def iteration(self, metrics: IterationMetrics, times: TimesByRank) -> None:
        record = dataclasses.asdict(metrics)
        del record["warnings"]  # text for the log; num_nan and num_skipped have the numbers
        record |= record.pop("other_losses")
        for name in ("params_norm", "num_zeros", "decoupled_learning_rate", "time_breakdown"):
            if record[name] is None:  # not requested, or the model has none
                del record[name]
        self._write(record | (self._load.rates() if self._load is not None else {}))

    def validation(self, metrics: ValidationMetrics) -> None:
        record = dataclasses.asdict(metrics) | {"ppl": metrics.ppl}
        if not metrics.name:
            del record["name"]
        if record.pop("is_of_average"):
            record["weights"] = "ema"
        record |= record.pop("other_losses")
        self._write({"validation": record})

    def task_scores(self, metrics: TaskScores) -> None:
        self._write({"tasks": dataclasses.asdict(metrics)})

    def expert_use(self, loads: ExpertUse) -> None:
        self._write({"experts": loads.record()})

    def layout_change(self, iteration: int, change: Mapping[str, Any]) -> None:
        self._write({"layout_change": {"iteration": iteration, **change}})

    def close(self, *, has_failed: bool = False) -> None:
        self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        timed = record | {"start_time": self._start, "wall_time": time.time()}
        # One write, so that a reader never sees half a line.
        self._file.write(json.dumps(_spell_non_finite(timed), allow_nan=False).encode() + b"\n")
        self._file.flush()


def _ends_in_broken_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            return False
        file.seek(-1, 2)
        return file.read(1) != b"\n"


def _spell_non_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _spell_non_finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
