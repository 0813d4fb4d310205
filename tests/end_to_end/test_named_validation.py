"""Several validation sets, each evaluated and told under its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.conftest import TINY_FLAGS, write_corpus
from tests.programs import run_program


def test_each_is_told_in_log_metrics_and_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    plain, odd = str(tmp_path / "plain"), str(tmp_path / "odd")
    write_corpus(plain, [b"aaaaaaab" * 40] * 20)
    write_corpus(odd, [bytes(range(128, 256)) * 3] * 20)
    (tmp_path / "valid").write_text(f'"PLAIN: 1 0.9:1 {plain}" "ODD: 0.5 0:1 {odd}, 0.5 0.9:1 {plain}"\n')
    flags = list(TINY_FLAGS)
    del flags[flags.index("--split") : flags.index("--split") + 2]
    done = run_program(
        *("pretrain_gpt.py", *flags, "--lr", "0.01", "--train-iters", "12"),
        *("--eval-interval", "6", "--train-weighted-split-paths", f"TRAIN: 1 0:0.9 {plain}"),
        *("--valid-weighted-split-paths-path", str(tmp_path / "valid")),
        *("--metrics-file", str(tmp_path / "m.jsonl"), "--tensorboard-dir", str(tmp_path / "t")),
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    found = [line["validation"] for line in lines if "validation" in line]
    assert [(each["iteration"], each["split"], each["name"]) for each in found] == [
        *((6, "valid", "PLAIN"), (6, "valid", "ODD"), (12, "valid", "PLAIN"), (12, "valid", "ODD"))
    ]
    assert found[2]["lm_loss"] < 2 < 3 < found[3]["lm_loss"]  # learnt, and half of it never seen
    output = done.stdout + done.stderr
    assert "validation loss at iteration 12 on PLAIN | lm loss value: " in output
    assert f"training takes 48 samples of {plain}: " in output and f"{plain} is evaluated" not in output
    events = accumulator.EventAccumulator(str(tmp_path / "t"))
    events.Reload()
    for name, expected in zip(("PLAIN", "ODD"), found[2:], strict=True):
        scalars = events.Scalars(f"lm-loss-validation/{name}/lm loss validation")
        assert [scalar.step for scalar in scalars] == [6, 12]
        assert scalars[1].value == pytest.approx(expected["lm_loss"])
