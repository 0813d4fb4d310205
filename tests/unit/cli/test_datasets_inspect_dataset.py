"""What inspection counts, which faults it names, and where two datasets differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.cli import datasets
from megalite.cli.datasets import compare, document_tokens, find_problem, histogram_lines, summarize
from megalite.cli.datasets import inspect_dataset as main
from megalite.data import indexed_dataset
from megalite.data.indexed_dataset import IndexedDataset, IndexedWriter
from megalite.utils.errors import UserError
from tests.chat import write_masked


@pytest.fixture(params=[1, 3, 1 << 16])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(datasets, "_BLOCK", request.param)
    monkeypatch.setattr(indexed_dataset, "BLOCK", request.param)
    return request.param


def write(prefix: Path, documents: list[list[list[int]]], dtype: str = "uint16") -> IndexedDataset:
    with IndexedWriter(str(prefix), dtype) as writer:
        for sequences in documents:
            writer.add_document(sequences)
    return IndexedDataset(str(prefix))


@pytest.mark.usefixtures("block")
def test_figures(tmp_path: Path) -> None:
    dataset = write(tmp_path / "d", [[[5, 9], [7]], [[]], [[3] * 4], [[4] * 7]])
    summary = summarize(dataset)
    assert (summary.num_empty, summary.min_length, summary.max_length) == (1, 0, 7)
    assert (summary.min_token, summary.max_token) == (3, 9)
    assert summary.length_counts[:5].tolist() == [1, 1, 1, 2, 0]  # of 0, 1, 2 to 3, 4 to 7 tokens
    assert [line.split()[-2] for line in histogram_lines(summary.length_counts)] == ["1", "1", "1", "2"]
    assert find_problem(dataset, summary, 10) is None
    assert "id 9 at byte 2" in str(find_problem(dataset, summary, 9))
    assert "(document 0) is outside the vocabulary of 9" in str(find_problem(dataset, summary, 9))


def test_empty_dataset(tmp_path: Path) -> None:
    dataset = write(tmp_path / "d", [])
    summary = summarize(dataset)
    assert (summary.min_length, summary.max_length, summary.max_token) == (0, 0, 0)
    assert list(histogram_lines(summary.length_counts)) == []
    assert find_problem(dataset, summary, 1) is None


@pytest.mark.usefixtures("block")
def test_negative_ids_are_faults(tmp_path: Path) -> None:
    negative = write(tmp_path / "n", [[[1, 2]], [[-3]]], "int32")
    assert "id -3 at byte 8" in str(find_problem(negative, summarize(negative), None))


def test_document(tmp_path: Path) -> None:
    dataset = write(tmp_path / "d", [[[5, 9], [7]], [], [[3]]])
    assert [part.tolist() for part in document_tokens(dataset, 0)] == [[5, 9], [7]]
    assert document_tokens(dataset, 1) == []
    assert [part.tolist() for part in document_tokens(dataset, 2)] == [[3]]
    for number in (-1, 3):
        with pytest.raises(UserError, match=f"no document {number} in .*it has 3"):
            document_tokens(dataset, number)


BASE = [[[1, 2, 3], [4]], [[5]], [[6, 7]]]


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize(
    ("other", "said"),
    [
        ([[[1, 2, 3], [4]], [[5]], [[6, 8]]], "document 2, sequence 3, token 1: id 7 and id 8"),
        ([[[1, 2], [3, 4]], [[5]], [[6, 7]]], "document 0, sequence 0, token 2: id 3 and its end (2 tokens)"),
        ([[[1, 2, 3]], [[4], [5]], [[6, 7]]], "document 0 is the first with another number of sequences"),
        ([[[1, 2, 3], [4]], [[5]]], "3 documents and .*b 2; one is the beginning of the other"),
        ([[[1, 2, 3], [9]], [[5]]], "3 documents and .*b 2; .*sequence 1, token 0: id 4 and id 9"),
        ([[[1, 2, 3], [4], [5]], [[6, 7]]], "3 documents and .*b 2; document 0 is the first"),
    ],
)
def test_first_difference(tmp_path: Path, other: list[list[list[int]]], said: str) -> None:
    a, b = write(tmp_path / "a", BASE), write(tmp_path / "b", other)
    found = compare(a, b)
    assert found is not None
    with pytest.raises(UserError, match=said.replace("(", r"\(").replace(")", r"\)")):
        main(["--compare", a.prefix, b.prefix])


@pytest.mark.usefixtures("block")
def test_same_documents_in_another_type(tmp_path: Path) -> None:
    a, wide = write(tmp_path / "a", BASE), write(tmp_path / "w", BASE, "int32")
    assert compare(a, wide) is None


def test_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write(tmp_path / "corpus", [[[97, 98, 99]], [[100, 101]]]).prefix
    main([prefix, "--vocab-size", "102"])
    assert "documents  2" in capsys.readouterr().out
    main([prefix, "--document", "1", "--tokenizer-type", "byte"])
    assert capsys.readouterr().out == "de\n"
    main([prefix, "--document", "1"])
    assert capsys.readouterr().out == "100 101\n"
    main(["--compare", prefix, prefix])
    assert capsys.readouterr().out == "the same documents\n"
    with pytest.raises(UserError, match="outside the vocabulary of 100"):
        main([prefix, "--vocab-size", "100"])
    with pytest.raises(UserError, match="pass one or several PREFIXes"):
        main([])


def test_the_answers_of_a_conversation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_masked(str(tmp_path / "chat"), [3, 110], first_answer=100)
    Path(f"{prefix}.loss_mask").write_bytes(bytes([0, 1, 1]) + bytes(94) + bytes([1, 1, 0]) + bytes(13))
    main([prefix, "--document", "0"])
    assert capsys.readouterr().out == "other   '0'\nanswer  '1 2'\n"
    main([prefix, "--document", "1", "--tokenizer-type", "byte"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["other", "answer", "other"]
    assert lines[1] == "answer  'ab'"
