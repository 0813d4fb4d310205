"""Measure what each module of a rank costs: operations, time and memory of one microbatch.

Four microbatches run forward and backward: one counts FLOPs and what forward leaves in memory, and
`NUM_TIMED` are timed. A hook around each module's forward reads a counter, and so does a hook around each
node of autograd's graph in backward. Nodes are numbered in the order in which forward creates them, so the
number gives a node's module.
"""

from __future__ import annotations

import math
import statistics
import time
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.flop_counter import flop_registry, sdpa_flop_count, shape_wrapper

from megalite.distributed.axis import DEVICE
from megalite.distributed.topology import Topology
from megalite.model.compiled import run_as_written
from megalite.model.stage import Stage
from megalite.observe.recorder import Reader, reading, tensors_in, watch_modules
from megalite.optim.optimizer import Optimizer
from megalite.train.model_chunks import named_parameters, unchanged_buffers
from megalite.train.trainer import Trainer
from megalite.utils.torch_private import (
    cpu_attention,
    cpu_attention_backward,
    next_node_number,
    node_number,
    storage_number,
)

K = TypeVar("K")

NUM_TIMED = 3
"""Number of timed microbatches; their median is reported."""
_SETTLING_SECONDS = 0.05
"""Seconds after which gloo's threads have released the tensors of a finished collective."""


class Phase(Enum):
    """Phase of a microbatch. Backward does not include the forward that it recomputes."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTED = "recomputed"


@dataclass
class ModuleCosts:
    """Costs of a module with its submodules, or of several modules.

    Attributes:
        name: name in the whole model; empty for the rank's whole part of it.
        flops: FLOPs of GEMMs and attention.
        nanoseconds: time of each timed microbatch.
        state_bytes: bytes of weights, gradients and optimizer state, without padding.
        activation_bytes: bytes that forward leaves in memory for backward.
    """

    name: str
    num_modules: int = 1
    num_parameters: int = 0
    flops: Counter[Phase] = field(default_factory=Counter)
    nanoseconds: tuple[Counter[Phase], ...] = field(
        default_factory=lambda: tuple(Counter() for _ in range(NUM_TIMED))
    )
    state_bytes: Counter[str] = field(default_factory=Counter)
    activation_bytes: int = 0

    def latency(self, *phases: Phase) -> float:
        """Return the sum of the median seconds of these phases, or of all."""
        medians = (statistics.median(run[phase] for run in self.nanoseconds) for phase in phases or Phase)
        return sum(medians) / 1e9

    def add(self, other: ModuleCosts, sign: int = 1) -> None:
        """Add the costs of other modules, or subtract them."""
        self.num_modules += sign * other.num_modules
        self.num_parameters += sign * other.num_parameters
        self.activation_bytes += sign * other.activation_bytes
        _add(self.flops, other.flops, sign)
        _add(self.state_bytes, other.state_bytes, sign)
        for mine, theirs in zip(self.nanoseconds, other.nanoseconds, strict=True):
            _add(mine, theirs, sign)


def _add(mine: Counter[K], theirs: Counter[K], sign: int) -> None:
    for key, amount in theirs.items():  # not +=, which drops values that are not positive
        mine[key] += sign * amount


def module_costs(trainer: Trainer) -> dict[str, ModuleCosts]:
    """Return the costs of this rank's modules by name, each before its submodules'; a collective.

    The run's state does not change: the next iteration overwrites the gradients.
    """
    costs = {name: ModuleCosts(name) for chunk in trainer.chunks for name, _ in chunk.named_modules()}
    _count_state(trainer, costs)
    with run_as_written(trainer.config.training.compile), unchanged_buffers(trainer.chunks):
        _count_work(trainer, costs)
        for number in range(NUM_TIMED):
            _time(trainer, costs, number)
    return costs


def _run_microbatch(trainer: Trainer) -> None:
    plan = trainer.train_step.plan_iteration(trainer.progress)
    num_samples = trainer.config.training.micro_batch_size * trainer.topology.sample_ranks.size
    for chunk in trainer.chunks:
        chunk.train()
    trainer.train_step.compute_gradients(replace(plan, num_microbatches=1, num_samples=num_samples))


def _count_state(trainer: Trainer, costs: Mapping[str, ModuleCosts]) -> None:
    for name, parameter in named_parameters(trainer.chunks):
        for each in _lineage(name, costs):
            each.num_parameters += parameter.numel()
    for name, num_bytes in _parameter_bytes(trainer.optimizer):
        for each in _lineage(name, costs):
            each.state_bytes.update(num_bytes)


def _parameter_bytes(optimizer: Optimizer) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Yield the bytes that this rank holds for each parameter between iterations, without padding."""
    buffer_of = {buffer.bucket: buffer for buffer in optimizer.buffers}
    for state in optimizer.states:
        buffer = buffer_of[state.bucket]
        for entry in state.entries:
            weights = entry.parameter.nbytes
            if state.bucket.main is not None:  # rounded copies only exist while they are used
                weights = 0 if state.has_own_main else state.parameter_shard(state.main, entry).tensor.nbytes
            held = min(entry.end, buffer.held.stop) - max(entry.start, buffer.held.start)
            yield (
                entry.name,
                {
                    "weights": weights,
                    "gradients": max(0, held) * buffer.dtype.itemsize,
                    "optimizer": sum(
                        state.parameter_shard(tensor, entry).tensor.nbytes
                        for tensor in (*dict(state.tensors()).values(), state.ema)
                        if tensor is not None
                    ),
                },
            )


