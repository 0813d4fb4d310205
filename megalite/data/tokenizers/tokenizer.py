"""Define the tokenizer interface, build the known kinds; implement SentencePiece's and those with no file.

A digest of a corpus's tokenizer is in a small file beside it, and is compared before training.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megalite.config import DataConfig
from megalite.config.data import tokenizer_type_for
from megalite.data.sharded_dataset import is_sharded, read_list
from megalite.data.storage import read_small
from megalite.data.tokenizers import IdArray, id_arrays
from megalite.data.tokenizers.hf_tokenizer import (
    SAMPLE,
    HuggingFaceTokenizer,
    gpt2_bpe_tokenizer,
    only_end,
    word_piece_tokenizer,
)
from megalite.utils.errors import UserError, few
from megalite.utils.files import parse_json, replace_file


class Tokenizer(Protocol):
    """Encoder of plain text: special tokens are neither added nor skipped.

    Attributes:
        vocab_size: one more than the largest id.
        unk: id of the token for unknown text, or None.
    """

    vocab_size: int
    unk: int | None

    @property
    def eod(self) -> int:
        """Return the id of the token that ends a document; raise a UserError if there is none."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def encode_arrays(self, texts: Sequence[bytes]) -> list[IdArray]:
        """Encode UTF-8 texts to arrays. It is fast for long texts: it creates no Python object per token.

        The caller must pass valid UTF-8; this is not checked.
        """
        return id_arrays(self.encode_batch([text.decode() for text in texts]))

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_id(self, name: str) -> int | None:
        """Return the id of the token with this name in the vocabulary, or None: bytes have no names."""
        return None


@dataclass(frozen=True)
class TokenizerFiles:
    """Settings of a tokenizer besides its kind, named like the flags.

    Attributes:
        tokenizer_model: a tokenizer.json or its folder, or a SentencePiece model.
        vocab_file: GPT-2's vocab.json, or BERT's vocab.txt.
        merge_file: GPT-2's merges.txt.
        name_or_path: folder of a tokenizer.json, or name of a model in Hugging Face's local cache.
        vocab_size: vocabulary size of a NullTokenizer.
    """

    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    name_or_path: str | None = None
    vocab_size: int | None = None


class ByteTokenizer(Tokenizer):
    """Tokenizer of UTF-8 bytes: 256 tokens, followed by an end-of-document token."""

    vocab_size = 257
    eod = 256
    unk = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_arrays(self, texts: Sequence[bytes]) -> list[IdArray]:
        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode the ids; the end-of-document token decodes to nothing, and broken UTF-8 to U+FFFD."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class NullTokenizer(Tokenizer):
    """Tokenizer of text that already consists of token ids: decimal numbers separated by spaces.

    The vocabulary of `vocab_size` ids is followed by an end-of-document token.
    """

    unk = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size + 1

    @property
    def eod(self) -> int:
        return self.vocab_size - 1

    def encode(self, text: str) -> list[int]:
        """Return the numbers of the text.

        Raises:
            UserError: a word is not a number, or not an id of the vocabulary.
        """
        ids = []
        for word in text.split():
            if not (word.isascii() and word.isdigit() and len(word) < 12 and int(word) < self.vocab_size):
                raise UserError(
                    f"{word[:40]!r} is not a token id of a NullTokenizer, from 0 to {self.vocab_size - 1}"
                )
            ids.append(int(word))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


def build_tokenizer(tokenizer_type: str | None, files: TokenizerFiles) -> Tokenizer:
    """Build the tokenizer of a kind from its files.

    Args:
        tokenizer_type: one of TOKENIZER_TYPES; None to detect the kind from the files.

    Raises:
        UserError: the kind is unknown, or a file that it needs is missing or cannot be read.
    """
    kind = tokenizer_type or _type_for(files)
    if kind in _UNSUPPORTED:
        raise UserError(f"--tokenizer-type {kind} is not supported: {_UNSUPPORTED[kind]}")
    if kind not in TOKENIZER_TYPES:
        names = {name.lower(): name for name in TOKENIZER_TYPES}
        near = difflib.get_close_matches(kind.lower(), names, n=1, cutoff=0.5)
        hint = f"did you mean {names[near[0]]}?" if near else f"pass one of {', '.join(TOKENIZER_TYPES)}"
        raise UserError(f"--tokenizer-type {kind} is unknown: {hint}")
    return _build(kind, files)


def configured_tokenizer(data: DataConfig, vocab_size: int | None) -> Tokenizer:
    """Build the tokenizer that a config names.

    Raises:
        UserError: as `build_tokenizer`.
    """
    named = data.tokenizer_model, data.vocab_file, data.merge_file, data.tokenizer_name_or_path
    return build_tokenizer(data.resolved_tokenizer_type, TokenizerFiles(*named, vocab_size))


