"""Describe what the Triton kernels of recurrences compute, read and write (`kernels/recurrence.py`).

This file needs no torch.
"""

from __future__ import annotations

import math
from typing import NamedTuple


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
        inverses = (self._inverses,) if self.is_delta else ()
        if self.is_backward:
            return (*inverses, self._states, self._chunk_gradients, self._state_gradients, *self._gradients)
        return (*inverses, self._states, self._outputs)

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
        """Return the number of chunks of all heads."""
        return self.heads * math.ceil(self.tokens / self.chunk)

    @property
    def _keys(self) -> float:
        """Return the bytes of the keys, and of the queries."""
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

    @property
    def _inverses(self) -> KernelWork:
        """Return the work of inverting a triangular matrix of each chunk, by joining pairs of blocks."""
        joins = 2 * (math.log2(self.chunk) - 1) * 2 * self.chunk**3 * self._num_chunks
        return KernelWork(self._flops(0, 1, 0) + joins, self._keys + self._all_inverses, self._num_chunks)

    @property
    def _looping(self) -> int:
        """Return the number of programs of the kernels that loop over chunks."""
        return self.heads * math.ceil(self.value_size / self.columns)

    @property
    def _states(self) -> KernelWork:
        moved = self._keys + self._values + self._all_states
        if self.is_delta:
            moved += self._all_inverses + self._values
        return KernelWork(self._flops(1 + self.is_delta, 0, 0) + self._inverse_flops, moved, self._looping)

    @property
    def _inverse_flops(self) -> float:
        """Return the FLOPs of the product of the inverses with values, or their gradients."""
        return self._flops(0, 0, 1) if self.is_delta else 0.0

    @property
    def _outputs(self) -> KernelWork:
        moved = 2 * self._keys + self._values + self._all_states + self._wide(self._values)
        return KernelWork(self._flops(1, 1, 1), moved, self._num_chunks)

    @property
    def _chunk_gradients(self) -> KernelWork:
        moved = 2 * self._keys + 2 * self._wide(self._values)
        return KernelWork(self._flops(0, 1, 1), moved, self._num_chunks)

    @property
    def _state_gradients(self) -> KernelWork:
        moved = 2 * self._keys + 2 * self._wide(self._values) + self._values + self._all_states
        if self.is_delta:
            moved += self._all_inverses
        return KernelWork(self._flops(2 + self.is_delta, 0, 0) + self._inverse_flops, moved, self._looping)

    @property
    def _gradients(self) -> tuple[KernelWork, KernelWork]:
        """Return the work of the gradients of each head's inputs, and of their sums over heads."""
        delta, of_head = int(self.is_delta), 2 * self._wide(self._head_keys)
        moved = 2 * self._keys + (1 + delta) * self._values + self._wide(self._values) + 2 * self._all_states
        by_head = KernelWork(
            self._flops(2 + delta, 2 + 2 * delta, 1 + delta), moved + of_head, self._num_chunks
        )
        return by_head, KernelWork(0.0, of_head + 2 * self._keys, self._num_chunks)
