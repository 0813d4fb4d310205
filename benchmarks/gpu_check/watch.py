"""Clock, power and temperature of the first GPU while something runs, by nvidia-smi."""

from __future__ import annotations

import shutil
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks_event_reasons.active")
UNITS = ("MHz", "MHz", "W", "°C", "")


class Watch:
    """Samples of the block, one a second.

    Attributes:
        samples: samples of each field except the last, as numbers; empty without nvidia-smi.
        reasons: why the clock was lowered, as nvidia-smi writes it: a bit mask.
    """

    def __init__(self) -> None:
        self.samples: list[list[float]] = []
        self.reasons: set[str] = set()

    def read(self, text: str) -> None:
        """Take the lines that nvidia-smi printed; those with a field that it does not know are skipped."""
        for line in text.splitlines():
            cells = [cell.strip() for cell in line.split(",")]
            try:
                self.samples.append([float(cell) for cell in cells[: len(FIELDS) - 1]])
            except ValueError:
                continue
            self.reasons.update(cells[len(FIELDS) - 1 :])

    def summary(self) -> str:
        """Return the medians of the later half in a line."""
        if not self.samples:
            return "no clock or power: nvidia-smi reported none"
        later = self.samples[len(self.samples) // 2 :]
        medians = [statistics.median(column) for column in zip(*later, strict=True)]
        names = zip(FIELDS, medians, UNITS, strict=False)
        shown = ", ".join(f"{name} {value:.0f} {unit}" for name, value, unit in names)
        return f"{shown}, {FIELDS[-1]} {' '.join(sorted(self.reasons)) or '-'}"


@contextmanager
def watched(device: str) -> Iterator[Watch]:
    """Sample in the block; what was seen can be read after it."""
    watch = Watch()
    if device != "cuda" or shutil.which("nvidia-smi") is None:
        yield watch
        return
    query = [
        "nvidia-smi",
        "-i",
        "0",
        f"--query-gpu={','.join(FIELDS)}",
        "--format=csv,noheader,nounits",
        "-l",
        "1",
    ]
    process = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield watch
    finally:
        process.terminate()
        watch.read(process.communicate()[0])
