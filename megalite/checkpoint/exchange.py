"""How the ranks agree on one save: through the store, from any thread, with no collective.

A collective from a second thread would need a group of its own: a mesh of connections among all ranks that
lies idle between saves, and a time-out that a slow disk runs into. What is to be told is little, and the
store, which every rank is connected to anyway, keeps it for as long as the slowest disk takes. Only rank 0
hears what every rank says: the others hear its verdict.
"""

from __future__ import annotations

import base64
import traceback
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from megalite.errors import UserError
from megalite.meeting import at_work, wait_for_key

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_WELL, _WRONG = "+", "-"


class SaveError(UserError):
    """A checkpoint that could not be written; what was there before it still is."""


class Answer(NamedTuple):
    """What a rank came to.

    Attributes:
        text: its result, or what went wrong.
    """

    is_well: bool
    text: str


class Exchange:
    """The ranks' messages about one save.

    Args:
        name: of the save: no two exchanges over a store have the same.
    """

    def __init__(self, store: Store, rank: int, world_size: int, name: str) -> None:
        self.rank = rank
        self._store = store
        self._world_size = world_size
        self._prefix = f"megalite/{name}"
        self._steps: list[str] = []

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def from_first(self, step: str, action: Callable[[], str]) -> str:
        """Calls `action` on rank 0 and gives every rank its result.

        Raises:
            SaveError: it raised, or rank 0 is gone; on every rank.
        """
        key = self._key(step)
        self._steps.append(key)
        if self.is_first:
            answer = self._answer_of(action)
            self._store.set(key, _packed(answer))
        elif wait_for_key(self._store, key):
            answer = _unpacked(self._store.get(key))
        else:
            answer = Answer(False, "rank 0 does not answer: it is gone or hangs")
        if not answer.is_well:
            raise SaveError(answer.text)
        return answer.text

    def to_first(self, step: str, action: Callable[[], str]) -> Sequence[Answer]:
        """Calls `action` on every rank; rank 0 gets what each of them came to, the others nothing."""
        answer, all_there = self._answer_of(action), self._key(step, "all")
        self._store.set(self._key(step, self.rank), _packed(answer))
        if self._store.add(self._key(step, "number"), 1) == self._world_size:
            self._store.set(all_there, "")
        if not self.is_first:
            return ()
        self._steps += [all_there, self._key(step, "number")]
        wait_for_key(self._store, all_there)
        return [self._take(self._key(step, rank), rank) for rank in range(self._world_size)]

    def forget(self) -> None:
        """Takes what is left out of the store; call it when every rank has come to the exchange's end."""
        if self.is_first:
            with suppress(RuntimeError):
                for key in self._steps:
                    self._store.delete_key(key)

    def _answer_of(self, action: Callable[[], str]) -> Answer:
        try:
            with at_work(self._store):
                return Answer(True, action())
        except SaveError as error:
            return Answer(False, str(error))
        except OSError as error:
            where = f": {error.filename}" if error.filename else ""
            return Answer(False, f"rank {self.rank}: {error.strerror or error}{where}")
        except Exception:  # a defect here must not leave the other ranks waiting
            return Answer(False, f"rank {self.rank} failed:\n{traceback.format_exc()}")

    def _take(self, key: str, rank: int) -> Answer:
        """A rank's answer, which the store keeps no longer."""
        if not self._store.check([key]):
            return Answer(False, f"rank {rank} does not answer: it is gone or hangs")
        answer = _unpacked(self._store.get(key))
        self._store.delete_key(key)
        return answer

    def _key(self, step: str, who: object = 0) -> str:
        return f"{self._prefix}/{step}/{who}"


def _packed(answer: Answer) -> str:
    """An answer as ASCII text; the names and places of a rank's tensors pack to about a tenth."""
    content = zlib.compress(answer.text.encode(), level=1)
    return (_WELL if answer.is_well else _WRONG) + base64.b64encode(content).decode()


def _unpacked(message: bytes) -> Answer:
    return Answer(message[:1] == _WELL.encode(), zlib.decompress(base64.b64decode(message[1:])).decode())
