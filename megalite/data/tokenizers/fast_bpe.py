"""Encode byte-level BPE with a faster engine if it gives exactly the reference's ids."""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megalite.data.tokenizers.token_ids import IdArray, id_arrays

EncodeArrays = Callable[[Sequence[bytes]], list[IdArray]]
"""Encodes texts in UTF-8."""

SAMPLE = (
    "",
    " ",
    "The quick brown fox didn't jump; it's over there, they'LL say, we've 'seen' it.",
    "  leading,   inner   and trailing spaces   ",
    "tabs\t\tand\r\nlines\n\n\n  indented:\n\treturn x_1 != y2[3:45678]  # 100% `code`\n",
    "0 12 345 6789 1234567890 3.14159 1e-05 0xDEADBEEF ½ ² ٣٤٥ 一二三",
    "naïve café Ångström Straße İstanbul e\u0301 a\u0308\u0323 \ufb01 \u212b",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก",  # noqa: RUF001
    "你好，世界。こんにちは世界、カタカナ。안녕하세요 세계",  # noqa: RUF001
    "👋🏽 🇫🇷 👨‍👩‍👧‍👦 🏴󠁧󠁢󠁥󠁮󠁧󠁿 ✂️ ™ \u200b\u200d\ufeff\u00a0\u2003\u3000\u2028\u0085 end",
    "\x00\x01\x1f\x7f\x80\x9f \ud7ff\ue000\ufffd\U0010ffff",
    "http://example.org/a?b=c&d=%20#e user@example.org C:\\dir\\file.txt <p class='x'>&amp;</p>",
    "ALLCAPS camelCase snake_case kebab-case a.b.c ... --- *** !!! ??? )))(((",
    "a" * 300,
    "ab" * 150 + " " * 40 + "\n" * 20 + "-" * 100,
)
"""Texts that pretokenizers cut in different ways: spaces, digits, scripts, marks, controls."""

_NUM_VOCABULARY_TEXTS = 2000


def fast_engine(reference: Any) -> EncodeArrays | None:
    """Return the fast engine for a byte-level BPE of the `tokenizers` library, or None.

    The engine is compared with the library on texts that pretokenizers cut differently and on pieces of the
    vocabulary, and rejected at the first difference. A random model (dropout) or another kind of model has no
    fast engine.

    Args:
        reference: a tokenizers.Tokenizer; special tokens that it adds to texts are ignored.
    """
    try:
        gigatoken = importlib.import_module("gigatoken")
    except ImportError:
        return None
    description = json.loads(reference.to_str())
    if not _is_byte_level_bpe(description):
        return None
    description["post_processor"] = None  # it adds special tokens
    try:
        encode = gigatoken.Tokenizer.from_json(json.dumps(description)).encode

        def encode_arrays(texts: Sequence[bytes]) -> list[IdArray]:
            # One text at a time: a batch returns lists, or an array of a library that is slow to import.
            return [encode(text) for text in texts]

        sample = [text.encode() for text in (*SAMPLE, *_vocabulary_texts(reference))]
        same = all(map(np.array_equal, encode_arrays(sample), reference_engine(reference)(sample)))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # the tokenizer is not supported; Rust's panics are not an Exception
        return None
    return encode_arrays if same else None


def reference_engine(reference: Any) -> EncodeArrays:
    """Return the library's own encoding of many texts, without offsets."""
    encode = getattr(reference, "encode_batch_fast", reference.encode_batch)  # tokenizers before 0.20

    def encode_arrays(texts: Sequence[bytes]) -> list[IdArray]:
        decoded = [text.decode() for text in texts]
        return id_arrays(encoding.ids for encoding in encode(decoded, add_special_tokens=False))

    return encode_arrays


def _is_byte_level_bpe(description: dict[str, Any]) -> bool:
    model, cutter = description["model"], description["pre_tokenizer"] or {}
    cutters = cutter.get("pretokenizers", [cutter])
    return (
        model["type"] == "BPE"
        and not model.get("dropout")
        and any(each.get("type") == "ByteLevel" for each in cutters)
    )


def _vocabulary_texts(reference: Any) -> list[str]:
    """Return pairs of evenly spaced pieces of the vocabulary, and every added token inside words."""
    size = reference.get_vocab_size(with_added_tokens=True)
    step = max(1, size // _NUM_VOCABULARY_TEXTS)
    pieces = [reference.decode([i], skip_special_tokens=False) for i in range(0, size, step)]
    pairs = [one + other for one, other in itertools.pairwise(pieces)]
    added = [token.content for token in reference.get_added_tokens_decoder().values()]
    return [*pairs, *(f"some{token} text {token}{token}\n" for token in added[:200])]
