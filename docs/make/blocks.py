"""The commands that the pages show, with what they print.

A block of the kind `console` holds commands, each behind a `$`, and their output. They are run in this
process, as a user would run them in the repository's root.
"""

from __future__ import annotations

import importlib.util
import io
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.cli import run_main

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LEFT_OUT = "…"
"""A line that stands for any number of lines."""


@dataclass(frozen=True)
class Example:
    """A command of a page and what the page says that it prints.

    Attributes:
        command: as it is shown, over several lines where they end in a backslash.
    """

    page: Path
    command: str
    output: str

    @property
    def words(self) -> list[str]:
        """The command as a shell takes it apart."""
        return shlex.split(self.command.replace("\\\n", " "))

    def __str__(self) -> str:
        return f"{self.page.name}: {' '.join(self.words)}"


def examples_of(page: Path) -> Iterator[Example]:
    """The commands of a page in its order."""
    for block in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        yield from _examples(page, block.group(1))


def _examples(page: Path, block: str) -> Iterator[Example]:
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, output = part, ""
        lines = part.split("\n")
        for number, line in enumerate(lines):
            if not line.endswith("\\"):
                command, output = "\n".join(lines[: number + 1]), "\n".join(lines[number + 1 :])
                break
        yield Example(page, command, output)


def run(example: Example) -> str:
    """What the command prints, errors too.

    Raises:
        ValueError: it is none that pages may show.
    """
    words = example.words
    if words[:1] != ["python"] or not (ROOT / words[1]).is_file():
        raise ValueError(f"{example}: only `python PROGRAM …` is run here; use a block of another kind")
    printed = io.StringIO()
    program = _main_of(ROOT / words[1])
    with redirect_stdout(printed), redirect_stderr(printed), suppress(SystemExit):
        run_main(program, words[2:])
    return printed.getvalue()


def _main_of(path: Path) -> Callable[[Sequence[str]], Any]:
    spec = importlib.util.spec_from_file_location(f"documented_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    found: Callable[[Sequence[str]], Any] = module.main
    return found


def agrees(shown: str, printed: str) -> bool:
    """Whether a page shows what was printed, but for what it leaves out and spaces at the ends of lines."""
    parts = re.split(rf"^{LEFT_OUT}\n", _stripped(shown), flags=re.MULTILINE)
    pattern = r"(?:.*\n)*?".join(map(re.escape, parts))
    return re.fullmatch(pattern, _stripped(printed)) is not None


def _stripped(text: str) -> str:
    lines = [line.rstrip() for line in text.split("\n")]
    return "\n".join(lines).strip("\n") + "\n" if any(lines) else ""


def renewed(page: Path) -> str:
    """The page's text with each command's output as it is now, with the same lines left out."""

    def renew(block: re.Match[str]) -> str:
        shown = [
            f"$ {example.command}\n{_renewed(example.output, _stripped(run(example)))}"
            for example in _examples(page, block.group(1))
        ]
        return "```console\n" + "".join(shown) + "```"

    return _BLOCK.sub(renew, page.read_text(encoding="utf-8"))


def _renewed(shown: str, printed: str) -> str:
    """What is printed now, with as many first lines as before, and of the others those that begin alike."""
    old, lines = _stripped(shown).splitlines(), printed.splitlines()
    if LEFT_OUT not in old:
        return printed
    first = old.index(LEFT_OUT)
    rest = [line if line == LEFT_OUT else _same_beginning(line, lines) for line in old[first:]]
    return "".join(f"{line}\n" for line in (*lines[:first], *rest))


def _same_beginning(old: str, lines: Sequence[str]) -> str:
    begins = [line for line in lines if line.split()[:1] == old.split()[:1]]
    return begins[0] if begins else old
