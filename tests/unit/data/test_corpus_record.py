"""What a run reads, as checkpoints record it: by what corpora hold, and not by where they are."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from megalite.config import DataConfig
from megalite.data import corpus_record
from megalite.data.build_datasets import open_corpora
from megalite.data.corpus_record import (
    CorpusIdentity,
    DataRecord,
    data_differences,
    num_read_again,
    reordered_corpora,
    samples_lost_and_repeated,
)
from megalite.data.corpus_sources import Blend, CorpusSource, DataPhases, find_sources
from megalite.data.gpt_dataset import gpt_index, plan_epochs
from megalite.data.indexed_dataset import IndexedDataset, IndexedWriter
from megalite.data.loss_mask import LossMask
from tests.chat import write_masked

LENGTHS = (5, 3, 7, 2, 6)


def write(prefix: Path, lengths: tuple[int, ...] = LENGTHS, token: int = 1) -> str:
    prefix.parent.mkdir(exist_ok=True)
    with IndexedWriter(str(prefix), np.uint16) as writer:
        for length in lengths:
            writer.add_document([[token] * length])
    return str(prefix)


def identity(prefix: str) -> CorpusIdentity:
    return CorpusIdentity.of(IndexedDataset(prefix))


def record(**fields: Any) -> DataRecord:
    data = DataConfig(**fields)
    sources = find_sources(data)
    identities = {prefix: CorpusIdentity.of(corpus) for prefix, corpus in open_corpora(sources).items()}
    return DataRecord(sources, identities, data.blend_by)


def differences(saved: DataRecord, here: DataRecord) -> tuple[list[str], list[str]]:
    return data_differences(json.loads(json.dumps(saved.for_json())), here.for_json())


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write(tmp_path / "a")


@pytest.mark.parametrize(
    ("lengths", "token"),
    [((5, 3, 7, 2, 6, 1), 1), ((3, 5, 7, 2, 6), 1), ((5, 3, 7, 8), 1), (LENGTHS, 2)],
    ids=["appended", "another order", "joined", "other tokens of the same lengths"],
)
def test_another_corpus_is_known(corpus: str, tmp_path: Path, lengths: tuple[int, ...], token: int) -> None:
    before = identity(corpus)
    assert before.is_equal(identity(write(tmp_path / "b" / "copy")))
    after = identity(write(tmp_path / "other", lengths, token))
    assert not before.is_equal(after)
    assert str(before) != str(after)


def test_large_arrays_are_sampled_from_end_to_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(corpus_record, "_WHOLE_BYTES", 256)
    monkeypatch.setattr(corpus_record, "_BLOCK_BYTES", 32)
    lengths = (3, 4) * 500
    base = identity(write(tmp_path / "a", lengths))
    assert base.is_equal(identity(write(tmp_path / "b", lengths)))
    first, last = (4, 3, *lengths[2:]), (*lengths[:-2], 4, 3)
    assert not base.is_equal(identity(write(tmp_path / "c", first)))
    assert not base.is_equal(identity(write(tmp_path / "d", last)))


def test_an_empty_corpus_has_an_identity(tmp_path: Path) -> None:
    assert identity(write(tmp_path / "none", ())).sequences == 0


def test_a_corpus_of_a_store_is_compared_by_its_index(corpus: str) -> None:
    known = identity(corpus)
    remote = CorpusIdentity(**(vars(known) | {"tokens_sha256": None}))
    assert known.is_equal(remote) and remote.is_equal(known)
    assert not remote.is_equal(CorpusIdentity(**(vars(remote) | {"index_sha256": "0"})))


def test_a_moved_corpus_is_the_same_and_weights_count_by_their_ratio(corpus: str, tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{corpus}{suffix}", tmp_path / f"moved{suffix}")
    moved = str(tmp_path / "moved")
    assert differences(record(data_path=(corpus,)), record(data_path=(moved,))) == ([], [])
    weighted = record(data_path=("3", corpus, "1", moved))
    assert differences(weighted, record(data_path=("0.75", moved, "0.25", corpus))) == ([], [])
    assert weighted.for_ranks() != record(data_path=("0.75", moved, "0.25", corpus)).for_ranks()


def test_differences_name_the_corpus_or_the_blend(corpus: str, tmp_path: Path) -> None:
    other = write(tmp_path / "b", (9, 9))
    saved = record(data_path=(corpus,), split="90,5,5")
    trained, evaluated = differences(saved, record(data_path=(other,), split="90,5,5"))
    assert len(trained) == 1
    assert trained[0].startswith(f"corpus {corpus} 5 sequences in 46 bytes, digest ")
    assert f"(now {other} 2 sequences in 36 bytes, digest " in trained[0]
    assert evaluated == []  # it is the same difference
    trained, evaluated = differences(saved, record(data_path=(corpus, other), split="90,5,5"))
    assert trained == [f"train {corpus}[0:0.9] (now {corpus}[0:0.9], {other}[0:0.9] by tokens)"]
    assert len(evaluated) == 2
    assert differences(
        record(data_path=(corpus, other)), record(data_path=(corpus, other), blend_by="documents")
    )[0]


def drawn(weights: tuple[float, ...], num_samples: int) -> list[int]:
    """Count the samples of each corpus as Megatron draws them: the one that is furthest behind comes next."""
    counts = np.zeros(len(weights), int)
    for i in range(num_samples):
        counts[np.argmax(np.array(weights) * max(i, 1) - counts)] += 1
    return [int(count) for count in counts]


def test_lost_and_repeated_samples_of_other_weights_are_counted(corpus: str, tmp_path: Path) -> None:
    other = write(tmp_path / "b", (9, 9))
    saved, here = record(data_path=("1", corpus, "1", other)), record(data_path=("8", corpus, "2", other))
    (a, b), (a_here, b_here), (_, b_end) = (
        drawn((0.5, 0.5), 10_000),
        drawn((0.8, 0.2), 10_000),
        drawn((0.8, 0.2), 20_000),
    )
    assert samples_lost_and_repeated(saved.for_json(), here.for_json(), 10_000, 20_000) == [
        f"{corpus} was read up to about sample {a:,} and continues at {a_here:,}, so that {a_here - a:,} "
        "samples are skipped",
        f"{other} was read up to about sample {b:,} and continues at {b_here:,}, so that "
        f"{min(b, b_end) - b_here:,} samples are read again",
    ]
    assert (a_here - a, min(b, b_end) - b_here) == (3000, 2000)
    added = record(data_path=(corpus,)).for_json(), saved.for_json()
    assert samples_lost_and_repeated(*added, 1000, 2000) == [
        f"{corpus} was read up to about sample 1,000 and continues at 500, so that 500 samples are read "
        "again",
        f"{other} was read up to about sample 0 and continues at 500, so that 500 samples are skipped",
    ]  # fmt: skip
    assert samples_lost_and_repeated(saved.for_json(), saved.for_json(), 1000, 2000) == []


def test_a_longer_run_tells_whether_it_reorders_a_corpus(tmp_path: Path) -> None:
    lengths = (50, 30, 70, 20, 60)
    known = record(train_data_path=(write(tmp_path / "c", lengths),)).for_json()
    orders = {
        number: gpt_index(np.array(lengths, np.int32), range(5), number, 2, 1) for number in range(1, 500)
    }
    reordered = set()
    for before, now in itertools.pairwise(orders):
        arrays = [[orders[i].document_index, orders[i].shuffle_index] for i in (before, now)]
        is_same = all(np.array_equal(*pair) for pair in zip(*arrays, strict=True))
        assert bool(reordered_corpora(known, 0, before, now, 2)) != is_same, (before, now)
        reordered |= {now} - ({now} if is_same else set())
    assert reordered
    (text,) = reordered_corpora(known, 200, 200, 300, 2)
    assert text.startswith(f"{tmp_path}/c (epochs: 2, now 3): about ")


@pytest.mark.parametrize(
    ("epochs", "longer", "share"), [(1, 2, 0.5), (1, 2, 1), (2, 3, 0.75), (2.3, 5, 0.95), (3, 2.5, 0.5)]
)
def test_samples_that_a_longer_run_reads_again_are_counted(
    epochs: float, longer: float, share: float
) -> None:
    num_texts, size = 3000, 4  # each text fills one sample
    lengths = np.full(num_texts, size, np.int32)
    num_samples = [int(number * num_texts) - 1 for number in (epochs, longer)]
    num_consumed = int(share * min(num_samples))

    def times_read(number: int) -> npt.NDArray[np.int64]:
        index = gpt_index(lengths, range(num_texts), number, size, 1)
        return np.bincount(index.document_index[index.shuffle_index[:num_consumed]], minlength=num_texts)

    read, skipped = map(times_read, num_samples)
    plans = [plan_epochs(num_texts * size, number, size) for number in num_samples]
    exact = np.maximum(read - skipped, 0).sum()
    assert num_read_again(*plans, num_consumed) == pytest.approx(exact, rel=0.1, abs=3)


def mixture(paths: dict[str, str], *rows: Any, exhausted: dict[str, int] | None = None) -> dict[str, Any]:
    """The record of a run on --data-phases: rows of first samples and weights."""
    parts = tuple(CorpusSource(path, 0, 0.5) for path in paths.values())
    sources = {"train": (Blend(parts, None, phases=DataPhases("f", (), ())),), "valid": (), "test": ()}
    corpora = {path: identity(path) for path in paths.values()}
    found = {"names": [*paths], "phases": [[*row, None] for row in rows], "exhausted": exhausted or {}}
    return json.loads(json.dumps(DataRecord(sources, corpora, "tokens", found).for_json()))


def test_a_mixture_is_compared_up_to_the_samples_trained_on(corpus: str, tmp_path: Path) -> None:
    a, b = (write(tmp_path / name, token=token) for name, token in (("one", 1), ("two", 2)))
    first, later = (0, {"web": 1.0}), (100, {"web": 0.5, "code": 0.5})
    saved = mixture({"web": a}, first)
    here = mixture({"web": a, "code": b}, first, later)
    assert data_differences(saved, here, 100) == ([], [])
    (text,), _ = data_differences(saved, here, 101)
    assert text == "--data-phases has another past from sample 100 on, of 101"
    (text,), _ = data_differences(here, mixture({"web": a, "code": b}, first, later, exhausted={"web": 7}), 8)
    assert text == "--data-phases has another past from sample 7 on, of 8"
    other = mixture({"web": write(tmp_path / "three", token=3), "code": b}, first, later)
    (text,), _ = data_differences(here, other, 50)
    assert text.startswith("source web ")
    replaced = mixture({"web": a, "code": write(tmp_path / "four", token=4)}, first, later)
    assert data_differences(here, replaced, 50)[0] == []  # no sample of it was read
    (text,), _ = data_differences(here, replaced, 150)
    assert text.startswith("source code ")
    plain = record(data_path=(a,), split="1,1,0").for_json()
    assert data_differences(plain, saved, 1)[0] == [f"train {a}[0:0.5] (now {a}[0:0.5] by --data-phases)"]
    assert data_differences(saved, plain, 1)[0] == [f"train {a}[0:0.5] by --data-phases (now {a}[0:0.5])"]


def test_data_for_evaluation_alone_are_reported_apart(corpus: str, tmp_path: Path) -> None:
    other = write(tmp_path / "b", (9, 9))
    saved = record(data_path=(corpus,), split="90,5,5")
    assert differences(saved, record(data_path=(corpus,), split="90,10")) == (
        [],
        [f"valid {corpus}[0.9:0.95] (now {corpus}[0.9:1])", f"test {corpus}[0.95:1] (now {corpus}[1:1])"],
    )
    train = {"train_data_path": (corpus,)}
    found = differences(record(**train), record(**train, valid_data_path=(other,)))
    assert found == ([], [f"valid nothing (now {other})"])


def test_a_record_of_many_corpora_differs_in_its_last_one(tmp_path: Path, corpus: str) -> None:
    prefixes = [write(tmp_path / f"c{number}") for number in range(8)]
    one, other = record(data_path=tuple(prefixes)), record(data_path=(*prefixes[:-1], corpus))
    assert one.for_ranks()["the data of train"] != other.for_ranks()["the data of train"]
    assert "and 3 more by tokens, digest " in one.for_ranks()["the data of train"]


@pytest.mark.parametrize(
    "damaged",
    [
        {},
        {"splits": 3},
        {"splits": {"train": [3]}},
        {"corpora": {}},
        {"corpora": {"a": 3}},
        {"splits": {"train": [{"weights": None, "blend_by": None, "parts": [[]]}]}},
    ],
)
def test_a_damaged_record_is_no_crash(corpus: str, damaged: dict[str, Any]) -> None:
    here = record(data_path=(corpus,)).for_json()
    saved = {**here, **damaged} if damaged else {"other": 1}
    with pytest.raises(ValueError, match=r"run.json is damaged"):
        data_differences(saved, here)


def test_other_answers_are_another_corpus(tmp_path: Path) -> None:
    def identity_with(first_answer: int) -> CorpusIdentity:
        corpus = IndexedDataset(write_masked(str(tmp_path / "c"), [5, 6], first_answer))
        return CorpusIdentity.of(corpus, LossMask(corpus))

    assert identity_with(2).is_equal(identity_with(2))
    assert not identity_with(2).is_equal(identity_with(3))