def _type_for(files: TokenizerFiles) -> str:
    kind = tokenizer_type_for(
        files.tokenizer_model or None,
        files.vocab_file or None,
        files.merge_file or None,
        files.name_or_path or None,
    )
    if kind is None:
        raise UserError(
            f"there is no tokenizer: pass --tokenizer-type, one of {', '.join(TOKENIZER_TYPES)}, or a "
            "tokenizer's files"
        )
    if kind == "SentencePieceTokenizer" and Path(files.tokenizer_model or "").is_dir():
        return "HuggingFaceTokenizer"
    return kind


def _build(kind: str, files: TokenizerFiles) -> Tokenizer:
    def needed(flag: str, value: str | None) -> str:
        if not value:
            raise UserError(f"--tokenizer-type {kind} needs {flag}")
        return value

    match kind:
        case "byte":
            return ByteTokenizer()
        case "GPT2BPETokenizer":
            vocab_file = needed("--vocab-file vocab.json", files.vocab_file)
            return gpt2_bpe_tokenizer(vocab_file, needed("--merge-file merges.txt", files.merge_file))
        case "BertWordPieceLowerCase" | "BertWordPieceCase":
            vocab_file = needed("--vocab-file vocab.txt", files.vocab_file)
            return word_piece_tokenizer(vocab_file, lowercase=kind.endswith("LowerCase"))
        case "HuggingFaceTokenizer" | "PretrainedFromHF":
            flags = "--tokenizer-model tokenizer.json or --tokenizer-name-or-path FOLDER"
            return HuggingFaceTokenizer.load(needed(flags, files.name_or_path or files.tokenizer_model))
        case "NullTokenizer":
            if files.vocab_size is None or files.vocab_size < 1:
                raise UserError(f"--tokenizer-type {kind} needs a positive --vocab-size")
            return NullTokenizer(files.vocab_size)
    model_file = needed("--tokenizer-model FILE.model", files.tokenizer_model)
    return SentencePieceTokenizer(model_file, begins_texts=kind == "Llama2Tokenizer")


TOKENIZER_TYPES = (
    "byte", "GPT2BPETokenizer", "BertWordPieceLowerCase", "BertWordPieceCase", "HuggingFaceTokenizer",
    "PretrainedFromHF", "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer",
    "NullTokenizer",
)  # fmt: skip

_UNSUPPORTED = {
    "TikTokenizer": "pass the tokenizer.json of the same vocabulary, as HuggingFaceTokenizer",
    "MultimodalTokenizer": "pass its text tokenizer, as HuggingFaceTokenizer",
    "NullMultimodalTokenizer": "use NullTokenizer",
    "SFTTokenizer": "pass its text tokenizer, as HuggingFaceTokenizer, and train with --sft",
}
"""Megatron-LM's other kinds, and what to do instead."""

_EOD_NAMES = ("<eod>", "<EOD>", "<|endoftext|>", "</s>")


class SentencePieceTokenizer(Tokenizer):
    """SentencePiece model; a document ends with its end-of-sentence token.

    Args:
        begins_texts: begin each text with the model's beginning-of-sentence token, as in Llama 2.

    Attributes:
        vocab_size: number of its pieces.
        unk: id of the token for unknown text, or None.
    """

    def __init__(self, model_file: str, begins_texts: bool = False) -> None:
        """Read a model.

        Raises:
            UserError: the file cannot be read, lacks a required token, or the library is not installed.
        """
        self._source = model_file
        self._library = _load(model_file)
        self._begins_texts = begins_texts
        if begins_texts and self._library.bos_id() < 0:
            raise UserError(
                f"{model_file} has no beginning-of-sentence token, which Llama2Tokenizer puts before each "
                "text: pass SentencePieceTokenizer"
            )
        self.vocab_size = int(self._library.vocab_size())
        self.unk: int | None = self._library.unk_id() if self._library.unk_id() >= 0 else None

    @property
    def eod(self) -> int:
        if self._library.eos_id() >= 0:
            return int(self._library.eos_id())
        found = {name: self.token_id(name) for name in _EOD_NAMES}
        ends = {name: number for name, number in found.items() if number is not None and number >= 0}
        return only_end(ends, self._source, _EOD_NAMES, "the eos_piece of the model")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._library.encode(text, out_type=int, add_bos=self._begins_texts)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self._library.encode(list(texts), out_type=int, add_bos=self._begins_texts)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._library.decode(list(ids))
        return text

    def token_id(self, name: str) -> int | None:
        found = int(self._library.piece_to_id(name))
        return None if found == self._library.unk_id() else found


