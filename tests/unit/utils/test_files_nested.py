"""JSON and YAML that are nested deeper than Python goes: a mistake in a file, and no traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.convert.hf_folder import HFFolder
from megalite.cli.generate import read_prompts
from megalite.data.corpus_sources import _read_per_split
from megalite.data.preprocessing.documents import DocumentRecord, RecordError, parse_record
from megalite.data.preprocessing.preprocessing_report import read_report
from megalite.data.tokenizers.hf_tokenizer import json_object
from megalite.data.tokenizers.tokenizer import read_tokenizer_digest
from megalite.frontends.command_line import parse
from megalite.observe.report.run_folder import _is_metrics
from megalite.observe.report.run_history import _row
from megalite.plan.trial import Results
from megalite.utils.errors import UserError
from megalite.utils.files import parse_json

DEEP = "[" * 50_000 + "]" * 50_000
REFUSED: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "settings": ("run.yaml", lambda file: parse(["--config", str(file)])),
    "DeepSpeed's settings": ("ds.json", lambda file: parse(["--deepspeed_config", str(file)])),
    "the data of each split": ("split.json", lambda file: _read_per_split(str(file))),
    "a prompt": ("prompts.jsonl", lambda file: read_prompts(None, str(file))),
    "a tuning's results": ("results.json", lambda file: Results(file.parent, {})),
    "transformers' config": ("config.json", lambda file: HFFolder(file.parent)),
    "a tokenizer's settings": (
        "tokenizer_config.json",
        lambda file: json_object(file),
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
        parse_record(DocumentRecord("x.jsonl", 1, "json", DEEP.encode()), ["text"])
    file = tmp_path / "x.json"
    file.write_text(DEEP)
    assert not _is_metrics(file)
    assert read_report(str(tmp_path / "x")) is None
