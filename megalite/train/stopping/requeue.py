"""The file by which a scheduler's script sees that a run ended early and wants to be started again."""

from __future__ import annotations

from pathlib import Path

from megalite.folders import no_follow
from megalite.log import log

NAME = "requeue"


class RequeueNote:
    """`SAVE/requeue`: there from an early end to the next start, with the reason in it.

    torchrun has one status for whatever goes wrong in its workers, so that a status alone does not tell it.

    Args:
        folder: of --save; None where there is none, and on every rank but the first.
    """

    def __init__(self, folder: str | None) -> None:
        self._file = Path(folder) / NAME if folder else None

    def write(self, reason: str) -> None:
        """Leaves the file; a folder that cannot be written is told, and is no reason to end otherwise."""
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with open(self._file, "w", encoding="utf-8", opener=no_follow) as file:
                file.write(reason + "\n")
        except OSError as error:
            log.warning("%s cannot be written (%s)", self._file, error.strerror)

    def remove(self) -> None:
        """Takes away what an earlier run left; where that fails it is told, as the run itself can go on."""
        if self._file is None:
            return
        try:
            self._file.unlink(missing_ok=True)
        except OSError as error:
            log.warning(
                "%s cannot be deleted (%s): a script may take it for this run's", self._file, error.strerror
            )
