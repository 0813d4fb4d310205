"""The real corpus, tokenized once for all the runs that are compared."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of the repository's corpus."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def write_corpus(folder: Path) -> str:
    """Write the repository's corpus with the tool as a user does, and return its prefix."""
    prefix = folder / "bible"
    command = [
        *(sys.executable, "tools/preprocess_data.py", "--input", "scripts/corpus/bible.jsonl.gz"),
        *("--output-prefix", str(prefix), "--json-keys", "text", "--append-eod", "--workers", "1"),
        *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "scripts/corpus/tokenizer.json"),
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return f"{prefix}_text_document"
