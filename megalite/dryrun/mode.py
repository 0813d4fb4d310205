"""What sees every operator of a block."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class Mode(TorchDispatchMode):
    """A dispatch mode that torch does not wrap against its compiler.

    Nothing is compiled here, and the wrapper takes half of the time of a block with modes, and seconds to
    import.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
