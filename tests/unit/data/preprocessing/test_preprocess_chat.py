"""Preprocessing of conversations: the dataset, its loss mask, and nothing where it cannot be made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megalite.cli.preprocess import parse_job
from megalite.data.dataset_merge import merge_datasets
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.loss_mask import LossMask
from megalite.data.preprocessing.input_plan import PreprocessJob
from megalite.data.preprocessing.preprocess import preprocess
from megalite.data.tokenizers.hf_tokenizer import HuggingFaceTokenizer
from megalite.data.tokenizers.tokenizer import TokenizerFiles
from megalite.utils.errors import ConfigError, UserError
from tests.chat import CHATML, MARKED, conversations, preprocess_chat, write_jsonl, write_tokenizer

ROOT = Path(__file__).parents[4]
SUFFIXES = ["bin", "idx", "json", "loss_mask", "tokenizer.json"]


def _outputs(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("chat_"))


def test_a_dataset_of_conversations_and_its_mask(tmp_path: Path) -> None:
    rows = conversations(50)
    prefix = preprocess_chat(tmp_path, rows)
    assert _outputs(tmp_path) == [f"chat_messages_document.{suffix}" for suffix in SUFFIXES]
    dataset, tokenizer = IndexedDataset(prefix), HuggingFaceTokenizer.load(str(tmp_path / "tokenizer"))
    mask = LossMask(dataset)
    for i, row in enumerate(rows):
        learned = [t for t, is_answer in zip(dataset[i].tolist(), mask[i].tolist(), strict=True) if is_answer]
        answers = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        assert tokenizer.decode(learned) == "".join(f"{answer}<|im_end|>" for answer in answers)
    report = json.loads(Path(f"{prefix}.json").read_text())
    assert report["num_documents"] == report["num_sequences"] == 50
    assert report["num_tokens"] == dataset.num_tokens
    assert report["num_answer_tokens"] == sum(int(mask[i].sum()) for i in range(50))
    assert sorted(report["sha256"]) == ["bin", "idx", "loss_mask"]


def test_workers_and_parts_do_not_change_the_dataset(tmp_path: Path) -> None:
    rows = conversations(30)
    one, two = (preprocess_chat(tmp_path / str(n), rows, workers=n) for n in (1, 2))
    parts = [preprocess_chat(tmp_path / name, part) for name, part in (("a", rows[:9]), ("b", rows[9:]))]
    merge_datasets(parts, str(tmp_path / "merged"))
    for suffix in ("bin", "idx", "loss_mask"):
        expected = Path(f"{one}.{suffix}").read_bytes()
        assert Path(f"{two}.{suffix}").read_bytes() == expected
        assert (tmp_path / f"merged.{suffix}").read_bytes() == expected


def test_bad_conversations_are_skipped_if_requested(tmp_path: Path) -> None:
    rows = [*conversations(3), {"messages": []}, *conversations(2)]
    prefix = preprocess_chat(tmp_path, rows, skip_bad_records=True)
    assert len(IndexedDataset(prefix)) == 5
    assert LossMask(IndexedDataset(prefix)).files[0].array.any()


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        (CHATML, {"messages": []}, "chat.jsonl, line 3: the conversation has no messages; correct it"),
        (
            CHATML,
            {"messages": [{"role": "tool", "content": "x"}]},
            "line 3: no message has the role assistant",
        ),
        ("{{ messages[0].contents.x }}", conversations(1)[0], "line 1: the chat template "),
        ("{% for %}", conversations(1)[0], "is not valid, line 1: "),
        (None, conversations(1)[0], "has no chat template"),
    ],
)
def test_a_template_or_conversation_that_fails_leaves_nothing(
    template: str | None, row: object, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        preprocess_chat(tmp_path, [*conversations(2), row], template)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chat.jsonl", "tokenizer"]


def test_if_every_conversation_is_bad_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the input has no conversation, so nothing is written"):
        preprocess_chat(tmp_path, [{"messages": []}], skip_bad_records=True)
    assert _outputs(tmp_path) == []


def test_another_template_is_another_job(tmp_path: Path) -> None:
    prefix = preprocess_chat(tmp_path, conversations(3))
    made_with = json.loads(Path(f"{prefix}.json").read_text())["made_with"]
    other = preprocess_chat(tmp_path / "other", conversations(3), MARKED)
    assert json.loads(Path(f"{other}.json").read_text())["made_with"]["--chat"] != made_with["--chat"]


def test_flags_beside_chat() -> None:
    line = "--chat --output-prefix o --append-eod --split-sentences --json-keys a b --tokenizer-type byte"
    with pytest.raises(ConfigError) as caught:
        parse_job([*line.split(), "--input", __file__])
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "--chat reads one list of messages",
        "--chat and --append-eod",
        "--chat and --split-sentences contradict each other",
        "--chat needs a tokenizer.json, beside which the chat template is",
    ]


def test_other_formats_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    job = PreprocessJob((str(tmp_path / "a.txt"),), "o", None, TokenizerFiles(tokenizer), chat=True)
    with pytest.raises(ConfigError, match=r"--chat reads conversations from JSONL, and .*a\.txt is not"):
        preprocess(job)


def test_the_command_prints_one_line(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", "{{ raise_exception('never') }}")
    path = write_jsonl(tmp_path / "chat.jsonl", conversations(3))
    line = f"--chat --input {path} --output-prefix {tmp_path}/o --tokenizer-model {tokenizer} --workers 1"
    done = subprocess.run(
        [sys.executable, "tools/preprocess_data.py", *line.split()], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"error: {path}, line 1: the chat template refuses the messages: never; correct it, or skip bad "
        "documents with --on-error skip\n"
    )
    assert sorted(each.name for each in tmp_path.iterdir()) == ["chat.jsonl", "tokenizer"]
