"""Describe a preprocessing job."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

import numpy as np

from megalite.data.indexed_dataset import token_dtype
from megalite.data.preprocessing.documents import MAX_DOCUMENT_BYTES, STANDARD_INPUT, file_states
from megalite.data.tokenizers.chat_template import chat_template_of
from megalite.data.tokenizers.tokenizer import Tokenizer, TokenizerFiles, build_tokenizer
from megalite.data.tokenizers.tokenizer_digest import tokenizer_digest


@dataclass(frozen=True)
class PreprocessJob:
    """Inputs and outputs of a job; the result does not depend on the number of workers."""

    inputs: tuple[str, ...]
    """Files, globs and folders, or "-" for standard input."""
    output_prefix: str
    """The output is {output_prefix}_{json_key}_{document|sentence}.bin, .idx and .json."""
    tokenizer_type: str | None
    """Kind of tokenizer; None to detect it from the files."""
    tokenizer_files: TokenizerFiles = field(default_factory=TokenizerFiles)
    """The tokenizer's files."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of the JSON objects to extract, each to its own dataset; "a.b" is key b of the object a."""
    append_eod: bool = False
    """End each document with the end-of-document token."""
    chat: bool = False
    """Render conversations with the tokenizer's chat template. The only key is the messages' key, and a
    second file, .loss_mask, marks the answers."""
    now: datetime = field(default_factory=datetime.now)
    """The time that a chat template reads."""
    sentence_language: str | None = None
    """ISO 639 code of the language for splitting text into sentences (sequences); None not to split."""
    keep_newlines: bool = False
    """Keep the white space between sentences, at the end of the previous sentence."""
    workers: int = 1
    """Number of processes that encode."""
    text_documents: str = "file"
    """The unit of a .txt file that is one document: "file", "line" or "paragraph"."""
    max_document_bytes: int = MAX_DOCUMENT_BYTES
    """A longer line, paragraph or text file is a bad document."""
    skip_bad_records: bool = False
    """Count and skip bad documents instead of failing at the first."""
    overwrite: bool = False
    """Replace existing output and the files of an interrupted run."""
    resume: bool = False
    """Continue an interrupted run."""
    partition: tuple[int, int] = (0, 1)
    """Part i of n of the input, i from 0; all parts in order are the whole input."""

    @property
    def stem(self) -> str:
        """Return the output prefix, with the part's number if there are several parts."""
        index, count = self.partition
        return self.output_prefix if count == 1 else f"{self.output_prefix}-{index:05}-of-{count:05}"

    def prefix(self, json_key: str) -> str:
        level = "sentence" if self.sentence_language else "document"
        return f"{self.stem}_{json_key}_{level}"

    def column_dtypes(self, tokenizer: Tokenizer) -> list[np.dtype[Any]]:
        """Return the dtype of each column of the shards: the tokens of each key, then the loss mask."""
        tokens = [token_dtype(tokenizer.vocab_size)] * len(self.json_keys)
        return [*tokens, np.dtype(np.uint8)] if self.chat else tokens

    def build_tokenizer(self) -> Tokenizer:
        return build_tokenizer(self.tokenizer_type, **asdict(self.tokenizer_files))

    def made_with(self, files: Sequence[str], tokenizer: Tokenizer) -> dict[str, Any]:
        """Return everything that the output depends on, by flag; a resumed run must have the same values."""
        chat = {"--chat": chat_template_of(tokenizer, self.now).digest} if self.chat else {}
        return chat | {
            "--input": _digest_of_names(files),
            "--tokenizer-type": tokenizer_digest(tokenizer),
            "--json-keys": list(self.json_keys),
            "--append-eod": self.append_eod,
            "--sentence-language": self.sentence_language,
            "--keep-newlines": self.keep_newlines,
            "--text-documents": self.text_documents,
            "--max-document-bytes": self.max_document_bytes,
            "--on-error": "skip" if self.skip_bad_records else "fail",
            "--partition": "{}/{}".format(*self.partition),
        }


def _digest_of_names(files: Sequence[str]) -> str:
    """Return a digest of the files' names, sizes and times: reading their contents would take too long."""
    digest = hashlib.sha256()
    for name, state in zip(files, file_states(files), strict=True):
        digest.update(repr((name, None if name == STANDARD_INPUT else state)).encode())
    return digest.hexdigest()
