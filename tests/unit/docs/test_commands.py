"""The commands in the pages' `sh` blocks and indented lines parse, and the files that they name are there.

`console` blocks are run by test_pages.py, and the rows of docs/guides.md are parsed by test_guides.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalite.utils.commands import COMMANDS
from tests.unit.docs.parsing import ROOT, check_command, stop_after_parsing

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")] + sorted((ROOT / "docs").glob("*.md"))
PROGRAM = rf"(?:python \S+\.py|torchrun --|megalite (?:{'|'.join(COMMANDS)}) )"
COMMAND = rf"((?:{PROGRAM})(?:.*\\\n)*.*)"
ELLIPSIS = re.compile(r"…|<.*?>|\$RUN")
"""What a reader replaces by flags."""
ELSEWHERE = ("python benchmarks/", " examples/", "stop_at_loss.py", "--help")
"""Parts of commands that other tests run; their programs have parsers of their own."""


def commands_of(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    for block in re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield from re.findall(rf"^ *{COMMAND}", block, re.MULTILINE)
    yield from re.findall(rf"^    +(?:\$ )?{COMMAND}", text, re.MULTILINE)


COMMANDS_OF = {page.name: [line.replace("\\\n", " ") for line in commands_of(page)] for page in PAGES}


@pytest.mark.parametrize("name", [name for name, lines in COMMANDS_OF.items() if lines])
def test_the_commands_of_a_page_parse(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    stop_after_parsing(monkeypatch)
    for line in COMMANDS_OF[name]:
        if not any(part in line for part in ELSEWHERE):
            is_whole = "--use-checkpoint-args" not in line and not ELLIPSIS.search(line)
            check_command(ELLIPSIS.sub("", line), is_whole)


def test_the_programs_that_commands_name_exist() -> None:
    lines = "\n".join(line for of_page in COMMANDS_OF.values() for line in of_page)
    named = set(re.findall(r"\S+\.py\b", lines)) - {"stop_at_loss.py"}
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_the_scripts_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"\b(?:benchmarks|examples|tools)/[\w/]+\.py\b", page.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_the_commands_are_found() -> None:
    assert sum(map(len, COMMANDS_OF.values())) > 90
