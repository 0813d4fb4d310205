"""Makes bible.jsonl.gz from what SWORD's mod2imp prints; run by hand, see README.md beside this file.

The input is a sequence of entries, a line `$$$<book> <chapter>:<verse>` followed by OSIS markup. Elements
may cross verses, so a chapter's markup is read as one stream of tags rather than as a tree per verse.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import itertools
import json
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path

NUM_CHAPTERS = 1189
"""Chapters of the 66 books that every Christian canon shares: a count to check the result against."""

DEUTEROCANON = frozenset(
    (
        *("Tobit", "Judith", "Esther (Greek)", "Wisdom", "Sirach", "Baruch", "Prayer of Azariah", "Susanna"),
        *("Bel and the Dragon", "I Maccabees", "II Maccabees", "III Maccabees", "IV Maccabees"),
        *("I Esdras", "II Esdras", "Prayer of Manasses", "Additional Psalm"),
    )
)
"""Books left out: canons differ on them, and many of their verse numbers in the module are empty."""

ENTRY = re.compile(r"\$\$\$(?P<book>.+) (?P<chapter>\d+):(?P<verse>\d+)$")
EDITORIAL = frozenset({"note", "title", "speaker", "reference"})
LINE_BREAKS = frozenset({"div", "l", "lb", "lg", "list", "item", "title"})


class ChapterText(HTMLParser):
    """Collects the plain text of one chapter: a paragraph or a line of poetry is a line of text.

    Footnotes, cross references, speakers' names and headings are dropped; titles that the source marks as
    canonical (a psalm's superscription) are text and stay.
    """

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._open_editorial: list[str] = []
        self._after_element = False
        self._ended = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in EDITORIAL and ("canonical", "true") not in attrs:
            self._open_editorial.append(tag)
        elif tag in LINE_BREAKS:
            self._break_line(attrs)

    def handle_endtag(self, tag: str) -> None:
        if self._open_editorial and self._open_editorial[-1] == tag:
            self._open_editorial.pop()
            self._after_element = True
        elif tag == "q":
            self._after_element = True
        elif tag in LINE_BREAKS:
            self._break_line([])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "chapter" and any(name == "eid" for name, _ in attrs):
            self._ended = True  # a glossary follows the last chapter in the same entry
        elif tag in LINE_BREAKS:
            self._break_line(attrs)

    def handle_data(self, data: str) -> None:
        if self._open_editorial or self._ended:
            return
        # The module's maker dropped the space that followed a footnote or a speech of Jesus.
        if self._after_element and re.match(r"[\w“‘(\[]", data):
            self.parts.append(" ")
        self._after_element = False
        self.parts.append(data)

    def _break_line(self, attrs: list[tuple[str, str | None]]) -> None:
        # x-preverse milestones only tell where a verse's number would be printed.
        if not self._open_editorial and ("subtype", "x-preverse") not in attrs:
            self.parts.append("\n")

    def text(self) -> str:
        """The text so far, without blank lines, doubled spaces, or spaces at the ends of lines."""
        lines = (" ".join(line.split()) for line in "".join(self.parts).split("\n"))
        text = "\n".join(line for line in lines if line)
        # It also put spaces between such a speech's last mark and the sentence's: `’ ?”`, `’ ”`.
        text = re.sub(r" (?=[,.;:!?”])", "", text)
        return unicodedata.normalize("NFC", text)


def read_entries(lines: Iterable[str]) -> Iterator[tuple[str, int, int, str]]:
    """Yields (book, chapter, verse, markup) for each entry that names a verse; verse 0 is front matter."""
    key: re.Match[str] | None = None
    markup: list[str] = []
    for line in itertools.chain(lines, ["$$$\n"]):
        if not line.startswith("$$$"):
            markup.append(line.rstrip("\n"))
            continue
        if key is not None:
            yield key["book"], int(key["chapter"]), int(key["verse"]), " ".join(markup)
        key, markup = ENTRY.match(line.rstrip("\n")), []


def chapter_text(verses: Iterable[str]) -> str:
    """Plain text of a chapter from the markup of its verses, in order."""
    parser = ChapterText()
    for markup in verses:
        parser.feed(markup + " ")
    parser.close()
    return parser.text()


def read_chapters(lines: Iterable[str]) -> Iterator[str]:
    """Yields the text of each chapter of the 66 books, in the order of the input."""
    verses = (entry for entry in read_entries(lines) if entry[0] not in DEUTEROCANON and entry[2] > 0)
    for _, chapter in itertools.groupby(verses, key=lambda entry: entry[:2]):
        yield chapter_text(markup for _, _, _, markup in chapter)


def write_corpus(documents: Iterable[str], path: Path) -> None:
    """Writes one JSON document a line, gzipped without time or name so that the bytes are reproducible."""
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents)
    path.write_bytes(gzip.compress(lines.encode(), compresslevel=9, mtime=0))


def main() -> None:
    """Makes the corpus of what mod2imp prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="the .jsonl.gz to write; mod2imp's output is stdin"
    )
    args = parser.parse_args()
    documents = list(read_chapters(sys.stdin))
    if len(documents) != NUM_CHAPTERS:
        raise SystemExit(
            f"error: {len(documents)} chapters read, expected {NUM_CHAPTERS}: is stdin mod2imp's output?"
        )
    # By hash, so that any contiguous split (train, validation, test) is a fair sample of all books.
    documents.sort(key=lambda text: hashlib.sha256(text.encode()).digest())
    write_corpus(documents, args.output)


if __name__ == "__main__":
    main()
