"""Find and copy the files of a tokenizer, which belong with the model that was trained on its ids."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megalite.config import DataConfig
from megalite.config.data import TOKENIZER_FIELDS, TokenizerType
from megalite.data.tokenizers.tokenizer import configured_tokenizer
from megalite.errors import UserError
from megalite.files import parse_json
from megalite.log import log

TOKENIZER = "tokenizer"
"""Folder for the files beside a converted checkpoint."""

_JSON, _PIECES = "tokenizer.json", "tokenizer.model"
_GPT2 = ("vocab.json", "merges.txt")
_WORDS = "vocab.txt"
_SETTINGS = "tokenizer_config.json"
_BESIDE = (
    _SETTINGS, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip
_SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
_WORD_PIECE: dict[bool, TokenizerType] = {
    True: "BertWordPieceLowerCase",
    False: "BertWordPieceCase",
}  # by whether case is ignored
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
    """Return the files of the config's tokenizer by Hugging Face's names for them; some may be missing.

    Empty for a tokenizer without files, or one that is named and is not a path on this machine.
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


def copy_files(files: Mapping[str, Path], folder: Path) -> None:
    """Copy the files under their new names.

    Raises:
        OSError: a file cannot be read or written.
    """
    folder.mkdir(exist_ok=True)
    for name, file in files.items():
        shutil.copyfile(file, folder / name)


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
    """Return the files, by name, that transformers needs to read BERT's vocab.txt alike."""
    kind = data.resolved_tokenizer_type
    if kind not in _WORD_PIECE.values():
        return {}
    return {_SETTINGS: {"tokenizer_class": "BertTokenizer", "do_lower_case": kind == _WORD_PIECE[True]}}


def _ignores_case(settings: Path) -> bool:
    """Return whether the settings beside a vocab.txt say so; it is transformers' default."""
    try:
        found = parse_json(settings.read_bytes())
    except (OSError, ValueError):
        return True
    return not isinstance(found, dict) or bool(found.get("do_lower_case", True))


def usable_files(data: DataConfig) -> dict[str, Path]:
    """Return `files_of`, or nothing after a warning if one of them is missing."""
    files = files_of(data)
    missing = [str(file) for file in files.values() if not file.is_file()]
    kind = data.resolved_tokenizer_type
    if missing:
        log.warning("the tokenizer is not copied: %s is missing; copy it by hand", ", ".join(missing))
        return {}
    if not files:
        reason = "the source names no tokenizer" if kind is None else f"the tokenizer {kind} has no files"
        log.warning("%s: no tokenizer is copied", reason)
    return files


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
    """Return those of the names that exist in the file's folder."""
    return {name: file.with_name(name) for name in names if file.with_name(name).is_file()}
