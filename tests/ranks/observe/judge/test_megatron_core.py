"""The adapter of megatron-core: a right layout agrees, and an error of Megatron's own is found."""

from __future__ import annotations

import logging

import pytest

from megalite.cli.judge import main

pytest.importorskip("megatron.core")
TWO_LAYERS = ("--preset", "llama-tiny", "--num-layers", "2", "--lr-decay-style", "constant")


def _judged(*arguments: str, caplog: pytest.LogCaptureFixture) -> str:
    with caplog.at_level(logging.INFO), pytest.raises(SystemExit):
        main(["megatron-core", "--iterations", "2", *TWO_LAYERS, *arguments])
    return caplog.text


@pytest.mark.slow
def test_right_layouts_agree_and_resume_each_other(caplog: pytest.LogCaptureFixture) -> None:
    log = _judged("--layouts", "tp2+sp,pp2,dp2+zero1", caplog=caplog)
    assert "every layout that can run trains the same run" in log
    assert "resumes no save of pp2: without Apex and Transformer Engine" in log


@pytest.mark.slow
def test_gathered_logits_before_a_loss_over_vocabulary_parts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = _judged("--layouts", "tp2", "--quick", "--set", "parallel_output=False", caplog=caplog)
    assert "NOT the same run: tp2" in log
    assert "the loss of iteration 1" in log
