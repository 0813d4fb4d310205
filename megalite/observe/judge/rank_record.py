"""Run a program on one rank, and record what must not depend on the layout."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Mapping
from contextlib import closing, nullcontext
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from torch import Tensor

from megalite.config import Config
from megalite.distributed.topology import Topology
from megalite.observe.judge.precision import widened
from megalite.observe.judge.program import Piece, Program, ProgramFault
from megalite.observe.judge.trace import Observation, Tracer
from megalite.observe.verify.layouts import Layout
from megalite.utils.errors import UserError, first_line

Pieces = dict[str, Piece]


class Task(NamedTuple):
    """Run of a program in one layout, for all of its ranks.

    Attributes:
        adapter: name of a module of `megalite.observe.judge.adapters`, or the path of a script.
        options: values of --set by name.
        samples: tokens of the iterations, ``[iterations, global batch, sequence + 1]``.
        start: full tensors of the weights to start from; None for those that the program draws.
        load: folder of a checkpoint to resume instead.
        save: folder to save to, and the number of iterations before.
        is_wide: compute in fp64 whatever dtype the program names.
        is_traced: record the outputs of modules and their gradients in the first iteration.
    """

    adapter: str
    layout: Layout
    config: Config
    options: Mapping[str, str]
    samples: Tensor
    start: Mapping[str, Tensor] | None = None
    load: Path | None = None
    save: tuple[Path, int] | None = None
    is_wide: bool = True
    is_traced: bool = False


class RankRecord(NamedTuple):
    """Results of a run on one rank.

    Attributes:
        own_start: weights that the program has drawn.
        start: weights before the first iteration.
        reports: what the program logs of each iteration.
        gradients: gradients of the first iteration.
        weights: weights after the last iteration.
        save_error: why the program could not save; empty if it could, or was not told to.
        trace: of the first iteration, if it was traced.
    """

    own_start: Pieces
    start: Pieces
    reports: list[dict[str, float]]
    gradients: Pieces
    weights: Pieces
    save_error: str
    trace: list[Observation]


@cache  # a script is run once in each process, as an imported module is
def import_adapter(name: str) -> ModuleType:
    """Import an adapter by its name, or a script by its path.

    Raises:
        UserError: there is none, its package is missing, or it does not define `build`.
    """
    path = Path(name)
    if path.suffix == ".py":
        if not path.is_file():
            raise UserError(f"there is no script {name}")
        spec = importlib.util.spec_from_file_location(f"judged_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        sys.path.insert(0, str(path.parent.resolve()))
        spec.loader.exec_module(module)
        if not hasattr(module, "build"):
            raise UserError(
                f"{name} defines no build(layout, config, options): see megalite/observe/judge/program.py"
            )
        return module
    module_name = f"megalite.observe.judge.adapters.{name.replace('-', '_')}"
    try:
        return import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name == module_name:
            raise UserError(
                f"there is no adapter {name}: pass {', '.join(adapter_names())}, or the path of a script"
            ) from None
        missing = (error.name or "a package").partition(".")[0]
        package = name if name.startswith(missing) else missing  # megatron is a part of megatron-core
        raise UserError(f"the adapter {name} needs {missing}: pip install {package}") from None
    except ImportError as error:
        raise UserError(
            f"the adapter {name} does not fit this version of its package, see docs/judge.md: {error}"
        ) from None


def adapter_names() -> list[str]:
    """Return the names of all adapters."""
    files = sorted((Path(__file__).parent / "adapters").glob("[!_]*.py"))
    return [path.stem.replace("_", "-") for path in files]


def record_rank(topology: Topology, task: Task) -> RankRecord:
    """Run a task on this rank."""
    rank, size = str(topology.rank), str(topology.world_size)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)  # as torchrun does
    os.environ["OMP_NUM_THREADS"] = "1"
    with warnings.catch_warnings(), widened() if task.is_wide else nullcontext():
        warnings.simplefilter("ignore")  # those of the package are no business of the judgement
        logging.disable(logging.WARNING)
        program: Program = import_adapter(task.adapter).build(task.layout, task.config, task.options)
        with closing(program):
            return _record(program, task)


def _record(program: Program, task: Task) -> RankRecord:
    own_start = _copied(program.weights())
    if task.load is not None:
        program.resume(task.load)
    elif task.start is not None:
        names = program.weights().keys()
        if missing := sorted(names - task.start.keys()):
            raise ProgramFault(f"the program has a tensor {missing[0]} in this layout alone")
        program.load(task.start)
    start = _copied(program.weights())
    reports, save_error = [], ""
    gradients: Pieces = {}
    with Tracer(program.modules()) if task.is_traced else nullcontext() as tracer:
        for number, batch in enumerate(task.samples):
            before = batch.clone()
            terms = program.backward(batch)
            if not batch.equal(before):
                raise ProgramFault("the program changes the samples that it is given: copy them in backward")
            if number == 0:
                gradients = _copied(program.gradients())
                if tracer is not None:
                    tracer.end()
            reports.append({**terms, **program.update()})
            if task.save is not None and number + 1 == task.save[1]:
                save_error = _save(program, task.save[0])
    trace = [] if tracer is None else tracer.observations
    return RankRecord(own_start, start, reports, gradients, _copied(program.weights()), save_error, trace)


def _save(program: Program, folder: Path) -> str:
    try:
        program.save(folder)
    except Exception as error:  # of the package: the run itself is judged all the same
        return first_line(error)
    return ""


def _copied(pieces: Mapping[str, Piece]) -> Pieces:
    """Return pieces that later iterations do not change."""
    return {
        name: piece._replace(tensor=piece.tensor.detach().clone(), shape=tuple(piece.shape))
        for name, piece in pieces.items()
    }
