"""Load tokenizers of the `tokenizers` library: a tokenizer.json, or GPT-2's or BERT's vocabulary.

A faster engine encodes byte-level BPE if it gives exactly the reference's ids.
"""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from megalite.data.tokenizers import IdArray, id_arrays
from megalite.utils.errors import UserError, first_line
from megalite.utils.files import parse_json

_EOD_NAMES = (
    "<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<eod>", "<EOD>", "<|eot_id|>", "[EOS]",
)  # fmt: skip
"""Names of end-of-document tokens, for vocabularies that do not name theirs."""
_SETTINGS, _ADDED = "tokenizer_config.json", "added_tokens_decoder"

_UNKNOWN = "[UNK]"
"""WordPiece's token for words that its vocabulary cannot spell."""


class HuggingFaceTokenizer:
    """Tokenizer of the `tokenizers` library, without special tokens, truncation or padding.

    Attributes:
        vocab_size: one more than the largest id.
        unk: id of the token for unknown text, or None.
        path: its tokenizer.json; None if it was made from other files.
    """

    def __init__(
        self, library: Any, source: str, eod_name: str | None = None, path: Path | None = None
    ) -> None:
        """Wrap a tokenizer.

        Args:
            library: a tokenizers.Tokenizer; its truncation and padding are turned off.
            source: file of the tokenizer, for messages.
            eod_name: name of the token that ends a document; by default the only well-known name.
            path: its tokenizer.json.

        Raises:
            UserError: the vocabulary is empty.
        """
        library.no_truncation()
        library.no_padding()
        self._library = library
        self._engine: EncodeArrays | None = None
        self._source = source
        self.path = path
        vocab: dict[str, int] = library.get_vocab(with_added_tokens=True)
        if not vocab:
            raise UserError(f"{source} has an empty vocabulary: pass another tokenizer")
        self.vocab_size = max(vocab.values()) + 1
        self.unk: int | None = vocab.get(getattr(library.model, "unk_token", None) or "")
        names = _EOD_NAMES if eod_name is None else (eod_name,)
        self._ends = {name: vocab[name] for name in names if name in vocab}

    @classmethod
    def load(cls, name_or_path: str) -> HuggingFaceTokenizer:
        """Read a tokenizer.json: the file, its folder, or a name in Hugging Face's local cache."""
        path = _find_tokenizer_json(name_or_path)
        tokenizers = _import_tokenizers()
        try:
            library = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"cannot read the tokenizer {path}: {first_line(error)}") from None
        _add_tokens_beside(path, library)
        return cls(library, str(path), _eos_token_beside(path, library), path)

    @property
    def eod(self) -> int:
        return only_end(self._ends, self._source, _EOD_NAMES, f'"eos_token" in a {_SETTINGS} beside the file')

    @property
    def special_ids(self) -> set[int]:
        """Return the ids of the tokens that the library marks as special; it finds their names in texts."""
        added = self._library.get_added_tokens_decoder()
        return {number for number, token in added.items() if token.special}

    def encode(self, text: str) -> list[int]:
        with self._failures_explained():
            ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts with the fastest engine that gives the ids of `encode`."""
        return [ids.tolist() for ids in self.encode_arrays([text.encode() for text in texts])]

    def encode_arrays(self, texts: Sequence[bytes]) -> list[IdArray]:
        if self._engine is None:
            self._engine = fast_engine(self._library) or reference_engine(self._library)
        with self._failures_explained():
            return self._engine(texts)

    @contextmanager
    def _failures_explained(self) -> Iterator[None]:
        """Raise a UserError that names the tokenizer if encoding a text fails.

        The library stops a regular expression that backtracks for too long with a Rust panic, which is not an
        Exception in Python.
        """
        try:
            yield
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:
            raise UserError(
                f"the tokenizer {self._source} fails on a text ({first_line(error)}): repair its regular "
                "expressions, or pass another tokenizer"
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._library.decode(list(ids), skip_special_tokens=False)
        return text

    def token_id(self, name: str) -> int | None:
        found: int | None = self._library.token_to_id(name)
        return found

    def token_name(self, number: int) -> str | None:
        """Return the name of the token with this id in the vocabulary, or None."""
        found: str | None = self._library.id_to_token(number)
        return found


def gpt2_bpe_tokenizer(vocab_file: str, merge_file: str) -> HuggingFaceTokenizer:
    """Load GPT-2's byte-level BPE; the text "<|endoftext|>" in a document is text, never the token.

    Raises:
        UserError: a file cannot be read or is malformed.
    """
    tokenizers = _import_tokenizers()
    source = f"{vocab_file} with {merge_file}"
    for path in (vocab_file, merge_file):
        _require_file(Path(path))
    try:
        library = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(vocab_file, merge_file))
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"cannot read the tokenizer {source}: {first_line(error)}") from None
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    ours = _EOD_NAMES[0] if library.token_to_id(_EOD_NAMES[0]) is not None else None  # as in Megatron
    return HuggingFaceTokenizer(library, source, _eos_token_beside(Path(vocab_file), library) or ours)


def only_end(ends: Mapping[str, int], source: str, known: Sequence[str], advice: str) -> int:
    """Return the id of the only token that may end a document.

    Args:
        ends: ids of the tokens that may, by name.
        source: file of the tokenizer, for messages.
        known: well-known names of such a token.
        advice: where to name one.

    Raises:
        UserError: there is none, or there are several.
    """
    if len({*ends.values()}) > 1:
        raise UserError(
            f"{source} has several tokens that may end a document, and no file says which does: "
            f"{', '.join(ends)}; name it as {advice}"
        )
    if not ends:
        raise UserError(
            f"{source} has no end-of-document token: it is none of {', '.join(known)}; name it as {advice}"
        )
    return next(iter(ends.values()))


def word_piece_tokenizer(vocab_file: str, *, lowercase: bool) -> HuggingFaceTokenizer:
    """Load BERT's WordPiece vocabulary; the text "[SEP]" in a document is text, never the token.

    Args:
        vocab_file: vocab.txt, with one token per line.
        lowercase: convert text to lowercase, and remove accents.

    Raises:
        UserError: the file cannot be read, or lacks the token for unknown words.
    """
    tokenizers = _import_tokenizers()
    _require_file(Path(vocab_file))
    try:
        model = tokenizers.models.WordPiece.from_file(vocab_file, unk_token=_UNKNOWN)
        library = tokenizers.Tokenizer(model)
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"cannot read the tokenizer {vocab_file}: {first_line(error)}") from None
    if library.token_to_id(_UNKNOWN) is None:
        raise UserError(f"{vocab_file} has no token {_UNKNOWN}: pass BERT's vocab.txt, one token per line")
    library.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
    library.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    library.decoder = tokenizers.decoders.WordPiece()
    return HuggingFaceTokenizer(library, vocab_file)


def _import_tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise UserError(
            "this tokenizer needs a package that is not installed: pip install tokenizers"
        ) from None
    return tokenizers


def _find_tokenizer_json(name_or_path: str) -> Path:
    path = Path(name_or_path)
    if path.is_dir():
        path = path / "tokenizer.json"
    elif not path.exists():
        path = _find_in_cache(name_or_path)
    _require_file(path)
    return path


def _find_in_cache(name: str) -> Path:
    """Return the tokenizer.json of a downloaded model; nothing is downloaded here."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "tokenizer.json")
    except (ImportError, ValueError):  # not installed, or not a valid name
        found = None
    if not isinstance(found, str):
        raise UserError(
            f"there is no tokenizer at {name}: it is not a file, a folder or a model in Hugging Face's local "
            "cache; pass a tokenizer.json or the folder of one"
        )
    return Path(found)


