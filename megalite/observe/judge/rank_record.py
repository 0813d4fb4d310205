"""Run a program on one rank, record what must not depend on the layout, and join the records of all ranks.

A program that was written for 32 or 16 bits runs in fp64, so that layouts can agree to 14 digits. Joined
records are full tensors, in which ranks that disagree are found.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from megalite.config import Config
from megalite.distributed.topology import Topology
from megalite.observe.judge.program import Piece, Program, ProgramFault
from megalite.observe.recorder import Reader, tensors_in, watch_modules
from megalite.observe.verify.layouts import Layout
from megalite.utils.errors import UserError, first_line
from megalite.utils.torch_private import backward_within, schema_of

_WIDE: dict[Any, Any] = {
    **dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float64),
    **dict.fromkeys((Tensor.float, Tensor.bfloat16, Tensor.half), Tensor.double),
}
"""Replacements of dtypes, and of methods that cast to them."""
_CASTS = {Tensor: ("float", "bfloat16", "half", "to"), torch: ("zeros", "zeros_like", "empty", "empty_like")}
"""Functions that also replace dtypes within calls that the mode handles, such as attention of DTensors."""


class _Widened(TorchFunctionMode):
    """Mode in which each call that names a narrower dtype gets fp64 instead."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _wide_call(func)(*args, **(kwargs or {}))


def _wide_call(function: Callable[..., Any]) -> Callable[..., Any]:
    wide = _WIDE.get(function, function)
    return lambda *args, **kwargs: wide(
        *map(_widened, args), **{name: _widened(each) for name, each in kwargs.items()}
    )


def _widened(argument: Any) -> Any:
    return _WIDE[argument] if isinstance(argument, torch.dtype) and argument in _WIDE else argument


@contextmanager
def widened() -> Iterator[None]:
    """Let the block compute in fp64 whatever dtype its code names.

    What C++ code chooses is not reached: a kernel that computes in 32 bits inside still does.
    """
    before, set_default = torch.get_default_dtype(), torch.set_default_dtype
    torch.set_default_dtype(torch.float64)
    torch.set_default_dtype = lambda dtype: set_default(_widened(dtype))
    casts = [(owner, name, getattr(owner, name)) for owner, names in _CASTS.items() for name in names]
    for owner, name, function in casts:
        setattr(owner, name, _wide_call(function))
    try:
        with _Widened() as mode, backward_within(mode):
            yield
    finally:
        for owner, name, function in casts:
            setattr(owner, name, function)
        torch.set_default_dtype = set_default
        torch.set_default_dtype(before)


class Observation(NamedTuple):
    """Tensor that a module has returned, or its gradient.

    Attributes:
        name: the module's name, and the number of the tensor if it returns several.
        call: number of the module's calls before.
        collective: the last collective of this rank before it, or "no collective".
    """

    name: str
    call: int
    is_gradient: bool
    value: Tensor
    collective: str


class Tracer(Reader):
    """Recorder of the outputs of modules in its block.

    Attributes:
        observations: in the order in which they were computed.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.observations: list[Observation] = []
        self._modules = modules
        self._calls: Counter[str] = Counter()
        self._collective = "no collective"
        self._is_ended = False

    def __enter__(self) -> Tracer:
        super().__enter__()
        self._hooks = watch_modules(self, self._modules.items())
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.close()
        super().__exit__(*error)

    def end(self) -> None:
        """Record no more."""
        self._is_ended = True

    def reads(self, func: Any) -> bool:
        return func.namespace in ("c10d", "_c10d_functional")

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        name = schema_of(func).name.partition("::")[2].rstrip("_")
        if name == "wait_tensor":
            return
        shapes = [list(tensor.shape) for tensor in tensors_in(args)]
        self._collective = f"{name} of {shapes[0] if shapes else 'nothing'}{_ranks_among(args)}"

    def leaves(self, name: str, module: nn.Module | None, args: tuple[Any, ...], output: Any) -> None:
        call = self._calls[name]
        self._calls[name] += 1
        tensors = [each for each in tensors_in(output) if each.is_floating_point() and each.dim() > 0]
        for number, tensor in enumerate(tensors):
            label = name if number == 0 else f"{name}, output {number + 1}"
            self._add(label, call, tensor, is_gradient=False)
            if tensor.requires_grad:
                tensor.register_hook(
                    lambda gradient, label=label: self._add(label, call, gradient, is_gradient=True)
                )

    def _add(self, name: str, call: int, tensor: Tensor, *, is_gradient: bool) -> None:
        if self._is_ended:
            return
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        value = local.detach().clone()
        self.observations.append(Observation(name, call, is_gradient, value, self._collective))


def _ranks_among(args: Sequence[Any]) -> str:
    """Return the ranks of the group among an operator's arguments, as a text."""
    for each in args:
        try:
            return f" over ranks {dist.get_process_group_ranks(dist.ProcessGroup.unbox(each))}"
        except (RuntimeError, TypeError, AttributeError, KeyError):
            continue
    return ""


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


