"""The matrices of a parameter, and the part of a matrix that a rank's box has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from megalite.tensor_parallel.parameter_spec import ParameterSpec
from megalite.tensor_parallel.placement import Box


@dataclass(frozen=True)
class Matrix:
    """One matrix of a full parameter ``[..., rows, columns]``.

    Attributes:
        index: its index along the leading dims.
        first: its first row in each period.
        rows: number of its consecutive rows in each period.
        period: number of rows after which the rows of all fused matrices repeat.
    """

    index: tuple[int, ...]
    first: int
    rows: int
    period: int
    shape: tuple[int, int]

    def rows_before(self, row: int) -> int:
        """Return how many rows of the matrix come before a row of the parameter."""
        periods, rest = divmod(row, self.period)
        return periods * self.rows + min(max(rest - self.first, 0), self.rows)

    def part(self, box: Box) -> MatrixPart:
        """Return the part of the matrix in a box of the parameter."""
        return MatrixPart(self, box)


def matrices_of(spec: ParameterSpec, *, splits_fused: bool = True) -> list[Matrix]:
    """Return the matrices of a parameter in the order of its rows.

    Args:
        splits_fused: return the matrices of a fused weight; otherwise the fused weight is one matrix.
    """
    *leading, num_rows, num_columns = spec.full_shape
    fused = spec.fused_rows if splits_fused and spec.fused_rows else (num_rows,)
    period = sum(fused)
    assert num_rows % period == 0, f"{num_rows} rows are not a multiple of {fused}"
    firsts = accumulate(fused, initial=0)
    parts = [
        (first, rows, (num_rows // period * rows, num_columns))
        for first, rows in zip(firsts, fused, strict=False)
    ]
    return [
        Matrix(index, first, rows, period, shape)
        for index in np.ndindex(*leading)
        for first, rows, shape in parts
    ]


@dataclass(frozen=True)
class MatrixPart:
    """Part of a matrix in a box of its parameter: a block of the matrix, or nothing.

    The elements of the part are in the order of the flattened box, which is the order of the flattened block.
    """

    matrix: Matrix
    box: Box

    @cached_property
    def _first_row(self) -> int:
        """Return the number of rows of the flattened box before the index of the matrix."""
        starts, shape, number = self.box.starts[:-2], self.box.shape[:-2], 0
        for index, start, size in zip(self.matrix.index, starts, shape, strict=True):
            number = number * size + index - start
        return number * self.box.shape[-2]

    @cached_property
    def _is_empty(self) -> bool:
        starts, ends = self.box.starts[:-2], self.box.ends[:-2]
        inside = zip(starts, self.matrix.index, ends, strict=True)
        return not all(start <= index < end for start, index, end in inside)

    @cached_property
    def block(self) -> tuple[slice, slice]:
        """Return the rows and columns of the matrix."""
        row, column = self.box.starts[-2:]
        before = self.matrix.rows_before
        if self._is_empty:
            return slice(0, 0), slice(0, 0)
        return (
            slice(before(row), before(row + self.box.shape[-2])),
            slice(column, column + self.box.shape[-1]),
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the block."""
        rows, columns = self.block
        return rows.stop - rows.start, columns.stop - columns.start

    def num_before(self, position: int) -> int:
        """Return how many elements of the part come before a position in the flattened box."""
        (row, column), (rows, columns) = divmod(position, self.box.shape[-1]), self.shape
        row -= self._first_row
        if self._is_empty or row < 0:
            return 0
        if row >= self.box.shape[-2]:
            return rows * columns
        before, row = self.matrix.rows_before, self.box.starts[-2] + row
        found = (before(row) - self.block[0].start) * columns
        return found + column * (before(row + 1) - before(row))

    def slices(self, start: int, end: int) -> Iterator[slice]:
        """Yield the consecutive elements of the part in ``[start, end)`` of the flattened box."""
        if self._is_empty:
            return
        first, num_rows, width = self.box.starts[-2], self.box.shape[-2], self.box.shape[-1]
        matrix = self.matrix
        for period in range(first // matrix.period, (first + num_rows - 1) // matrix.period + 1):
            row = period * matrix.period + matrix.first - first
            begins = max(start, (self._first_row + max(row, 0)) * width)
            ends = min(end, (self._first_row + min(row + matrix.rows, num_rows)) * width)
            if begins < ends:
                yield slice(begins, ends)


def newton_schulz_flops(shape: tuple[int, int]) -> int:
    """Return the floating-point operations of a step of Newton-Schulz iteration on a matrix."""
    small, large = sorted(shape)
    return 4 * small * small * large + 2 * small**3
