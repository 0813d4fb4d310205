"""JSON and YAML that are nested deeper than Python goes: a mistake in a file, and no traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megalite.cli import parse
from megalite.convert.hf_folder import HFFolder
from megalite.data.documents import Record, RecordError, parse_record
from megalite.data.hf_tokenizer import _eos_token_beside
from megalite.data.preprocessing.report import read_report
from megalite.data.sources import _per_split_words
from megalite.data.tokenizer_digest import read_tokenizer_digest
from megalite.errors import UserError
from megalite.generation.prompts import read_prompts
from megalite.parsing import parse_json
from megalite.reporting.history import _row
from megalite.reporting.run import _is_metrics
from megalite.reporting.trace import read_trace
from megalite.tuning.results import Results

DEEP = "[" * 50_000 + "]" * 50_000
REFUSED: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "settings": ("run.yaml", lambda file: parse(["--config", str(file)])),
    "DeepSpeed's settings": ("ds.json", lambda file: parse(["--deepspeed_config", str(file)])),
    "words for each split": ("split.json", lambda file: _per_split_words(str(file))),
    "a prompt": ("prompts.jsonl", lambda file: read_prompts(None, str(file))),
    "a trace": ("trace.json", read_trace),
    "a tuning's results": ("results.json", lambda file: Results(file.parent, {})),
    "transformers' config": ("config.json", lambda file: HFFolder(file.parent)),
    "a tokenizer's settings": (
        "tokenizer_config.json",
        lambda file: _eos_token_beside(file.with_name("tokenizer.json")),
    ),
    "a tokenizer's digest": ("x.tokenizer.json", lambda file: read_tokenizer_digest(str(file.parent / "x"))),
}


@pytest.mark.parametrize(("name", "read"), REFUSED.values(), ids=REFUSED.keys())
def test_a_file_that_is_nested_too_deep_is_a_mistake(
    tmp_path: Path, name: str, read: Callable[[Path], Any]
) -> None:
    (tmp_path / name).write_text(DEEP)
    with pytest.raises(UserError) as error:
        read(tmp_path / name)
    assert name in str(error.value).splitlines()[0]


def test_a_line_that_is_nested_too_deep_is_a_bad_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nested too deep"):
        parse_json(DEEP)
    assert _row(DEEP) is None
    with pytest.raises(RecordError, match="nested too deep"):
        parse_record(Record("x.jsonl", 1, "json", DEEP.encode()), ["text"])
    file = tmp_path / "x.json"
    file.write_text(DEEP)
    assert not _is_metrics(file)
    assert read_report(str(tmp_path / "x")) is None