class FullTensor(NamedTuple):
    """Tensor that ranks hold together.

    Attributes:
        value: the elements, each of the first rank that holds it.
        disagreement: largest difference between ranks that hold the same element; NaN if one of them is NaN.
        total: sum of the elements over all ranks that hold them; None if they agree.
        num_holders: number of ranks that hold each element.
        ranks: the first rank, and one that disagrees with it.
    """

    value: Tensor
    disagreement: float = 0.0
    total: Tensor | None = None
    num_holders: Tensor | None = None
    ranks: tuple[int, ...] = ()


Fulls = dict[str, FullTensor]
Report = dict[str, list[float]]
"""Numbers that a program reports for an iteration, by name: one of each rank that reports it."""


@dataclass(frozen=True)
class FullRecord:
    """Results of a layout, as full tensors; see `RankRecord`."""

    own_start: Fulls
    start: Fulls
    reports: list[Report]
    gradients: Fulls
    weights: Fulls
    eps: float = 0.0  # relative distance of neighbouring numbers of the coarsest dtype that weights have
    save_error: str = ""
    traces: list[list[Observation]] = field(default_factory=list)


def join(ranks: Sequence[RankRecord]) -> FullRecord:
    """Join the records of all ranks of a layout.

    Raises:
        ProgramFault: an element of a tensor is on no rank, or ranks have different full shapes of it.
    """
    reports: list[Report] = [{} for _ in ranks[0].reports]
    for rank in ranks:
        for report, own in zip(reports, rank.reports, strict=True):
            for name, value in own.items():
                report.setdefault(name, []).append(value)
    dtypes = {piece.tensor.dtype for rank in ranks for piece in rank.own_start.values()}
    return FullRecord(
        joined([rank.own_start for rank in ranks]),
        joined([rank.start for rank in ranks]),
        reports,
        joined([rank.gradients for rank in ranks]),
        joined([rank.weights for rank in ranks]),
        max((torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point), default=0.0),
        next((rank.save_error for rank in ranks if rank.save_error), ""),
        [rank.trace for rank in ranks],
    )


def joined(ranks: Sequence[Mapping[str, Piece]]) -> Fulls:
    """Join the pieces of all ranks."""
    names = dict.fromkeys(name for pieces in ranks for name in pieces)
    return {
        name: _joined(name, {rank: pieces[name] for rank, pieces in enumerate(ranks) if name in pieces})
        for name in names
    }


def _joined(name: str, pieces: Mapping[int, Piece]) -> FullTensor:
    shapes = {piece.shape for piece in pieces.values()}
    if len(shapes) > 1:
        raise ProgramFault(f"ranks say that the full shape of {name} is {' and '.join(map(str, shapes))}")
    (shape,) = shapes
    size = torch.Size(shape).numel()
    value, total, count = torch.zeros(size), torch.zeros(size), torch.zeros(size)
    value, total = value.double(), total.double()
    first = torch.full((size,), -1)
    disagreement = 0.0
    ranks: tuple[int, ...] = ()
    for rank, piece in pieces.items():
        positions = torch.arange(size) if piece.positions is None else piece.positions.flatten()
        elements = piece.tensor.flatten().double()[positions >= 0]
        positions = positions[positions >= 0]
        held = count[positions] > 0
        value[positions[~held]] = elements[~held]
        first[positions[~held]] = rank
        off = (value[positions] - elements).abs()
        largest = float(off.max()) if off.numel() else 0.0
        if not (math.isnan(disagreement) or largest <= disagreement):
            at = int(off.nan_to_num(torch.inf).argmax())
            disagreement, ranks = largest, (int(first[positions[at]]), rank)
        total[positions] += elements
        count[positions] += 1
    if num_missing := int((count == 0).sum()):
        raise ProgramFault(
            f"no rank holds {num_missing} of the {size} elements of {name}: the pieces do not cover it"
        )
    full = FullTensor(value.view(shape))
    if disagreement == 0.0:
        return full
    return full._replace(
        disagreement=disagreement, total=total.view(shape), num_holders=count.view(shape), ranks=ranks
    )
