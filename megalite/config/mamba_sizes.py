"""The sizes of a layer with Mamba-2."""

from __future__ import annotations

from typing import NamedTuple


class MambaSizes(NamedTuple):
    """Holds the sizes of Mamba-2; the heads of a group share what writes to their states and reads them.

    Attributes:
        state_dim: n, size of the state of each element of a head.
        head_dim: p, size of a head.
        num_groups, num_heads: numbers of groups and heads.
        kernel: tokens that the convolution before the recurrence sees.
        min_time_step: smallest time step.
    """

    state_dim: int
    head_dim: int
    num_groups: int
    num_heads: int
    kernel: int
    min_time_step: float

    @property
    def group_heads(self) -> int:
        """Return the number of heads of a group."""
        return self.num_heads // self.num_groups

    @property
    def width(self) -> int:
        """Return the number of features of all heads."""
        return self.num_heads * self.head_dim

    @property
    def group_rows(self) -> tuple[int, ...]:
        """Return the features that the input projection computes for a group, by kind.

        The kinds are the gates of the output, the inputs x of the heads, B, C, and each head's time step.
        """
        heads = self.group_heads * self.head_dim
        return (heads, heads, self.state_dim, self.state_dim, self.group_heads)

    @property
    def num_mixed(self) -> int:
        """Return the features of a group that the convolution mixes: x, B and C."""
        return sum(self.group_rows[1:4])

    def num_weights(self, hidden_size: int) -> int:
        """Return the number of elements of the matrices of both projections."""
        return hidden_size * (self.num_groups * sum(self.group_rows) + self.width)

    @property
    def multiply_adds(self) -> int:
        """Return the multiply-adds of the recurrence and the convolution per token.

        The recurrence adds an outer product to the state, and reads the state.
        """
        return 2 * self.width * self.state_dim + self.kernel * self.num_groups * self.num_mixed
