"""Record what the steps of a corpus removed, and where each document that is left comes from.

Each task counts what it removed, and the sum of all is the report. PREFIX.sources begins with a line of JSON,
the names of the input files. Then follows a `SOURCE` for each document, in the order of the corpus.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megalite.data.prepare.plan import CorpusPlan
from megalite.data.preprocessing.input_plan import ByteRange, InputPiece
from megalite.data.sharded_dataset import LIST_SUFFIX
from megalite.utils.errors import UserError
from megalite.utils.files import open_regular, parse_json, replace_file

Facts = dict[str, Any]
"""Counts of a task, as JSON. Those of two tasks are added by `add_facts`."""
MAX_EXAMPLES = 20
MAX_GROUPS = 100
_MAX_CHARACTERS = 200


def new_facts(num_steps: int) -> Facts:
    """Return counts of zero."""
    steps = [{"documents": 0, "bytes": 0, "examples": []} for _ in range(num_steps)]
    special = {"documents": 0, "tokens": 0, "examples": []}
    return {
        **{"documents": 0, "bytes": 0, "bad": 0, "bad_examples": [], "steps": steps},
        **{"languages": {}, "contaminated": {}, "groups": [], "special": special},
        **{"empty": 0, "kept": 0, "kept_bytes": 0, "tokens": 0},
    }


def add_facts(total: Any, facts: Any) -> Any:
    """Return the sum of two tasks' facts: numbers add up, and the first examples and largest groups stay."""
    if isinstance(total, dict):
        return {
            key: _largest(total.get(key, []), facts.get(key, []))
            if key == "groups"
            else add_facts(total[key], facts[key])
            if key in total and key in facts
            else total.get(key, facts.get(key))
            for key in {**total, **facts}
        }
    if isinstance(total, list) and total and isinstance(total[0], dict) and "documents" in total[0]:
        return [add_facts(a, b) for a, b in zip(total, facts, strict=True)]
    if isinstance(total, list):
        return [*total, *facts][:MAX_EXAMPLES]
    return total + facts


def _largest(groups: Sequence[list[int]], others: Sequence[list[int]]) -> list[list[int]]:
    """Return the largest groups of documents with one key, one for each first document."""
    ordered = sorted([*groups, *others], key=lambda group: (-group[0], *group[1:]))
    return list({(piece, number): [*rest, piece, number] for *rest, piece, number in ordered[::-1]}.values())[
        -MAX_GROUPS:
    ][::-1]


def note_example(examples: list[dict[str, str]], place: str, text: str, reason: str) -> None:
    """Append an example, unless there are enough."""
    if len(examples) < MAX_EXAMPLES:
        examples.append({"from": place, "reason": reason, "text": text[:_MAX_CHARACTERS]})


def place_of(piece: InputPiece, source: str, number: int) -> str:
    """Return where a record is; in a range of a file's bytes, lines are counted from its start."""
    begin = getattr(piece, "begin", 0)
    return f"{source} line {number}" + (f" after byte {begin}" if begin else "")


def make_report(plan: CorpusPlan, facts: Facts, shards: Sequence[Facts]) -> dict[str, Any]:
    """Return the report: documents and bytes into and out of each step, examples, and the output."""
    documents, num_bytes, steps = facts["documents"] - facts["bad"], facts["bytes"], []
    for step, removed in zip(plan.job.steps, facts["steps"], strict=True):
        left = documents - removed["documents"], num_bytes - removed["bytes"]
        steps.append(
            {
                "step": step.label,
                "documents_in": documents,
                "documents_out": left[0],
                "bytes_in": num_bytes,
                "bytes_out": left[1],
                "examples": removed["examples"],
            }
        )
        documents, num_bytes = left
    return {
        "format": 1,
        "digest": plan.digest,
        "settings": plan.identity,
        "inputs": plan.states,
        **{key: facts[key] for key in ("documents", "bytes", "bad", "bad_examples")},
        "steps": steps,
        "languages": dict(sorted(facts["languages"].items(), key=lambda each: (-each[1], each[0]))),
        "contaminated_items": facts["contaminated"],
        "duplicate_groups": facts["groups"],
        "special_tokens_in_text": facts["special"],
        "output": {
            "documents": facts["kept"],
            "bytes": facts["kept_bytes"],
            "tokens": facts["tokens"],
            "empty": facts["empty"],
            "shards": [{key: shard[key] for key in ("kept", "tokens", "sha256")} for shard in shards],
        },
    }


SOURCE = np.dtype([("file", "<u4"), ("begin", "<u8"), ("number", "<u8")])
"""Number of the file, a position in it in bytes, and the number of the line or row from 1, counted from the
first line that starts there."""


def write_sources(prefix: str, files: Sequence[str], parts: Sequence[Path]) -> None:
    """Write PREFIX.sources from the files of its shards.

    Raises:
        OSError: it cannot be written.
    """
    with replace_file(f"{prefix}.sources") as stream:
        stream.write(f"{json.dumps(files)}\n".encode())
        for part in parts:
            with open(part, "rb") as records:
                shutil.copyfileobj(records, stream, 1 << 20)


def find_source(prefix: str, document: int) -> str:
    """Return the input file and line of a document; empty for a corpus without PREFIX.sources.

    Raises:
        UserError: the file is damaged.
    """
    path = Path(f"{prefix.removesuffix(LIST_SUFFIX)}.sources")
    if not path.is_file():
        return ""
    with open_regular(path, follow=True) as stream, open(stream.fileno(), "rb", closefd=False) as lines:
        header = lines.readline()
        lines.seek(len(header) + document * SOURCE.itemsize)
        record = np.frombuffer(lines.read(SOURCE.itemsize), SOURCE)
    try:
        file = str(parse_json(header)[int(record["file"][0])])
        begin, number = int(record["begin"][0]), int(record["number"][0])
    except (ValueError, IndexError):
        raise UserError(f"{path} is damaged: prepare the corpus again, or delete the file") from None
    if begin:
        try:
            number = ByteRange(file, begin, sys.maxsize).locate(number)
        except UserError:
            return f"{file} line {number} after byte {begin}"
    return f"{file} line {number}"
