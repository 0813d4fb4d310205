"""The command line of autotune: its examples are accepted, and what no trial can do is rejected."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch

from megalite.cli import plan as commands
from megalite.config.fields import with_fields
from megalite.config.validate import problems_of
from megalite.frontends.command_line import parse
from megalite.plan import measure as tuning
from megalite.plan.layout_fields import layout_flags
from megalite.plan.measure import autotune
from megalite.plan.plan_request import read_request, training_tokens
from megalite.plan.trial import DONE, Length, Trial, trial_config
from megalite.utils.errors import UserError

LENGTH = Length(iterations=10, warmup=3, timeout=900.0)
TINY = "--gpu h100 --world-size 2 --preset gpt-tiny --vocab-size 256 --global-batch-size 8 --mock-data"


def examples() -> list[str]:
    assert commands.autotune.__doc__
    lines = map(str.strip, commands.autotune.__doc__.replace("\\\n", " ").splitlines())
    return [line.partition("autotune")[2] for line in lines if line.startswith("megalite autotune")]


@pytest.mark.parametrize("example", examples())
def test_training_accepts_what_the_help_s_examples_start(example: str) -> None:
    words = ["--search", *shlex.split(example.replace("--calibrate", "--gpu a100-80"))]
    request = read_request(words)
    config, _ = parse(training_tokens(request, with_fields(request.config, zero_stage=1)))
    assert problems_of(trial_config(config, Path("metrics.jsonl"), LENGTH), request.cluster.world_size) == []


def test_there_are_two_examples() -> None:
    assert len(examples()) == 2


@pytest.mark.parametrize(
    "words", ["--train-tokens 1e9", "--watts 600", "--price-per-gpu-hour 2", "--node-mtbf 9d", "--json"]
)
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


def test_the_fastest_layout_becomes_a_file_for_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([3.0, 1.0, 2.0])
    monkeypatch.setattr(
        tuning,
        "run_trial",
        lambda *_: Trial(DONE, "", next(seconds), tokens_per_second=1.0, memory_bytes=1.0),
    )
    words = [*TINY.split(), "--train-iters", "20", "--top", "3", "--folder", str(tmp_path)]
    monkeypatch.setattr(tuning, "check_machine", lambda ranks, requested: None)
    lines = list(autotune(words, ""))
    file = tmp_path / "best.yaml"
    assert lines[-2] == f"wrote {file}: the config of the fastest layout, for --config"
    flags = shlex.split(lines[-1].partition(" megalite train ")[2])
    config, notices = parse(["--config", str(file)])
    assert (config, notices) == (parse(flags)[0], [])
    assert config.training.train_iters == 20
    fastest = list(json.loads((tmp_path / "results.json").read_text())["trials"])[1]["layout"]
    assert " ".join(layout_flags(config)) == fastest
