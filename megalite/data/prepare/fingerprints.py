"""Hash documents: their words, runs of words, and the keys by which duplicates find each other.

Everything is computed for a batch of documents at once, with numpy, in unsigned 64-bit arithmetic that wraps.
"""

from __future__ import annotations

import functools
import importlib
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megalite.data.window_dataset import U64, mix
from megalite.utils.errors import UserError

Hashes = npt.NDArray[np.uint64]

_SEPARATOR = "\udfff"
"""Character between documents: half of a surrogate pair, which is in no UTF-8 text."""
_BASE = U64(0x9E3779B97F4A7C15)
_INVERSE = U64(pow(int(_BASE), -1, 1 << 64))
_SEED = 1
_CHUNK_WORDS = 1 << 13
_UNSPACED = (
    *((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x3400, 0x9FFF)),
    *((0xF900, 0xFAFF), (0x20000, 0x3FFFF)),
)
"""Thai, Lao, Burmese, Khmer, Japanese and Chinese characters, which are written without spaces."""
UNICODE_VERSION = unicodedata.unidata_version
"""Version of the tables that define letters and lower case: hashes depend on it."""


def library(name: str, needed_by: str) -> Any:
    """Import a package of the extra `corpus`, or an optional one.

    Raises:
        UserError: the package, or one that it needs, is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = (error.name or name).partition(".")[0]
        install = "'megalite[corpus]'" if missing in ("rensa", "xxhash") else missing
        raise UserError(
            f"{needed_by} needs {missing}, which is not installed: pip install {install}"
        ) from None


def word_hashes(texts: Sequence[str]) -> tuple[Hashes, npt.NDArray[np.int64]]:
    """Return a hash of each word of the texts, and the number of words of each text.

    A word is a longest run of letters, marks and digits, in lower case; where a script has no spaces, it is
    one character. The hash is a polynomial of the characters' hashes.
    """
    joined = _SEPARATOR.join([*texts, ""]).lower()
    characters = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), "<u4")
    kinds = _character_kinds()[characters]
    begins = kinds > 0
    begins[1:] &= (kinds[1:] == 2) | (kinds[:-1] != 1)
    starts = np.flatnonzero(begins)
    ends = np.flatnonzero(characters == ord(_SEPARATOR))
    counts = np.diff(np.searchsorted(starts, ends), prepend=0)
    hashes = np.empty(len(starts), U64)
    for first in range(0, len(starts), _CHUNK_WORDS):  # a few at a time stay in the processor's cache
        part = slice(first, first + _CHUNK_WORDS)
        begin = int(starts[first])
        end = int(starts[part.stop]) if part.stop < len(starts) else len(characters)
        size = 1 << (end - begin).bit_length()  # so that chunks share a few tables of powers
        letters = np.flatnonzero(kinds[begin:end])
        values = _character_hashes()[characters[begin:end][letters]] * _powers(_BASE, size)[letters]
        local = starts[part] - begin
        sums = np.add.reduceat(values, np.searchsorted(letters, local))
        hashes[part] = mix(sums * _powers(_INVERSE, size)[local])
    return hashes, counts


def shingles(
    words: Hashes, counts: npt.NDArray[np.int64], length: int, or_shorter: bool
) -> tuple[Hashes, npt.NDArray[np.int64]]:
    """Return a hash of each run of `length` words within a text, and the number of runs of each text.

    Args:
        words, counts: of `word_hashes`.
        or_shorter: take all words of a text that has fewer as one run.
    """
    num_runs = np.maximum(counts - length + 1, 0)
    is_short = (num_runs == 0) & (counts > 0) & or_shorter
    num_runs += is_short
    starts = np.cumsum(counts) - counts
    first_runs = np.cumsum(num_runs) - num_runs
    text = np.repeat(np.arange(len(counts)), num_runs)
    begins = starts[text] + np.arange(len(text)) - first_runs[text]
    lengths = np.minimum(counts, length)[text]
    hashes = np.zeros(len(text), U64)
    for i in range(length if len(words) else 0):
        following = hashes * _BASE + words[np.minimum(begins + i, len(words) - 1)]
        hashes = np.where(i < lengths, following, hashes) if or_shorter else following
    return mix(hashes), num_runs


def exact_keys(texts: Sequence[str]) -> Hashes:
    """Return the xxh3-128 of each text in UTF-8, [texts, 2]."""
    digest = library("xxhash", "the step exact").xxh3_128_digest
    return _to_keys([digest(text.encode()) for text in texts])


def band_keys(
    texts: Sequence[str], ngram: int, bands: int, rows: int
) -> tuple[Hashes, npt.NDArray[np.int64]]:
    """Return keys of near-duplicates: two texts share one of their `bands` keys if a band is equal.

    A band is `rows` values of a MinHash signature of the text's runs of `ngram` words. Texts of Jaccard
    similarity s share a key with probability 1 - (1 - s^rows)^bands (Broder 1997; Leskovec et al., "Mining of
    Massive Datasets", 3.4). The signature is rensa's R-MinHash (Dahlgaard et al. 2017, "Fast Similarity
    Sketching").

    Returns:
        The keys [n * bands, 2] of the n texts that have a word, and the numbers of these texts [n].
    """
    sketch = library("rensa", "the step minhash").RMinHash
    digest = library("xxhash", "the step minhash").xxh3_128_digest
    hashes, num_runs = shingles(*word_hashes(texts), ngram, or_shorter=True)
    numbers = np.flatnonzero(num_runs)
    if not len(numbers):
        return np.empty((0, 2), U64), numbers
    offsets = np.concatenate([[0], np.cumsum(num_runs[numbers])]).astype(U64)
    matrix = sketch.digest_matrix_from_flat_token_hashes(hashes, offsets, bands * rows, _SEED)
    data, size = np.array(matrix.to_rows(), "<u4").tobytes(), 4 * rows
    bands_of_all = (data[i : i + size] for i in range(0, len(data), size))
    return _to_keys([digest(band, seed=1 + i % bands) for i, band in enumerate(bands_of_all)]), numbers


def minhash_version() -> int:
    """Return the version of rensa's algorithm: keys of different versions differ."""
    return int(library("rensa", "the step minhash").RMinHash.ALGORITHM_VERSION)


def _to_keys(digests: list[bytes]) -> Hashes:
    return np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)


@functools.lru_cache(maxsize=4)
def _powers(base: np.uint64, count: int) -> Hashes:
    powers = np.full(count, base)
    powers[:1] = 1
    return np.cumprod(powers, dtype=U64)


@functools.cache
def _character_hashes() -> Hashes:
    return mix(np.arange(1, 0x110001, dtype=U64))


@functools.cache
def _character_kinds() -> npt.NDArray[np.uint8]:
    """Return 1 for each character that continues a word, 2 for one that is a word, and 0 for others."""
    categories = (unicodedata.category(chr(number))[0] for number in range(0x110000))
    kinds = np.fromiter((each in "LMN" for each in categories), np.uint8, 0x110000)
    for first, last in _UNSPACED:
        kinds[first : last + 1] *= 2
    return kinds
