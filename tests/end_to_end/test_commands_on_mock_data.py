"""The commands that train on mock data, on as many ranks as a laptop can start, pasted page by page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.end_to_end.conftest import make_checkout, paste
from tests.unit.docs.test_commands import COMMANDS_OF, ELLIPSIS

STARTS = re.compile(r"(?:python|torchrun --nproc-per-node [1-4]) pretrain_\w+\.py .*--mock-data")
ELSEWHERE = ("--dry-run", "--profile", "--train-iters 1000")
"""Parts of commands that other tests run, or that train for long."""


def _runs_here(line: str) -> bool:
    elsewhere = ELLIPSIS.search(line) or any(part in line for part in ELSEWHERE)
    return bool(STARTS.match(line)) and not elsewhere


HERE = {name: [line for line in lines if _runs_here(line)] for name, lines in COMMANDS_OF.items()}


def test_the_commands_are_found() -> None:
    assert sum(map(len, HERE.values())) > 12


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, lines in HERE.items() if lines])
def test_the_commands_train_as_pasted(name: str, tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path)
    for line in HERE[name]:
        printed = paste(checkout, f". .venv/bin/activate\n{line}")
        assert re.search(r"^ iteration .* lm loss: \d", printed, re.MULTILINE), line
