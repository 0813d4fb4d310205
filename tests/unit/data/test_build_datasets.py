"""From --data-path and --split to the three datasets, and what is refused on the way."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from megalite.data.blend import BlendedDataset
from megalite.data.build import build_datasets, num_samples_per_split
from megalite.data.gpt import GPTDataset
from megalite.data.splits import parse_split, split_ranges
from megalite.errors import UserError


def test_numbers_of_samples() -> None:
    assert num_samples_per_split(0, 100, 30, 10, 8) == (800, 4 * 10 * 8, 80)
    assert num_samples_per_split(1234, 100, 1000, 10, 8) == (1234, 80, 80)
    assert num_samples_per_split(0, 100, 0, 0, 8) == (800, 0, 0)


def test_split_ranges() -> None:
    assert split_ranges("949,50,1", 1000) == (range(0, 949), range(949, 999), range(999, 1000))
    assert split_ranges("90,5,5", 10) == (range(0, 9), range(9, 10), range(10, 10))
    assert split_ranges("0.9,0.05,0.05", 100) == (range(0, 90), range(90, 95), range(95, 100))
    assert parse_split("3") == (1, 0, 0)


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "-1,2,0", "0,0,0", "nan,1,1", "inf", "1,,2"])
def test_wrong_split_is_named(split: str) -> None:
    with pytest.raises(UserError, match=f"--split {split} must be"):
        parse_split(split)


def test_splits_do_not_share_tokens(write_dataset: Any) -> None:
    prefix = write_dataset([20] * 20)
    splits = build_datasets([prefix], "80,15,5", 8, (40, 10, 2), seed=3)
    seen = []
    for dataset, size in zip((splits.train, splits.valid, splits.test), (40, 10, 2), strict=True):
        assert isinstance(dataset, GPTDataset)
        assert len(dataset) >= size
        seen.append(set(np.concatenate([dataset[i] for i in range(len(dataset))]).tolist()))
    assert seen[0] == set(range(320)) and seen[1] <= set(range(320, 380)) and seen[2] <= set(range(380, 400))


def test_splits_without_use_or_documents_are_none(write_dataset: Any) -> None:
    prefix = write_dataset([20] * 10)
    assert build_datasets([prefix], "90,10,0", 8, (5, 5, 5), seed=3).test is None
    assert build_datasets([prefix], "90,5,5", 8, (5, 0, 5), seed=3).valid is None
    assert build_datasets([prefix], "0,5,5", 8, (0, 5, 5), seed=3).train is None
    with pytest.raises(UserError, match=r"--split 0,5,5 leaves no sequence of .*corpus to train on"):
        build_datasets([prefix], "0,5,5", 8, (5, 5, 5), seed=3)


def test_small_split_is_named(write_dataset: Any) -> None:
    prefix = write_dataset([20] * 9 + [5])
    with pytest.raises(
        UserError, match=r"the valid split of .* holds 5 tokens in 1 sequences, fewer than the 9"
    ):
        build_datasets([prefix], "90,10,0", 8, (5, 5, 5), seed=3)


def test_blend_by_size_repeats_only_when_all_are_used_up(write_dataset: Any) -> None:
    """60 and 30 samples an epoch: every sample once, then further epochs in the same proportion."""
    a, b = write_dataset([481], "a"), write_dataset([241], "b", first=1000)
    once = build_datasets([a, b], "1", 8, (90, 0, 0), seed=3).train
    assert isinstance(once, BlendedDataset)
    assert len({tuple(once[i].tolist()) for i in range(90)}) == 90
    more = build_datasets([a, b], "1", 8, (300, 0, 0), seed=3).train
    assert more is not None and len(more) == 300
    from_a = sum(bool(more[i][0] < 1000) for i in range(300))
    assert from_a == 200


def test_blend_goes_without_a_dataset_only_where_nothing_trains_on_it(
    write_dataset: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("megalite"), "propagate", True)
    large, small = write_dataset([20] * 100, "large"), write_dataset([20] * 3, "small")
    splits = build_datasets(["1", large, "1", small], "90,10,0", 8, (50, 5, 0), seed=3)
    assert splits.valid is not None and len(splits.valid) == 5
    assert "none of the 3 sequences of" in caplog.text and "small" in caplog.text
    with pytest.raises(UserError, match=r"none of the 3 sequences of .*small to the train split"):
        build_datasets(["1", large, "1", small], "10,90,0", 8, (50, 5, 0), seed=3)


def test_vocabulary_is_checked_in_a_blend(write_dataset: Any) -> None:
    prefix = write_dataset([40])
    train = build_datasets(["1", prefix], "1", 8, (4, 0, 0), seed=3, vocab_size=20).train
    assert train is not None
    with pytest.raises(
        UserError, match=f"document 0 of {prefix} has token id 20, outside the vocabulary of 20"
    ):
        _ = [train[i] for i in range(len(train))]
