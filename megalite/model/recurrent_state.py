"""The state of a recurrent layer between the tokens of a generated sequence.

Shapes: b sequences.
"""

from __future__ import annotations

from torch import Tensor


class RecurrentState:
    """Holds one layer's state between the pieces of a sequence; both tensors are None before the first one.

    The layer's forward replaces them.

    Attributes:
        inputs: last inputs of the layer's convolution, ``[b, kernel - 1, channels]``.
        state: state of its recurrence, ``[b, ...]``.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the sequences."""
        self.inputs: Tensor | None = None
        self.state: Tensor | None = None

    def select(self, rows: Tensor) -> None:
        """Continue with these sequences, int64: omitted ones are dropped, repeated ones are copied."""
        assert self.inputs is not None and self.state is not None
        self.inputs, self.state = self.inputs[rows], self.state[rows]
