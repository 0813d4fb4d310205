"""Encode pieces in worker processes; results come in the pieces' order, in bounded memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from typing import NamedTuple

from megalite.data.preprocessing.encoder import Encoder, PieceResult
from megalite.data.preprocessing.input_plan import InputPiece
from megalite.data.preprocessing.preprocess_job import PreprocessJob
from megalite.utils.errors import UserError

_RESULTS_AHEAD = 64
"""Number of pieces per worker that may finish before the next result in order; results are small."""


class WorkerDied(UserError):
    """Raised when a worker process ended unexpectedly; finished pieces are kept for --resume."""


class _Worker(NamedTuple):
    process: BaseProcess
    connection: Connection


class EncoderPool:
    """Encoder in the calling process for one worker, else in worker processes; a context manager.

    A worker's only connection to this process is its pipe, so it ends when this process ends.
    """

    def __init__(self, job: PreprocessJob, folder: str) -> None:
        self._job = job
        self._folder = folder
        self._workers: list[_Worker] = []

    def __enter__(self) -> EncoderPool:
        if self._job.workers > 1:
            # Use spawn: the threads of the tokenizers library do not survive a fork.
            context = multiprocessing.get_context("spawn")
            try:
                with _signals_held():
                    for _ in range(self._job.workers):
                        self._workers.append(_start(context, self._job, self._folder))
            except BaseException:
                self._end_workers()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end_workers()

    def _end_workers(self) -> None:
        for worker in self._workers:
            worker.connection.close()
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join()

    def encode(self, pieces: Iterable[InputPiece]) -> Iterator[tuple[InputPiece, PieceResult]]:
        """Yield the pieces with their results, in order.

        Raises:
            UserError: the error of the first piece that has one.
            WorkerDied: a worker process ended.
        """
        if self._workers:
            yield from self._encode_in_processes(iter(pieces))
            return
        with Encoder(self._job, self._folder) as encoder:
            for piece in pieces:
                yield piece, encoder.encode(piece)

    def _encode_in_processes(self, pieces: Iterator[InputPiece]) -> Iterator[tuple[InputPiece, PieceResult]]:
        source = enumerate(pieces)
        ready: deque[tuple[int, InputPiece]] = deque()  # at most one, read while the workers encode
        idle = list(self._workers)
        busy: dict[Connection, tuple[_Worker, int, InputPiece]] = {}
        done: dict[int, tuple[InputPiece, PieceResult | Exception]] = {}
        index = 0  # number of the next result
        while True:
            if not ready and len(done) < _RESULTS_AHEAD * len(self._workers):
                ready.extend(item for item in [next(source, None)] if item)
            if ready and idle:
                worker = idle.pop()
                self._send(worker, ready[0][1])
                busy[worker.connection] = (worker, *ready.popleft())
                continue
            if not busy and not ready:
                return
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                worker, number, piece = busy.pop(connection)
                done[number] = (piece, self._receive(worker))
                idle.append(worker)
            while index in done:
                piece, result = done.pop(index)
                index += 1
                if isinstance(result, Exception):
                    raise result
                yield piece, result

    def _send(self, worker: _Worker, piece: InputPiece) -> None:
        try:
            worker.connection.send(piece)
        except (BrokenPipeError, ConnectionResetError):
            raise self._died(worker) from None

    def _receive(self, worker: _Worker) -> PieceResult | Exception:
        try:
            result: PieceResult | Exception = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._died(worker) from None
        return result

    def _died(self, worker: _Worker) -> WorkerDied:
        worker.process.join(timeout=5)
        return WorkerDied(
            f"a worker died (exit status {worker.process.exitcode}), perhaps because it ran out of memory: "
            f"continue with --resume and fewer than --workers {self._job.workers}"
        )


@contextmanager
def _signals_held() -> Iterator[None]:
    """Delay signals that end the program until the block ends; half-started workers would print tracebacks.

    Children that are started in the block have SIGINT blocked, so a terminal's Ctrl-C does not reach them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    resource_tracker.ensure_running()  # its own start would unblock the signal
    held: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    handled = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in handled:
        signal.signal(number, lambda received, _: held.append(received))
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, handler in handled.items():
            signal.signal(number, handler)
    if held:
        signal.raise_signal(held[0])


def _start(context: SpawnContext, job: PreprocessJob, folder: str) -> _Worker:
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, job, folder), daemon=True)
    process.start()
    there.close()
    return _Worker(process, here)


def _serve(connection: Connection, job: PreprocessJob, folder: str) -> None:
    """Run a worker: receive pieces and send their results until the other side closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process handles the terminal's interrupt
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # otherwise each worker starts a thread per core
    os.environ["RAYON_NUM_THREADS"] = "1"
    try:
        try:
            with Encoder(job, folder) as encoder:
                while True:
                    piece = connection.recv()
                    connection.send(_try_to_encode(encoder, piece))
        except UserError as error:  # the encoder could not be created: answer the first piece with this
            connection.recv()
            connection.send(error)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _end_with_parent() -> None:
    """End this worker when the first process ends: a worker that encodes would notice seconds later."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _try_to_encode(encoder: Encoder, piece: InputPiece) -> PieceResult | Exception:
    try:
        return encoder.encode(piece)
    except UserError as error:
        return error
    except Exception:  # a defect: its traceback would not survive the pipe
        return RuntimeError(f"in a worker:\n{traceback.format_exc()}")
