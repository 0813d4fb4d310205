"""Samples that are packed: several documents one after the other."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """What the documents in a microbatch's samples change; each part is None where samples are taken whole.

    Attributes:
        position_ids: int64 ``[b, s]``, each token's position, below s.
        document_ids: int64 ``[b, s]``, a number for each document, unlike its neighbours': tokens attend to
            those of their own.
        loss_mask: bool ``[b, s]``, True where the loss of predicting the next token counts.
    """

    position_ids: Tensor | None = None
    document_ids: Tensor | None = None
    loss_mask: Tensor | None = None
