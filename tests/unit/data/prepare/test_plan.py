"""The settings of a corpus: each mistake is one line that says what to write."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from megalite.data.prepare.plan import make_plan, read_corpus_job
from megalite.utils.errors import UserError

from .conftest import plan_of, write_texts


def problems_of(folder: Path, **options: Any) -> list[str]:
    with pytest.raises(UserError) as error:
        plan_of(folder, **options)
    return str(error.value).splitlines()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sharts": 3}, "'sharts' is unknown; nearest is shards"),
        ({"input": []}, "input has no text: it names no files, or empty ones"),
        ({"shards": 0}, "shards is 0: write a whole number from 1 to 99999"),
        ({"shuffle": "yes"}, "shuffle is 'yes': write a whole number from 0"),
        ({"special_tokens_in_text": "hide"}, "is 'hide': write keep or escape or drop"),
        ({"tokenizer": {"typ": "byte"}}, "tokenizer: 'typ' is unknown; nearest is type"),
        ({"tokenizer": {"type": 3}}, "tokenizer: type is 3: write a text"),
        ({"run": {"worker": 3}}, "run: 'worker' is unknown; nearest is workers"),
        (
            {"run": {"executor": "slurm", "sbatch": {"mem": 1, "output": "x"}}},
            "run: sbatch: remove output: megalite sets array, dependency, job-name",
        ),
        (
            {"run": {"executor": "slurm", "sbatch": {"time": 14400}}},
            "sbatch: remove time, and write run: time",
        ),
        ({"run": {"time": "1:00:00"}}, "run: time has no effect without executor: slurm"),
        ({"steps": [{"exakt": True}]}, "steps: 'exakt' is unknown; nearest is exact"),
        ({"steps": [{"minhash": {"band": 3}}]}, "steps: minhash: 'band' is unknown; nearest is bands"),
        ({"steps": [{"minhash": {"rows": 0}}]}, "steps: minhash: rows is 0: write a whole number from 1"),
        ({"steps": [{"language": {"model": "m"}}]}, "steps: language: keep is missing"),
        ({"steps": [{"exact": True}, {"exact": True}]}, "exact and minhash can be there once each"),
        (
            {"steps": [{"minhash": {}}, {"python": "json:dumps"}, {"exact": True}]},
            "steps: python is between exact and minhash, which are found in one pass: move it before",
        ),
        ({"steps": [{"python": "json:nothing"}]}, "the step python: json:nothing: module 'json' has no"),
        ({"steps": [{"python": "json"}]}, "write module:function"),
        ({"steps": [{"decontaminate": "none.jsonl"}]}, "none.jsonl names no file"),
        ({"input": "none/*.jsonl"}, "input: none/*.jsonl names no file: pass files, globs or folders"),
        ({"input": "-"}, "standard input can be read only once"),
        ({"output": "hf://bucket/c"}, "output: hf://bucket/c is a URL"),
        ({"tokenizer": {"type": "bite"}}, "tokenizer: type bite is unknown: did you mean byte?"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    write_texts(tmp_path / "in", [["a"]])
    (line,) = problems_of(tmp_path, **options)
    assert message in line


def test_all_mistakes_come_at_once(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", [["a"]])
    assert len(problems_of(tmp_path, shards=0, sharts=1, steps=[{"exakt": 1}])) == 3


def test_one_file_under_two_names_is_refused(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", [["a"]])
    os.symlink(tmp_path / "in" / "000.jsonl", tmp_path / "in" / "001.jsonl")
    assert "which are one file: remove one" in problems_of(tmp_path)[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", [["a"]])
    (tmp_path / "out").mkdir(mode=0o500)
    assert "output" in problems_of(tmp_path)[0]


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "rensa", None)
    monkeypatch.setitem(__import__("sys").modules, "datatrove", None)
    write_texts(tmp_path / "in", [["a"]])
    steps = [{"datatrove": "RegexFilter"}, {"minhash": {}}]
    assert problems_of(tmp_path, steps=steps) == [
        "the step datatrove: RegexFilter needs datatrove, which is not installed: pip install datatrove",
        "the step minhash needs rensa, which is not installed: pip install 'megalite[corpus]'",
    ]


def test_a_file_that_is_no_settings_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    for text, message in (("- a", "has no settings"), ("a: [", "is not YAML")):
        path.write_text(text)
        with pytest.raises(UserError, match=re.escape(message)):
            read_corpus_job(str(path))
    with pytest.raises(UserError, match="No such file"):
        read_corpus_job(str(tmp_path / "none.yaml"))


def test_a_column_that_one_file_lacks_is_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    from .conftest import run

    (tmp_path / "in").mkdir()
    for name, column in (("a", "text"), ("b", "body")):
        parquet.write_table(pyarrow.Table.from_pylist([{column: "t"}]), tmp_path / "in" / f"{name}.parquet")
    path = tmp_path / "c.yaml"
    settings = {"input": str(tmp_path / "in"), "output": str(tmp_path / "c"), "tokenizer": {"type": "byte"}}
    path.write_text(json.dumps(settings))
    message = r"b.parquet has no column 'text' \(it has body\): pass another column as text"
    with pytest.raises(UserError, match=message):
        run(make_plan(read_corpus_job(str(path))))
