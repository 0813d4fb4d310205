"""How the input is cut up: every record once, in order, by its number in its file, wherever a cut falls."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import random
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.preprocessing import input_plan as plan_module
from megalite.data.preprocessing.documents import DocumentRecord, find_inputs, read_records, read_stream
from megalite.data.preprocessing.input_plan import (
    ByteRange,
    InputChunk,
    InputPlan,
    PreprocessJob,
    WholeFiles,
    locate,
)
from megalite.data.preprocessing.preprocess import preprocess
from megalite.utils.errors import UserError

LINES = st.lists(
    st.sampled_from([b"a", b"bb" * 9, b"", b"  ", b"c" * 70, b"\xef\xbb\xbfd", b"\xef\xbb\xbf", b"e\r"]),
    max_size=40,
)


def records_of(plan: InputPlan, job: PreprocessJob) -> list[DocumentRecord]:
    return [
        record._replace(number=locate(piece, record.number))
        for piece in plan.pieces()
        for record in piece.records(job)
    ]


MARK = b"\xef\xbb\xbf"


@settings(max_examples=60, deadline=None)
@example(lines=[b"a"] * 4 + [MARK + b"d"] * 2 + [b"a"], ending=b"", size=1, limit=15)
@example(lines=[b"a", b"a" * 9, MARK, b"b" * 9, b"b"], ending=b"", size=1, limit=15)
@given(
    lines=LINES,
    ending=st.sampled_from([b"", b"\n"]),
    size=st.integers(1, 90),
    limit=st.sampled_from([15, 1000]),
)
@pytest.mark.parametrize(
    ("name", "how"),
    [("a.txt", "line"), ("a.jsonl", "file"), ("a.txt", "paragraph"), ("a.txt.gz", "paragraph")],
)
def test_pieces_are_the_whole(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    how: str,
    lines: list[bytes],
    ending: bytes,
    size: int,
    limit: int,
) -> None:
    path = tmp_path_factory.mktemp("pieces") / name
    data = b"\n".join(lines) + ending
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    job = PreprocessJob((), "", "byte", text_documents=how, max_document_bytes=limit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "_MIN_PIECE_BYTES", size)
        pieces = records_of(InputPlan(job, [str(path)], stream_compressed=True), job)
        whole = list(read_records(str(path), job.json_keys, how, limit))
    assert pieces == whole


def test_parts_of_the_input_are_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "_MIN_PIECE_BYTES", 50)
    for i, size in enumerate((300, 2, 0, 75, 1000)):
        (tmp_path / f"{i}.txt").write_text("".join(f"{i} {k}\n" for k in range(size // 5)))
    (tmp_path / "9.txt.gz").write_bytes(gzip.compress(b"x\ny\n"))
    files = find_inputs([str(tmp_path)])
    job = PreprocessJob((), "", "byte", text_documents="line")
    whole = records_of(InputPlan(job, files, stream_compressed=False), job)
    parts = [PreprocessJob((), "", "byte", text_documents="line", partition=(i, 3)) for i in range(3)]
    split = [records_of(InputPlan(part, files, stream_compressed=False), part) for part in parts]
    assert list(itertools.chain(*split)) == whole
    assert all(split)
    with pytest.raises(UserError, match=r"standard input .* cannot be read in parts"):
        InputPlan(parts[0], ["-"], stream_compressed=False)


@pytest.mark.parametrize(("share_of_file", "num_pieces"), [(0.1, 3), (0.7, 2), (1, 1)])
def test_parquet_is_cut_at_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share_of_file: float, num_pieces: int
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    rows = [{"text": f"t{i}", "meta": {"title": f"m{i}"}} for i in range(10)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=4)
    job = PreprocessJob(
        (str(path),), str(tmp_path / "o"), "byte", json_keys=("meta.title", "text"), workers=2
    )
    monkeypatch.setattr(plan_module, "_MIN_PIECE_BYTES", int(path.stat().st_size * share_of_file))
    plan = InputPlan(job, [str(path)], stream_compressed=False)
    assert len(list(plan.pieces())) == num_pieces
    assert [(r.number, r.data["text"]) for r in records_of(plan, job)] == [
        (i + 1, f"t{i}") for i in range(10)
    ]
    preprocess(job)
    dataset = IndexedDataset(tmp_path / "o_meta.title_document")
    assert [bytes(dataset[i].tolist()).decode() for i in range(10)] == [f"m{i}" for i in range(10)]


def test_a_large_file_of_paragraphs_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "_MIN_PIECE_BYTES", 10)
    path = tmp_path / "a.txt"
    path.write_text("one\nmore\n\ntwo\n\nthree is long\n\nfour\n")
    job = PreprocessJob((), "", "byte", text_documents="paragraph")
    plan = InputPlan(job, [str(path)], stream_compressed=False)
    assert len(list(plan.pieces())) == 3
    assert [(record.number, record.data) for record in records_of(plan, job)] == [
        (1, b"one\nmore"), (4, b"two"), (6, b"three is long"), (8, b"four")
    ]  # fmt: skip


def test_small_files_share_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "_MIN_PIECE_BYTES", 10)
    for i in range(7):
        (tmp_path / f"{i}.txt").write_text("1234")
    job = PreprocessJob((), "", "byte")
    pieces = list(InputPlan(job, find_inputs([str(tmp_path)]), stream_compressed=True).pieces())
    assert all(isinstance(piece, WholeFiles) for piece in pieces)
    assert [piece.num_input_bytes for piece in pieces] == [8, 8, 8, 4]


def test_a_line_without_end_takes_no_memory(tmp_path: Path) -> None:
    """A sparse file of 256 MB with one newline near its end: no piece may hold that line."""
    path = tmp_path / "a.jsonl"
    with open(path, "wb") as stream:
        stream.seek(1 << 28)
        stream.write(b'\n{"text": "x"}\n')
    job = PreprocessJob((), "", "byte", max_document_bytes=1000)
    pieces = list(InputPlan(job, [str(path)], stream_compressed=True).pieces())
    assert len(pieces) == 65
    middle = pieces[30]
    assert isinstance(middle, ByteRange)
    assert list(middle.records(job)) == []
    (last,) = pieces[-1].records(job)
    assert (locate(pieces[-1], last.number), json.loads(last.data)) == (2, {"text": "x"})


def test_compressed_files_give_the_same_whoever_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers get a file each of five, three get parts of files that are too few for them."""
    monkeypatch.setattr(plan_module, "_MIN_PIECE_BYTES", 500)
    for i in range(5):
        lines = "".join(json.dumps({"text": f"{i} {k}" * (k % 9)}) + "\n" for k in range(200))
        (tmp_path / f"{i}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    outputs = []
    for workers in (1, 2, 3):
        job = PreprocessJob((f"{tmp_path}/*.gz",), str(tmp_path / f"w{workers}"), "byte", workers=workers)
        preprocess(job)
        outputs.append([Path(f"{job.prefix('text')}.{kind}").read_bytes() for kind in ("bin", "idx")])
    assert outputs[0] == outputs[1] == outputs[2]


def test_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(json.dumps({"text": "x" * i}) + "\n" for i in range(1, 50)).encode()
    monkeypatch.setattr(plan_module, "_MIN_PIECE_BYTES", 200)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    preprocess(PreprocessJob(("-",), str(tmp_path / "o"), "byte", workers=2))
    assert IndexedDataset(tmp_path / "o_text_document").sequence_lengths.tolist() == list(range(1, 50))


def test_bad_lines_of_a_cut_file_are_numbered_as_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plan_module, "_MIN_PIECE_BYTES", 64)
    path, bad = tmp_path / "a.jsonl", sorted(random.Random(1).sample(range(1, 101), 12))
    path.write_text("".join("junk\n" if i in bad else f'{{"text": "{i}"}}\n' for i in range(1, 101)))
    job = PreprocessJob((str(path),), str(tmp_path / "o"), "byte", skip_bad_records=True, workers=2)
    summary = preprocess(job)
    assert (summary.progress.num_skipped, summary.progress.num_documents) == (12, 88)
    shown = [record.getMessage() for record in caplog.records]
    assert shown == [f"skipped {path}, line {i}: not valid JSON: {_json_error()}" for i in bad[:10]]
    failing = PreprocessJob((str(path),), str(tmp_path / "p"), "byte", workers=2)
    with pytest.raises(UserError, match=f"a.jsonl, line {bad[0]}: not valid JSON"):
        preprocess(failing)
    assert not [name for name in os.listdir(tmp_path) if name.startswith("p")]


def _json_error() -> str:
    with pytest.raises(ValueError, match="Expecting") as error:
        json.loads(b"junk\n")
    return str(error.value)


def test_long_documents_are_bad_ones() -> None:
    for kind in ("json", "line", "paragraph", "file"):
        records = list(read_stream("a", kind, io.BytesIO(b"x" * 11), 10))
        assert [(r.kind, r.number) for r in records] == [("bad", 1)], kind
        assert "--max-document-bytes" in records[0].data
    paragraph = list(read_stream("a", "paragraph", io.BytesIO(b"x\n\n" + b"y\n" * 9 + b"\nz\n"), 10))
    assert [(r.kind, r.number) for r in paragraph] == [("text", 1), ("bad", 3), ("text", 13)]


def test_a_chunk_is_checked_when_it_is_read_again() -> None:
    assert InputChunk("-", "json", b"a", 0, 1).checksum != InputChunk("-", "json", b"b", 0, 1).checksum
