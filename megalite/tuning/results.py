"""What a tuning has found so far, in a file that the next start goes on from."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megalite.errors import UserError
from megalite.parsing import parse_json
from megalite.tuning.trial import Trial

FILE = "results.json"


class Results:
    """Trials by layout, on the disk as soon as they are known.

    Args:
        folder: of the tuning.
        about: what the trials were made with: those of anything else are not taken.

    Raises:
        UserError: the folder holds the results of another tuning, or cannot be read or written.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self._file = folder / FILE
        self._about = json.loads(json.dumps(about))
        self._trials: dict[str, Trial] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self._file.exists():
                self._read()
        except OSError as error:
            raise UserError(f"--folder {folder} cannot be used ({error.strerror}): give another") from None

    def __len__(self) -> int:
        return len(self._trials)

    def get(self, layout: str) -> Trial | None:
        """None where it was not tried yet."""
        return self._trials.get(layout)

    def add(self, layout: str, trial: Trial) -> None:
        """Keeps a trial; the file is whole at every moment."""
        self._trials[layout] = trial
        record = {
            "about": self._about,
            "trials": [{"layout": name, **asdict(each)} for name, each in self._trials.items()],
        }
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(record, indent=1), encoding="utf-8")
        os.replace(partial, self._file)

    def _read(self) -> None:
        try:
            record = parse_json(self._file.read_text(encoding="utf-8"))
            about, trials = dict(record["about"]), record["trials"]
            found = {each.pop("layout"): Trial(**each) for each in trials}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(
                f"{self._file} is no file of results: give another --folder, or delete it"
            ) from None
        if about != self._about:
            changed = ", ".join(name for name in self._about if about.get(name) != self._about[name])
            raise UserError(
                f"{self._file} holds the results of another tuning ({changed} changed): give another "
                "--folder, or delete it"
            )
        self._trials = found
