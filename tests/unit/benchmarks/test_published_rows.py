"""The two halves of published runs, and their plans: benchmarks/planner_published.py prints the table."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from statistics import median

import pytest

from benchmarks import planner_errors, published_rows
from benchmarks.planner_published import (
    Comparison,
    compare,
    flags_of,
    lines,
    setting_of,
)
from benchmarks.published_rows import BLIND, OPEN, read_rows
from megalite.plan.uncertainty import FILE, OTHER, error_ranges


@pytest.fixture(scope="module")
def comparisons() -> list[Comparison]:
    return list(compare(read_rows(OPEN)))


def test_the_halves_share_no_setting() -> None:
    halves = [{setting_of(row) for row in read_rows(path)} for path in (OPEN, BLIND)]
    assert not halves[0] & halves[1]
    for number, settings in enumerate(halves):
        for setting in settings:
            assert hashlib.sha256("|".join(setting).encode()).digest()[0] % 2 == number
    assert [len(read_rows(path)) for path in (OPEN, BLIND)] == [156, 172]


def test_a_changed_blind_half_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    changed = tmp_path / BLIND.name
    changed.write_bytes(BLIND.read_bytes().replace(b"4096", b"4097", 1))
    monkeypatch.setattr(published_rows, "BLIND", changed)
    with pytest.raises(ValueError, match="is not the file whose hash was committed"):
        read_rows(changed)


def test_the_open_half_is_planned(comparisons: list[Comparison]) -> None:
    planned = [each for each in comparisons if each.plan is not None]
    errors = [abs(each.error) for each in planned]
    assert len(planned) >= 135 and median(errors) < 0.08
    assert sum(error < 0.2 for error in errors) > 0.88 * len(errors)
    dense = [abs(each.error) for each in planned if each.kind.startswith("dense")]
    assert median(dense) < 0.055


def test_the_planner_has_the_errors_of_these_plans(comparisons: list[Comparison]) -> None:
    assert json.loads(FILE.read_text()) == planner_errors.collect(comparisons)


def test_an_interval_has_80_percent_of_the_settings() -> None:
    errors = [planner_errors.Error("dense", number, number / 100) for number in range(-9, 10)]
    repeated = [*errors, *[planner_errors.Error("dense", 9, 0.09)] * 20]  # releases of one setting
    few = [planner_errors.Error("few", setting, 1.0) for setting in "abc"]
    for each in (errors, repeated):  # with 20 settings, one more would be outside at each end
        (found,) = {planner_errors.error_ranges([*each, *few])["dense"]}
        assert found == (-0.08, 0.08, 19)  # 17 of 19 errors are in it, and a new one with (18 - 2) / 20
    assert planner_errors.error_ranges([*errors, *few]).keys() == {"dense", OTHER}


def test_intervals_hold_most_of_their_own_half(comparisons: list[Comparison]) -> None:
    found = error_ranges("time")
    assert found.keys() > {"dense, 8 or 4 bits", "experts, 8 or 4 bits", OTHER}
    planned = [each for each in comparisons if each.plan is not None]
    inside = 0
    for each in planned:
        least, most, _ = found.get(each.kind, found[OTHER])
        inside += least <= each.error <= most
    assert 0.75 < inside / len(planned) < 0.95
    assert all(each.least < 0 < each.most for each in found.values())


def test_the_table_has_every_kind_and_refusal(comparisons: list[Comparison]) -> None:
    text = "\n".join(lines(comparisons))
    kinds = ("precision nvfp4", "GPU gb300", "model kimi_k2", "80% interval, dense")
    assert all(expected in text for expected in (*kinds, "rows: fine-tuning"))


def test_flags_follow_the_row() -> None:
    rows = {(row["release"], row["gpu"], row["precision"], row["model"]): row for row in read_rows(OPEN)}
    words = " ".join(flags_of(rows["26.04", "gb200", "fp8_mx", "deepseek_v3"]))
    assert "--pipeline-layers" + " 4" * 15 + " 1 --ep 64" in words and "--mtp-num-layers 1" in words
    assert "--zero-stage 3" in " ".join(flags_of(rows["26.04", "gb300", "fp8_cs", "llama3_70b"]))
