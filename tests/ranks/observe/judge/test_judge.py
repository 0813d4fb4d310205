"""Judgements of the example's program: right as it is, and with errors of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megalite.config import Config
from megalite.config.fields import with_fields
from megalite.config.presets import PRESETS
from megalite.distributed.local_ranks import LocalRanks
from megalite.observe.judge.judge import ProgramJudge, Verdict
from megalite.observe.judge.rank_record import Task, import_adapter
from megalite.observe.verify.layouts import Layout
from megalite.utils.errors import UserError

WRONG = str(Path(__file__).with_name("wrong_program.py"))
EXAMPLE = str(Path(__file__).parents[4] / "examples/judge/judged_program.py")
CONFIG = with_fields(
    Config(model=PRESETS["gpt-tiny"]),
    **{"vocab_size": 32, "hidden_size": 8, "global_batch_size": 4, "micro_batch_size": 1},
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[LocalRanks]:
    with LocalRanks() as ranks:
        yield ranks


def _judged(
    ranks: LocalRanks, program: str, layouts: str, folder: Path | None = None, **options: str
) -> Verdict:
    samples = torch.randint(32, (2, 4, 9), generator=torch.Generator().manual_seed(0))
    task = Task(program, Layout(), CONFIG, options, samples)
    judge = ProgramJudge(import_adapter(program), task, ranks, folder)
    return judge.run([Layout.parse(name) for name in layouts.split(",")])


def test_a_right_program_trains_the_same_run(ranks: LocalRanks, tmp_path: Path) -> None:
    verdict = _judged(ranks, EXAMPLE, "tp2,dp2", tmp_path)
    assert verdict.same == ["tp2", "tp2 -> tp2", "dp2", "dp2 -> dp2", "dp2 -> one rank"]
    saves = ("one rank -> tp2", "tp2 -> dp2")
    assert verdict.refused == dict.fromkeys(saves, "a checkpoint of another tp cannot be loaded")
    assert not verdict.different


@pytest.mark.parametrize(
    ("error", "layout", "findings"),
    [
        ("without_sum", "tp2", ["norm.weight: their sum is the reference's", "output of embedding differs"]),
        ("not_averaged", "dp2", ["is 2 (dp or microbatches) times", "see the reduction of gradients"]),
        ("doubled", "tp2", ["the output of head differs on ranks 0, 1", "the last one that agrees is down"]),
        ("drifting", "dp2", ["ranks 0 and 1 hold different copies of the weight of norm.weight, by 2.0e-06"]),
        ("misreporting", "dp2", ["the loss of iteration 1 is 4."]),
        ("with_a_hole", "tp2", ["no rank holds 16 of the 256 elements of up.weight"]),
    ],
)
def test_an_error_is_found_and_named(ranks: LocalRanks, error: str, layout: str, findings: list[str]) -> None:
    verdict = _judged(ranks, WRONG, layout, error=error)
    text = "\n".join(verdict.different[layout])
    assert all(each in text for each in findings), text


def test_a_resume_that_forgets_the_optimizer_is_found(ranks: LocalRanks, tmp_path: Path) -> None:
    verdict = _judged(ranks, WRONG, "dp2", tmp_path, error="forgetting")
    assert list(verdict.different) == ["one rank -> dp2", "dp2 -> one rank"]


@pytest.mark.parametrize(
    ("error", "message"),
    [("in_place", "changes the samples"), ("random", "two runs of one rank differ in the")],
)
def test_a_program_that_cannot_be_compared_is_refused(ranks: LocalRanks, error: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        _judged(ranks, WRONG, "dp2", error=error)
