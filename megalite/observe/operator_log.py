"""Sort the operators that run into GEMMs, attention, messages and other kernels, and list messages."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.distributed.topology import Topology
from megalite.kernels.recurrence import block_size, sizes_for
from megalite.observe.recorder import Reader, tensors_in
from megalite.observe.unit_record import (
    ATTENTION,
    GEMMS,
    MEMORY_BOUND,
    AttentionCall,
    CastCall,
    CollectiveCall,
    GemmCall,
    JoinedCollective,
    KernelKind,
    PhaseRecord,
    RecurrenceCall,
)
from megalite.utils import torch_private
from megalite.utils.torch_private import schema_of, storage_number, tree_leaves

_ATEN, _OURS = torch.ops.aten, torch.ops.megalite


def _mm(a: Tensor, b: Tensor) -> GemmCall:
    return GemmCall(a.shape[0], b.shape[1], a.shape[1], 1, a.element_size())


def _bmm(a: Tensor, b: Tensor) -> GemmCall:
    return GemmCall(a.shape[1], b.shape[2], a.shape[2], a.shape[0], a.element_size())


def _grouped_mm(a: Tensor, b: Tensor, ends: Tensor, *_: Any) -> GemmCall:
    """Return the GEMMs of groups of equal size: of the rows of `a`, or of the dim over which they sum."""
    num_groups = len(ends)
    if b.dim() == 3:
        return GemmCall(
            math.ceil(a.shape[0] / num_groups), b.shape[2], b.shape[1], num_groups, a.element_size()
        )
    k = math.ceil(a.shape[1] / num_groups)
    return GemmCall(a.shape[0], b.shape[1], k, num_groups, a.element_size(), sums_rows=True)


_GEMMS: dict[Any, Callable[..., GemmCall]] = {
    _ATEN.mm: _mm,
    _ATEN.addmm: lambda bias, a, b, *_: _mm(a, b),
    _ATEN.addmm_: lambda total, a, b, *_: _mm(a, b),
    _ATEN.bmm: _bmm,
    _ATEN.baddbmm: lambda total, a, b, *_: _bmm(a, b),
    _ATEN.baddbmm_: lambda total, a, b, *_: _bmm(a, b),
    _OURS.add_weight_gradient_: lambda total, grad, x, *_: GemmCall(
        *(grad.shape[1], x.shape[1], x.shape[0], 1, x.element_size()), adds=True
    ),
    torch_private.grouped_mm: _grouped_mm,
    torch_private.scaled_mm_operator: lambda a, b, *_: _mm(a, b),
}
_DECODED = {_OURS.round_in_blocks, _OURS.transform_and_round}
"""Operators that round to the dtype in their second argument, and return what the codes stand for."""
_CASTS = {_OURS.amax, _OURS.round_tensor, _OURS.round_and_measure, *_DECODED}
"""Operators that find the largest magnitude of a GEMM's operand, or round it."""


class _AttentionOperator(NamedTuple):
    """Positions of the arguments of an operator of fused attention.

    Attributes:
        first: index of the queries; keys and values are next.
        is_causal, dropout: index of the argument.
    """

    kernel: str
    first: int
    is_causal: int
    dropout: int

    def call(self, args: Sequence[Any]) -> AttentionCall:
        q, k, v = args[self.first : self.first + 3]
        b, heads, queries, size = q.shape
        p = args[self.dropout] if len(args) > self.dropout else 0.0
        flag = args[self.is_causal] if len(args) > self.is_causal else False
        # The argument of triton's is the end of each query's document, if it sees all of it.
        is_causal = flag is None if self.kernel == "triton" else bool(flag)
        return AttentionCall(
            *(self.kernel, b * heads, b * k.shape[1], queries, k.shape[2], size, v.shape[3]),
            *(is_causal, p > 0.0, self.first > 0),
        )


