"""The adapter of megatron-core: right layouts agree, and an error of its own is found without a hint."""

from __future__ import annotations

import pytest

from megalite.cli.judge import main

pytest.importorskip("megatron.core")
TWO_LAYERS = ("--preset", "llama-tiny", "--num-layers", "2", "--lr-decay-style", "constant")


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
