"""Run a function on several ranks of this machine, for tests and for tools that compare layouts."""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megalite.distributed.axes import MeshOptions
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.utils.errors import UserError
from megalite.utils.torch_private import COMPILER

_FIRST_STEP = (
    "torch.fx.experimental.symbolic_shapes",  # by torch's first backward
    COMPILER,
)
"""Modules that a rank imports only when it trains, in two seconds of CPU time."""


class RankError(RuntimeError):
    """Raised for an exception on a rank; the message has the rank and its traceback."""


def forked_with_torch(*modules: str) -> ForkServerContext:
    """Return a context whose processes are forked from a server that has already imported their modules.

    A process then starts in hundredths of a second instead of seconds. The first process that starts
    determines what the server imports for all later ones: torch, and what this process has of megalite.

    Args:
        modules: additional modules to import.
    """
    context = multiprocessing.get_context("forkserver")
    ours = sorted(name for name in sys.modules if name.partition(".")[0] == "megalite")
    tests = ["pytest"] if "pytest" in sys.modules else []
    context.set_forkserver_preload(["torch", *ours, *tests, *_FIRST_STEP, *modules])
    return context


@dataclasses.dataclass(frozen=True)
class _LocalRank:
    """Process of a rank, which calls what arrives over the connection and answers over it."""

    process: BaseProcess
    connection: Connection


class LocalRanks:
    """Ranks of this machine, in processes that stay alive until its ``with`` block ends.

    Without a ``with`` block, they end with this object, or when Python exits. A later run needs no new
    processes, and its first iteration is as fast as others. A process keeps what an earlier function changed
    in it, such as attributes of modules, and with NCCL its environment: pass only functions that change
    nothing. After a failure, the next run starts new processes.
    """

    def __init__(self) -> None:
        self._ranks: list[_LocalRank] = []
        # When Python exits, multiprocessing first calls its finalizers, and then waits for all processes that
        # are not daemons. Ranks are not, because daemons may not start processes, as a DataLoader does.
        Finalize(self, _end, (self._ranks, 5.0), exitpriority=0)

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End all processes; the next run starts new ones."""
        _end(self._ranks, seconds=5.0)

    def run(
        self,
        function: Callable[..., Any],
        options: MeshOptions,
        world_size: int,
        *args: Any,
        timeout: float = 300.0,
    ) -> list[Any]:
        """Call the function on each of `world_size` ranks; see `run_ranks`."""
        context = forked_with_torch(function.__module__)
        if options.backend != "nccl":
            options = dataclasses.replace(options, backend="gloo")
        if not all(rank.process.is_alive() for rank in self._ranks):  # killed since the last run
            _end(self._ranks, seconds=5.0)
        with _not_interrupted():
            while len(self._ranks) < world_size:
                self._ranks.append(_start(context))
        ranks = self._ranks[:world_size]
        with tempfile.TemporaryDirectory(prefix="megalite-ranks-") as folder:
            try:
                for number, rank in enumerate(ranks):
                    launch = Launch(number, world_size, number, world_size)
                    call = (function, options, launch, Path(folder) / "rendezvous", args)
                    with suppress(BrokenPipeError):  # it could not start, and has no answer
                        rank.connection.send_bytes(pickle.dumps(call))
                return _collect(ranks, timeout)
            except BaseException:
                _end(self._ranks, seconds=0.5)  # others may hang
                raise


def run_ranks(
    function: Callable[..., Any],
    options: MeshOptions,
    world_size: int,
    *args: Any,
    timeout: float = 300.0,
) -> list[Any]:
    """Call ``function(topology, *args)`` on each of `world_size` new ranks and return their results by rank.

    Args:
        function: function that can be imported by name, because it, its arguments and results are pickled.
        options: the layout: `ParallelConfig.mesh`. Its backend is replaced with gloo, unless it is nccl,
            which needs a GPU per rank.
        timeout: seconds after which ranks without an answer are killed.

    Raises:
        UserError: a rank raised a UserError.
        RankError: a rank raised another exception, or did not answer in time.
    """
    with LocalRanks() as ranks:
        return ranks.run(function, options, world_size, *args, timeout=timeout)


@contextmanager
def _not_interrupted() -> Iterator[None]:
    """Start processes that Ctrl-C does not reach: it ends this process, which ends its ranks.

    Otherwise the fork server and each rank would print a traceback of their own.
    """
    resource_tracker.ensure_running()  # it would unblock the signal below when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(ranks: list[_LocalRank], seconds: float) -> None:
    """End all processes, and empty the list; kill those that run longer than this."""
    ended = ranks[:]
    ranks.clear()
    for rank in ended:
        rank.connection.close()  # a rank that waits for a call ends
    deadline = time.monotonic() + seconds
    for rank in ended:
        rank.process.join(max(0.0, deadline - time.monotonic()))
        if rank.process.is_alive():
            rank.process.kill()
            rank.process.join()


def _start(context: ForkServerContext) -> _LocalRank:
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,))
    process.start()
    theirs.close()
    return _LocalRank(process, ours)


def _serve(connection: Connection) -> None:
    gc.freeze()  # the server's imports are never garbage; visiting them would copy their pages
    with suppress(EOFError, ConnectionError):  # it may be closed before this rank has answered
        call = connection.recv_bytes()
        while True:
            _answer(connection, *pickle.loads(call))
            gc.freeze()  # what this run imported; each collection would visit it again
            call = connection.recv_bytes()


def _answer(
    connection: Connection,
    function: Callable[..., Any],
    options: MeshOptions,
    launch: Launch,
    init_file: Path,
    args: tuple[Any, ...],
) -> None:
    """Call the function, and send whether it succeeded and its result or its error."""
    torch.set_num_threads(options.num_threads or 1)
    with ExitStack() as stack:
        try:
            result = function(stack.enter_context(Topology.start(options, launch, init_file)), *args)
            dist.barrier()
            stack.close()
        except BaseException as error:
            is_from_user = isinstance(error, UserError)
            answer = error if is_from_user else RankError(f"rank {launch.rank}:\n{traceback.format_exc()}")
            connection.send_bytes(pickle.dumps((False, answer)))
            # Stay in the process groups until every rank is ended: when one leaves, the calls of others fail,
            # and their errors could be reported instead of this one.
            connection.recv_bytes()
            raise
    # End the process groups, whose threads wake a hundred times a second. After the answer the file of the
    # rendezvous is removed, and a store that was about to write to it would wait for it until its time-out.
    gc.collect()
    connection.send_bytes(pickle.dumps((True, result)))


def _collect(ranks: list[_LocalRank], timeout: float) -> list[Any]:
    """Wait for every rank's answer. Raise the first failure immediately: other ranks may hang on it."""
    results: dict[int, Any] = {}
    errors: list[Exception] = []
    pending = {rank.connection: number for number, rank in enumerate(ranks)}
    # After an error, look once more: a rank that has ended makes the calls of others fail.
    while pending and (ready := wait(list(pending), 0.0 if errors else timeout)):
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = pending.pop(connection)
            try:
                succeeded, answer = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                process = ranks[rank].process
                process.join(timeout=5.0)
                raise RankError(
                    f"rank {rank} ended without an answer (exit {process.exitcode}): its error is above. A "
                    "program of your own must start ranks from a file, below `if __name__ == '__main__':`"
                ) from None
            if succeeded:
                results[rank] = answer
            else:
                errors.append(answer)
    if errors:
        raise errors[0]
    if pending:
        raise RankError(f"ranks {sorted(pending.values())} did not answer in {timeout:.0f} s")
    return [results[rank] for rank in range(len(ranks))]
