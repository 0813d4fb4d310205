"""A reduction of gradients in flight, and the work that follows it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megalite.distributed.collectives import Pending


class ReduceHandle:
    """In-flight reduction of a bucket; `wait` also stores its result.

    Args:
        store_result: called once the collective is complete.
        start_next: starts the collective that must follow it.

    Attributes:
        on_complete: called once the result is stored, on the stream that has it; may be None.
    """

    def __init__(
        self,
        pending: Pending,
        store_result: Callable[[], object],
        start_next: Callable[[], ReduceHandle] | None = None,
    ) -> None:
        self._pending = pending
        self._store_result = store_result
        self._start_next = start_next
        self._first: object = None
        self._is_complete = False
        self._completed: torch.cuda.Event | None = None
        self.on_complete: Callable[[], object] | None = None

    def advance(self, stream: torch.cuda.Stream | None) -> None:
        """Run the work after the first collective while backward runs, if there is any.

        Args:
            stream: on a GPU, the stream that waits, so that backward does not; None on a CPU, where the host
                waits.
        """
        if self._is_complete or (self._start_next is None and self.on_complete is None):
            return
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._complete()
                self._completed = stream.record_event()  # the tensors are kept until `wait`
        elif self.on_complete is not None:
            self._complete()
        else:
            self._start_following()

    def wait(self) -> None:
        if not self._is_complete:
            self._complete()
        elif self._completed is not None:
            torch.cuda.current_stream().wait_event(self._completed)

    def _complete(self) -> None:
        self._start_following()
        self._pending.wait()
        self._store_result()
        self._is_complete = True
        if self.on_complete is not None:
            self.on_complete()

    def _start_following(self) -> None:
        if self._start_next is None:
            return
        self._pending.wait()
        self._store_result()
        following = self._start_next()
        self._first = self._store_result  # keeps the tensors alive: a stream may still use them
        self._pending, self._store_result = following._pending, following._store_result
        self._start_next = None
