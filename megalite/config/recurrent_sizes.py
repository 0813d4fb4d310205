"""The sizes of layers with Gated DeltaNet and with Mamba-2."""

from __future__ import annotations

from typing import NamedTuple


class DeltaNetSizes(NamedTuple):
    """Sizes of Gated DeltaNet; several value heads can share a query and key head.

    Attributes:
        kernel: tokens that the convolution sees.
        key_dim, value_dim: size of a query or key head, and of a value head.
        key_heads, value_heads: numbers of heads.
    """

    kernel: int
    key_dim: int
    value_dim: int
    key_heads: int
    value_heads: int

    @property
    def sharers(self) -> int:
        """Return the number of value heads that share a key head."""
        return self.value_heads // self.key_heads

    @property
    def group_rows(self) -> tuple[int, ...]:
        """Return the features that the input projection computes for one key head, by kind.

        The kinds are query, key, values, the gates of the output, and each value head's rate and decay.
        """
        values = self.sharers * self.value_dim
        return (self.key_dim, self.key_dim, values, values, self.sharers, self.sharers)

    @property
    def num_mixed(self) -> int:
        """Return the features of one key head that the convolution mixes: query, key and values."""
        return sum(self.group_rows[:3])

    def num_weights(self, hidden_size: int) -> int:
        """Return the number of elements of the matrices of both projections."""
        return hidden_size * (self.key_heads * sum(self.group_rows) + self.value_heads * self.value_dim)

    @property
    def multiply_adds(self) -> int:
        """Return the multiply-adds of the recurrence and the convolution per token.

        The recurrence reads the state with a key, adds an outer product to it, and reads it with a query.
        """
        return 3 * self.value_heads * self.key_dim * self.value_dim + (
            self.kernel * self.key_heads * self.num_mixed
        )


class MambaSizes(NamedTuple):
    """Sizes of Mamba-2; the heads of a group share what writes to their states and reads them.

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
