"""Find the documents inside a sample, for their positions, attention and loss.

Shapes: b samples of a microbatch, s tokens of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalite.data.batch.microbatch import Microbatch
from megalite.data.indexed_dataset import IndexedDataset
from megalite.utils.errors import UserError

NUM_CHECKED = 16
"""Number of a corpus's documents to check for the end-of-document token."""


@dataclass(frozen=True)
class DocumentEnds:
    """Finder of the documents of packed samples by their end-of-document tokens, as in Megatron-LM.

    Such a token belongs to the document that it ends. A sample's first tokens are a document of their own,
    even if most of that document is in the sample before.

    Attributes:
        eod: id of the token that ends a document.
        reset_position_ids: positions count from 0 in each document.
        reset_attention_mask: tokens attend within their document only.
        eod_mask_loss: inputs equal to `eod` have no loss: the next document's first token is not learned.
        on_every_stage: whether the layers need the documents, not only the embedding and the loss.
    """

    eod: int
    reset_position_ids: bool
    reset_attention_mask: bool
    eod_mask_loss: bool
    on_every_stage: bool

    def marked(self, microbatch: Microbatch) -> Microbatch:
        """Return the microbatch with the requested fields, computed on its device without waiting."""
        is_end = microbatch.tokens == self.eod  # [b, s]
        return replace(
            microbatch,
            position_ids=position_ids(is_end) if self.reset_position_ids else None,
            document_ids=document_ids(is_end) if self.reset_attention_mask else None,
            loss_mask=~is_end if self.eod_mask_loss else None,
        )


def document_ids(is_end: Tensor) -> Tensor:
    """Count the document ends before each token in its sample, int64 ``[b, s]``."""
    ends = is_end.long()
    return ends.cumsum(1) - ends


def position_ids(is_end: Tensor) -> Tensor:
    """Count the tokens before each token in its document, int64 ``[b, s]``."""
    positions = torch.arange(is_end.shape[1], device=is_end.device)
    after_end = torch.where(is_end, positions + 1, 0)  # where the next document starts
    starts = after_end.cummax(1).values.roll(1, 1)
    starts[:, 0] = 0
    return positions - starts


def check_ends(corpus: IndexedDataset, eod: int) -> None:
    """Refuse a corpus without end-of-document tokens: its documents cannot be found in a sample.

    Raises:
        UserError: none of its first documents ends with `eod`.
    """
    lasts = corpus.document_index[1 : NUM_CHECKED + 1] - 1
    sequences = [corpus[last] for last in lasts.tolist() if last >= 0]
    tokens = [int(sequence[-1]) for sequence in sequences if len(sequence)]
    if tokens and eod not in tokens:
        raise UserError(
            f"no document of {corpus.prefix} ends with the tokenizer's end-of-document token {eod}: "
            "preprocess it with --append-eod, or train without --reset-position-ids, --reset-attention-mask "
            "and --eod-mask-loss"
        )
