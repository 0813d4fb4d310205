"""Run the example commands of the documentation and compare or update their output.

A `console` block holds commands, each after a `$`, followed by their output. Commands run in this process,
as a user would run them in the repository root.
"""

from __future__ import annotations

import importlib
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

from megalite.utils.commands import COMMANDS, main_of, run_main

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OMITTED = "…"
"""A line that matches any number of lines."""


@dataclass(frozen=True)
class Example:
    """A command of a page and the output that the page shows.

    Attributes:
        command: as shown; lines that end in a backslash continue.
    """

    page: Path
    command: str
    output: str

    @property
    def arguments(self) -> list[str]:
        """Split the command as a shell does."""
        return shlex.split(self.command.replace("\\\n", " "))

    def __str__(self) -> str:
        return f"{self.page.name}: {' '.join(self.arguments)}"


def examples_of(page: Path) -> Iterator[Example]:
    """Yield the commands of a page in order."""
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
    """Return the standard output and standard error of the command.

    Raises:
        ValueError: the command is not `python PROGRAM …` with a program of this repository.
    """
    arguments = example.arguments
    if arguments[:1] != ["python"] or not (ROOT / arguments[1]).is_file():
        raise ValueError(f"{example}: only `python PROGRAM …` is supported here; use another block type")
    printed = io.StringIO()
    program = _main_of(ROOT / arguments[1])
    caller, sys.argv = sys.argv, arguments[1:]
    try:
        with redirect_stdout(printed), redirect_stderr(printed), suppress(SystemExit):
            run_main(program, arguments[2:])
    finally:
        sys.argv = caller
    return printed.getvalue()


_COMMANDS = {ROOT / each.script: name for name, each in COMMANDS.items()}
"""The commands that scripts run."""


def _main_of(path: Path) -> Callable[[Sequence[str]], Any]:
    if path in _COMMANDS:
        return main_of(_COMMANDS[path])
    spec = importlib.util.spec_from_file_location(f"documented_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    found: Callable[[Sequence[str]], Any] = module.main
    return found


def agrees(shown: str, printed: str) -> bool:
    """Return whether the shown output matches, ignoring omitted lines and trailing spaces."""
    parts = re.split(rf"^{OMITTED}\n", _stripped(shown), flags=re.MULTILINE)
    pattern = r"(?:.*\n)*?".join(map(re.escape, parts))
    return re.fullmatch(pattern, _stripped(printed)) is not None


def _stripped(text: str) -> str:
    lines = [line.rstrip() for line in text.split("\n")]
    return "\n".join(lines).strip("\n") + "\n" if any(lines) else ""


def renewed(page: Path) -> str:
    """Return the text of the page with current command output, omitting the same lines as before."""

    def renew(block: re.Match[str]) -> str:
        shown = [
            f"$ {example.command}\n{_renewed(example.output, _stripped(run(example)))}"
            for example in _examples(page, block.group(1))
        ]
        return "```console\n" + "".join(shown) + "```"

    return _BLOCK.sub(renew, page.read_text(encoding="utf-8"))


def _renewed(shown: str, printed: str) -> str:
    """Return the printed output, with the same omissions.

    Keep as many leading lines as were shown; match the other shown lines by their first word.
    """
    old, lines = _stripped(shown).splitlines(), printed.splitlines()
    if OMITTED not in old:
        return printed
    first = old.index(OMITTED)
    rest = [line if line == OMITTED else _same_beginning(line, lines) for line in old[first:]]
    return "".join(f"{line}\n" for line in (*lines[:first], *rest))


def _same_beginning(old: str, lines: Sequence[str]) -> str:
    begins = [line for line in lines if line.split()[:1] == old.split()[:1]]
    return begins[0] if begins else old
