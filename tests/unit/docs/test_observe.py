"""Run the profilers as docs/observe.md shows them, and look for what it says they write."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from docs.make.blocks import ROOT, Example, run
from megalite.config import LoggingConfig
from megalite.train.telemetry.dashboards import main_scalars, validation_scalars
from megalite.train.telemetry.metrics import IterationMetrics, ValidationMetrics
from tests.run_folder import iteration

PAGE = ROOT / "docs" / "observe.md"
TIMES = ("start_time", "wall_time")


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Example]:
    """Return the page's commands in order; they write below a temporary folder."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [Example(PAGE, block, "") for block in blocks]


def test_the_profilers_write_what_the_page_says(commands: list[Example]) -> None:
    traced, measured = commands
    printed = run(traced)
    (trace,) = Path("runs/profiled/profile").iterdir()
    assert "profiler: the trace is in runs/profiled/profile" in printed
    assert trace.name.startswith("rank0.") and trace.name.endswith(".pt.trace.json")
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["name"] for event in events} >= {"ProfilerStep#3", "ProfilerStep#4", "[memory]"}
    assert {"Input Dims", "Call stack"} <= {key for event in events for key in event.get("args", {})}

    printed = run(measured)
    written = Path("runs/profiled/modules.txt").read_text()
    assert written in printed
    shown = re.search(r"^    modules of rank 0 .*?(?=^- )", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert shown is not None
    assert _without_times(shown[0]) == _without_times(written)


def _without_times(tables: str) -> list[list[str]]:
    """Return the words of each line, without the five columns of times in the rows of the first table.

    The two parts of the embedding that take longest depend on the machine: their rows are left out.
    """
    lines = [line.split() for line in tables.strip().splitlines()]
    timed = [len(words) >= 10 and _are_numbers(words[-5:]) for words in lines]
    return [
        words[:-5] if is_timed else words
        for words, is_timed in zip(lines, timed, strict=True)
        if not (is_timed and words[0].startswith("embedding."))
    ]


def _are_numbers(words: list[str]) -> bool:
    return all(re.fullmatch(r"[\d.]+%?", word) for word in words)


@pytest.mark.parametrize("file", ["docs/observe.md", "scripts/quickstart.sh"])
def test_the_address_of_tensorboard_pins_the_losses_that_are_written(file: str) -> None:
    (address,) = re.findall(r"http://localhost:6006/[^)\"\s]+", (ROOT / file).read_text())
    (cards,) = parse_qs(urlsplit(address).query)["pinnedCards"]
    record = {name: value for name, value in iteration(1, 0.0, 0.0).items() if name not in TIMES}
    written = main_scalars(LoggingConfig(), IterationMetrics(**record))
    written |= validation_scalars(LoggingConfig(), ValidationMetrics(1, 8, "valid", 2.0))
    tags = [card["tag"] for card in json.loads(cards) if card["plugin"] == "scalars"]
    assert tags == ["lm loss", "lm loss validation"] and set(tags) <= written.keys()
