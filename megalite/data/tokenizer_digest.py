"""Which tokenizer a corpus was made with: a small file beside it, compared when it is trained on."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from megalite.config import DataConfig
from megalite.data.fast_bpe import SAMPLE
from megalite.data.storage import read_small
from megalite.data.tokenizer import NullTokenizer, Tokenizer, configured_tokenizer
from megalite.errors import UserError
from megalite.folders import open_new
from megalite.parsing import parse_json

_NUM_PROBES = 2000


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """A digest of what a tokenizer does: two of the same digest give the same tokens for the same text.

    It is taken from what texts are encoded to: a fixed few, and the texts of ids evenly spaced over the
    vocabulary. So files that differ in form alone, such as GPT-2's two and the tokenizer.json made of
    them, have the same digest, and so has every engine that is exact. The text of the end-of-document token
    is left out: whether it is read as the token differs between such forms.

    Returns:
        SHA-256 in hexadecimal.
    """
    size, eod = tokenizer.vocab_size, _eod(tokenizer)
    digest = hashlib.sha256(json.dumps([size, eod]).encode())
    if not isinstance(tokenizer, NullTokenizer):  # whose text is ids already
        step = max(1, size // _NUM_PROBES)
        texts = [*SAMPLE, *(tokenizer.decode([i]) for i in range(0, size, step) if i != eod)]
        for text in texts:  # one by one: no fast engine is worth its start here
            digest.update(json.dumps([text, tokenizer.encode(text)]).encode())
    return digest.hexdigest()


@functools.lru_cache(maxsize=1)
def digest_of(data: DataConfig, vocab_size: int | None) -> str | None:
    """The digest of the tokenizer that a config names, None where it names none; taken once a run.

    Raises:
        UserError: the tokenizer cannot be read.
    """
    if data.resolved_tokenizer_type is None:
        return None
    return tokenizer_digest(configured_tokenizer(data, vocab_size))


def write_tokenizer_digest(prefix: str, tokenizer: Tokenizer) -> None:
    """Writes PREFIX.tokenizer.json for the corpus of this prefix, whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    record = {
        "digest": tokenizer_digest(tokenizer),
        "vocab_size": tokenizer.vocab_size,
        "eod": _eod(tokenizer),
    }
    _write(prefix, f"{json.dumps(record, indent=1)}\n".encode())


def copy_tokenizer_digest(source: str, prefix: str) -> None:
    """Gives the corpus of this prefix the digest of another one, which may be in a store.

    Raises:
        UserError: it cannot be written.
    """
    _write(prefix, read_small(_digest_name(source)))


def _write(prefix: str, data: bytes) -> None:
    path = digest_path(prefix)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open_new(part) as stream:
            stream.write(data)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def read_tokenizer_digest(prefix: str) -> str | None:
    """The digest beside the corpus of this prefix; None where there is none, as other programs write none.

    Raises:
        UserError: the file is there, and is not one of these.
    """
    path = _digest_name(prefix)
    try:
        record = parse_json(read_small(path))
        digest = record["digest"]
    except FileNotFoundError:
        return None
    except UserError:  # of a store
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"cannot read {path} ({type(error).__name__}): delete it, or preprocess the corpus again"
        ) from None
    return str(digest)


def check_tokenizer(prefixes: Iterable[str], tokenizer: Tokenizer) -> None:
    """Refuses corpora that were made with another tokenizer than the given one.

    Raises:
        UserError: naming them, or a file beside one that cannot be read.
    """
    stored = {prefix: read_tokenizer_digest(prefix) for prefix in dict.fromkeys(prefixes)}
    if not any(stored.values()):
        return  # the given one's own takes a moment
    digest = tokenizer_digest(tokenizer)
    wrong = [prefix for prefix, found in stored.items() if found not in (None, digest)]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise UserError(
            f"{', '.join(wrong[:5])}{more}: made with another tokenizer than the given one, so that ids mean "
            f"other text: give the same one, or delete {_digest_name(wrong[0])} if they are known to be equal"
        )


def digest_path(prefix: str) -> Path:
    """The file beside a corpus that says which tokenizer made it."""
    return Path(_digest_name(prefix))


def _digest_name(prefix: str) -> str:
    return f"{prefix}.tokenizer.json"  # of a URL too, which a Path is not


def _eod(tokenizer: Tokenizer) -> int | None:
    try:
        return tokenizer.eod
    except UserError:
        return None  # a vocabulary without an end-of-document token
