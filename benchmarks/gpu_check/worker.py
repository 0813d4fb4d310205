"""Run one check and append its results to a file.

python -m benchmarks.gpu_check.worker NAME DEVICE SCRATCH FILE [small]
"""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path

from benchmarks.gpu_check.results import failed
from benchmarks.gpu_check.runner import CheckContext
from benchmarks.gpu_check.stages import STAGES


def main(name: str, device: str, scratch: str, file: str, *options: str) -> None:
    """Report each result when it is found, and an exception as a failure with the line that raised it."""
    check = next(check for stage in STAGES for check in (*stage.builds, *stage.checks) if check.name == name)
    context = CheckContext(device, "small" in options, Path(scratch))
    with open(file, "a", encoding="utf-8") as results:
        try:
            module, function = check.function.split(".")
            found = importlib.import_module(f"benchmarks.gpu_check.{module}")
            for result in getattr(found, function)(context):
                results.write(result.to_json() + "\n")
                results.flush()
        except Exception as error:
            traceback.print_exc()
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            results.write(failed(name, f"{type(error).__name__}: {error} ({place})").to_json() + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
