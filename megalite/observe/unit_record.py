"""Work of a unit of a model (embedding, layer or head) for one microbatch on one rank.

A key has everything that the work depends on. `record_unit` runs the real module of a key, and makes a
record. These classes need no torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from megalite.config import ModelConfig
from megalite.config.parallel import KeyExchange
from megalite.config.recompute import Module
from megalite.config.training import Fp8Options
from megalite.distributed.axes import MODEL

EMBEDDING, HEAD = "embedding", "head"


@dataclass(frozen=True)
class UnitKey:
    """Everything that the work of a unit on one microbatch depends on.

    Attributes:
        unit: EMBEDDING, HEAD or the number of a layer.
        tp: tensor-parallel size.
        positions: positions of a sample on a rank.
        num_exchanging: ranks that hold the positions of a sample, if the unit exchanges tokens for heads with
            them, as recurrent layers do; otherwise 1.
        has_documents: attention stays within documents.
        splits_backward: weight gradients are computed after the rest of backward.
        recomputed_modules: parts of a layer that backward recomputes.
        recomputes_head: backward recomputes whole modules of multi-token prediction, which the head runs.
        cross_entropy_chunks: number of parts in which the head computes the loss.
        ep, etp: sizes of the axes of experts; without such axes, ep is 1 and etp is None.
        moe_imbalance: rows for the rank's experts, relative to even ones.
        moe_token_dispatcher_type: how tokens reach experts that are on axes of their own.
        mlp_chunks: number of parts of the sequence in which a layer computes its MLP.
        triton_recurrence: megalite's kernels compute recurrences, as on a GPU; otherwise plain PyTorch.
        fp8: options of the layer's 8-bit GEMMs; None for GEMMs in the dtype of the model.
        provider: builds the stages of the program's own model; None for the model of the architecture.
    """

    model: ModelConfig
    unit: str | int
    tp: int
    positions: int
    micro_batch_size: int
    sequence_parallel: bool
    has_documents: bool
    splits_backward: bool
    recomputed_modules: tuple[Module, ...] = ()
    recomputes_head: bool = False
    cross_entropy_chunks: int = 1
    ep: int = 1
    etp: int | None = None
    moe_imbalance: float = 1.0
    moe_token_dispatcher_type: str = "alltoall"
    mlp_chunks: int = 1
    num_exchanging: int = 1
    triton_recurrence: bool = False
    fp8: Fp8Options | None = None
    provider: Callable[..., Any] | None = None


Phase = Literal["forward", "backward", "weight"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "weight")
"""Phases of a microbatch. `weight` are weight gradients that a schedule computes after the rest of backward;
without such a schedule they are part of `backward`."""
KernelKind = Literal["GEMMs", "attention", "memory-bound kernels"]
KERNEL_KINDS: tuple[KernelKind, ...] = ("GEMMs", "attention", "memory-bound kernels")
GEMMS, ATTENTION, MEMORY_BOUND = KERNEL_KINDS
"""Kinds of kernels. Kernels that are neither GEMMs nor fused attention count as memory-bound."""


class CollectiveCall(NamedTuple):
    """Collective over an axis, or a message along it.

    Attributes:
        axis: name of the axis, "world" for all ranks.
        kind: all-reduce, all-gather, reduce-scatter, all-to-all, send or receive.
        dtype: dtype of the elements, such as "bfloat16".
        num_bytes: size of the message, or of the tensor with the elements of all ranks. In an all-to-all, of
            what the rank sends or of what it receives, whichever is larger.
    """

    axis: str
    kind: str
    dtype: str
    num_bytes: int

    @property
    def is_over_experts(self) -> bool:
        """Return whether the ranks are those that hold the experts of a group of tokens."""
        return self.axis in ("ep", "etp", "ep_etp")


class GemmCall(NamedTuple):
    """``batch`` GEMMs ``[m, k] x [k, n]``.

    Attributes:
        element_bytes: bytes per element of what it multiplies.
        adds: the GEMM adds its result to a sum, as a weight gradient's does with fused accumulation.
        sums_rows: `k` is the mean number of rows of an expert, over which its weight gradient is summed.
    """

    m: int
    n: int
    k: int
    batch: int
    element_bytes: float
    adds: bool = False
    sums_rows: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * self.batch


class CastCall(NamedTuple):
    """Call of the kernels that round an operand of GEMMs to fewer bits, or that find its largest magnitude.

    Attributes:
        num_bytes: bytes that they read and write.
        measures: they find the largest magnitude.
        of_weight: the operand is a weight, which changes only between iterations.
    """

    num_bytes: float
    measures: bool
    of_weight: bool


class AttentionCall(NamedTuple):
    """Call of a fused attention kernel.

    Attributes:
        kernel: ``sdpa`` for one of PyTorch's kernels, ``triton`` for megalite's own.
        heads: number of samples times query heads.
        kv_heads: number of samples times key/value heads.
        size: size of a head of queries and keys.
        value_size: size of a head of values.
        is_causal: only half of the scores are computed.
        dropout: the kernel drops attention weights.
        is_backward: the call computes gradients.
        window: largest number of keys before its own that a query sees; None without this limit.
        exchange: how queries reach the keys of other ranks' positions; None if one rank has all.
    """

    kernel: str
    heads: int
    kv_heads: int
    queries: int
    keys: int
    size: int
    value_size: int
    is_causal: bool
    dropout: bool
    is_backward: bool
    window: int | None = None
    exchange: KeyExchange | None = None

    @property
    def scores(self) -> float:
        """Return the number of attention scores that the kernel computes."""
        if not self.is_causal:
            return self.heads * self.queries * self.keys
        most = self.keys if self.window is None else min(self.window + 1, self.keys)
        return self.heads * self.queries * (most - most**2 / (2 * self.keys))

    @property
    def flops(self) -> float:
        """Return the FLOPs of a forward: two GEMMs."""
        return 2 * (self.size + self.value_size) * self.scores


class KernelWork(NamedTuple):
    """Work of one kernel.

    Attributes:
        flops: FLOPs of its GEMMs.
        num_bytes: bytes that it reads and writes; caches serve what several of its programs read.
        num_programs: number of its programs, each on one multiprocessor.
    """

    flops: float
    num_bytes: float
    num_programs: int


class RecurrenceCall(NamedTuple):
    """Call of the operator `recurrence`, or of its backward.

    Attributes:
        heads: number of samples times value heads.
        key_heads: number of samples times query and key heads.
        key_size, value_size: sizes of a query or key head, and of a value head.
        chunk: tokens of a chunk.
        columns: value elements of a program of the kernels that loop over chunks.
        element_bytes: bytes per element of queries, keys and values; sums have 4 or more.
        is_delta: the recurrence is the delta rule's.
    """

    heads: int
    key_heads: int
    tokens: int
    key_size: int
    value_size: int
    chunk: int
    columns: int
    element_bytes: int
    is_delta: bool
    is_backward: bool

    @property
    def kernels(self) -> tuple[KernelWork, ...]:
        """Return the work of the kernels, in the order of their launch."""
        keys, values, states, inverses = self._keys, self._values, self._all_states, self._all_inverses
        sums, d, chunks = self._wide(values), int(self.is_delta), self._num_chunks
        looping = self.heads * math.ceil(self.value_size / self.columns)  # programs that loop over chunks
        of_inverses = self._flops(0, 0, d)  # their product with values, or with gradients of values
        found = []
        if self.is_delta:  # the inverse of a triangular matrix of each chunk, by joining pairs of blocks
            joins = 2 * (math.log2(self.chunk) - 1) * 2 * self.chunk**3 * chunks
            found.append(KernelWork(self._flops(0, 1, 0) + joins, keys + inverses, chunks))
        moved = keys + values + states + d * (inverses + values)  # the states before the chunks
        found.append(KernelWork(self._flops(1 + d, 0, 0) + of_inverses, moved, looping))
        if not self.is_backward:  # the outputs
            found.append(KernelWork(self._flops(1, 1, 1), 2 * keys + values + states + sums, chunks))
            return tuple(found)
        found.append(KernelWork(self._flops(0, 1, 1), 2 * keys + 2 * sums, chunks))  # gradients in a chunk
        moved = 2 * keys + 2 * sums + values + states + d * inverses  # gradients of the states
        found.append(KernelWork(self._flops(2 + d, 0, 0) + of_inverses, moved, looping))
        of_heads = 2 * self._wide(self._head_keys)  # gradients of each head's inputs, then their sums
        moved = 2 * keys + (1 + d) * values + sums + 2 * states + of_heads
        found.append(KernelWork(self._flops(2 + d, 2 + 2 * d, 1 + d), moved, chunks))
        found.append(KernelWork(0.0, of_heads + 2 * keys, chunks))
        return tuple(found)

    @property
    def workspace_bytes(self) -> float:
        """Return the bytes that exist while the kernels run, besides arguments and results."""
        of_errors = self._values + self._all_inverses if self.is_delta else 0.0
        if not self.is_backward:
            return self._all_states + of_errors
        of_heads = self._wide(self._values) + 2 * self._wide(self._head_keys)
        sums = 2 * self._keys if self.element_bytes == 2 else 0.0  # of heads, before they are rounded
        return 2 * self._all_states + of_errors + of_heads + sums

    @property
    def _num_chunks(self) -> int:
        return self.heads * math.ceil(self.tokens / self.chunk)

    @property
    def _keys(self) -> float:
        return self.key_heads * self.tokens * self.key_size * self.element_bytes

    @property
    def _head_keys(self) -> float:
        """Return the bytes of the keys if each value head had its own."""
        return self.heads * self.tokens * self.key_size * self.element_bytes

    @property
    def _values(self) -> float:
        return self.heads * self.tokens * self.value_size * self.element_bytes

    @property
    def _all_states(self) -> float:
        """Return the bytes of the states before all chunks, and of their gradients."""
        return self._num_chunks * self.key_size * self.value_size * self.element_bytes

    @property
    def _all_inverses(self) -> float:
        return self._num_chunks * self.chunk**2 * self.element_bytes

    def _wide(self, num_bytes: float) -> float:
        """Return the bytes of a tensor of this size in the dtype of sums."""
        return num_bytes * max(1.0, 4 / self.element_bytes)

    def _flops(self, of_state: int, of_keys: int, of_values: int) -> float:
        """Return the FLOPs of GEMMs of all chunks.

        Args:
            of_state: GEMMs of tokens, keys and values: ``[C, d] x [d, e]``.
            of_keys: GEMMs of pairs of tokens and keys: ``[C, d] x [d, C]``.
            of_values: the same with values.
        """
        by_token = of_state * self.key_size * self.value_size
        by_token += self.chunk * (of_keys * self.key_size + of_values * self.value_size)
        return 2 * self._num_chunks * self.chunk * by_token


class JoinedCollective(NamedTuple):
    """Collective, and the GEMM whose operand it gathers or whose result it sums.

    Attributes:
        gemm: index of the GEMM among the GEMMs of the phase; None if there is none.
        is_hidden: another GEMM runs between the start of the collective and its GEMM.
    """

    call: CollectiveCall
    gemm: int | None
    is_hidden: bool


@dataclass(frozen=True)
class PhaseRecord:
    """Work of one phase.

    Attributes:
        kernel_bytes: bytes that kernels other than GEMMs, casts, attention and recurrences read and write.
        num_kernels: number of those kernels.
        num_operators: operators that the host dispatches, including those that launch no kernel.
        recurrences: calls of megalite's kernels of recurrences; plain PyTorch is GEMMs and other kernels.
    """

    gemms: tuple[GemmCall, ...] = ()
    attention: tuple[AttentionCall, ...] = ()
    kernel_bytes: float = 0.0
    num_kernels: int = 0
    num_operators: int = 0
    collectives: tuple[JoinedCollective, ...] = ()
    recurrences: tuple[RecurrenceCall, ...] = ()
    casts: tuple[CastCall, ...] = ()


class WeightRecord(NamedTuple):
    """Parameter of a unit.

    Attributes:
        name: its name in the whole model.
        shape: shape of the whole parameter.
        size: elements that the rank holds.
        is_cut: whether tensor parallelism cuts it.
        is_tied: the head uses it too, and it is recorded with the embedding and with the head.
        matrices: shapes of its matrices, for an optimizer of matrices; none if it has none.
        mesh: name of the mesh of the ranks whose axes cut and replicate it.
    """

    name: str
    shape: tuple[int, ...]
    size: int
    is_cut: bool
    is_tied: bool
    matrices: tuple[tuple[int, int], ...] = ()
    mesh: str = MODEL.name


INPUT = "input"
"""Part of a unit: the hidden states that it reads."""


class SavedPart(NamedTuple):
    """Bytes that a part of a unit leaves in memory for backward.

    Attributes:
        part: one of --recompute-modules, another module of the unit, or INPUT.
    """

    part: str
    num_bytes: float


@dataclass(frozen=True)
class UnitRecord:
    """Work of a unit for one microbatch.

    Attributes:
        input_bytes: size of the hidden states that the unit reads.
        saved: bytes that forward leaves in memory for backward, by the part that makes them.
        workspace_bytes: most bytes that exist besides `saved_bytes`, in forward or backward.
    """

    weights: tuple[WeightRecord, ...]
    forward: PhaseRecord
    backward: PhaseRecord
    weight: PhaseRecord
    input_bytes: int
    saved: tuple[SavedPart, ...]
    workspace_bytes: float

    def phases(self) -> Iterator[PhaseRecord]:
        """Yield the phases, in the order of `PHASES`."""
        yield from (self.forward, self.backward, self.weight)

    @property
    def saved_bytes(self) -> float:
        """Return the bytes that forward leaves in memory for backward."""
        return sum(each.num_bytes for each in self.saved)

    def saving(self, more: Mapping[str, float]) -> UnitRecord:
        """Return a record that saves more bytes, by part, or less."""
        found = {each.part: each.num_bytes for each in self.saved}
        for part, num_bytes in more.items():
            found[part] = found.get(part, 0) + num_bytes
        return replace(self, saved=tuple(SavedPart(*each) for each in found.items()))

    @property
    def num_parameters(self) -> int:
        """Return the elements of the whole parameters."""
        return sum(math.prod(weight.shape) for weight in self.weights)


def from_json(kind: Any, found: Any) -> Any:
    """Return a `UnitRecord`, or a part of one, from the JSON of its `asdict`.

    Args:
        kind: type of the part.

    Raises:
        KeyError, TypeError, ValueError: it is not such an object.
    """
    if (kinds := _kinds_of_items(kind)) is not None:
        each_kind = itertools.repeat(kinds[0], len(found)) if kinds[-1] is ... else kinds
        return tuple(from_json(*each) for each in zip(each_kind, found, strict=True))
    if isinstance(found, dict):
        return kind(**{name: from_json(each, found[name]) for name, each in _types(kind).items()})
    if isinstance(found, list):
        return kind(*(from_json(*each) for each in zip(_types(kind).values(), found, strict=True)))
    return found


_types = cache(get_type_hints)


@cache
def _kinds_of_items(kind: Any) -> tuple[Any, ...] | None:
    """Return the types of a tuple's items; None if the type is no tuple."""
    return get_args(kind) if get_origin(kind) is tuple else None