def _time(trainer: Trainer, costs: Mapping[str, ModuleCosts], number: int) -> None:
    def add(name: str, phase: Phase, nanoseconds: int) -> None:
        for each in _lineage(name, costs):
            each.nanoseconds[number][phase] += nanoseconds

    with _watched(_CostReader(_clock(trainer.topology), add), trainer):
        _run_microbatch(trainer)


def _count_work(trainer: Trainer, costs: Mapping[str, ModuleCosts]) -> None:
    """Count FLOPs, and the storages that a stage's forward made in each module and that are alive at its end.

    Autograd and recomputed regions keep them. The stage's input is counted for the stage as a whole; its
    output is sent and freed.
    """

    def add(name: str, phase: Phase, flops: int) -> None:
        for each in _lineage(name, costs):
            each.flops[phase] += flops

    def count(chunk: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        time.sleep(_SETTLING_SECONDS)
        sent = {_identity(tensor) for tensor in _plain_tensors(output)}
        for owner, storage in made.take_alive():
            if storage_number(storage) not in sent:
                for each in _lineage(owner, costs):
                    each.activation_bytes += storage.nbytes()
        costs[""].activation_bytes += sum(each.nbytes for each in arguments if isinstance(each, Tensor))

    flops = FlopCounter()
    reader = _CostReader(lambda: flops.total, add, count)
    made = _MadeStorages(reader.running_module)
    with reading(flops, made), _watched(reader, trainer):
        _run_microbatch(trainer)


def _watched(reader: _CostReader, trainer: Trainer) -> ExitStack:
    return watch_modules(reader, (each for chunk in trainer.chunks for each in chunk.named_modules()))


def _lineage(name: str, costs: Mapping[str, ModuleCosts]) -> Iterator[ModuleCosts]:
    while name:
        if name in costs:
            yield costs[name]
        name = name.rpartition(".")[0]
    yield costs[""]


def _clock(topology: Topology) -> Callable[[], int]:
    if topology.device.type != "cuda":
        return time.perf_counter_ns

    def read() -> int:
        with topology.events.during(DEVICE):
            torch.cuda.synchronize(topology.device)
        return time.perf_counter_ns()

    return read


@dataclass
class _Span:
    """Forward of a module, or a node of its backward, while it runs.

    `inner` is the cost of nested spans.
    """

    name: str
    phase: Phase
    begun: int
    inner: int = 0


class _CostReader(Reader):
    """Reader of a counter before and after each module's forward and each node of its backward.

    Args:
        read: returns the counter.
        add: takes a module's name, the phase and the counter's increase, submodules not included.
        after_forward: called at the end of a stage's forward with the stage, its arguments and its output.
    """

    def __init__(
        self,
        read: Callable[[], int],
        add: Callable[[str, Phase, int], None],
        after_forward: Callable[[nn.Module, tuple[Any, ...], Any], None] = lambda *_: None,
    ) -> None:
        self._read, self._add, self._after_forward = read, add, after_forward
        self._open: list[_Span] = []
        # Nodes of autograd's graph from this number on belong to this module.
        self._first_nodes: list[int] = []
        self._modules: list[str | None] = []

    def running_module(self) -> str | None:
        """Return the name of the innermost running module; None outside of all modules."""
        return self._open[-1].name if self._open else None

    def _begin(self, name: str, phase: Phase) -> None:
        self._open.append(_Span(name, phase, self._read()))

    def _end(self) -> None:
        now = self._read()
        span = self._open.pop()
        if self._open:
            self._open[-1].inner += now - span.begun
        self._add(span.name, span.phase, now - span.begun - span.inner)

    def enters(self, name: str, *_: Any) -> None:
        in_backward = self._open and self._open[-1].phase is not Phase.FORWARD
        self._begin(name, Phase.RECOMPUTED if in_backward else Phase.FORWARD)
        self._note_module()

    def leaves(self, name: str, module: nn.Module | None, args: tuple[Any, ...], output: Any) -> None:
        self._end()
        self._note_module()
        if isinstance(module, Stage) and output is not None:
            self._end_stage(module, args, output)

    def _note_module(self) -> None:
        if not self._open or self._open[-1].phase is Phase.FORWARD:
            self._first_nodes.append(next_node_number())
            self._modules.append(self.running_module())

    def _end_stage(self, stage: Stage, arguments: tuple[Any, ...], output: Any) -> None:
        for node in _graph_of(output):
            index = bisect_right(self._first_nodes, node_number(node)) - 1
            name = self._modules[index] if index >= 0 else None
            if name is not None:
                node.register_prehook(lambda _, name=name: self._begin(name, Phase.BACKWARD))
                node.register_hook(lambda *_: self._end())
        self._after_forward(stage, arguments, output)


def _graph_of(output: Any) -> Iterator[Node]:
    """Yield the nodes of the graph that computed a stage's output; a stage without layers has none."""
    waiting = [each.grad_fn for each in _plain_tensors(output) if each.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        waiting += new


class _MadeStorages(Reader):
    """Storages that operators create in this block, each with the running module.

    Args:
        running_module: returns the module's name; storages are not recorded while it returns None.
    """

    def __init__(self, running_module: Callable[[], str | None]) -> None:
        self._running_module = running_module
        self._made: dict[int, tuple[str, weakref.ref[torch.UntypedStorage]]] = {}  # by the storage's number

    def after(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        name = self._running_module()
        if name is not None:
            passed = {_identity(tensor) for tensor in _plain_tensors((args, kwargs))}
            for tensor in _plain_tensors(out):
                if _identity(tensor) not in passed:  # neither a view nor in place
                    self._made[_identity(tensor)] = name, weakref.ref(tensor.untyped_storage())

    def take_alive(self) -> Iterator[tuple[str, torch.UntypedStorage]]:
        """Yield the storages that are still alive, each with its module, and clear the record."""
        made, self._made = self._made, {}
        for name, reference in made.values():
            storage = reference()
            if storage is not None:
                yield name, storage


def _plain_tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested arguments or results, without subclasses such as DTensor."""
    return (each for each in tensors_in(tree) if type(each) in (Tensor, nn.Parameter))


def _identity(tensor: Tensor) -> int:
    return storage_number(tensor.untyped_storage())


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Count attention by its arguments' shapes: torch only has formulas for its own GPU kernels.

    A key that several query heads share counts for each; before torch 2.12 its formula did not support that.
    """
    return sdpa_flop_count(query, *((each[0], query[1], *each[2:]) for each in (key, value)))


def _attention_backward_flops(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Count five GEMMs for forward's two: the scores again, and the gradients of all four factors."""
    return _attention_flops(query, key, value) * 5 // 2


def _recurrence_flops(query: Any, key: Any, value: Any, *rest: Any, **_: Any) -> int:
    """Count a product of the state with a vector for each write and read, and one for the delta rule.

    The kernels compute more: the pairs of tokens of a chunk.
    """
    is_delta = rest[4]
    return 2 * (3 if is_delta else 2) * math.prod(value) * query[-1]


def _recurrence_backward_flops(grad: Any, of_last: Any, *arguments: Any, **_: Any) -> int:
    return 2 * _recurrence_flops(*arguments)


def _weight_gradient_flops(total: Any, grad: Any, x: Any, *_: Any, **__: Any) -> int:
    (num_rows, num_out), num_in = grad, x[1]
    return 2 * num_rows * num_out * num_in


_FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    cpu_attention: shape_wrapper(_attention_flops),
    cpu_attention_backward: shape_wrapper(_attention_backward_flops),
    torch.ops.megalite.flash_attention: shape_wrapper(_attention_flops),
    torch.ops.megalite.flash_attention_backward: shape_wrapper(_attention_backward_flops),
    torch.ops.megalite.recurrence: shape_wrapper(_recurrence_flops),
    torch.ops.megalite.recurrence_backward: shape_wrapper(_recurrence_backward_flops),
    torch.ops.megalite.add_weight_gradient_: shape_wrapper(_weight_gradient_flops),
}
"""FLOPs of operators, torch's and ours, by their arguments."""


class FlopCounter(Reader):
    """FLOPs of the GEMMs and attention that run in this block."""

    def __init__(self) -> None:
        self.total = 0

    def reads(self, func: Any) -> bool:
        return func.overloadpacket in _FORMULAS

    def after(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        self.total += _FORMULAS[func.overloadpacket](*args, **kwargs, out_val=out)
