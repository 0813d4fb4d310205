"""Train a GPT, and kill the process in the middle of a write: some of its bytes are in the file, others not.

python tests/ranks/optim/killed_in_write.py state|checkpoint NUMBER RECORD FLAGS...

The write that is cut is the process' NUMBER-th to the optimizer's state file or to a checkpoint's tensor
files. RECORD gets what was cut, as JSON, right before the process dies.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from megalite import GPT, pretrain
from megalite.optim import offload
from megalite.optim.state_storage import BLOCK

RANGE_SIZE = 1 << 16
"""Elements of a range of the state file, so that a small model has many."""


class CutWrite:
    """Write as `os.pwritev` and `os.write` do, but write only the first half of one write, and die.

    Args:
        number: of the write to cut, from 1.
        record: file to which the cut is written.
    """

    def __init__(self, number: int, record: Path) -> None:
        self._number, self._record = number, record
        self._times: Counter[tuple[str, int]] = Counter()  # by file and position
        self._lock = threading.Lock()
        self._pwritev, self._write = os.pwritev, os.write

    def to_state(self, descriptor: int, contents: list[memoryview], start: int) -> int:
        """Write to the state file; nothing else uses `os.pwritev`."""
        (content,) = contents
        self._count(descriptor, content, start, lambda half: self._pwritev(descriptor, [half], start))
        return self._pwritev(descriptor, contents, start)

    def to_checkpoint(self, descriptor: int, content: memoryview) -> int:
        """Write to any file, and count the writes to tensor files."""
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".safetensors"):
            self._count(descriptor, content, 0, lambda half: self._write(descriptor, half))
        return self._write(descriptor, content)

    def _count(
        self, descriptor: int, content: memoryview, start: int, write: Callable[[memoryview], int]
    ) -> None:
        file = os.readlink(f"/proc/self/fd/{descriptor}")
        with self._lock:
            self._times[file, start] += 1
            times, is_last = self._times[file, start], self._times.total() == self._number
        if is_last:
            written = write(content[: len(content) // 2 // BLOCK * BLOCK])
            cut = {"file": file, "start": start, "times": times, "size": len(content), "written": written}
            self._record.write_text(json.dumps(cut))
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Run the training with the flags that follow this program's own arguments."""
    kind, number, record = sys.argv[1:4]
    del sys.argv[1:4]
    offload.RANGE_SIZE = RANGE_SIZE
    cut = CutWrite(int(number), Path(record))
    if kind == "state":
        os.pwritev = cut.to_state
    else:
        os.write = cut.to_checkpoint
    pretrain(GPT)


if __name__ == "__main__":
    main()
