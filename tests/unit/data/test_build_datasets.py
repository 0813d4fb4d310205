"""From --data-path and --split to the three datasets, and what is refused on the way."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from megalite.config import DataConfig
from megalite.data.blend import BlendedDataset, Coverage
from megalite.data.build_datasets import BuildOptions, num_samples_per_split
from megalite.data.corpus_sources import find_sources, parse_split
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.samples import GPTSamples
from megalite.utils.errors import UserError
from tests.corpora import build_datasets, build_from_sources, split_ranges


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
    write_dataset: Any, caplog: pytest.LogCaptureFixture
) -> None:
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


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="megalite")
    return caplog


OPTIONS = BuildOptions(GPTSamples(seq_length=8, seed=3))


def test_each_split_reads_its_own_corpora_whole(write_dataset: Any) -> None:
    a, b = write_dataset([20] * 10, "a"), write_dataset([20] * 10, "b", first=1000)
    sources = find_sources(DataConfig(train_data_path=(a,), valid_data_path=(b,)))
    splits = build_from_sources(sources, (25, 25, 25), OPTIONS)
    assert splits.train is not None and splits.valid is not None and splits.test is None
    for dataset, first in ((splits.train, 0), (splits.valid, 1000)):
        assert isinstance(dataset, GPTDataset)
        row = dataset.index.document_index
        assert sorted(row[:10].tolist()) == list(range(10))
        assert all(first <= token < first + 200 for i in range(len(dataset)) for token in dataset[i])


def test_weighted_groups_are_datasets_of_their_own(write_dataset: Any) -> None:
    """Each group holds the samples that its part, built as a corpus of its own, has in that order."""
    a, b = write_dataset([20] * 20, "a"), write_dataset([20] * 20, "b", first=1000)
    data = DataConfig(
        train_weighted_split_paths=(f"TRAIN: 0.75 0:0.5 {a}, 0.25 0:1 {b}",),
        valid_weighted_split_paths=(f"ONE: 1 0.5:0.75 {a}", f"TWO: 1 0.75:1 {a}"),
    )
    splits = build_from_sources(find_sources(data), (40, 9, 9), OPTIONS)
    assert splits.train is not None and splits.valid is None
    drawn = [int(splits.train[i][0]) for i in range(40)]
    assert sum(token >= 1000 for token in drawn) == 10 and all(t < 200 or t >= 1000 for t in drawn)
    assert [(name, len(dataset)) for name, dataset in splits.evaluated("valid")] == [("ONE", 12), ("TWO", 12)]
    assert splits.evaluated("test") == []
    assert list(splits.sizes()) == [("train", 40), ("valid ONE", 12), ("valid TWO", 12)]
    for first, (_, dataset) in zip((200, 300), splits.evaluated("valid"), strict=True):
        alone = build_datasets(
            [write_dataset([20] * 5, f"x{first}", first=first)], "1", 8, (9, 0, 0), 3
        ).train
        assert alone is not None
        assert [dataset[i].tolist() for i in range(12)] == [alone[i].tolist() for i in range(12)]


def test_a_whole_validation_set_has_each_sample_once(write_dataset: Any) -> None:
    a, b = write_dataset([481], "a"), write_dataset([241] * 2, "b", first=1000)
    sources = find_sources(DataConfig(train_data_path=(a,), valid_data_path=(a, b)))
    for blend_by in ("tokens", "documents"):
        options = OPTIONS._replace(full_validation=True, blend_by=blend_by)
        valid = build_from_sources(sources, (9, 5, 0), options).valid
        assert valid is not None and len(valid) == 60 + 60
        assert len({int(valid[i][0]) for i in range(120)}) == 120
    with pytest.raises(UserError, match="2 corpora once, whatever their weights: pass --multiple-validation"):
        build_from_sources(
            find_sources(DataConfig(train_data_path=(a,), valid_data_path=("1", a, "2", b))),
            (9, 5, 0),
            OPTIONS._replace(full_validation=True),
        )


def test_blend_by_documents(write_dataset: Any, logged: pytest.LogCaptureFixture) -> None:
    """Corpora of the same tokens, in 8 and in 2 documents."""
    prefixes = (write_dataset([10] * 8, "many"), write_dataset([40] * 2, "few", first=1000))
    sources = find_sources(DataConfig(data_path=prefixes, split="1"))
    for blend_by, expected in (("tokens", 50), ("documents", 20)):
        train = build_from_sources(sources, (100, 0, 0), OPTIONS._replace(blend_by=blend_by)).train
        assert train is not None
        assert sum(bool(train[i][0] >= 1000) for i in range(100)) == expected
        assert f"blended by their number of {blend_by}" in logged.text


def test_coverage_of_each_corpus_is_logged(write_dataset: Any, logged: pytest.LogCaptureFixture) -> None:
    a, b = write_dataset([80] * 10, "a"), write_dataset([41] * 1, "b")
    build_from_sources(find_sources(DataConfig(data_path=("1", a, "1", b), split="1")), (100, 0, 0), OPTIONS)
    lines = [record.message for record in logged.records if record.message.startswith("training takes")]
    assert lines == [
        f"training takes 50 samples of {b}: 9.76 epochs of its 41 tokens, each used about 9.8 times",
        f"training takes 50 samples of {a}: 0.5 epochs of its 800 tokens; 50% of its tokens are not used",
    ]


def test_many_epochs_are_reported_without_an_exponent() -> None:
    assert ": 1,500 epochs of its 1,000 tokens" in Coverage("a", 1000, 10.0, 1500.0, 0.0).line()
    assert ": 2.34 epochs" in Coverage("a", 1000, 10.0, 2.34, 0.0).line()


def test_a_corpus_that_is_seen_is_not_said_to_be_unseen() -> None:
    assert "99.99% of its tokens are not used" in Coverage.of("a", 10**9, 8, 5, 5).line()
    assert "100% of its tokens are not used" in Coverage.of("a", 10**9, 8, 0, 5).line()


@pytest.mark.parametrize("num_samples", [3, 12, 13, 25, 38])
def test_coverage_is_what_the_samples_hold(write_dataset: Any, num_samples: int) -> None:
    """Against a count of the tokens that are the start of a step in the samples drawn."""
    prefix = write_dataset([17, 9, 30, 1, 50])
    train = build_datasets([prefix], "1", 8, (num_samples, 0, 0), seed=3).train
    assert train is not None
    seen = {int(token) for i in range(num_samples) for token in train[i][:-1]}
    coverage = Coverage.of(prefix, 107, 8, num_samples, num_samples)
    assert coverage.epochs == pytest.approx(num_samples * 8 / 107)
    assert coverage.unseen == pytest.approx(1 - len(seen) / 107, abs=0.08)


def test_evaluating_on_what_is_trained_on_is_reported(
    write_dataset: Any, logged: pytest.LogCaptureFixture
) -> None:
    prefix = write_dataset([20] * 20)
    for begin, is_reported in ((0.7, True), (0.8, False)):
        logged.clear()
        data = DataConfig(
            train_weighted_split_paths=(f"T: 1 0:0.8 {prefix}",),
            valid_weighted_split_paths=(f"V: 1 {begin}:1 {prefix}",),
        )
        build_from_sources(find_sources(data), (5, 5, 0), OPTIONS)
        assert ("also trained on" in logged.text) is is_reported
