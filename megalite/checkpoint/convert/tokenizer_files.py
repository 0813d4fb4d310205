"""Find and copy the files of a tokenizer, which belong with the model that was trained on its ids.

A converted model is often published, and its source may come from anyone. So a file is only copied if its
content fits its name, and if it is inside its folder: a symbolic link could lead to any file on this machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megalite.config import DataConfig
from megalite.config.data import TOKENIZER_FIELDS, TokenizerType
from megalite.data.tokenizers.tokenizer import configured_tokenizer
from megalite.frontends.huggingface.families import TOKENS, TRAINED
from megalite.frontends.huggingface.settings import TOKEN_IDS
from megalite.utils.errors import UserError
from megalite.utils.files import parse_json, read_regular
from megalite.utils.log import log

TOKENIZER = "tokenizer"
"""Folder beside a converted checkpoint for the tokenizer's files."""

_JSON, _PIECES = "tokenizer.json", "tokenizer.model"
_MODEL, _OF_MODEL = "config.json", ("model_type", *TOKEN_IDS)
_GPT2 = ("vocab.json", "merges.txt")
_WORDS = "vocab.txt"
_SETTINGS = "tokenizer_config.json"
GENERATION = "generation_config.json"
_BESIDE = (
    _SETTINGS, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", GENERATION,
)  # fmt: skip
_SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
_WORD_PIECE: dict[bool, TokenizerType] = {
    True: "BertWordPieceLowerCase",
    False: "BertWordPieceCase",
}  # by whether case is ignored
_MAX_BYTES = 1 << 30
_TIKTOKEN_LINES = re.compile(rb"([A-Za-z0-9+/]+=* [0-9]+\r?\n?)+")
_HUGGING_FACE = ("HuggingFaceTokenizer", "PretrainedFromHF")


def tokenizer_in(folder: Path) -> DataConfig:
    """Return the tokenizer in a Hugging Face folder, if there is one."""
    if (folder / _JSON).is_file():
        return DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_name_or_path=str(folder))
    if all((folder / name).is_file() for name in _GPT2):
        vocab, merges = (str(folder / name) for name in _GPT2)
        return DataConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
    if (folder / _WORDS).is_file():
        kind = _WORD_PIECE[_ignores_case(folder / _SETTINGS)]
        return DataConfig(tokenizer_type=kind, vocab_file=str(folder / _WORDS))
    if (folder / _PIECES).is_file():
        return DataConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(folder / _PIECES))
    return DataConfig()


def files_of(data: DataConfig) -> dict[str, Path]:
    """Return the files of the config's tokenizer, by Hugging Face's names for them; some may be missing.

    The result is empty for a tokenizer without files, or for a name that is not a path on this machine.
    """
    kind = data.resolved_tokenizer_type
    if kind == "GPT2BPETokenizer":
        paths = (data.vocab_file, data.merge_file)
        files = {name: Path(path) for name, path in zip(_GPT2, paths, strict=True) if path}
        return files | _beside(Path(data.vocab_file or "."), (_JSON, *_BESIDE))
    if kind in _WORD_PIECE.values() and data.vocab_file:
        words = Path(data.vocab_file)
        return {_WORDS: words} | _beside(words, _BESIDE)
    if kind in _SENTENCEPIECE and data.tokenizer_model:
        model = Path(data.tokenizer_model)
        return {_PIECES: model} | _beside(model, _BESIDE)
    if kind in _HUGGING_FACE:
        return _hugging_face_files(Path(data.tokenizer_name_or_path or data.tokenizer_model or "."))
    return {}


def model_beside(data: DataConfig) -> dict[str, Any] | None:
    """Return a trained model's family and token ids in a config.json beside its tokenizer; None without one.

    The model of a run may be another one of the same tokenizer, so the other settings are not its own.
    """
    files = files_of(data)
    if not files:
        return None
    try:
        found = parse_json(
            read_regular(next(iter(files.values())).with_name(_MODEL), _MAX_BYTES, follow=True)
        )
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict):
        return None
    return {name: value for name, value in found.items() if name in _OF_MODEL} | {TOKENS: TRAINED}


def write_files(contents: Mapping[str, bytes], folder: Path) -> None:
    """Write files with these names.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)


def moved_to(data: DataConfig, folder: Path) -> DataConfig:
    """Return the same tokenizer with its files in `folder`."""
    kind = data.resolved_tokenizer_type
    nothing: dict[str, Any] = dict.fromkeys(TOKENIZER_FIELDS)
    moved = replace(data, **{**nothing, "tokenizer_type": kind})
    if kind == "GPT2BPETokenizer":
        vocab, merges = (str(folder / name) for name in _GPT2)
        return replace(moved, vocab_file=vocab, merge_file=merges)
    if kind in _WORD_PIECE.values():
        return replace(moved, vocab_file=str(folder / _WORDS))
    if kind in _SENTENCEPIECE:
        return replace(moved, tokenizer_model=str(folder / _PIECES))
    return replace(moved, tokenizer_name_or_path=str(folder))


def settings_of(data: DataConfig) -> dict[str, dict[str, object]]:
    """Return the files, by name, with which transformers reads BERT's vocab.txt as we do."""
    kind = data.resolved_tokenizer_type
    if kind not in _WORD_PIECE.values():
        return {}
    return {_SETTINGS: {"tokenizer_class": "BertTokenizer", "do_lower_case": kind == _WORD_PIECE[True]}}


