"""The adapter of megatron-core: right layouts agree, and an error of its own is found without a hint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megalite.cli.judge import judge_config, main, random_samples
from megalite.distributed.local_ranks import LocalRanks
from megalite.observe.judge.judge import ProgramJudge
from megalite.observe.judge.rank_record import Task, import_adapter
from megalite.observe.verify.layouts import Layout

pytest.importorskip("megatron.core")
TWO_LAYERS = ("--preset", "llama-tiny", "--num-layers", "2", "--lr-decay-style", "constant")
WITH_ERRORS = str(Path(__file__).with_name("megatron_errors.py"))
NUM_ERRORS = 22
SHOWN_BY_RESUMES = ("SwiGLU saved as one matrix", "schedule not resumed")


def _judged(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main(["megatron-core", "--iterations", "2", *TWO_LAYERS, *arguments])
    return capsys.readouterr().out


@pytest.mark.slow
def test_right_layouts_agree_and_resume_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    log = _judged("--layouts", "tp2+sp,pp2,dp2+zero1", capsys=capsys)
    assert "every layout that can run trains the same run" in log
    assert "resumes no save of pp2: without Apex and Transformer Engine" in log


@pytest.mark.slow
def test_gathered_logits_before_a_loss_over_vocabulary_parts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = _judged("--layouts", "tp2", "--quick", "--set", "parallel_output=False", capsys=capsys)
    assert "NOT the same run: tp2" in log
    assert "the loss of iteration 1" in log


@pytest.fixture(scope="module")
def ranks() -> Iterator[LocalRanks]:
    with LocalRanks() as ranks:
        yield ranks


@pytest.mark.slow
@pytest.mark.parametrize("number", range(NUM_ERRORS))
def test_an_injected_error_is_found(ranks: LocalRanks, number: int, tmp_path: Path) -> None:
    module = import_adapter(WITH_ERRORS)
    assert len(module.ERRORS) == NUM_ERRORS
    name, error = list(module.ERRORS.items())[number]
    config = judge_config(error.flags, error.num_iterations, module)
    task = Task(WITH_ERRORS, Layout(), config, {"error": name, **error.options}, random_samples(config))
    folder = tmp_path if name in SHOWN_BY_RESUMES else None
    verdict = ProgramJudge(module, task, ranks, folder).run([Layout.parse(error.layout)])
    assert [each for each in verdict.different if each != "megalite"], name
