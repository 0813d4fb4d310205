"""The padded vocabulary."""

from __future__ import annotations

import pytest

from megalite.config import ModelConfig
from megalite.config.model.model_config import padded_vocab_size
from megalite.utils.errors import UserError


@pytest.mark.parametrize(
    ("model", "tp", "rows"),
    [
        (ModelConfig(vocab_size=50257), 1, 50304),
        (ModelConfig(vocab_size=50257), 3, 50304),
        (ModelConfig(vocab_size=50257), 5, 50560),
        (ModelConfig(vocab_size=257, make_vocab_size_divisible_by=1), 4, 260),
        (ModelConfig(vocab_size=128), 8, 128),
        (ModelConfig(vocab_size=250680, pad_vocab_size_to=250880), 8, 250880),
    ],
)
def test_padded_vocabulary(model: ModelConfig, tp: int, rows: int) -> None:
    assert padded_vocab_size(model, tp) == rows


def test_padded_vocabulary_wants_a_vocabulary() -> None:
    with pytest.raises(UserError, match="--vocab-size"):
        padded_vocab_size(ModelConfig(), 1)
    with pytest.raises(UserError, match="smaller"):
        padded_vocab_size(ModelConfig(vocab_size=9, pad_vocab_size_to=8), 1)
