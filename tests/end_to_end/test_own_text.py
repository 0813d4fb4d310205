"""The commands of docs/quickstart.md that train on a text file of one's own, run as pasted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.end_to_end.conftest import ROOT, make_checkout, paste

SECTION = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8").split("\n## ")[2]
CORPUS_AS_TEXT, COMMANDS = re.findall(r"^```sh\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return make_checkout(tmp_path)


def losses(checkout: Path) -> list[float]:
    rows = [json.loads(line) for line in (checkout / "runs/mine/metrics.jsonl").read_text().splitlines()]
    return [row["lm_loss"] for row in rows if "iteration" in row]


def test_a_short_text_and_three_iterations(checkout: Path) -> None:
    (checkout / "my_text.txt").write_text("\n\n".join(f"In the beginning was {i}.\n" * 9 for i in range(200)))
    commands = COMMANDS
    for long, short in (
        ("--train-iters 300", "--train-iters 3 --lr-warmup-iters 1 --log-interval 1"),
        ("torchrun --nproc-per-node 4", "python"),  # each rank imports torch; the README's blocks run four
        (" --tp 2 --pp 2", ""),
    ):
        assert commands.count(long) == 1
        commands = commands.replace(long, short)
    printed = paste(checkout, commands)
    assert "200 documents" in printed
    assert len(losses(checkout)) == 3
    assert len(printed.rpartition("In the beginning")[2]) > 10


@pytest.mark.slow
def test_the_commands_as_they_are(checkout: Path) -> None:
    paste(checkout, CORPUS_AS_TEXT)
    printed = paste(checkout, COMMANDS)
    assert losses(checkout)[-1] < losses(checkout)[0] - 1.5
    assert len(printed.rpartition("In the beginning")[2].split()) > 10
