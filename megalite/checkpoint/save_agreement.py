"""Let the ranks agree on a save through the store, from any thread, without collectives.

A collective from a second thread would need its own group: a mesh of connections among all ranks that is
idle between saves, and a timeout that a slow disk exceeds. The messages are small. Every rank is already
connected to the store, which keeps them for as long as the slowest disk takes. Only rank 0 reads the answers
of all ranks; the others read its decision.
"""

from __future__ import annotations

import base64
import traceback
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from megalite.distributed.agreement import at_work, wait_for_key
from megalite.utils.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import Store

_DONE, _FAILED = "+", "-"


class SaveError(UserError):
    """Raised if a checkpoint cannot be written; earlier checkpoints are unchanged."""


class _Answer(NamedTuple):
    """Outcome of a step of a save on one rank.

    Attributes:
        text: result of the step, or the error.
    """

    is_done: bool
    text: str

    def result(self) -> str:
        if not self.is_done:
            raise SaveError(self.text)
        return self.text


class SaveAgreement:
    """Messages about one save between the ranks.

    Args:
        name: name of the save, unique in the store.
    """

    def __init__(self, store: Store, rank: int, world_size: int, name: str) -> None:
        self.rank = rank
        self._store = store
        self._world_size = world_size
        self._prefix = f"megalite/{name}"
        self._keys: list[str] = []

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def from_first(self, step: str, action: Callable[[], str | None]) -> str:
        """Call `action` on rank 0 and return its result on every rank; None is returned as an empty text.

        Raises:
            SaveError: `action` raised, or rank 0 is gone. Every rank raises it.
        """
        key = self._key(step)
        self._keys.append(key)
        if self.is_first:
            answer = self._run(action)
            self._store.set(key, _packed(answer))
        elif wait_for_key(self._store, key):
            answer = _unpacked(self._store.get(key))
        else:
            answer = _Answer(False, "rank 0 does not answer: it is gone or hangs")
        return answer.result()

    def from_all(
        self,
        step: str,
        action: Callable[[], str | None],
        conclude: Callable[[Sequence[str]], str | None] = lambda results: None,
    ) -> str:
        """Call `action` on every rank, and then `conclude` with the results of all ranks on rank 0.

        Returns:
            The result of `conclude`, on every rank.

        Raises:
            SaveError: one of the calls raised, or a rank is gone. Every rank raises it.
        """
        answer, all_there = self._run(action), self._key(step, "all")
        self._store.set(self._key(step, self.rank), _packed(answer))
        if self._store.add(self._key(step, "number"), 1) == self._world_size:
            self._store.set(all_there, "")
        answers: list[_Answer] = []
        if self.is_first:
            self._keys += [all_there, self._key(step, "number")]
            wait_for_key(self._store, all_there)
            answers = [self._remove(self._key(step, rank), rank) for rank in range(self._world_size)]

        return self.from_first(f"after {step}", lambda: conclude([each.result() for each in answers]))

    def forget(self) -> None:
        """Delete the keys of the save from the store; call it after every rank has finished the save."""
        if self.is_first:
            with suppress(RuntimeError):
                for key in self._keys:
                    self._store.delete_key(key)

    def _run(self, action: Callable[[], str | None]) -> _Answer:
        try:
            with at_work(self._store):
                return _Answer(True, action() or "")
        except SaveError as error:
            return _Answer(False, str(error))
        except OSError as error:
            file = f": {error.filename}" if error.filename else ""
            return _Answer(False, f"rank {self.rank}: {error.strerror or error}{file}")
        except Exception:  # a bug here must not leave the other ranks waiting
            return _Answer(False, f"rank {self.rank} failed:\n{traceback.format_exc()}")

    def _remove(self, key: str, rank: int) -> _Answer:
        """Return a rank's answer, and delete it from the store."""
        if not self._store.check([key]):
            return _Answer(False, f"rank {rank} does not answer: it is gone or hangs")
        answer = _unpacked(self._store.get(key))
        self._store.delete_key(key)
        return answer

    def _key(self, step: str, who: object = 0) -> str:
        return f"{self._prefix}/{step}/{who}"


def _packed(answer: _Answer) -> str:
    """Return an answer as compressed ASCII text; names and ranges of tensors compress to a tenth."""
    content = zlib.compress(answer.text.encode(), level=1)
    return (_DONE if answer.is_done else _FAILED) + base64.b64encode(content).decode()


def _unpacked(message: bytes) -> _Answer:
    text = zlib.decompress(base64.b64decode(message[1:])).decode()
    return _Answer(message[:1] == _DONE.encode(), text)
