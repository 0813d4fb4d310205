"""scripts/corpus/make_corpus.py on hand-written entries, each with one habit of the source's markup."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "corpus" / "make_corpus.py"


@pytest.fixture(scope="module")
def make_corpus() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_corpus", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ('<w lemma="strong:H0430">God</w> <w lemma="strong:H0559">said</w>, “Let', "God said, “Let"),
        ('God<note placement="foot"><reference>1:1 </reference>or, X</note><w>made</w> it', "God made it"),
        ("six<note>a</note>, two<note>b</note> <note>c</note>.”<note>d</note>", "six, two.”"),
        (
            '<q who="Jesus">“Go.”</q>They went. <q>“What?</q> <note>a</note> <q>‘No’</q> ?” ',
            "“Go.” They went. “What? ‘No’?”",
        ),
        ('<l sID="a"/>One,<l eID="a"/> <l sID="b"/>two. <l eID="b"/>', "One,\ntwo."),
        (
            'A.<div eID="a" type="x-p"/> <div sID="b" type="x-p"/><note>x</note>B <lb type="x-p"/>C',
            "A.\nB\nC",
        ),
        ('so <div type="x-milestone" subType="x-preverse" sID="pv1"/>that', "so that"),
        (
            '<title canonical="true" type="psalm">A Song.<note>x</note></title><title>Part 2</title> Sing',
            "A Song.\nSing",
        ),
        ("<speaker>Lover</speaker> <l>Come</l>", "Come"),
        ('Amen.<chapter eID="Rev.22"/><div type="glossary"/> Abba is a word.', "Amen."),
        ("salt &amp; light, cafe\u0301", "salt & light, caf\u00e9"),
    ],
)
def test_markup_becomes_text(make_corpus: ModuleType, markup: str, text: str) -> None:
    assert make_corpus.chapter_text([markup]) == text


def test_elements_may_cross_verses(make_corpus: ModuleType) -> None:
    assert make_corpus.chapter_text(
        ["All: <list> <item>of A,", "of B. </item>", "<item>Of C.</item> </list> So"]
    ) == ("All:\nof A, of B.\nOf C.\nSo")


def test_chapters_are_read_without_front_matter_and_deuterocanon(make_corpus: ModuleType) -> None:
    lines = [
        "$$$[ Module Heading ]",
        "",
        "$$$Genesis 0:0",
        "Preface",
        "$$$I Kings 1:0",
        "Label",
        "$$$I Kings 1:1",
    ]
    lines += [
        "Now",
        "$$$I Kings 1:2",
        "then.",
        "$$$I Kings 2:1",
        "Two.",
        "$$$Tobit 1:1",
        "No.",
        "$$$Jude 1:1",
        "Jude,",
    ]
    assert list(make_corpus.read_chapters(line + "\n" for line in lines)) == ["Now then.", "Two.", "Jude,"]


def test_written_bytes_carry_no_time(make_corpus: ModuleType, tmp_path: Path) -> None:
    make_corpus.write_corpus(["“a”\nb", "c"], tmp_path / "corpus.jsonl.gz")
    data = (tmp_path / "corpus.jsonl.gz").read_bytes()
    assert data[4:8] == bytes(4)  # RFC 1952, MTIME
    assert [json.loads(line) for line in gzip.decompress(data).splitlines()] == [
        {"text": "“a”\nb"},
        {"text": "c"},
    ]
