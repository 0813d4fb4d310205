"""The runs of docs/gpus.md are planned: layout, time and memory of its table; the law gives their loss."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest

from megalite.plan.plan_report import answer
from tests.unit.docs.parsing import ROOT

TEXT = (ROOT / "docs" / "gpus.md").read_text(encoding="utf-8")
ROWS = re.findall(
    r"^\| (\d+) \| `(.+)` \| ([\d.,]+) billion \| `(.+)` \| ([\d.]+) \| ([\d.]+) \| ([\d,]+) \| ([\d.]+) \|$",
    TEXT,
    re.MULTILINE,
)
RUNS = re.findall(
    r"^    \$ (?:torchrun .*?|python )(?:pretrain_gpt|tools/make_sbatch)\.py (.*?[^\\])$",
    TEXT,
    re.M | re.DOTALL,
)
GPUS_PER_NODE = 8
OF_JOBS = ("--gpu", "--nodes", "--time", "--output")
"""Flags of tools/make_sbatch.py, which have one value each."""


def planned(command: str, num_gpus: int) -> tuple[dict[str, Any], int]:
    """Return the plan of a run of the page on some H100s, and the GPUs of the nodes that it names."""
    words = shlex.split(command.replace("\\\n", " "))
    nodes = int(words[words.index("--nodes") + 1]) if "--nodes" in words else 0
    for flag in OF_JOBS:
        if flag in words:
            at = words.index(flag)
            del words[at : at + 2]
    cluster = ["--gpu", "h100", "--world-size", str(num_gpus), "--json"]
    (line,) = answer([*cluster, *words])
    (plan,) = json.loads(line)["layouts"]
    return plan, nodes * GPUS_PER_NODE


def law(parameters: float, tokens: float) -> float:
    """Return the loss of Hoffmann et al. 2022, approach 3 (equation 10)."""
    return 1.69 + 406.4 / parameters**0.34 + 410.7 / tokens**0.28


def test_there_is_a_run_for_each_row() -> None:
    assert [int(row[0]) for row in ROWS] == [1, 8, 64, 512]
    assert len(RUNS) == len(ROWS)
    assert all("--layout auto" in run for run in RUNS)


@pytest.mark.parametrize("number", [0, 1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_run_of_a_row_fits_and_takes_its_hours(number: int) -> None:
    (gpus, model, tokens, layout, seconds, gigabytes, hours, loss), command = ROWS[number], RUNS[number]
    plan, named_gpus = planned(command, int(gpus))
    assert f"--preset {model} " in command
    assert named_gpus in (0, int(gpus))
    assert plan["fits"] and not plan["tight"] and plan["notices"] == []
    parameters, trained = plan["parameters"], plan["train_tokens"]
    assert tokens == f"{trained / 1e9:,.0f}"
    assert plan["command"].endswith(layout)
    assert float(seconds) == pytest.approx(plan["iteration_time_s"], rel=0.01)
    assert float(gigabytes) == pytest.approx(plan["memory_gb"], rel=0.01)
    assert re.findall(r"GB of (\d+) ", TEXT) == [f"{plan['memory_gb_available']:.0f}"]
    if plan["bubble_fraction"]:
        assert re.findall(r"a bubble of ([\d.]+)%", TEXT) == [f"{100 * plan['bubble_fraction']:.1f}"]
    assert hours == f"{24 * plan['days']:,.0f}"
    assert loss == f"{law(parameters, trained):.2f}"


def test_the_published_loss_is_as_far_from_the_law_as_the_page_says() -> None:
    pattern = r"reached ([\d.]+) on FineWeb.*?, ([\d.]+) above the law"
    ((published, above),) = re.findall(pattern, TEXT, re.DOTALL)
    assert float(published) - float(ROWS[0][-1]) == pytest.approx(float(above), abs=0.006)
