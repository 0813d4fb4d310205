"""Samples of conversations: whole, apart, and with a loss on answers alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megalite.cli.where import sample_spans
from megalite.data.blend import Epochs
from megalite.data.index_cache import IndexCache
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.packed_dataset import PackedDataset, PackingOptions, sequences_row
from megalite.utils.errors import UserError
from tests.chat import write_masked

LENGTHS = [6, 3, 9, 4, 5, 12, 2, 9]


def _options(**changes: object) -> PackingOptions:
    return PackingOptions(**{"seq_length": 8, "seed": 1, "vocab_size": 100, **changes})  # type: ignore[arg-type]


def _dataset(
    folder: Path, lengths: list[int] = LENGTHS, first_answer: int = 1, **options: object
) -> PackedDataset:
    prefix = write_masked(str(folder / "c"), lengths, first_answer)
    return PackedDataset(IndexedDataset(prefix), range(len(lengths)), _options(**options))


def _sequences(dataset: PackedDataset, index: int) -> list[int]:
    assert all(piece.start == 0 for piece in dataset.pieces(index))
    return [piece.sequence for piece in dataset.pieces(index)]


def test_a_row_holds_conversations_one_after_the_other() -> None:
    first, second = np.arange(10, 14), np.arange(20, 23)
    marks = np.array([False, False, True, True]), np.array([True, True, False])
    row = sequences_row([(first, marks[0]), (second, marks[1])], 7).reshape(4, 7)
    assert row.tolist() == [
        [10, 11, 12, 20, 21, 0, 0],
        [11, 12, 13, 21, 22, 0, 0],
        [1, 2, 2, 2, 1, 0, 0],
        [0, 0, 0, 1, 1, 2, 2],
    ]


def test_every_conversation_is_whole_in_one_sample(tmp_path: Path) -> None:
    dataset = _dataset(tmp_path)
    found: list[int] = []
    for i in range(len(dataset)):
        tokens, labels, kinds, documents = dataset[i].reshape(4, 8)
        for number, sequence in enumerate(_sequences(dataset, i)):
            expected = dataset.indexed[sequence][:9]
            own = documents == number
            assert tokens[own].tolist() == expected[:-1].tolist()
            assert labels[own].tolist() == expected[1:].tolist()
            assert (kinds[own] == 2).all()
        assert (kinds[documents == len(_sequences(dataset, i))] == 0).all()
        found += _sequences(dataset, i)
    assert sorted(found) == list(range(len(LENGTHS)))
    assert len(dataset) == 5  # 8, 8, 8 (truncated), 5 + 3, 4 + 2 + 1
    assert (dataset.num_long, dataset.num_dropped) == (1, 0)


def test_without_packing_each_conversation_is_a_sample(tmp_path: Path) -> None:
    dataset = _dataset(tmp_path, packs=False)
    assert sorted(_sequences(dataset, i)[0] for i in range(len(dataset))) == list(range(8))
    assert all(len(_sequences(dataset, i)) == 1 for i in range(8))


@pytest.mark.parametrize("packs", [True, False])
def test_long_conversations_are_dropped_if_requested(packs: bool, tmp_path: Path) -> None:
    dataset = _dataset(tmp_path, packs=packs, long="drop")
    found = sorted(c for i in range(len(dataset)) for c in _sequences(dataset, i))
    assert found == [0, 1, 2, 3, 4, 6, 7]
    assert "0 truncated and 1 dropped, longer than --seq-length 8" in dataset.use()


def test_a_truncated_conversation_without_an_answer_is_dropped(tmp_path: Path) -> None:
    dataset = _dataset(tmp_path, [12, 12, 3], first_answer=2)
    assert (dataset.num_long, dataset.num_dropped) == (2, 0)
    Path(f"{dataset.indexed.prefix}.loss_mask").write_bytes(
        np.concatenate([np.arange(12) > 8, np.arange(12) > 7, np.ones(3)]).astype(np.uint8).tobytes()
    )
    again = PackedDataset(IndexedDataset(dataset.indexed.prefix), range(3), _options())
    assert again.num_dropped == 1
    assert sorted(c for i in range(len(again)) for c in _sequences(again, i)) == [1, 2]
    assert "1 truncated and 1 dropped" in again.use()


def test_no_answer_within_the_samples(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none of them has an answer within --seq-length 8: pass a longer"):
        _dataset(tmp_path, [12, 12], first_answer=9)


def test_a_split_has_its_own_conversations(tmp_path: Path) -> None:
    prefix = write_masked(str(tmp_path / "c"), LENGTHS)
    dataset = PackedDataset(IndexedDataset(prefix), range(3, 7), _options())
    assert sorted(c for i in range(len(dataset)) for c in _sequences(dataset, i)) == [3, 4, 5, 6]


def test_the_seed_changes_the_packing_and_the_cache_keeps_it(tmp_path: Path) -> None:
    lengths = [5] * 40
    prefix = write_masked(str(tmp_path / "c"), lengths)
    cache = IndexCache(tmp_path / "cache")

    def items(seed: int) -> list[int]:
        dataset = PackedDataset(IndexedDataset(prefix), range(40), _options(seed=seed), cache=cache)
        found: list[int] = dataset.packing.items.tolist()
        return found

    assert items(1) == items(1) != items(2)
    assert len(list((tmp_path / "cache").glob("*items.npy"))) == 2
    in_memory = PackedDataset(IndexedDataset(prefix), range(40), _options())
    assert in_memory.packing.items.tolist() == items(1)


def test_the_mask_of_long_conversations_is_part_of_the_cache_key(tmp_path: Path) -> None:
    cache = IndexCache(tmp_path / "cache")
    for first_answer, expected in ((2, 0), (9, 1)):
        prefix = write_masked(str(tmp_path / "c"), [12, 10], 2)
        mask = np.concatenate([np.arange(12) >= first_answer, np.ones(10)])
        Path(f"{prefix}.loss_mask").write_bytes(mask.astype(np.uint8).tobytes())
        dataset = PackedDataset(IndexedDataset(prefix), range(2), _options(), cache=cache)
        assert dataset.num_dropped == expected


def test_a_token_outside_the_vocabulary(tmp_path: Path) -> None:
    dataset = _dataset(tmp_path, [30], vocab_size=5)
    with pytest.raises(UserError, match=r"document 0 of .* has token id 5, outside the vocabulary of 5"):
        dataset[0]


def test_samples_are_traced_to_their_conversations(tmp_path: Path) -> None:
    dataset = _dataset(tmp_path)
    epochs = Epochs(dataset, 12, seed=1)
    for index in (0, 7):
        spans = sample_spans(epochs, index)
        assert [span.sequence for span in spans] == _sequences(dataset, epochs.number(index))
        assert all(span.tokens.tolist() == dataset.indexed[span.sequence][:9].tolist() for span in spans)


def test_the_estimate_of_samples_is_a_lower_bound(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(2, 12, 200).astype(np.int32)
    for packs in (True, False):
        for long in ("drop", "truncate"):
            dataset = _dataset(tmp_path, lengths.tolist(), packs=packs, long=long, vocab_size=10**6)
            estimate = dataset.options.num_samples(lengths)
            assert estimate <= len(dataset) <= 1.1 * estimate
            assert packs or estimate == len(dataset)


def _documents(folder: Path, lengths: list[int]) -> PackedDataset:
    prefix = write_masked(str(folder / "c"), lengths)
    Path(f"{prefix}.loss_mask").unlink()
    options = _options(long="split", only_answers=False)
    return PackedDataset(IndexedDataset(prefix), range(len(lengths)), options)


def test_every_token_of_a_document_is_predicted_once(tmp_path: Path) -> None:
    lengths = [6, 3, 9, 4, 1, 26, 2, 9, 17]
    dataset = _documents(tmp_path, lengths)
    predicted: list[tuple[int, int]] = []
    for i in range(len(dataset)):
        tokens, labels, kinds, documents = dataset[i].reshape(4, 8)
        for number, piece in enumerate(dataset.pieces(i)):
            own = documents == number
            whole = dataset.indexed[piece.sequence]
            end = piece.start + int(own.sum())
            assert tokens[own].tolist() == whole[piece.start : end].tolist()
            assert labels[own].tolist() == whole[piece.start + 1 : end + 1].tolist()
            assert (kinds[own] == 2).all()
            predicted += [(piece.sequence, position) for position in range(piece.start + 1, end + 1)]
        assert (kinds[documents == len(dataset.pieces(i))] == 0).all()
    assert sorted(predicted) == [(i, j) for i, length in enumerate(lengths) for j in range(1, length)]
    split = {piece.sequence for i in range(len(dataset)) for piece in dataset.pieces(i) if piece.start}
    assert split == {5, 8}  # the ones that are longer than a sample
    assert dataset.use() == (
        f"8 documents of {dataset.indexed.prefix} in 9 samples, 94.4% of their positions filled; "
        "2 longer than --seq-length 8 are split"
    )


def test_documents_of_a_split_are_traced(tmp_path: Path) -> None:
    corpus = _documents(tmp_path, [6, 20, 9, 30, 5]).indexed
    dataset = PackedDataset(corpus, range(1, 4), _options(long="split", only_answers=False))
    spans = [span for i in range(len(dataset)) for span in sample_spans(dataset, i)]
    assert sorted((span.sequence, span.offset) for span in spans) == [
        (1, 0), (1, 8), (1, 16), (2, 0), (3, 0), (3, 8), (3, 16), (3, 24),
    ]  # fmt: skip


def test_documents_of_one_token(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has 2 documents, and none of them has two tokens"):
        _documents(tmp_path, [1, 1])
