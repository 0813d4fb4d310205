"""Record a corpus's tokenizer in a small file beside it, and compare it before training."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from megalite.config import DataConfig
from megalite.data.sharded_dataset import is_sharded, read_list
from megalite.data.storage import read_small
from megalite.data.tokenizers.hf_tokenizer import SAMPLE, HuggingFaceTokenizer
from megalite.data.tokenizers.tokenizer import NullTokenizer, Tokenizer, configured_tokenizer
from megalite.utils.errors import UserError, few
from megalite.utils.files import parse_json, replace_file

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