_ATTENTION = {
    torch_private.flash_attention: _AttentionOperator("sdpa", 0, 4, 3),
    torch_private.flash_attention_backward: _AttentionOperator("sdpa", 1, 11, 10),
    torch_private.efficient_attention: _AttentionOperator("sdpa", 0, 6, 5),
    torch_private.efficient_attention_backward: _AttentionOperator("sdpa", 1, 11, 9),
    _OURS.flash_attention: _AttentionOperator("triton", 0, 5, 9),
    _OURS.flash_attention_backward: _AttentionOperator("triton", 1, 8, 12),
}
_FIRST_OF_RECURRENCE = {_OURS.recurrence: 0, _OURS.recurrence_backward: 2}
"""Index of the queries among the arguments of the operators of recurrences; keys and values are next."""
_LAUNCH_NOTHING = {
    _ATEN.empty,
    _ATEN.new_empty,
    _ATEN.empty_strided,
    _ATEN.new_empty_strided,
    _ATEN.empty_like,
}
_GEMM_NAMES = {str(packet).replace(".", "::") for packet in _GEMMS}


def recurrence_call(func: Any, args: Sequence[Any]) -> RecurrenceCall | None:
    """Return what a call of an operator computes if it is one of recurrences."""
    first = _FIRST_OF_RECURRENCE.get(func.overloadpacket)
    if first is None:
        return None
    q, _, v = args[first : first + 3]
    (b, g, s, d), (r, e), sizes = q.shape, (v.shape[2], v.shape[4]), sizes_for(q)
    return RecurrenceCall(
        b * g * r,
        b * g,
        s,
        d,
        e,
        sizes.tokens,
        block_size(sizes.columns, v),
        q.element_size(),
        is_delta=args[-1],
        is_backward=first > 0,
    )


def kind_by_name(operator: str) -> KernelKind:
    """Return the kind of the kernels of an operator with this name, such as "aten::mm".

    The planner's operators of attention, and those of cuDNN and of CPUs, have "attention" in their names.
    """
    if operator in _GEMM_NAMES:
        return GEMMS
    return ATTENTION if "attention" in operator else MEMORY_BOUND


def kernel_kind(func: Any) -> KernelKind | None:
    """Return the kind of an operator's kernels; None for a view, an allocation or a collective."""
    schema = schema_of(func)
    aliases = [value.alias_info for value in schema.returns if value.alias_info is not None]
    is_view = any(not alias.is_write for alias in aliases)
    if is_collective(func) or func.overloadpacket in _LAUNCH_NOTHING or is_view:
        return None
    return kind_by_name(schema.name)