def _load(model_file: str) -> Any:
    try:
        import sentencepiece
    except ImportError:
        raise UserError(
            "this tokenizer needs a package that is not installed: pip install sentencepiece"
        ) from None
    try:
        model = Path(model_file).read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the tokenizer {model_file}: {error.strerror}") from None
    try:
        if not model:  # the library accepts it, and writes errors to stderr later
            raise ValueError
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except (RuntimeError, ValueError):
        raise UserError(f"cannot read the tokenizer {model_file}: not a SentencePiece model") from None


_NUM_PROBES = 2000


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Return a digest of a tokenizer's output: tokenizers with the same digest give the same tokens.

    It is computed from the encoding of a few fixed texts, and of the texts of ids evenly spaced over the
    vocabulary. Files that differ only in form, such as GPT-2's two files and the tokenizer.json made from
    them, therefore have the same digest, and so have all exact engines. The text of the end-of-document token
    is skipped: these forms differ in whether it is read as the token.

    Returns:
        SHA-256 in hexadecimal.
    """
    size, eod = tokenizer.vocab_size, end_of_document(tokenizer)
    digest = hashlib.sha256(json.dumps([size, eod]).encode())
    if not isinstance(tokenizer, NullTokenizer):  # its text already consists of ids
        step = max(1, size // _NUM_PROBES)
        texts = [*SAMPLE, *(tokenizer.decode([i]) for i in range(0, size, step) if i != eod)]
        for text in texts:  # one at a time: starting a fast engine takes longer
            digest.update(json.dumps([text, tokenizer.encode(text)]).encode())
    return digest.hexdigest()


@functools.lru_cache(maxsize=1)
def digest_of(data: DataConfig, vocab_size: int | None) -> str | None:
    """Return the digest of the config's tokenizer, or None without one; computed once per run.

    Raises:
        UserError: the tokenizer cannot be read.
    """
    if data.resolved_tokenizer_type is None:
        return None
    return tokenizer_digest(configured_tokenizer(data, vocab_size))


def write_tokenizer_digest(prefix: str, tokenizer: Tokenizer) -> None:
    """Write PREFIX.tokenizer.json for the corpus of this prefix.

    Raises:
        UserError: it cannot be written.
    """
    record = {
        "digest": tokenizer_digest(tokenizer),
        "vocab_size": tokenizer.vocab_size,
        "eod": end_of_document(tokenizer),
    }
    _write(prefix, f"{json.dumps(record, indent=1)}\n".encode())


def copy_tokenizer_digest(source: str, prefix: str) -> None:
    """Copy the digest of another corpus, which may be in object storage, to the corpus of this prefix.

    Raises:
        UserError: it cannot be written.
    """
    _write(prefix, read_small(digest_path(source)))


def _write(prefix: str, data: bytes) -> None:
    path = digest_path(prefix)
    try:
        with replace_file(Path(path)) as stream:
            stream.write(data)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def read_tokenizer_digest(prefix: str) -> str | None:
    """Return the digest beside the corpus of this prefix, or None: other programs do not write one.

    Raises:
        UserError: the file exists but is not a digest.
    """
    if is_sharded(prefix):
        return read_list(prefix).tokenizer
    path = digest_path(prefix)
    try:
        record = parse_json(read_small(path))
        digest = record["digest"]
    except FileNotFoundError:
        return None
    except UserError:  # from object storage
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"cannot read {path} ({type(error).__name__}): delete it, or preprocess the corpus again"
        ) from None
    return str(digest)


def check_tokenizer(prefixes: Iterable[str], tokenizer: Tokenizer) -> None:
    """Refuse corpora that another tokenizer has made.

    Raises:
        UserError: the message names these corpora, or a digest that cannot be read.
    """
    stored = {prefix: read_tokenizer_digest(prefix) for prefix in dict.fromkeys(prefixes)}
    if not any(stored.values()):
        return  # computing this tokenizer's digest takes a moment
    digest = tokenizer_digest(tokenizer)
    wrong = [prefix for prefix, found in stored.items() if found not in (None, digest)]
    if wrong:
        raise UserError(
            f"{few(wrong, 5)}: made with another tokenizer than this run's, so its ids mean other text: pass "
            f"the same tokenizer, or delete {digest_path(wrong[0])} if you know that they are equal"
        )


def digest_path(prefix: str) -> str:
    """Return the path or URL of the file that holds the digest of a corpus's tokenizer."""
    return f"{prefix}.tokenizer.json"


def end_of_document(tokenizer: Tokenizer) -> int | None:
    """Return the end-of-document token; None for a vocabulary without one."""
    try:
        return tokenizer.eod
    except UserError:
        return None


def special_ids(tokenizer: Tokenizer) -> set[int]:
    """Return the ids of the tokens that a text can name, such as <|endoftext|>, but that are not text."""
    ids = {end_of_document(tokenizer)}
    if isinstance(tokenizer, HuggingFaceTokenizer):
        ids |= tokenizer.special_ids
    return {number for number in ids if number is not None and number != tokenizer.unk}
