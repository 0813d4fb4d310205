"""The process that runs train steps on fake CUDA tensors.

It has to load the fake device before it imports torch, so this module imports the rest where it is used.
"""

from __future__ import annotations

import os
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megalite.distributed.topology import Topology
    from megalite.train.trainer import Trainer
    from tests.fake_cuda.cases import Case
    from tests.fake_cuda.checks import DeviceChecks

MAX_SECONDS = 120.0
BETWEEN = "reduction"
"""The phase between backward and the update: reductions, the norm and clipping."""


@dataclass
class Outcome:
    """Holds what the checks found in the last train step of a rank.

    Attributes:
        error: traceback of the exception that ended it, or an empty string.
        mixed: operators with tensors of the host and of the device, in any iteration.
        waits: waits of the host in an iteration, from the end of an update to the end of the next one.
        num_launched: number of operators that the iteration has launched before each wait.
        pageable: copies without a wait, of host memory that is not pinned, in any iteration.
        misplaced: weights, gradients and state with another device or dtype than expected.
        launches: numbers of operators, by phase and name.
    """

    error: str = ""
    mixed: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    num_launched: list[int] = field(default_factory=list)
    pageable: list[str] = field(default_factory=list)
    misplaced: list[str] = field(default_factory=list)
    launches: dict[str, Counter[str]] = field(default_factory=dict)


class FakeGpu:
    """Runs cases in the child process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __call__(self, case: Case) -> dict[int, Outcome]:
        """Return the outcome of each rank of a case."""
        self._connection.send(case)
        if not self._connection.poll(MAX_SECONDS):
            raise TimeoutError(f"no answer in {MAX_SECONDS:.0f} s")
        answer: dict[int, Outcome] = self._connection.recv()
        return answer


@contextmanager
def fake_gpu(folder: Path) -> Iterator[FakeGpu]:
    """Start a child process with a fake device, whose library is built in this folder."""
    from tests.fake_cuda.device import build_library

    context = get_context("spawn")
    ours, theirs = context.Pipe()
    library = build_library(folder / "guard.so")
    process = context.Process(target=_serve, args=(theirs, library), daemon=True)
    process.start()
    theirs.close()
    try:
        yield FakeGpu(ours)
    finally:
        process.kill()
        process.join()


def _serve(connection: Connection, library: Path) -> None:
    from tests.fake_cuda.device import install, load

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["OMP_NUM_THREADS"] = "1"
    guard = load(library)
    from tests.fake_cuda.checks import DeviceChecks

    checks = DeviceChecks()
    install(guard, checks)
    while True:
        case: Case = connection.recv()
        connection.send({rank: _run(case, rank, checks) for rank in case.ranks})


def _run(case: Case, rank: int, checks: DeviceChecks) -> Outcome:
    from megalite.distributed.topology import Topology
    from tests.fake_cuda.injected import INJECTED

    checks.reset()
    outcome = Outcome()
    config = case.config()
    try:
        mesh = config.parallel.mesh
        fake = Topology.fake(mesh, case.layout.world_size, rank, "cuda:0")
        with INJECTED[case.injected](), fake as topology, checks.active():
            _train(config, topology, checks, outcome, in_loop=case.num_logged > 0)
    except Exception:
        outcome.error = traceback.format_exc()
    outcome.mixed, outcome.waits, outcome.pageable = checks.mixed, checks.waits, checks.pageable
    outcome.num_launched = checks.num_launched
    return outcome


def _train(config: Any, topology: Topology, checks: DeviceChecks, outcome: Outcome, *, in_loop: bool) -> None:
    from megalite.train.trainer import start_trainer

    with start_trainer(config, topology) as trainer:
        phases = _Phases(checks)
        topology.observers.append(phases)
        queue_update = trainer.optimizer.step

        def step(*arguments: Any) -> None:
            queue_update(*arguments)
            if not checks.watches_waits:  # the first iteration tries operators, which reads results
                checks.launches.clear()
                checks.watches_waits = True

        trainer.optimizer.step = step  # type: ignore[method-assign]
        checks.phase = BETWEEN
        if in_loop:
            _run_loop(trainer)
        for queues_next in () if in_loop else (True, False):
            result = trainer.step(queues_next=queues_next)
            assert not result.skipped, result
        checks.watches_waits = False
        outcome.launches = dict(checks.launches)
        checks.phase = "after the steps"  # reading the weights launches operators, too
        outcome.misplaced = _misplaced(trainer)


def _run_loop(trainer: Trainer) -> None:
    """Run the training loop with the default callbacks and a log line for each iteration."""
    from megalite.train.callbacks import default_callbacks
    from megalite.train.loop import train
    from megalite.train.stopping import RequeueNote, StopConditions, StopSignals
    from megalite.train.telemetry.writers import Writers

    config = replace(trainer.config, logging=replace(trainer.config.logging, log_interval=1))
    stop = StopConditions(config.training, trainer.topology, StopSignals(RequeueNote(None)))
    stop._agreed = lambda: [0.0] * 6  # type: ignore[method-assign]  # fake tensors have no values
    with Writers(config.logging, trainer.topology, "") as writers:
        assert train(trainer, stop, default_callbacks(writers, config)) == 0


class _Phases:
    """Tells the checks which part of a step runs."""

    def __init__(self, checks: DeviceChecks) -> None:
        self._checks = checks

    def begins(self, what: Any) -> None:
        if what == "optimizer-inner-step":
            self._checks.phase = "update"
        elif _is_action(what):
            self._checks.phase = "forward" if what.kind.name == "FORWARD" else "backward"

    def ends(self, what: Any) -> None:
        if _is_action(what) or what == "optimizer-inner-step":
            self._checks.phase = BETWEEN


def _is_action(event: object) -> bool:
    from megalite.pipeline.schedules import Action

    return isinstance(event, Action)


def _misplaced(trainer: Trainer) -> list[str]:
    """Return the weights, gradients and state that are not on the device, or do not have their dtype."""
    from megalite.model.stage import DTYPES
    from megalite.optim.gradient_buckets import main_dtype
    from megalite.tensor_parallel.parameter_spec import ParameterShard
    from megalite.train.model_chunks import named_parameters

    dtype = DTYPES[trainer.config.model.params_dtype]
    tensors = trainer.tensors()
    state = {name: each.tensor for name, each in tensors.items() if isinstance(each, ParameterShard)}
    is_rounded = trainer.config.optimizer.exp_avg_dtype != "fp32"  # then `tensors` has copies of moments
    state = {name: each for name, each in state.items() if not (is_rounded and ".exp_avg" in name)}
    found = [
        (name, tensor, dtype if name.startswith("model.") and "amax" not in name else main_dtype(dtype))
        for name, tensor in state.items()
        if trainer.optimizer.offload is None or name.startswith("model.")
    ]
    for name, parameter in named_parameters(trainer.chunks):
        found.append((f"{name} in the chunk", parameter, parameter.dtype))
    for name, gradient in trainer.optimizer._named_gradients():
        found.append((f"gradient of {name}", gradient, main_dtype(dtype)))
    for each in trainer.optimizer.updated if is_rounded else ():
        found += [(name, moment, each.rounding.dtypes[name]) for name, moment in each.moments.items()]
    return [
        f"{name}: {tensor.dtype} on {tensor.device}, not {expected}"
        for name, tensor, expected in found
        if tensor.device != trainer.topology.device or tensor.dtype != expected
    ]