class OperatorLog(Reader):
    """Log of the operators that run in this block; `take` returns it and starts a new one.

    Args:
        window: window of the attention that runs, which is not an argument of the operators.
        weights: parameters; what is computed from them is the same for all microbatches of an iteration.
    """

    def __init__(
        self, topology: Topology, window: int | None = None, weights: Collection[Tensor] = ()
    ) -> None:
        self._traffic = Traffic(topology)
        self._window = window
        self._weights = {storage_number(weight.untyped_storage()) for weight in weights}
        self._clear()

    def _clear(self) -> None:
        self._gemms: list[GemmCall] = []
        self._attention: list[AttentionCall] = []
        self._collectives: list[JoinedCollective] = []
        self._recurrences: list[RecurrenceCall] = []
        self._casts: list[CastCall] = []
        self._rounded = _StorageMap()  # bytes per element of the codes that a storage stands for
        self._bytes = self._kernels = self._operators = 0
        self._products = _StorageMap()  # index of the GEMM that made a storage
        self._gathered = _StorageMap()  # (index of its collective, GEMMs before it) for a gathered storage

    def take(self) -> PhaseRecord:
        """Return what has run since the last call."""
        found = PhaseRecord(
            tuple(self._gemms),
            tuple(self._attention),
            self._bytes,
            self._kernels,
            self._operators,
            tuple(self._collectives),
            tuple(self._recurrences),
            tuple(self._casts),
        )
        self._clear()
        return found

    def after(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        self._operators += 1
        packet = func.overloadpacket
        if is_collective(func):
            self._add_collective(func, args)
        elif packet in _GEMMS:
            self._add_gemm(_GEMMS[packet](*args), args, out)
        elif packet in _ATTENTION:
            call = _ATTENTION[packet].call(args)
            self._attention.append(call._replace(window=self._window))
        elif recurrence := recurrence_call(func, args):
            self._recurrences.append(recurrence)
        elif packet in _CASTS:
            self._add_cast(packet, args, out)
        elif packet not in _LAUNCH_NOTHING and not _is_view(func, args, out):
            self._kernels += 1
            read = (args, kwargs) if packet is not _ATEN.embedding else (args[1], out)
            written = tensors_in(out) or _overwritten(func, args)
            self._bytes += sum(map(_num_bytes, tensors_in(read))) + sum(map(_num_bytes, written))

    def _add_cast(self, packet: Any, args: Sequence[Any], out: Any) -> None:
        x, num_bytes = args[0], float(sum(map(_num_bytes, tensors_in(out))))
        of_weight = storage_number(x.untyped_storage()) in self._weights
        if packet in _DECODED:
            size = 0.5 if "float4" in str(args[1]) else args[1].itemsize
            num_bytes = size * out.numel()
            self._rounded.put(out, size)
        self._casts.append(CastCall(_num_bytes(x) + num_bytes, packet is _OURS.amax, of_weight))

    def _add_gemm(self, call: GemmCall, args: Sequence[Any], out: Any) -> None:
        index = len(self._gemms)
        sizes = [size for operand in tensors_in(args) if (size := self._rounded.get(operand)) is not None]
        if len(sizes) > 1:  # both factors
            call = call._replace(element_bytes=max(sizes))
        for operand in tensors_in(args):
            gathered = self._gathered.pop(operand)
            if gathered is not None:
                number, before = gathered
                joined = self._collectives[number]
                self._collectives[number] = joined._replace(gemm=index, is_hidden=index > before)
        self._gemms.append(call)
        if isinstance(out, Tensor):
            self._products.put(out, index)

    def _add_collective(self, func: Any, args: Sequence[Any]) -> None:
        call = self._traffic.call_of(func, args)
        gemm = None
        if call.kind == "all-gather":
            (whole, *_) = tensors_in(args[0])
            self._gathered.put(whole, (len(self._collectives), len(self._gemms)))
        else:
            (operand, *_) = tensors_in(args[0] if call.kind == "all-reduce" else args[1])
            gemm = self._products.pop(operand)
        self._collectives.append(JoinedCollective(call, gemm, False))


class _StorageMap:
    """Map of storages to values, which forgets a storage when it is freed."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], Any]] = {}

    def put(self, tensor: Tensor, value: Any) -> None:
        storage = tensor.untyped_storage()
        self._known[storage_number(storage)] = weakref.ref(storage), value

    def get(self, tensor: Tensor) -> Any:
        """Return the value of a tensor's storage; None if there is none."""
        reference, value = self._known.get(storage_number(tensor.untyped_storage()), (lambda: None, None))
        return None if reference() is None else value

    def pop(self, tensor: Tensor) -> Any:
        """Return the value of a tensor's storage, and forget it; None if there is none."""
        value = self.get(tensor)
        self._known.pop(storage_number(tensor.untyped_storage()), None)
        return value


def _num_bytes(tensor: Tensor) -> int:
    """Return the bytes to read a tensor, whose elements may be the same ones many times."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _overwritten(func: Any, args: Sequence[Any]) -> list[Tensor]:
    """Return the tensors that an operator without results writes its results to."""
    arguments = zip(schema_of(func).arguments, args, strict=False)
    return tensors_in([arg for value, arg in arguments if value.alias_info and value.alias_info.is_write])


def _is_view(func: Any, args: Sequence[Any], out: Any) -> bool:
    """Return whether an operator's results share the memory of its arguments, and nothing is written."""
    if _writes(func):
        return False
    inputs = {storage_number(each.untyped_storage()) for each in tensors_in(args)}
    results = tensors_in(out)
    return all(storage_number(each.untyped_storage()) in inputs for each in results)


@cache
def _writes(func: Any) -> bool:
    return any(value.alias_info and value.alias_info.is_write for value in schema_of(func).arguments)


class _Operator(NamedTuple):
    """Operator of c10d.

    Attributes:
        kind: usual name of the operator.
        whole: index of the argument with the message, or with the elements of all ranks.
    """

    kind: str
    whole: int


_OPERATORS = {
    "allreduce_": _Operator("all-reduce", 0),
    "_allgather_base_": _Operator("all-gather", 0),
    "_reduce_scatter_base_": _Operator("reduce-scatter", 1),
    "alltoall_base_": _Operator("all-to-all", 1),
    "send": _Operator("send", 0),
    "recv_": _Operator("receive", 0),
}
"""The operators that training uses. Any other raises a `KeyError`, so none is missed."""


class Traffic(Reader):
    """Counter of all calls of torch.distributed on each axis.

    Attributes:
        calls: number of each call.
    """

    def __init__(self, topology: Topology) -> None:
        # An axis can share its group with the world; it counts as the axis, which comes later here.
        axes = reversed(topology.groups())
        groups = [(axis.name, group) for axis in axes for group in (axis.group, axis.backward_group)]
        self._axes = {group.group_name: name for name, group in groups if group is not None}
        self.calls: Counter[CollectiveCall] = Counter()

    def reads(self, func: Any) -> bool:
        return is_collective(func)

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.calls[self.call_of(func, args)] += 1

    def call_of(self, func: Any, args: Sequence[Any]) -> CollectiveCall:
        """Return what an operator of c10d does."""
        kind, tensors = message_of(func, args)
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        if kind == "all-to-all":
            num_bytes = max(num_bytes, args[0].nbytes)  # what the rank receives
        return CollectiveCall(self.axis_of(args), kind, dtype, num_bytes)

    def axis_of(self, args: Sequence[Any]) -> str:
        """Return the name of the axis whose group is among an operator's arguments.

        Raises:
            KeyError: it is no group of the topology.
        """
        (group,) = (arg for arg in args if isinstance(arg, torch.ScriptObject) and _is_group(arg))
        return self._axes[dist.ProcessGroup.unbox(group).group_name]


class Collective(NamedTuple):
    """Call of torch.distributed on one rank.

    Attributes:
        in_forward: whether it ran in the forward of a microbatch.
    """

    kind: str
    axis: str
    shape: tuple[int, ...]
    in_forward: bool = False

    def __str__(self) -> str:
        return f"{self.kind} over {self.axis} of {list(self.shape)}"


class CollectiveList(Traffic):
    """List of the calls of torch.distributed on this rank, in their order.

    Attributes:
        in_forward: whether the forward of a microbatch runs.
    """

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology)
        self.found: list[Collective] = []
        self.in_forward = False
        self._is_paused = False

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if not self._is_paused:
            self.found.append(self._collective(func, args))

    def _collective(self, func: Any, args: Sequence[Any]) -> Collective:
        try:
            kind, tensors = message_of(func, args)
            return Collective(kind, self.axis_of(args), tuple(tensors[0].shape), self.in_forward)
        except (KeyError, ValueError):  # a collective that only the program's own model uses
            return Collective(schema_of(func).name.removeprefix("c10d::"), "a group of its own", ())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not list the collectives of this block, which only the recording needs."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False


