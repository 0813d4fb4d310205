"""Pad the vocabulary, so that tensor parallelism divides it evenly."""

from __future__ import annotations

import math

from megalite.config.model.model_config import ModelConfig, round_up
from megalite.utils.errors import UserError


def padded_vocab_size(model: ModelConfig, tp: int) -> int:
    """Return the padded vocabulary size, a multiple of `tp`.

    Raises:
        UserError: `vocab_size` is unknown, or --pad-vocab-size-to is smaller.
    """
    if model.vocab_size is None:
        raise UserError("the vocabulary size is unknown: pass --vocab-size, or a tokenizer")
    if model.pad_vocab_size_to is not None:
        if model.pad_vocab_size_to < model.vocab_size:
            raise UserError(
                f"--pad-vocab-size-to {model.pad_vocab_size_to} is smaller than the vocabulary of "
                f"{model.vocab_size} tokens: pass at least {model.vocab_size}, or remove it"
            )
        return model.pad_vocab_size_to
    return round_up(model.vocab_size, math.lcm(model.make_vocab_size_divisible_by, tp))


def num_padding_rows(model: ModelConfig, tp: int) -> int:
    """Return the number of padding rows at the end of the padded vocabulary.

    Raises:
        UserError: see `padded_vocab_size`.
    """
    padded = padded_vocab_size(model, tp)
    assert model.vocab_size is not None  # otherwise padded_vocab_size raises
    return padded - model.vocab_size
