"""Which tokenizer a corpus was made with: a small file beside it, compared when it is trained on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from megalite.data.fast_bpe import SAMPLE
from megalite.data.tokenizer import NullTokenizer, Tokenizer
from megalite.errors import UserError

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
        for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
            digest.update(json.dumps([text, ids]).encode())
    return digest.hexdigest()


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
    path = digest_path(prefix)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps(record, indent=1) + "\n")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def read_tokenizer_digest(prefix: str) -> str | None:
    """The digest beside the corpus of this prefix; None where there is none, as other programs write none.

    Raises:
        UserError: the file is there, and is not one of these.
    """
    path = digest_path(prefix)
    try:
        record = json.loads(path.read_bytes())
        digest = record["digest"]
    except FileNotFoundError:
        return None
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
            f"other text: give the same one, or delete {digest_path(wrong[0])} if they are known to be equal"
        )


def digest_path(prefix: str) -> Path:
    """The file beside a corpus that says which tokenizer made it."""
    return Path(f"{prefix}.tokenizer.json")


def _eod(tokenizer: Tokenizer) -> int | None:
    try:
        return tokenizer.eod
    except UserError:
        return None  # a vocabulary without an end-of-document token
