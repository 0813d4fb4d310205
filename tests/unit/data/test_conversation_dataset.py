"""Samples of conversations: whole, apart, and with a loss on answers alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megalite.data.conversation_dataset import ConversationDataset, ConversationOptions, conversations_row
from megalite.data.epochs import Epochs
from megalite.data.index_cache import IndexCache
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.provenance import sample_spans
from megalite.errors import UserError
from tests.chat import write_masked

LENGTHS = [6, 3, 9, 4, 5, 12, 2, 9]


def _options(**changes: object) -> ConversationOptions:
    return ConversationOptions(**{"seq_length": 8, "seed": 1, "vocab_size": 100, **changes})  # type: ignore[arg-type]


def _dataset(
    folder: Path, lengths: list[int] = LENGTHS, first_answer: int = 1, **options: object
) -> ConversationDataset:
    prefix = write_masked(str(folder / "c"), lengths, first_answer)
    return ConversationDataset(IndexedDataset(prefix), range(len(lengths)), _options(**options))


def test_a_row_holds_conversations_one_after_the_other() -> None:
    first, second = np.arange(10, 14), np.arange(20, 23)
    marks = np.array([False, False, True, True]), np.array([True, True, False])
    row = conversations_row([(first, marks[0]), (second, marks[1])], 7).reshape(4, 7)
    assert row.tolist() == [
        [10, 11, 12, 20, 21, 0, 0],
        [11, 12, 13, 21, 22, 0, 0],
        [0, 1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 1, 2, 2],
    ]


def test_every_conversation_is_whole_in_one_sample(tmp_path: Path) -> None:
    dataset = _dataset(tmp_path)
    found: list[int] = []
    for i in range(len(dataset)):
        tokens, labels, has_loss, documents = dataset[i].reshape(4, 8)
        for number, sequence in enumerate(dataset.conversations(i)):
            expected = dataset.indexed[sequence][:9]
            own = documents == number
            assert tokens[own].tolist() == expected[:-1].tolist()
            assert labels[own].tolist() == expected[1:].tolist()
            assert has_loss[own].all()
        assert not has_loss[documents == len(dataset.conversations(i))].any()
        found += dataset.conversations(i)
    assert sorted(found) == list(range(len(LENGTHS)))
    assert len(dataset) == 5  # 8, 8, 8 (truncated), 5 + 3, 4 + 2 + 1
    assert (dataset.num_long, dataset.num_dropped) == (1, 0)


def test_without_packing_each_conversation_is_a_sample(tmp_path: Path) -> None:
    dataset = _dataset(tmp_path, packs=False)
    assert sorted(dataset.conversations(i)[0] for i in range(len(dataset))) == list(range(8))
    assert all(len(dataset.conversations(i)) == 1 for i in range(8))


@pytest.mark.parametrize("packs", [True, False])
def test_long_conversations_are_dropped_if_requested(packs: bool, tmp_path: Path) -> None:
    dataset = _dataset(tmp_path, packs=packs, drops_long=True)
    found = sorted(c for i in range(len(dataset)) for c in dataset.conversations(i))
    assert found == [0, 1, 2, 3, 4, 6, 7]
    assert "0 truncated and 1 dropped, longer than --seq-length 8" in dataset.use()


def test_a_truncated_conversation_without_an_answer_is_dropped(tmp_path: Path) -> None:
    dataset = _dataset(tmp_path, [12, 12, 3], first_answer=2)
    assert (dataset.num_long, dataset.num_dropped) == (2, 0)
    Path(f"{dataset.indexed.prefix}.loss_mask").write_bytes(
        np.concatenate([np.arange(12) > 8, np.arange(12) > 7, np.ones(3)]).astype(np.uint8).tobytes()
    )
    again = ConversationDataset(IndexedDataset(dataset.indexed.prefix), range(3), _options())
    assert again.num_dropped == 1
    assert sorted(c for i in range(len(again)) for c in again.conversations(i)) == [1, 2]
    assert "1 truncated and 1 dropped" in again.use()


def test_no_answer_within_the_samples(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none of them has an answer within --seq-length 8: pass a longer"):
        _dataset(tmp_path, [12, 12], first_answer=9)


def test_a_split_has_its_own_conversations(tmp_path: Path) -> None:
    prefix = write_masked(str(tmp_path / "c"), LENGTHS)
    dataset = ConversationDataset(IndexedDataset(prefix), range(3, 7), _options())
    assert sorted(c for i in range(len(dataset)) for c in dataset.conversations(i)) == [3, 4, 5, 6]


def test_the_seed_changes_the_packing_and_the_cache_keeps_it(tmp_path: Path) -> None:
    lengths = [5] * 40
    prefix = write_masked(str(tmp_path / "c"), lengths)
    cache = IndexCache(tmp_path / "cache")

    def items(seed: int) -> list[int]:
        dataset = ConversationDataset(IndexedDataset(prefix), range(40), _options(seed=seed), cache=cache)
        found: list[int] = dataset.packing.items.tolist()
        return found

    assert items(1) == items(1) != items(2)
    assert len(list((tmp_path / "cache").glob("*items.npy"))) == 2
    in_memory = ConversationDataset(IndexedDataset(prefix), range(40), _options())
    assert in_memory.packing.items.tolist() == items(1)


def test_the_mask_of_long_conversations_is_part_of_the_cache_key(tmp_path: Path) -> None:
    cache = IndexCache(tmp_path / "cache")
    for first_answer, expected in ((2, 0), (9, 1)):
        prefix = write_masked(str(tmp_path / "c"), [12, 10], 2)
        mask = np.concatenate([np.arange(12) >= first_answer, np.ones(10)])
        Path(f"{prefix}.loss_mask").write_bytes(mask.astype(np.uint8).tobytes())
        dataset = ConversationDataset(IndexedDataset(prefix), range(2), _options(), cache=cache)
        assert dataset.num_dropped == expected


def test_a_token_outside_the_vocabulary(tmp_path: Path) -> None:
    dataset = _dataset(tmp_path, [30], vocab_size=20)
    with pytest.raises(UserError, match=r"document 0 of .* has token id 20, outside the vocabulary of 20"):
        dataset[0]


def test_samples_are_traced_to_their_conversations(tmp_path: Path) -> None:
    dataset = _dataset(tmp_path)
    epochs = Epochs(dataset, 12, seed=1)
    for index in (0, 7):
        spans = sample_spans(epochs, index)
        assert [span.sequence for span in spans] == dataset.conversations(epochs.number(index))
        assert all(span.tokens.tolist() == dataset.indexed[span.sequence][:9].tolist() for span in spans)


def test_the_estimate_of_samples_is_a_lower_bound(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(2, 12, 200).astype(np.int32)
    for packs in (True, False):
        for drops in (True, False):
            dataset = _dataset(tmp_path, lengths.tolist(), packs=packs, drops_long=drops, vocab_size=10**6)
            estimate = dataset.options.num_samples(lengths)
            assert estimate <= len(dataset) <= 1.1 * estimate
            assert packs or estimate == len(dataset)
