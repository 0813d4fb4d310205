"""Train tokenizers on a corpus: byte-level BPE as a tokenizer.json, or a SentencePiece model.

The same texts in the same order give the same tokenizer.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from megalite.data.preprocessing.documents import RecordError, find_inputs, parse_record, read_records
from megalite.errors import UserError
from megalite.files import replace_file

END_OF_TEXT = "<|endoftext|>"
_MIN_BPE_SIZE = 257
"""The end-of-document token and one token a byte: a smaller vocabulary could not encode every text."""
_MAX_LINE_BYTES = 1 << 20


def read_texts(inputs: Sequence[str], json_key: str, max_documents: int | None = None) -> Iterator[str]:
    """Yield the texts of files, globs and folders, at most `max_documents`, one at a time in memory.

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


def train_bpe(texts: Iterable[str], vocab_size: int) -> bytes:
    """Train byte-level BPE with GPT-2's splitting into words, and return its tokenizer.json.

    Id 0 is END_OF_TEXT, then come the 256 bytes, so that any text can be encoded and decoded without loss;
    the rest are merges, most frequent first.

    Raises:
        UserError: the texts are too few for the vocabulary, or it is too small.
    """
    if vocab_size < _MIN_BPE_SIZE:
        raise UserError(
            f"--vocab-size {vocab_size} is below {_MIN_BPE_SIZE} (256 bytes and {END_OF_TEXT}): "
            "pass a larger one"
        )
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise UserError(
            f"the input yields only {tokenizer.get_vocab_size()} of --vocab-size {vocab_size} tokens: "
            "pass a smaller --vocab-size, or use more text"
        )
    return f"{tokenizer.to_str()}\n".encode()


def train_sentencepiece(texts: Iterable[str], vocab_size: int, model_type: str) -> bytes:
    """Train a SentencePiece model that decodes what it encodes, and return its file.

    Ids 0 to 2 are the unknown token, the beginning and the end of a document, then come the 256 bytes, which
    encode unknown characters. Text is not normalised, and each digit is a token, as in Llama's.

    Args:
        texts: of documents; pieces do not cross line ends.
        vocab_size: total number of tokens.
        model_type: "bpe" or "unigram".

    Raises:
        UserError: the texts are too few for the vocabulary, or it is too small.
    """
    import sentencepiece

    model = io.BytesIO()
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
    return model.getvalue()


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Yield the lines of the texts; those that are too long for the library in parts."""
    for text in texts:
        for line in text.split("\n"):
            for first in range(0, len(line), _MAX_LINE_BYTES // 4):  # a character has at most 4 bytes
                yield line[first : first + _MAX_LINE_BYTES // 4]


TRAINERS: dict[str, Callable[[Iterable[str], int], bytes]] = {
    "bpe": train_bpe,
    "sentencepiece-bpe": lambda texts, size: train_sentencepiece(texts, size, "bpe"),
    "sentencepiece-unigram": lambda texts, size: train_sentencepiece(texts, size, "unigram"),
}
"""By the name of --type; each returns the bytes of the file."""


def write_tokenizer(path: Path, train: Callable[[], bytes], overwrite: bool = False) -> None:
    """Train a tokenizer and write its file; the name appears once it is complete.

    Raises:
        UserError: the file exists or cannot be written, a library is missing, or training is not possible.
    """
    if path.exists() and not overwrite:
        raise UserError(f"{path} exists: pass another --output, or --overwrite")
    try:
        content = train()
    except ImportError as error:
        raise UserError(f"training needs a package that is not installed: pip install {error.name}") from None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as stream:
            stream.write(content)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
