"""Run a function on several ranks of this machine, for tests and for tools that compare layouts."""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megalite.distributed.axes import MeshOptions
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.errors import UserError
from megalite.torch_private import COMPILER

_PRELOADED = ("megalite.distributed.topology", "megalite.train.trainer", "megalite.cli.train", "pytest")
"""Modules that ranks import. The fork server imports those that this process uses."""
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
    determines what the server imports for all later ones.

    Args:
        modules: additional modules to import.
    """
    context = multiprocessing.get_context("forkserver")
    imported = [name for name in _PRELOADED if name in sys.modules]
    context.set_forkserver_preload(["torch", *imported, *_FIRST_STEP, *modules])
    return context


def run_ranks(
    function: Callable[..., Any],
    options: MeshOptions,
    world_size: int,
    *args: Any,
    timeout: float = 300.0,
) -> list[Any]:
    """Call ``function(topology, *args)`` on each of `world_size` ranks and return their results by rank.

    Args:
        function: function that can be imported by name, because it, its arguments and results are pickled.
        options: the layout: `ParallelConfig.mesh`. Its backend is replaced with gloo, unless it is nccl,
            which needs a GPU per rank.
        timeout: seconds after which ranks without an answer are killed.

    Raises:
        UserError: a rank raised a UserError.
        RankError: a rank raised another exception, or did not answer in time.
    """
    context = forked_with_torch(function.__module__)
    if options.backend != "nccl":
        options = dataclasses.replace(options, backend="gloo")
    with tempfile.TemporaryDirectory(prefix="megalite-ranks-") as folder:
        ranks: list[tuple[BaseProcess, Connection]] = []
        try:
            with _not_interrupted():
                for rank in range(world_size):
                    receiver, sender = context.Pipe(duplex=False)
                    launch = Launch(rank, world_size, rank, world_size)
                    process = context.Process(
                        target=_rank_main,
                        args=(sender, function, options, launch, Path(folder) / "rendezvous", args),
                    )
                    process.start()
                    sender.close()
                    ranks.append((process, receiver))
            return _collect(ranks, timeout)
        finally:
            _end(ranks)


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


def _rank_main(
    sender: Connection,
    function: Callable[..., Any],
    options: MeshOptions,
    launch: Launch,
    init_file: Path,
    args: tuple[Any, ...],
) -> None:
    gc.freeze()  # the server's imports are never garbage; visiting them would copy their pages
    torch.set_num_threads(options.num_threads or 1)
    try:
        with Topology.start(options, launch, init_file) as topology:
            result = function(topology, *args)
            dist.barrier()
        answer = (True, result)
    except UserError as error:
        answer = (False, error)
    except BaseException:
        answer = (False, RankError(f"rank {launch.rank}:\n{traceback.format_exc()}"))
    sender.send_bytes(pickle.dumps(answer))


def _collect(ranks: list[tuple[BaseProcess, Connection]], timeout: float) -> list[Any]:
    """Wait for every rank's answer. Raise the first failure immediately: other ranks may hang on it."""
    results: dict[int, Any] = {}
    pending = {receiver: rank for rank, (_, receiver) in enumerate(ranks)}
    while pending:
        ready = wait(list(pending), timeout)
        if not ready:
            raise RankError(f"ranks {sorted(pending.values())} did not answer in {timeout:.0f} s")
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = pending.pop(receiver)
            try:
                succeeded, answer = pickle.loads(receiver.recv_bytes())
            except EOFError:
                process = ranks[rank][0]
                process.join(timeout=5.0)
                raise RankError(
                    f"rank {rank} ended without an answer (exit {process.exitcode}): its error is above. A "
                    "program of your own must start ranks from a file, below `if __name__ == '__main__':`"
                ) from None
            if not succeeded:
                raise answer
            results[rank] = answer
    return [results[rank] for rank in range(len(ranks))]


def _end(ranks: list[tuple[BaseProcess, Connection]]) -> None:
    for process, receiver in ranks:
        process.join(timeout=5.0 if receiver.poll() else 0.5)
        if process.is_alive():
            process.kill()
            process.join()
        receiver.close()
