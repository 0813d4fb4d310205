"""Train tokenizers on a corpus: byte-level BPE as a tokenizer.json, or a SentencePiece model.

The same texts in the same order give the same tokenizer.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megalite.data.preprocessing.documents import RecordError, find_inputs, parse_record, read_records
from megalite.utils.errors import UserError
from megalite.utils.files import replace_file

END_OF_TEXT = "<|endoftext|>"
_MIN_BPE_SIZE = 257
"""The end-of-document token and one token per byte: a smaller vocabulary could not encode every text."""
_MAX_LINE_BYTES = 1 << 20
DEFAULT_VOCAB_SIZE = 2048
"""Number of tokens without --vocab-size; a short text may give fewer."""


class TrainedTokenizer(NamedTuple):
    """File of a tokenizer and its number of tokens."""

    content: bytes
    num_tokens: int


def read_texts(inputs: Sequence[str], json_key: str, max_documents: int | None = None) -> Iterator[str]:
    """Yield the texts of files, globs and folders, at most `max_documents`, with one in memory at a time.

    Raises:
        UserError: an input names no file, cannot be read, or has a record without text under the key.
    """
    num_read = 0
    for path in find_inputs(inputs):
        for record in read_records(path, [json_key], "paragraph"):
            if num_read == max_documents:
                return
            try:
                yield from (text.decode() for text in parse_record(record, [json_key]))
            except RecordError as error:
                raise UserError(f"{record.source}:{record.number}: {error}") from None
            num_read += 1


def train_bpe(texts: Iterable[str], vocab_size: int | None) -> TrainedTokenizer:
    """Train byte-level BPE with GPT-2's splitting into words, to a tokenizer.json.

    Id 0 is END_OF_TEXT. The 256 bytes follow, so any text can be encoded and decoded without loss. The rest
    are merges, most frequent first.

    Args:
        vocab_size: total number of tokens; None for `DEFAULT_VOCAB_SIZE`, or fewer for a short text.

    Raises:
        UserError: there is too little text for the vocabulary, or the vocabulary is too small.
    """
    if vocab_size is not None and vocab_size < _MIN_BPE_SIZE:
        raise UserError(
            f"--vocab-size {vocab_size} is below {_MIN_BPE_SIZE} (256 bytes and {END_OF_TEXT}): "
            "pass a larger one"
        )
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size or DEFAULT_VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    num_tokens = tokenizer.get_vocab_size()
    if vocab_size is not None and num_tokens != vocab_size:
        raise UserError(
            f"the input yields only {num_tokens} of --vocab-size {vocab_size} tokens: "
            "pass a smaller --vocab-size, or use more text"
        )
    return TrainedTokenizer(f"{tokenizer.to_str()}\n".encode(), num_tokens)


def train_sentencepiece(texts: Iterable[str], vocab_size: int | None, model_type: str) -> TrainedTokenizer:
    """Train a SentencePiece model that decodes its tokens without loss.

    Ids 0 to 2 are the unknown token, the beginning and the end of a document. The 256 bytes follow, which
    encode unknown characters. Text is not normalised, and each digit is a token, as in Llama's tokenizer.

    Args:
        texts: texts of documents; pieces do not cross line ends.
        vocab_size: total number of tokens; None for `DEFAULT_VOCAB_SIZE`.
        model_type: "bpe" or "unigram".

    Raises:
        UserError: there is too little text for the vocabulary, or the vocabulary is too small.
    """
    import sentencepiece

    model, vocab_size = io.BytesIO(), vocab_size or DEFAULT_VOCAB_SIZE
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(texts),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            byte_fallback=True,
            split_digits=True,
            character_coverage=0.9999,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=_MAX_LINE_BYTES,
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise UserError(
            f"SentencePiece cannot train --vocab-size {vocab_size} on this input ({reason}): pass another "
            "size or more text"
        ) from None
    return TrainedTokenizer(model.getvalue(), vocab_size)


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Yield the lines of the texts; lines that are too long for the library are cut into parts."""
    for text in texts:
        for line in text.split("\n"):
            for first in range(0, len(line), _MAX_LINE_BYTES // 4):  # a character has at most 4 bytes
                yield line[first : first + _MAX_LINE_BYTES // 4]


TRAINERS: dict[str, Callable[[Iterable[str], int | None], TrainedTokenizer]] = {
    "bpe": train_bpe,
    "sentencepiece-bpe": lambda texts, size: train_sentencepiece(texts, size, "bpe"),
    "sentencepiece-unigram": lambda texts, size: train_sentencepiece(texts, size, "unigram"),
}
"""Training functions by the name of --type."""


def write_tokenizer(path: Path, train: Callable[[], TrainedTokenizer], overwrite: bool = False) -> int:
    """Train a tokenizer, write its file, and return its number of tokens.

    The file's name appears once it is complete.

    Raises:
        UserError: the file exists or cannot be written, a library is missing, or training is not possible.
    """
    if path.exists() and not overwrite:
        raise UserError(f"{path} exists: pass another --output, or --overwrite")
    try:
        trained = train()
    except ImportError as error:
        raise UserError(f"training needs a package that is not installed: pip install {error.name}") from None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as stream:
            stream.write(trained.content)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    return trained.num_tokens
