"""Run one check and append its results to a file.

python -m benchmarks.gpu_check.worker NAME CONTEXT RESULTS
"""

from __future__ import annotations

import importlib
import pickle
import signal
import sys
import traceback
from pathlib import Path

from benchmarks.gpu_check.results import failed
from benchmarks.gpu_check.runner import CheckContext
from benchmarks.gpu_check.stages import STAGES


def main(name: str, context_file: str, file: str) -> None:
    """Report each result when it is found, and an exception as a failure with the line that raised it.

    Args:
        context_file: a pickled `CheckContext`.
        file: where results go, a line of JSON for each.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end what the check has started
    check = next(check for stage in STAGES for check in (*stage.builds, *stage.checks) if check.name == name)
    context: CheckContext = pickle.loads(Path(context_file).read_bytes())
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
