"""What changes at the end of a document inside a sample. Shapes: b samples of a microbatch, s tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalite.data.batch import Microbatch
from megalite.data.indexed import IndexedDataset
from megalite.errors import UserError

NUM_LOOKED_AT = 16
"""Documents of a corpus that are looked at for the token that ends them."""


@dataclass(frozen=True)
class DocumentEnds:
    """Finds the documents of packed samples by their end-of-document tokens, as Megatron-LM does.

    Such a token belongs to the document that it ends. What a sample begins with is a document of its own,
    though most of it may lie in the sample before.

    Attributes:
        eod: id of the token that ends a document.
        reset_position_ids: positions count from 0 in each document.
        reset_attention_mask: tokens attend to those of their document alone.
        eod_mask_loss: what follows an end of document is not learned: the inputs `eod` have no loss.
        on_every_stage: whether layers need this, and not only the embedding and the loss.
    """

    eod: int
    reset_position_ids: bool
    reset_attention_mask: bool
    eod_mask_loss: bool
    on_every_stage: bool

    def marked(self, microbatch: Microbatch) -> Microbatch:
        """The microbatch with what is asked for, computed where its tokens are and without waiting."""
        is_end = microbatch.tokens == self.eod  # [b, s]
        return replace(
            microbatch,
            position_ids=position_ids(is_end) if self.reset_position_ids else None,
            document_ids=document_ids(is_end) if self.reset_attention_mask else None,
            loss_mask=~is_end if self.eod_mask_loss else None,
        )


def document_ids(is_end: Tensor) -> Tensor:
    """For each token the ends of documents before it in its sample, int64 ``[b, s]``."""
    ends = is_end.long()
    return ends.cumsum(1) - ends


def position_ids(is_end: Tensor) -> Tensor:
    """For each token the tokens before it in its document, int64 ``[b, s]``."""
    places = torch.arange(is_end.shape[1], device=is_end.device)
    after_end = torch.where(is_end, places + 1, 0)  # where the next document starts
    starts = after_end.cummax(1).values.roll(1, 1)
    starts[:, 0] = 0
    return places - starts


def check_ends(corpus: IndexedDataset, eod: int) -> None:
    """Refuses a corpus without end-of-document tokens: nothing would end its documents in a sample.

    Raises:
        UserError: none of its first documents ends with `eod`.
    """
    lasts = corpus.document_index[1 : NUM_LOOKED_AT + 1] - 1
    sequences = [corpus[last] for last in lasts.tolist() if last >= 0]
    tokens = [int(sequence[-1]) for sequence in sequences if len(sequence)]
    if tokens and eod not in tokens:
        raise UserError(
            f"no document of {corpus.prefix} ends with the tokenizer's end-of-document token {eod}: "
            "preprocess it with --append-eod, or train without --reset-position-ids, --reset-attention-mask "
            "and --eod-mask-loss"
        )