def _eos_token_beside(path: Path, library: Any) -> str | None:
    """Return the name of the end token in the files beside a tokenizer, in transformers' order.

    A special_tokens_map.json is of older versions: a tokenizer_config.json with added tokens replaces it. The
    last two files are the model's, and name ids; of several, the first ends documents.
    """
    settings = json_object(path.with_name(_SETTINGS))
    older = {} if _ADDED in settings else json_object(path.with_name("special_tokens_map.json"))
    for file, found in (("special_tokens_map.json", older), (_SETTINGS, settings)):
        token = found.get("eos_token")  # a name, or an object with a content
        name = token.get("content") if isinstance(token, dict) else token
        if isinstance(name, str) and library.token_to_id(name) is not None:
            return name
        if isinstance(name, str):
            raise UserError(
                f"the {file} beside {path} has eos_token {name!r}, which is not in its vocabulary: pass the "
                "name of one of its tokens"
            )
    for file in ("generation_config.json", "config.json"):
        ids = json_object(path.with_name(file)).get("eos_token_id")
        first = ids[0] if isinstance(ids, list) and ids else ids
        if isinstance(first, int) and first >= 0:
            ending: str | None = library.id_to_token(first)
            if ending is not None:
                return ending
    return None


def _add_tokens_beside(path: Path, library: Any) -> None:
    """Add the tokens that only the tokenizer_config.json beside a file has, as transformers does."""
    added = json_object(path.with_name(_SETTINGS)).get(_ADDED)
    if not isinstance(added, dict):
        return
    make, vocab = _import_tokenizers().AddedToken, library.get_vocab(with_added_tokens=True)
    try:
        tokens = [make(**token) for _, token in sorted(added.items(), key=lambda item: int(item[0]))]
    except (TypeError, ValueError) as error:
        raise UserError(
            f"cannot read {_ADDED} in {path.with_name(_SETTINGS)}: {first_line(error)}; correct it, or "
            "remove it"
        ) from None
    library.add_tokens([token for token in tokens if token.content not in vocab])


def json_object(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty if there is no file.

    Raises:
        UserError: the file cannot be read, or holds something else.
    """
    if not path.is_file():
        return {}
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {first_line(error)}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} is not a JSON object: copy it again")
    return found


def _require_file(path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise UserError(f"cannot read the tokenizer {path}: {error.strerror}") from None


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
