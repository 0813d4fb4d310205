"""Reading loss masks, and masks that do not belong to their corpus."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.loss_mask import LossMask, has_loss_mask, loss_mask_path
from megalite.utils.errors import UserError
from tests.chat import write_masked


def test_each_conversation_has_its_part(tmp_path: Path) -> None:
    prefix = write_masked(str(tmp_path / "c"), [3, 5, 2], first_answer=2)
    mask = LossMask(IndexedDataset(prefix))
    assert [mask[i].tolist() for i in range(3)] == [
        [False, False, True],
        [False, False, True, True, True],
        [False, False],
    ]
    mask.check(prefix)
    assert has_loss_mask(IndexedDataset(prefix))
    os.remove(loss_mask_path(prefix))
    assert not has_loss_mask(IndexedDataset(prefix))


def test_a_corpus_without_answers(tmp_path: Path) -> None:
    prefix = write_masked(str(tmp_path / "c"), [3, 5, 2], first_answer=9)
    with pytest.raises(UserError, match="marks no token of the first 3 conversations as an answer"):
        LossMask(IndexedDataset(prefix)).check(prefix)


def test_a_missing_mask(tmp_path: Path) -> None:
    prefix = write_masked(str(tmp_path / "c"), [3, 5])
    Path(f"{prefix}.loss_mask").unlink()
    with pytest.raises(UserError, match=r"has no answers marked, .*: preprocess conversations with --chat"):
        LossMask(IndexedDataset(prefix))


def test_the_mask_of_another_corpus(tmp_path: Path) -> None:
    prefix = write_masked(str(tmp_path / "c"), [3, 5])
    Path(f"{prefix}.loss_mask").write_bytes(np.ones(7, np.uint8).tobytes())
    with pytest.raises(UserError, match=r"c.loss_mask has 7 bytes, and .*c.bin 8 tokens"):
        LossMask(IndexedDataset(prefix))
