"""A corpus from the command line: resumed, in tasks, beside other work; its tokens and its sources."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.cli import prepare as program
from megalite.data._index_builder import permute
from megalite.data.build_datasets import BuildOptions
from megalite.data.corpus_sources import sources_of_one_blend
from megalite.data.prepare import prepare
from megalite.data.prepare.passes import PassWorker
from megalite.data.prepare.plan import PASSES
from megalite.data.prepare.prepare import finish, run_pass, start
from megalite.data.prepare.report import find_source
from megalite.data.samples import GPTSamples
from megalite.data.sharded_dataset import ShardedDataset, open_dataset
from megalite.data.tokenizers.tokenizer import TokenizerFiles, build_tokenizer
from megalite.data.window_dataset import round_keys
from megalite.utils.errors import UserError
from megalite.utils.log import log
from megalite.utils.object_store import ObjectFolder
from tests.corpora import build_from_sources
from tests.object_server import s3_in

from .conftest import digests_of, plan_of, run, texts_of, write_texts

TEXTS = [["one", "two", "three " * 9], ["four", "five"] * 9, ["six"]]


def command(folder: Path, *flags: str) -> None:
    program.main(["--config", str(folder / "corpus.yaml"), "--workers", "1", *flags])


def test_tasks_of_array_jobs_write_the_same_corpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_texts(tmp_path / "in", TEXTS)
    plan_of(tmp_path, shuffle=1, shards=3)
    command(tmp_path)
    assert "22 documents" in capsys.readouterr().out
    whole = digests_of(tmp_path)
    command(tmp_path)
    assert "complete already" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "out")
    command(tmp_path, "--pass", "sign", "--task", "1/2")
    with pytest.raises(UserError, match=r"--pass tokenize needs the pass sign, which lacks \d+ of its"):
        command(tmp_path, "--pass", "tokenize")
    command(tmp_path, "--pass", "sign", "--task", "0/2")
    for name, tasks in (("match", 1), ("tokenize", 3), ("shard", 5)):
        for i in range(tasks):
            command(tmp_path, "--pass", name, "--task", f"{i}/{tasks}")
    command(tmp_path, "--pass", "finish")
    assert digests_of(tmp_path) == whole


def test_only_windows_of_a_corpus_in_order_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefixes = []
    for name, settings in (("ordered", {}), ("shuffled", {"shuffle": 0, "shards": 2})):
        write_texts(tmp_path / name / "in", TEXTS)
        run(plan_of(tmp_path / name, **settings))
        prefixes.append(str(tmp_path / name / "out" / "c"))
    sources = sources_of_one_blend(["0.5", prefixes[0], "0.5", prefixes[1]], "1")
    build_from_sources(sources, (4, 0, 0), BuildOptions(GPTSamples(4, 1, are_windows=True)))
    assert [line for line in caplog.messages if "shuffle" in line] == [
        f"samples are windows of {prefixes[0]}, with neighbouring documents together: shuffle the documents "
        "before you preprocess them, or prepare the corpus with the setting shuffle"
    ]


def test_work_of_another_job_is_not_continued(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", TEXTS)
    plan = plan_of(tmp_path)
    start(plan, overwrite=False)
    run_pass(plan, "sign", (0, 1), 1, lambda *_: None)
    with pytest.raises(UserError, match="begun with another value of shards: start again with"):
        start(plan_of(tmp_path, shards=2), overwrite=False)
    file = tmp_path / "in" / "000.jsonl"
    file.write_text(json.dumps({"text": "other"}) + "\n")
    with pytest.raises(UserError, match=r"000.jsonl has changed since .* was begun: start again with --over"):
        start(plan_of(tmp_path), overwrite=False)
    with pytest.raises(UserError, match=r"000.jsonl has changed since the corpus was planned"):
        PassWorker(plan)(("tokenize", 0))
    file.unlink()
    with pytest.raises(UserError, match=r"000.jsonl is gone"):
        start(plan_of(tmp_path), overwrite=False)
    (tmp_path / "out" / "c.idx").touch()
    with pytest.raises(UserError, match=r"c.idx exists, and it would hide the corpus"):
        start(plan_of(tmp_path), overwrite=True)
    (tmp_path / "out" / "c.idx").unlink()
    changed = plan_of(tmp_path)
    start(changed, overwrite=True)
    for name in PASSES[:-1]:
        run_pass(changed, name, (0, 1), 1, lambda *_: None)
    finish(changed)
    assert texts_of(tmp_path) == [text for texts in TEXTS[1:] for text in texts]
    with pytest.raises(UserError, match=r"c.shards.json is a corpus of other settings or input"):
        start(plan_of(tmp_path, shards=2), overwrite=False)


def test_a_kill_while_the_last_files_are_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_texts(tmp_path / "in", TEXTS)
    run(plan_of(tmp_path, shuffle=1, shards=3))
    whole = digests_of(tmp_path)
    shutil.rmtree(tmp_path / "out")
    plan = plan_of(tmp_path, shuffle=1, shards=3)
    start(plan, overwrite=False)
    for name in PASSES[:-1]:
        run_pass(plan, name, (0, 1), 1, lambda *_: None)
    with monkeypatch.context() as patch:
        patch.setattr("megalite.data.prepare.prepare.copy_tokenizer_digest", None)  # after the first shard
        with pytest.raises(TypeError):
            finish(plan)
    assert not os.path.exists(tmp_path / "out" / "c.shards.json")
    finish(plan_of(tmp_path, shuffle=1, shards=3))
    assert digests_of(tmp_path) == whole


@pytest.mark.slow
def test_kills_at_any_time_change_no_byte(tmp_path: Path) -> None:
    """Kill -9 of the command and its processes, at random times from its start to its end."""
    write_texts(
        tmp_path / "in", [[f"{i % 3000} {number} " * 60 for i in range(12_000)] for number in range(3)]
    )
    plan_of(tmp_path, shuffle=1, shards=3, steps=[{"exact": True}])
    command = [sys.executable, "-m", "megalite", "prepare", "--config", str(tmp_path / "corpus.yaml")]
    started = time.monotonic()
    subprocess.run([*command, "--workers", "1"], check=True, capture_output=True)
    seconds, whole = time.monotonic() - started, digests_of(tmp_path)
    shutil.rmtree(tmp_path / "out")
    chance, num_interrupted = random.Random(1), 0
    for _ in range(50):
        process = subprocess.Popen(
            [*command, "--workers", "2"],
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(seconds * chance.random())
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            num_interrupted += 1
        if process.wait() == 0:
            assert digests_of(tmp_path) == whole
            shutil.rmtree(tmp_path / "out")
    assert num_interrupted > 20
    subprocess.run([*command, "--workers", "2"], check=True, capture_output=True)
    assert digests_of(tmp_path) == whole


def test_another_process_may_finish_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_texts(tmp_path / "in", TEXTS)
    plan_of(tmp_path, shards=3)

    def run_both(*arguments: Any, **options: Any) -> None:
        monkeypatch.setattr(program, "run_pass", run_pass)
        command(tmp_path)
        run_pass(*arguments, **options)

    monkeypatch.setattr(program, "run_pass", run_both)
    command(tmp_path)
    first, second = capsys.readouterr().out.split("wrote ")[1:]
    assert first == second
    assert not (tmp_path / "out" / "c.unfinished").exists()


def test_every_document_has_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"document {i} with some words" for i in range(40)]
    write_texts(tmp_path / "in", [lines[:3], lines[3:]])  # the second file is many ranges of bytes
    plan = plan_of(tmp_path, shuffle=5, shards=3)
    assert any(getattr(piece, "begin", 0) for piece in plan.pieces)
    run(plan)
    found = texts_of(tmp_path)
    order = np.argsort(permute(np.arange(40), 40, round_keys("prepare", 5)))
    assert found == [lines[i] for i in order]  # through all shards
    assert found != lines
    for number, text in enumerate(found):
        file, _, line = find_source(str(tmp_path / "out" / "c"), number).partition(" line ")
        assert json.loads(Path(file).read_text().splitlines()[int(line) - 1])["text"] == text
    assert ShardedDataset(str(tmp_path / "out" / "c")).first_altered() is None  # checksums without reading


def test_bad_documents_are_skipped_and_reported(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", TEXTS)
    with (tmp_path / "in" / "001.jsonl").open("a") as file:
        file.write('{"title": 3}\n{"text"\n')
    with pytest.raises(UserError, match=r"no key 'text' .*; correct it, or set on_error to skip"):
        run(plan_of(tmp_path))
    shutil.rmtree(tmp_path / "out")
    report = run(plan_of(tmp_path, on_error="skip"))
    assert texts_of(tmp_path) == [text for texts in TEXTS for text in texts]
    assert (report["documents"], report["bad"], report["output"]["documents"]) == (24, 2, 22)
    assert [each["reason"].partition(" ")[0] for each in report["bad_examples"]] == ["no", "not"]


def test_input_in_object_storage(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    write_texts(tmp_path / "in", TEXTS)
    store = fsspec.filesystem("memory")
    for file in (tmp_path / "in").iterdir():
        store.pipe(f"/prepared/{file.name}", file.read_bytes())
    run(plan_of(tmp_path, input="memory://prepared/*.jsonl", shards=2))
    assert texts_of(tmp_path) == [text for texts in TEXTS for text in texts]
    assert find_source(str(tmp_path / "out" / "c"), 0).endswith("prepared/000.jsonl line 1")


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> str:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.ByteLevelBPETokenizer()
    names = ["<|endoftext|>", "<|call|>"]
    model.train_from_iterator(["a b c"], vocab_size=260, special_tokens=names, show_progress=False)
    path = str(tmp_path / "tokenizer.json")
    model.save(path)
    return path


@pytest.mark.parametrize("action", ["keep", "escape", "drop"])
def test_names_of_special_tokens_in_texts(
    tmp_path: Path, tokenizer_file: str, action: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    texts = ["a<|endoftext|>b", "plain", "<|call|><|call|>", "<|en<|call|>doftext|>c"]
    write_texts(tmp_path / "in", [texts])
    options: dict[str, Any] = {"tokenizer": {"model": tokenizer_file}, "special_tokens_in_text": action}
    plan_of(tmp_path, **options)
    log.propagate = True
    with caplog.at_level(logging.WARNING, logger=log.name):
        command(tmp_path)
    report = json.loads((tmp_path / "out" / "c.report.json").read_text())["special_tokens_in_text"]
    assert (report["documents"], report["tokens"]) == (3, 4)
    assert ("the texts of 3 documents name special tokens" in caplog.text) == (action == "keep")
    dataset = ShardedDataset(str(tmp_path / "out" / "c"))
    found = [dataset[i].tolist() for i in range(len(dataset))]
    tokenizer = build_tokenizer(None, TokenizerFiles(tokenizer_file))
    library = tokenizers.Tokenizer.from_file(tokenizer_file)
    library.encode_special_tokens = action == "escape"  # the library's own way to read names as text
    expected = ["ab", "plain", "c"] if action == "drop" else texts
    assert [tokenizer.decode(ids[:-1]) for ids in found] == expected
    if action == "keep":
        assert found == [[*library.encode(text).ids, tokenizer.eod] for text in texts]
    else:
        assert not {0, 1} & {number for ids in found for number in ids[:-1]}


def test_a_corpus_in_object_storage_is_that_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed before any of its uploads, it is no corpus, and the same command makes it one."""
    pytest.importorskip("obstore")
    write_texts(tmp_path / "in", TEXTS)
    run(plan_of(tmp_path, shuffle=1, shards=3))
    here = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    work = {"run": {"folder": str(tmp_path / "work")}, "output": "s3://b/out/c", "shuffle": 1, "shards": 3}
    with s3_in(tmp_path, monkeypatch) as server:
        upload, uploads_left = ObjectFolder.upload, [0]

        def killed(objects: ObjectFolder, name: str, file: Path) -> None:
            if not uploads_left[0]:
                raise KeyboardInterrupt
            uploads_left[0] -= 1
            upload(objects, name, file)

        monkeypatch.setattr(ObjectFolder, "upload", killed)
        monkeypatch.setattr(prepare, "_UPLOADS", 1)
        number, is_complete = 0, False
        plan_of(tmp_path, **work)
        while not is_complete:
            uploads_left[0] = number
            assert "b/out/c.shards.json" not in server.objects
            try:
                command(tmp_path)
                is_complete = True
            except SystemExit:
                number += 1
        assert number == len(here)
        there = {name.rpartition("/")[2]: content for name, content in server.objects.items()}
        assert there.pop("c.report.html").startswith(b"<!doctype html>")
        assert there == here
        assert not list((tmp_path / "work").iterdir())
        dataset = open_dataset("s3://b/out/c")
        local = open_dataset(str(tmp_path / "out" / "c"))
        assert [dataset[i].tolist() for i in range(len(dataset))] == [
            local[i].tolist() for i in range(len(local))
        ]
        capsys.readouterr()
        command(tmp_path)
        assert "s3://b/out/c.shards.json: complete already" in capsys.readouterr().out
        plan_of(tmp_path, **{**work, "shuffle": 2})
        with pytest.raises(UserError, match=r"s3://b/out/c.shards.json is a corpus of other settings"):
            command(tmp_path)
        server.is_read_only = True
        with pytest.raises(UserError, match=r"output: s3://b/out/c.unfinished cannot be written \(Perm"):
            plan_of(tmp_path, **work)
        with pytest.raises(UserError, match=r"run: folder is missing: work in progress for s3://b/out/c"):
            plan_of(tmp_path, **{**work, "run": {}})
    with pytest.raises(UserError, match=r"run: folder is for an output in object storage: remove it"):
        plan_of(tmp_path, **{**work, "output": str(tmp_path / "out" / "c")})
    with pytest.raises(UserError, match=r"output: hf://b/c is a URL: pass a path .* or s3://BUCKET/NAME"):
        plan_of(tmp_path, **{**work, "output": "hf://b/c"})
