"""Run tasks in worker processes; results come in the tasks' order, in bounded memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any, Generic, NamedTuple, TypeVar

from megalite.utils.errors import UserError

_RESULTS_AHEAD = 64
"""Number of tasks per worker that may finish before the next result in order; results are small."""

Task = TypeVar("Task")
Result = TypeVar("Result")
StartWorker = Callable[[], AbstractContextManager[Callable[[Task], Result]]]
"""A function that a process calls once, to get the function that runs each of its tasks."""


class WorkerDied(UserError):
    """Raised when a worker process ended unexpectedly; finished tasks are kept."""


class _Worker(NamedTuple):
    process: BaseProcess
    connection: Connection


class WorkerPool(Generic[Task, Result]):
    """Runner of tasks in the calling process for one worker, else in processes; a context manager.

    A worker's only connection to this process is its pipe, so it ends when this process ends.

    Args:
        start: gets a worker's function; it can be pickled.
        after_death: what to do if a process dies, for the message.
    """

    def __init__(self, start: StartWorker[Task, Result], workers: int, after_death: str) -> None:
        self._start = start
        self._num_workers = workers
        self._after_death = after_death
        self._workers: list[_Worker] = []

    def __enter__(self) -> WorkerPool[Task, Result]:
        if self._num_workers > 1:
            # Use spawn: the threads of the tokenizers library do not survive a fork.
            context = multiprocessing.get_context("spawn")
            try:
                with _signals_held():
                    for _ in range(self._num_workers):
                        self._workers.append(_start(context, self._start))
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

    def run(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Result]]:
        """Yield the tasks with their results, in order.

        Raises:
            UserError: the error of the first task that has one.
            WorkerDied: a worker process ended.
        """
        if self._workers:
            yield from self._run_in_processes(iter(tasks))
            return
        with self._start() as work:
            for task in tasks:
                yield task, work(task)

    def _run_in_processes(self, tasks: Iterator[Task]) -> Iterator[tuple[Task, Result]]:
        source = enumerate(tasks)
        ready: deque[tuple[int, Task]] = deque()  # at most one, read while the workers run
        idle = list(self._workers)
        busy: dict[Connection, tuple[_Worker, int, Task]] = {}
        done: dict[int, tuple[Task, Result | Exception]] = {}
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
                worker, number, task = busy.pop(connection)
                done[number] = (task, self._receive(worker))
                idle.append(worker)
            while index in done:
                task, result = done.pop(index)
                index += 1
                if isinstance(result, Exception):
                    raise result
                yield task, result

    def _send(self, worker: _Worker, task: Task) -> None:
        try:
            worker.connection.send(task)
        except (BrokenPipeError, ConnectionResetError):
            raise self._died(worker) from None

    def _receive(self, worker: _Worker) -> Result | Exception:
        try:
            result: Result | Exception = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._died(worker) from None
        return result

    def _died(self, worker: _Worker) -> WorkerDied:
        worker.process.join(timeout=5)
        return WorkerDied(
            f"a worker died (exit status {worker.process.exitcode}), perhaps because it ran out of memory: "
            f"{self._after_death}"
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


def _start(context: SpawnContext, start: StartWorker[Any, Any]) -> _Worker:
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, start), daemon=True)
    process.start()
    there.close()
    return _Worker(process, here)


def _serve(connection: Connection, start: StartWorker[Any, Any]) -> None:
    """Run a worker: receive tasks and send their results until the other side closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process handles the terminal's interrupt
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # otherwise each worker starts a thread per core
    os.environ["RAYON_NUM_THREADS"] = "1"
    try:
        try:
            with start() as work:
                while True:
                    task = connection.recv()
                    connection.send(_try(work, task))
        except UserError as error:  # the worker could not start: answer the first task with this
            connection.recv()
            connection.send(error)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _end_with_parent() -> None:
    """End this worker when the first process ends: a worker that computes would notice seconds later."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _try(work: Callable[[Task], Result], task: Task) -> Result | Exception:
    try:
        return work(task)
    except UserError as error:
        return error
    except Exception:  # a defect: its traceback would not survive the pipe
        return RuntimeError(f"in a worker:\n{traceback.format_exc()}")
