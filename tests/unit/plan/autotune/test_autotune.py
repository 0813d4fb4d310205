"""The command line of autotune: its examples are accepted, and what no trial can do is rejected."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch

from megalite.cli import autotune as tool
from megalite.config.command_line import parse
from megalite.config.validate import problems_of
from megalite.errors import UserError
from megalite.plan.autotune import autotune as tuning
from megalite.plan.autotune.autotune import autotune
from megalite.plan.autotune.trial import Length, trial_config
from megalite.plan.layout_fields import with_layout
from megalite.plan.plan_request import read_request, training_tokens

LENGTH = Length(iterations=10, warmup=3, timeout=900.0)
TINY = "--gpu h100 --world-size 2 --preset gpt-tiny --vocab-size 256 --global-batch-size 8 --mock-data"


def examples() -> list[str]:
    assert tool.__doc__
    lines = tool.__doc__.replace("\\\n", " ").splitlines()
    return [line.partition("autotune")[2] for line in lines if line.startswith("megalite autotune")]


@pytest.mark.parametrize("example", examples())
def test_training_accepts_what_the_help_s_examples_start(example: str) -> None:
    words = ["--search", *shlex.split(example.replace("--calibrate", "--gpu a100-80"))]
    request = read_request(words)
    config, _ = parse(training_tokens(request, with_layout(request.config, zero_stage=1)))
    assert problems_of(trial_config(config, Path("metrics.jsonl"), LENGTH), request.cluster.world_size) == []


def test_there_are_two_examples() -> None:
    assert len(examples()) == 2


@pytest.mark.parametrize("words", ["--train-tokens 1e9", "--watts 600", "--price-per-gpu-hour 2", "--json"])
def test_what_the_table_does_not_show_is_refused(words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"{words.split()[0]}.*megalite plan") as caught:
        list(autotune([*TINY.split(), *words.split(), "--folder", str(tmp_path)], ""))
    assert "remove" in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="trials run in the GPUs' memory")
def test_trials_that_the_host_cannot_hold_are_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning.os, "sysconf", lambda name: 1000)  # pages, and bytes of one
    with pytest.raises(UserError, match=r"layouts need at least .* GB over all ranks, .* --calibrate"):
        list(autotune([*TINY.split(), "--folder", str(tmp_path / "tuning")], ""))
    assert not (tmp_path / "tuning").exists()