def is_collective(func: Any) -> bool:
    """Return whether an operator is a collective or a message of torch.distributed."""
    return bool(func.namespace == "c10d")


def message_of(func: Any, args: Sequence[Any]) -> tuple[str, list[torch.Tensor]]:
    """Return the kind of an operator of c10d, and the tensors with its message or the elements of all ranks.

    Raises:
        KeyError: training does not use the operator.
    """
    operator = _OPERATORS[schema_of(func).name.removeprefix("c10d::")]
    leaves = tree_leaves(args[operator.whole])
    return operator.kind, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _is_group(argument: torch.ScriptObject) -> bool:
    try:
        dist.ProcessGroup.unbox(argument)
    except RuntimeError:
        return False
    return True


_RING_FACTORS: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda size: 2 * (size - 1) / size,
    "all-gather": lambda size: (size - 1) / size,
    "reduce-scatter": lambda size: (size - 1) / size,
    "all-to-all": lambda size: (size - 1) / size,
    "send": lambda size: 1.0,
    "receive": lambda size: 0.0,
}


def ring_bytes(calls: Mapping[CollectiveCall, int], axis: str, size: int) -> float:
    """Return the bytes that a rank sends on an axis of `size` ranks with ring collectives.

    In an all-gather or reduce-scatter of n bytes every rank sends n (size - 1) / size; an all-reduce is one
    of each (Narayanan et al. 2021, section 3.2).
    """
    return sum(
        _RING_FACTORS[call.kind](size) * call.num_bytes * count
        for call, count in calls.items()
        if call.axis == axis
    )
