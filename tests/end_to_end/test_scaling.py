"""A scaling table of one and two ranks, run for real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megalite.plan.measure import measure_scaling

RUN = (
    *("--scaling", "1,2", "--gpu", "a100-80", "--gpus-per-node", "1", "--preset", "gpt-tiny", "--mock-data"),
    *("--vocab-size", "256", "--seq-length", "32", "--global-batch-size", "4", "--micro-batch-size", "2"),
    *("--iterations", "3", "--warmup-iterations", "1", "--timeout", "200"),
)


@pytest.mark.slow
def test_one_and_two_ranks(tmp_path: Path) -> None:
    words = [*RUN, "--folder", str(tmp_path)]
    started = [line for line in measure_scaling(words, "") if line.endswith(": 3 iterations")]
    assert len(started) == 3
    lines = list(measure_scaling([*words, "--json"], ""))
    points = [each for each in json.loads(lines[0])["scaling"] if each["series"] == "measured"]
    assert [(each["scaling"], each["nodes"], each["global_batch_size"]) for each in points] == [
        *(("weak", 1, 2), ("weak", 2, 4), ("strong", 1, 4), ("strong", 2, 4))
    ]
    for each in points:
        rate = each["global_batch_size"] * 32 / each["iteration_time_s"]
        assert 0.1 < each["tokens_per_second"] / rate < 10  # medians of other iterations, on a loaded machine
        assert each["efficiency"] > 0
    assert not list(tmp_path.glob("*/iter_*"))  # no checkpoints