def _ignores_case(settings: Path) -> bool:
    """Return whether the settings beside a vocab.txt ask for lower case, as transformers does by default."""
    try:
        found = parse_json(settings.read_bytes())
    except (OSError, ValueError):
        return True
    return not isinstance(found, dict) or bool(found.get("do_lower_case", True))


def read_files(data: DataConfig) -> dict[str, bytes]:
    """Return the contents of `files_of`, or nothing after a warning if one of them is missing.

    Raises:
        UserError: a file cannot be read, is not a tokenizer's file, or is a symbolic link out of its folder.
    """
    files = files_of(data)
    missing = [str(file) for file in files.values() if not file.is_file()]
    kind = data.resolved_tokenizer_type
    if missing:
        log.warning("the tokenizer is not copied: %s is missing; copy it by hand", ", ".join(missing))
        return {}
    if not files:
        reason = "the source names no tokenizer" if kind is None else f"the tokenizer {kind} has no files"
        log.warning("%s: no tokenizer is copied", reason)
    return {name: _read(name, file) for name, file in files.items()}


def _read(name: str, file: Path) -> bytes:
    """Return the content of a tokenizer's file, which has this name in Hugging Face's folders."""
    target = Path(os.path.realpath(file))
    if not _is_in_its_folder(file, target):
        raise UserError(
            f"the tokenizer's file {file} is a symbolic link to {target}, out of its folder: "
            "replace it with a copy, or remove it and pass the tokenizer's flags with that file"
        )
    try:
        content = read_regular(target, _MAX_BYTES)
    except OSError as error:
        raise UserError(f"the tokenizer's file {file} cannot be read: {error.strerror}") from None
    if not _is_of(name, content):
        raise UserError(
            f"{file} is not a tokenizer's {name}, so it is not copied: replace it, or remove it and pass the "
            "tokenizer's flags"
        )
    return content


def _is_in_its_folder(file: Path, target: Path) -> bool:
    """Return whether a link's target is in the same folder, or in the Hugging Face cache around the folder.

    That cache has links in snapshots/REVISION to files in blobs.
    """
    folder = Path(os.path.realpath(file.parent))
    is_cached = folder.parent.name == "snapshots" and target.parent == folder.parents[1] / "blobs"
    return target.is_relative_to(folder) or is_cached


def _is_of(name: str, content: bytes) -> bool:
    """Return whether a file with this name can have this content."""
    if name == _PIECES:
        return _is_sentencepiece(content) or _TIKTOKEN_LINES.fullmatch(content) is not None
    try:
        text = content.decode()
        found = parse_json(text) if name.endswith(".json") else {}
    except ValueError:
        return False
    model = found.get("model") if isinstance(found, dict) else None
    return isinstance(found, dict) and (name != _JSON or (isinstance(model, dict) and "vocab" in model))


def _is_sentencepiece(content: bytes) -> bool:
    """Return whether the bytes are protocol buffer fields, a piece first, as in a SentencePiece model."""
    at, num_bytes = 0, len(content)

    def number() -> int:
        nonlocal at
        value = shift = 0
        while at < num_bytes:
            byte = content[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128 or shift > 63:
                break
        return value

    while at < num_bytes:
        kind = number() & 7  # the field is a varint, 8 bytes, as many as the next number says, or 4 bytes
        if kind not in (0, 1, 2, 5):
            return False
        length = number() if kind in (0, 2) else {1: 8, 5: 4}[kind]
        at += 0 if kind == 0 else length
    return content[:1] == b"\n" and at == num_bytes


def end_of_document(data: DataConfig, vocab_size: int | None) -> int | None:
    """Return the id of the token that ends a document; None if the tokenizer has none or cannot be read.

    A warning is logged if the tokenizer has more tokens than the model has rows.
    """
    kind = data.resolved_tokenizer_type
    if kind is None:
        return None
    is_null = kind == "NullTokenizer"  # it adds its end-of-document token to the vocabulary
    try:
        tokenizer = configured_tokenizer(data, vocab_size and vocab_size - is_null)
        eod = tokenizer.eod
    except UserError as error:
        log.warning("the end-of-document token is unknown: %s", error)
        return None
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        log.warning("the tokenizer has %d tokens, the model %d", tokenizer.vocab_size, vocab_size)
    return eod


def _hugging_face_files(path: Path) -> dict[str, Path]:
    if path.is_dir():
        files = _beside(path / _JSON, (_JSON, _PIECES, *_GPT2, *_BESIDE))
        return files or {_JSON: path / _JSON}
    return {_JSON: path} | _beside(path, _BESIDE)


def _beside(file: Path, names: tuple[str, ...]) -> dict[str, Path]:
    return {name: file.with_name(name) for name in names if file.with_name(name).is_file()}
