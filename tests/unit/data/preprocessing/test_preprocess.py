"""Text files to datasets: what is read, what is written, and what is refused before anything is."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megalite.cli import preprocess as program
from megalite.cli.preprocess import parse_job
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.preprocessing import compressed_readers as readers_module
from megalite.data.preprocessing import encoder as encoder_module
from megalite.data.preprocessing import input_plan as plan_module
from megalite.data.preprocessing.documents import find_inputs
from megalite.data.preprocessing.input_plan import PreprocessJob
from megalite.data.preprocessing.preprocess import preprocess
from megalite.data.preprocessing.preprocessing_report import PreprocessingProgress
from megalite.data.tokenizers.tokenizer import ByteTokenizer, TokenizerFiles
from megalite.utils.errors import ConfigError, UserError

ROOT = Path(__file__).parents[4]
EOD = 256


def run(tmp_path: Path, *inputs: object, **options: object) -> list[str]:
    """Preprocesses with the byte tokenizer; the documents of the first key, ␄ for the token at their end."""
    job = PreprocessJob(tuple(map(str, inputs)), str(tmp_path / "out"), "byte", **options)  # type: ignore[arg-type]
    preprocess(job)
    return texts(job.prefix(job.json_keys[0]))


def texts(prefix: str) -> list[str]:
    dataset, tokenizer = IndexedDataset(prefix), ByteTokenizer()
    assert dataset.document_index.tolist() == list(range(len(dataset) + 1))
    documents = [dataset[i].tolist() for i in range(len(dataset))]
    return [tokenizer.decode(ids) + "␄" * ids.count(EOD) for ids in documents]


def jsonl(path: Path, *documents: object) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def test_jsonl(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"text": "one"}, {"text": "zwei ü", "n": 3}, {"text": ""})
    path.write_text("\ufeff" + path.read_text() + '\n  \n{"text": "last"}', encoding="utf-8")
    assert run(tmp_path, path) == ["one", "zwei ü", "last"]
    assert run(tmp_path, path, append_eod=True, overwrite=True) == ["one␄", "zwei ü␄", "last␄"]
    assert IndexedDataset(tmp_path / "out_text_document").dtype.name == "uint16"


def test_several_keys(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"title": "t1", "text": "one"}, {"title": "", "text": "two"})
    assert run(tmp_path, path, json_keys=("text", "title")) == ["one", "two"]
    assert texts(str(tmp_path / "out_title_document")) == ["t1"]


def test_lone_surrogates_become_replacement_characters(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud800b \\ud83d\\ude42"}\n')
    assert run(tmp_path, path) == ["a\ufffdb 🙂"]


@pytest.mark.parametrize(
    ("how", "documents"),
    [
        ("file", ["one\ntwo\n\n\nthree\r\nfour\n"]),
        ("line", ["one", "two", "three", "four"]),
        ("paragraph", ["one\ntwo", "three\r\nfour"]),
    ],
)
def test_text_files(tmp_path: Path, how: str, documents: list[str]) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\ntwo\n\n\nthree\r\nfour\n")
    assert run(tmp_path, path, text_documents=how) == documents


def test_a_whole_book_as_one_document_gets_a_hint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    book = tmp_path / "my_text.txt"
    book.write_text("one\n\ntwo\n")
    line = ["--input", str(book), "--tokenizer-type", "byte", "--output-prefix"]
    program._run([*line, str(tmp_path / "paragraphs"), "--text-documents", "paragraph"])
    assert caplog.messages == []
    program._run([*line, str(tmp_path / "whole")])
    assert "the input is one document" in caplog.text
    assert "pass --text-documents paragraph" in caplog.text
    with pytest.raises(UserError, match=r"--max-document-bytes: with --text-documents paragraph"):
        run(tmp_path, book, max_document_bytes=7)
    caplog.clear()
    line[1] = str(jsonl(tmp_path / "one.jsonl", {"text": "one"}))
    program._run([*line, str(tmp_path / "json")])
    assert "the input is one document" in caplog.text
    assert "preprocess more documents" in caplog.text
    assert "--text-documents" not in caplog.text


@pytest.mark.parametrize("sentences", [False, True])
def test_documents_without_a_token_are_counted(
    sentences: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"text": "One. Two."}, {"text": ""}, {"text": "Three."}, {"text": ""})
    line = ["--input", str(path), "--tokenizer-type", "byte", "--output-prefix", str(tmp_path / "o")]
    program._run([*line, *(["--split-sentences"] if sentences else [])])
    printed = capsys.readouterr().out.splitlines()
    assert [re.findall(r"[\d,]+ documents|\d+ skipped(?:, \d+ empty)?", line) for line in printed[:2]] == [
        ["2 documents", "0 skipped, 2 empty"]
    ] * 2


def test_compressed_files(tmp_path: Path) -> None:
    line = b'{"text": "packed"}\n'
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line) + gzip.compress(line))
    (tmp_path / "b.jsonl.bz2").write_bytes(bz2.compress(line))
    (tmp_path / "c.jsonl.xz").write_bytes(lzma.compress(line))
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"text"))
    assert run(tmp_path, tmp_path) == ["packed"] * 4 + ["text"]


def test_zstandard(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    text = "packed" * 100
    frame = zstandard.compress(b'{"text": "%s"}\n' % text.encode() * 1000)
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(frame + frame)
    assert run(tmp_path, path) == [text] * 2000
    for damaged, message in ((frame[:-9], "ends in the middle"), (b"junk" + frame, "cannot read")):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=message):
            run(tmp_path, path, overwrite=True)


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["one", None, "three"], "n": [1, 2, 3]}), path)
    with pytest.raises(UserError, match=r"a\.parquet, row 2: the value of 'text' is NoneType"):
        run(tmp_path, path)
    assert run(tmp_path, path, skip_bad_records=True) == ["one", "three"]
    with pytest.raises(UserError, match=r"no column 'body' \(it has text, n\)"):
        run(tmp_path, path, json_keys=("body",))
    path.write_bytes(b"junk")
    with pytest.raises(UserError, match=r"cannot read .*a\.parquet"):
        run(tmp_path, path, overwrite=True)


@pytest.mark.parametrize("form", ["new_stream", "new_file"])
def test_arrow_is_read_like_parquet(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    ipc = pytest.importorskip("pyarrow.ipc")
    monkeypatch.setattr(readers_module, "_BATCHES_PER_GROUP", 2)
    texts = [f"t{i}" for i in range(10)]
    table = pyarrow.table({"text": texts, "n": range(10)})
    path = tmp_path / "a.arrow"
    with getattr(ipc, form)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    assert readers_module.row_group_sizes(str(path)) == [6, 4]
    assert run(tmp_path, path) == texts
    with pytest.raises(UserError, match=r"no column 'body' \(it has text, n\)"):
        run(tmp_path, path, json_keys=("body",))
    for damaged in (path.read_bytes()[:-200], b"junk", b""):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"cannot read .*a\.arrow"):
            run(tmp_path, path, overwrite=True)


def test_a_saved_hugging_face_dataset_is_read_from_its_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    texts = [f"t{i}" for i in range(10)]
    folder = tmp_path / "saved"
    split = datasets.Dataset.from_dict({"text": texts})
    split.save_to_disk(str(folder / "train"), num_shards=3)
    (folder / "train" / "data-00003-of-00004.arrow").write_bytes(b"of an earlier save")
    assert run(tmp_path, folder / "train") == texts
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UserError, match=r"saved holds several splits of a dataset: pass the folder of one"):
        find_inputs([str(folder)])


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.csv", "CSV"), ("a.tsv.gz", "CSV"), ("a.warc.gz", "WARC"), ("a.WET", "WARC"), ("a.tar.gz", "tar")],
)
def test_other_formats_are_refused_by_name(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / name).write_text("x")
    for pattern in (tmp_path / name, tmp_path / "a*"):
        with pytest.raises(
            UserError, match=rf"--input .*{name} is a {kind} file: convert it to one of \.jsonl"
        ):
            find_inputs([str(pattern)])
    with pytest.raises(UserError, match=r"names no file"):
        find_inputs([str(tmp_path)])


def test_inputs_are_files_globs_and_folders_in_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "sub/c.txt", "sub/.hidden.txt", "sub/readme.md", "raw"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    relative = [os.path.relpath(name, tmp_path) for name in find_inputs([str(tmp_path)])]
    assert relative == ["a.jsonl", "b.jsonl", "sub/c.txt"]
    found = find_inputs([str(tmp_path / "raw"), str(tmp_path / "*.jsonl")])
    assert [Path(name).name for name in found] == ["raw", "a.jsonl", "b.jsonl"]
    with pytest.raises(UserError, match=r"--input .*\*\.csv names no file"):
        find_inputs([str(tmp_path / "*.csv")])


def test_output_does_not_depend_on_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_module, "_BATCH_RECORDS", 7)
    monkeypatch.setattr(plan_module, "_MIN_PIECE_BYTES", 150)  # many pieces under way
    path = jsonl(tmp_path / "a.jsonl", *({"text": "x" * (i % 13), "b": str(i)} for i in range(200)))
    progresses: list[tuple[int, int, int]] = []
    for workers in (1, 2):
        job = PreprocessJob(
            (str(path),), str(tmp_path / f"w{workers}"), "byte", json_keys=("text", "b"), workers=workers
        )
        seen: list[PreprocessingProgress] = []
        end = preprocess(job, seen.append).progress
        assert len(seen) == -(-path.stat().st_size // 150)
        progresses.append((end.num_documents, end.num_tokens, end.num_bytes))
    assert progresses[0] == progresses[1]
    for name in ("text_document.bin", "text_document.idx", "b_document.bin", "b_document.idx"):
        assert (tmp_path / f"w1_{name}").read_bytes() == (tmp_path / f"w2_{name}").read_bytes()


BAD_LINES = {
    "not json": "line 2: not valid JSON",
    '["a", "b"]': "line 2: not a JSON object",
    '{"body": "x"}': "line 2: no key 'text' \\(it has 'body'\\)",
    '{"text": 3}': "line 2: the value of 'text' is int, not a text",
    "[" * 100_000: "line 2: not valid JSON",
    '{"text": "\udcff"}': "line 2: not valid JSON",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=list(map(str, range(len(BAD_LINES)))))
@pytest.mark.parametrize("workers", [1, 2])
def test_bad_lines_are_named_or_skipped(tmp_path: Path, line: str, workers: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + line.encode(errors="surrogateescape") + b'\n{"text": "c"}\n')
    if workers == 1:
        with pytest.raises(UserError, match=f"a.jsonl, {BAD_LINES[line]}"):
            run(tmp_path, path, workers=workers)
        assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]
        assert run(tmp_path, path, skip_bad_records=True) == ["a", "c"]
    elif line == "not json":  # an error crosses the processes' border as itself
        with pytest.raises(UserError, match=f"a.jsonl, {BAD_LINES[line]}"):
            run(tmp_path, path, workers=workers)


def test_text_that_the_tokenizer_refuses_is_named_or_skipped(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"text": "1 2"}, {"text": "x"}, {"text": "3"})
    job = PreprocessJob((str(path),), str(tmp_path / "o"), "NullTokenizer", TokenizerFiles(vocab_size=70000))
    with pytest.raises(UserError, match=r"a\.jsonl, line 2: 'x' is not a token id"):
        preprocess(job)
    skipping = PreprocessJob(
        job.inputs, job.output_prefix, job.tokenizer_type, job.tokenizer_files, skip_bad_records=True
    )
    assert preprocess(skipping).progress.num_skipped == 1
    dataset = IndexedDataset(tmp_path / "o_text_document")
    assert [dataset[i].tolist() for i in range(2)] == [[1, 2], [3]]
    assert dataset.dtype.name == "int32"


def test_refusals(tmp_path: Path) -> None:
    good = jsonl(tmp_path / "a.jsonl", {"text": "a"})
    empty = jsonl(tmp_path / "empty.jsonl", {"text": ""})
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(good.read_bytes())[:-9])
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    text = tmp_path / "a.txt"
    text.write_text("x")
    before = sorted(tmp_path.iterdir())
    for inputs, options, message in (
        ([empty], {}, "no document with text under the key 'text'"),
        ([good, cut], {}, r"cannot read .*cut\.jsonl\.gz"),
        ([latin], {}, r"latin\.txt, line 1: not UTF-8 text: byte 3 is 0xe9"),
        ([text], {"json_keys": ("a", "b")}, r"a\.txt is plain text"),
        ([tmp_path / "none"], {}, "names no file"),
        ([good], {"partition": (1, 2)}, r"part 1/2 of the input has no document .*fewer parts"),
    ):
        with pytest.raises(UserError, match=message):
            run(tmp_path, *inputs, **options)
        assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(UserError, match="--output-prefix s3://bucket/o is a URL"):
        preprocess(PreprocessJob((str(good),), "s3://bucket/o", "byte"))


def test_sentences_keep_the_white_space_between_them(tmp_path: Path) -> None:
    text = " One is here. Two is\nhere.\n\nThree is here.\t\nFour?  "
    path = jsonl(tmp_path / "a.jsonl", {"text": text})
    for keeps, expected in (
        (False, ["One is here.", "Two is\nhere.", "Three is here.", "Four?"]),
        (True, ["One is here. ", "Two is\nhere.\n\n", "Three is here.\t\n", "Four?"]),
    ):
        prefix = str(tmp_path / f"keeps_{keeps}")
        job = PreprocessJob((str(path),), prefix, "byte", sentence_language="en", keep_newlines=keeps)
        preprocess(job)
        dataset = IndexedDataset(job.prefix("text"))
        assert [ByteTokenizer().decode(dataset[i].tolist()) for i in range(len(dataset))] == expected


def test_all_mistakes_of_a_command_line_are_reported_at_once(tmp_path: Path) -> None:
    arguments = ["--input", tmp_path / "none", tmp_path / "no*", "--workers", "0", "--json-keys", "a", "a"]
    arguments += ["--overwrite", "--resume", "--tokenizer-type", "bite", "--keep-newline", "--lang", "latin"]
    wrong = tool(*arguments)
    assert wrong.returncode == 1
    assert [line.removeprefix("error: ") for line in wrong.stderr.splitlines()] == [
        "unknown flag --keep-newline; nearest is --keep-newlines (see --help)",
        "argument --workers: '0' is not a whole number above 0 (see --help)",
        "argument --lang: 'latin' is not an ISO 639 code, such as en or de (see --help)",
        "the following arguments are required: --output-prefix (see --help)",
        "--resume and --overwrite contradict each other: remove one",
        "--json-keys names a key twice",
        "--tokenizer-type bite is unknown: did you mean byte?",
        f"--input {tmp_path / 'none'} names no file: pass files, globs or folders",
        f"--input {tmp_path / 'no*'} names no file: pass files, globs or folders",
    ]


def test_megatrons_flags_that_change_nothing(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", *({"text": str(i)} for i in range(10)))
    arguments = ["--input", path, "--output-prefix", tmp_path / "o", "--tokenizer-type", "byte"]
    arguments += ["--partitions", "2", "--keep-sequential-samples", "--vocab-extra-ids", "100"]
    run = tool(*arguments, "--keep-newlines", "--lang", "en", "--log-interval", "4", "--workers", "1")
    assert run.returncode == 0
    *notices, progress = run.stderr.splitlines()
    assert [line.removeprefix("note: ").split(":")[0] for line in notices] == [
        "--partitions 2 is not needed",
        "--keep-sequential-samples is not needed",
        "--vocab-extra-ids 100 is not needed",
        "--lang en has no effect without --split-sentences",
        "--keep-newlines has no effect without --split-sentences",
    ]
    assert progress.startswith("[####################] 100% 10 documents, 10 tokens")
    assert texts(str(tmp_path / "o_text_document")) == [str(i) for i in range(10)]


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        # Megatron-LM
        (
            "--json-keys text title --split-sentences --keep-newlines --append-eod --lang english "
            "--workers 2 --workers-to-check 16 32 --max-documents 1000 --partitions 2 --log-interval 1000 "
            "--keep-sequential-samples --vocab-size 9 --padded-vocab-size 128 --no-pad-vocab-size "
            "--vocab-file v --merge-file m --vocab-extra-ids 0 --tokenizer-type byte --tokenizer-model t "
            "--tokenizer-hf-no-use-fast --tokenizer-hf-no-include-special-tokens --use-gigatoken",
            "",
        ),
        (
            "--find-optimal-num-workers --tokenizer-metadata m --tokenizer-special-tokens a b "
            "--tiktoken-pattern v2 --tiktoken-num-special-tokens 9 --tokenizer-sentencepiece-legacy "
            "--no-tokenizer-sentencepiece-ignore-extra-whitespaces --trust-remote-code "
            "--null-tokenizer-eod-id 3 --null-tokenizer-pad-id -1 --chat-template c",
            "find-optimal-num-workers trust-remote-code tokenizer-metadata tokenizer-special-tokens "
            "tokenizer-sentencepiece-legacy no-tokenizer-sentencepiece-ignore-extra-whitespaces "
            "tiktoken-pattern tiktoken-num-special-tokens null-tokenizer-eod-id null-tokenizer-pad-id "
            "chat-template",
        ),
        # Megatron-DeepSpeed, and BigScience's
        ("--json-keys text --seq-length 2048 --dataset-impl mmap --trust-remote-code", "trust-remote-code"),
        (
            "--json-key text --vocab v --merge-file m --dataset-impl mmap --tokenizer-name-or-path n "
            "--make-vocab-size-divisible-by 128 --pad-vocab-size-to 250880",
            "",
        ),
    ],
)
def test_every_flag_of_megatrons_scripts_is_known(flags: str, refused: str, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"text": "one"})
    arguments = ["--input", str(path), "--output-prefix", str(tmp_path / "o"), "--tokenizer-type", "byte"]
    problems = []
    try:
        parse_job([*arguments, *flags.split()])
    except ConfigError as error:
        problems = list(error.problems)
    assert [each.split()[0] for each in problems] == [f"--{name}" for name in refused.split()]
    assert all(" is not supported: remove it" in each for each in problems)


def test_languages_have_codes_or_english_names(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"text": "one"})
    arguments = ["--input", str(path), "--output-prefix", str(tmp_path / "o"), "--tokenizer-type", "byte"]
    job, _ = parse_job([*arguments, "--split-sentences", "--lang", "german"])
    assert job.sentence_language == "de"


def tool(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tools" / "preprocess_data.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, env=environment
    )


def test_tool(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"text": "one"}, {"text": "two"})
    arguments = ["--input", path, "--output-prefix", tmp_path / "new" / "o", "--tokenizer-type", "byte"]
    arguments += ["--json-keys", "text", "--append-eod", "--workers", "2", "--dataset-impl", "mmap"]
    first = tool(*arguments)
    assert first.returncode == 0
    assert all(line.startswith("[") for line in first.stderr.splitlines())  # progress, on a slow machine
    assert "o_text_document.bin and .idx: 2 documents, 8 tokens, 0 skipped" in first.stdout
    assert texts(str(tmp_path / "new" / "o_text_document")) == ["one␄", "two␄"]
    again = tool(*arguments)
    assert (again.returncode, again.stdout) == (1, "")
    assert again.stderr.startswith("error: ")
    assert again.stderr.count("\n") == 1
    assert "exists" in again.stderr
    wrong = tool(*arguments, "--overwrit")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (1, 1)
    assert "unknown flag --overwrit; nearest is --overwrite" in wrong.stderr
    wrong = tool(*arguments, "--json-keys", "te\udcfft")  # a byte that is not UTF-8
    assert (wrong.returncode, wrong.stderr.count("\n")) == (1, 1)
    assert "cannot be part of a file's name" in wrong.stderr
