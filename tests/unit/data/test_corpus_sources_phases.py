"""The file of --data-phases: what it says, and what is wrong with it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megalite.data.corpus_sources import DataPhase, Source, parse_until, read_phases
from megalite.utils.errors import UserError

SOURCES = "sources: {web: {path: a, max_epochs: 2}, code: {path: b}}\n"


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "phases.yaml"
    path.write_text(text)
    return str(path)


def test_phases_are_read(tmp_path: Path) -> None:
    text = (
        "phases:\n- {until: 2T, weights: {web: 8, code: 2}}\n- {until: 2.5T tokens, ramp: {code: 1}}\n"
        "- {until: 7 samples, unimax: {max_epochs: 4}}\n"
        "- {until: end, size_exponent: 0.7, when_exhausted: renormalize}\n"
    )
    found = read_phases(written(tmp_path, SOURCES + text))
    assert found.sources == (Source("web", "a", 2.0), Source("code", "b", math.inf))
    assert found.phases == (
        DataPhase((2e12, "tokens"), "weights", {"web": 8.0, "code": 2.0}, False),
        DataPhase((2.5e12, "tokens"), "ramp", {"code": 1.0}, False),
        DataPhase((7.0, "samples"), "unimax", 4.0, False),
        DataPhase(None, "size_exponent", 0.7, True),
    )


@pytest.mark.parametrize(
    ("text", "until"),
    [("2T", (2e12, "tokens")), (1500, (1500.0, "tokens")), ("1.5k iterations", (1500.0, "iterations")),
     ("end", None), ("30B tokens", (3e10, "tokens"))],
)  # fmt: skip
def test_ends(text: object, until: tuple[float, str] | None) -> None:
    assert parse_until("phase 1", text) == until


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ("[]", "phases must be a list with at least one phase"),
        ("[{weights: {web: 1}}]", "phase 1 has no until"),
        ("[{until: end}]", "phase 1 has no mixture: write one of weights, ramp"),
        (
            "[{until: end, weights: {web: 1}, unimax: {max_epochs: 1}}]",
            "phase 1 has weights and unimax: write",
        ),
        ("[{until: soon, weights: {web: 1}}]", "phase 1: until is soon: write tokens, as in 2.5T"),
        ("[{until: 0, weights: {web: 1}}]", "phase 1: until is 0"),
        ("[{until: end, weights: {webb: 1}}]", "unknown source webb: the sources are web, code"),
        ("[{until: end, weights: {web: -1}}]", "web is -1: write a weight of at least 0"),
        ("[{until: end, weights: {web: .nan}}]", "web is nan: write a number"),
        ("[{until: end, weights: {web: .inf}}]", "web is inf: write a weight"),
        ("[{until: end, weights: {web: 0, code: 0}}]", "weights are all 0: give one source a weight"),
        ("[{until: 5, ramp: {web: 1}}]", "phase 1 is a ramp, which has nothing to start from"),
        ("[{until: 5, weights: {web: 1}}, {until: end, ramp: {web: 1}}]", "phase 2: ramp with until: end"),
        ("[{until: end, unimax: {max_epochs: 4}}]", "phase 1: unimax with until: end"),
        ("[{until: end, weights: {web: 1}, when_exhausted: stop}]", "is stop: write error or renormalize"),
        ("[{until: end, weight: {web: 1}}]", "has the key weight: use until, weights, ramp"),
        ("[{until: end, size_exponent: -1}]", "size_exponent is -1: write a number from 0 on"),
        ("[{until: 5, unimax: 4}]", "unimax must be a mapping with the keys max_epochs"),
    ],
)
def test_wrong_phases_are_named_in_one_line(tmp_path: Path, phases: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read_phases(written(tmp_path, f"{SOURCES}phases: {phases}\n"))
    assert "\n" not in str(caught.value) and "phases.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be a mapping with the keys sources, phases"),
        ("a: [", "is not YAML"),
        ("sources: {}\nphases: []", "sources must be a mapping from names of sources"),
        ("sources: {web: a}\nphases: []", "source web must be a mapping with the keys path, max_epochs"),
        ("sources: {web: {path: a, max_epochs: 0}}\nphases: []", "max_epochs is 0: write a number above 0"),
        ("sources: {a/b: {path: a}}\nphases: []", "source a/b has a slash in its name"),
        ("sources: {a: {path: c}, b: {path: c}}\nphases: []", "two sources with the path c"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_phases(written(tmp_path, text))
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_phases(str(tmp_path / "none.yaml"))
