"""The reader of JSON lines in C++: it gives the texts that Python's json gives, or leaves a line alone."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data._json_reader import json_texts
from megalite.data.preprocessing.documents import DocumentRecord, RecordError, parse_record, parse_records

KEYS = ["text", "b"]
ODD = [
    "",
    "t",
    "\x00",
    "\x1f",
    "\x7f",
    "\\",
    '"',
    "é",
    "\u2028",
    "\uffff",
    "😀",
    "\U0010ffff",
    "日本",
    "\r\n",
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(ODD),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(
    st.sampled_from(KEYS) | st.text(max_size=4), st.text() | VALUES, max_size=5
) | st.fixed_dictionaries({"text": st.text(), "b": st.text(), "c": VALUES})


PIECES = [
    b"", b'"', b"\\", b",", b":", b"{", b"]", b"0", b"-", b"e", b"\\u", b"\xed\xa0\x80", b"\xff", b"\xc0\x80",
    b"\xf4\x90\x80\x80", b"\x00", b"\n", b" ",
]  # fmt: skip


def by_python(line: bytes) -> list[bytes] | None:
    """What json.loads and a look-up give; None where they refuse, or a text is not one."""
    try:
        found = json.loads(line)
        texts = [found[key] for key in KEYS]
        return [text.encode() for text in texts]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


@settings(max_examples=150, deadline=None)
@given(found=OBJECTS, ascii_only=st.booleans(), indent=st.sampled_from([None, 1]))
def test_plain_objects_are_read(found: dict[str, object], ascii_only: bool, indent: int | None) -> None:
    line = json.dumps(found, ensure_ascii=ascii_only, indent=indent).encode(errors="surrogatepass")
    (texts,) = json_texts([line + b"\n"], KEYS)
    assert texts in (None, by_python(line))
    odd = any(word in line for word in (b"NaN", b"Infinity", b"\\ud")) or "\\" in json.dumps(list(found))
    if not odd and by_python(line) is not None:
        assert texts is not None


@settings(max_examples=300, deadline=None)
@given(found=OBJECTS, seed=st.integers(0, 2**32))
def test_what_python_refuses_is_not_taken(found: dict[str, object], seed: int) -> None:
    """Lines with a few bytes changed, removed or doubled."""
    source = random.Random(seed)
    line = bytearray(json.dumps(found, ensure_ascii=seed % 2 == 0).encode(errors="replace"))
    for _ in range(source.randrange(1, 4)):
        at = source.randrange(len(line) + 1)
        line[at : at + source.randrange(3)] = source.choice([*PIECES, line[at : at + 9] * 2])
    (texts,) = json_texts([bytes(line)], KEYS)
    assert texts is None or texts == by_python(bytes(line))


GOOD = b'{"text": "a", "b": "c"'
UNUSUAL_VALUES = [
    b"01", b".5", b"1.", b"-", b"+1", b"1e", b"NaN", b"-Infinity", b"tru", b'"\\x"', b'"\\u12"', b'"\t"',
    b'"\xc3"', b'"\xed\xa0\x80"', b'"\xc0\x80"', b'"\xf4\x90\x80\x80"', b"9" * 5000, b"[" * 100_000, b'"',
    b"[1,]", b'{"a"}', b"", b"{1: 2}", b"'a'", b"1 2",
]  # fmt: skip
UNUSUAL_LINES = [
    b"", b"{}", b"[]", b'"text"', GOOD, GOOD + b",}", GOOD + b"} x", GOOD + b', "text": "d"}',
    b"\xef\xbb\xbf" + GOOD + b"}", b'{"te\\u0078t": "a", "b": "c"}', b'{"text": "a"}',
    b'{"text": "\\ud800", "b": "c"}', b'{"text": "\\udc00\\ud800", "b": "c"}',
    b'{"text": "\\ud83d\\ud83d", "b": "c"}', b'{"text": "a", "b": 1}', b'{"text": "a", "b": null}',
    b'{"text": "\xf0\x80\x80\x80", "b": "c"}', b'{"text": "\xe0\x80\x80", "b": "c"}',
    b'{"text": "\xe2\x82", "b": "c"}', (GOOD + b"}").decode().encode("utf-16"),
    (GOOD + b"}").decode().encode("utf-32-le"),
    *(GOOD + b', "n": ' + value + b"}" for value in UNUSUAL_VALUES),
]  # fmt: skip


@pytest.mark.parametrize("line", UNUSUAL_LINES, ids=range(len(UNUSUAL_LINES)))
def test_unusual_lines_are_left_to_python(line: bytes) -> None:
    assert json_texts([line], KEYS) == [None]


def test_lines_of_every_length() -> None:
    """The eight bytes at a time meet an end, a quote, an escape and a wide character at every position."""
    lines, expected = [], []
    for size in range(40):
        for middle in ("", "\n", '"', "\\", "é", "日", "😀", "\x01"):
            text = "a" * size + middle + "b" * (39 - size)
            for ascii_only in (False, True):
                lines.append(json.dumps({"text": text, "b": text[::-1]}, ensure_ascii=ascii_only).encode())
                expected.append([text.encode(), text[::-1].encode()])
    assert json_texts(lines, KEYS) == expected


def test_records_keep_their_order() -> None:
    """Plain lines, lines for Python, bad ones and texts beside each other."""
    records = [
        DocumentRecord("f", 1, "json", b'{"text": "one"}'),
        DocumentRecord("f", 2, "text", "zwei ü".encode()),
        DocumentRecord("f", 3, "json", b'{"text": "thr\\ud800ee", "n": NaN}'),
        DocumentRecord("f", 4, "bad", "too long"),
        DocumentRecord("f", 5, "json", b"junk"),
        DocumentRecord("f", 6, "json", b'{"text": "six"}\r\n'),
        DocumentRecord("f", 7, "row", {"text": "seven"}),
    ]
    found = parse_records(records, ["text"])
    assert [texts for texts in found if not isinstance(texts, RecordError)] == [
        [b"one"], ["zwei ü".encode()], ["thr\ufffdee".encode()], [b"six"], [b"seven"],
    ]  # fmt: skip
    assert [str(error)[:14] for error in found if isinstance(error, RecordError)] == [
        "too long",
        "not valid JSON",
    ]
    assert parse_record(records[0], ["text"]) == [b"one"]


def test_a_line_is_bytes() -> None:
    with pytest.raises(TypeError, match="a line is bytes"):
        json_texts(["{}"], KEYS)  # type: ignore[list-item]
