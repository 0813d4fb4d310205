"""A verification of layouts finds the errors of the catalogue, and nothing where there is no error."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace

import pytest

from tests.power.catalogue import CATALOGUE, CONTROL
from tests.power.injected_error import InjectedError
from tests.power.measure import MODELS, PAGE, default_names, full_differences, measure

SAMPLE = 14
"""Number of errors to inject by default, each in the layout in which it acts."""
SAMPLE_OF_SAVES = 1
"""Number of such errors in evaluations, saves and resumes."""


def _check(errors: list[InjectedError], *, only_own_layout: bool = False) -> None:
    found = {error.name: False for error in errors}
    for finding in measure(errors, only_own_layout=only_own_layout):
        found[finding.error] |= bool(finding.differences)
    assert found == {error.name: not error.unseen for error in errors}


def test_a_sample_is_found(request: pytest.FixtureRequest) -> None:
    """Another commit draws another sample, as in the layout table."""
    seed = request.config.option.layout_seed
    errors = [error for error in CATALOGUE if not error.unseen]
    errors.sort(key=lambda error: hashlib.sha256(f"{seed} {error.name}".encode()).digest())
    of_saves = [error for error in errors if error.is_of_saves]
    others = [error for error in errors if not error.is_of_saves]
    _check([*of_saves[:SAMPLE_OF_SAVES], *others[:SAMPLE]], only_own_layout=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "error", [error for error in CATALOGUE if error.is_of_saves], ids=lambda each: each.name
)
def test_a_quick_verification_does_not_show_an_error_in_saves(error: InjectedError) -> None:
    (finding,) = measure([replace(error, is_of_saves=False)], only_own_layout=True)
    assert finding.differences == []


@pytest.mark.parametrize("model", ["averaged", "packed"])
def test_nothing_is_found_in_saves_without_an_error(model: str) -> None:
    assert full_differences(replace(CONTROL, model=model, layout="dp2")) == []


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_error_is_found(model: str) -> None:
    _check([error for error in CATALOGUE if error.model == model])


def test_nothing_is_found_without_an_error() -> None:
    assert [finding.differences for finding in measure([CONTROL], only_own_layout=True)] == [[]]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_found_in_the_default_layouts_without_an_error(model: str) -> None:
    control = replace(CONTROL, model=model)
    differences = [finding.differences for finding in measure([control])]
    assert differences == [[]] * len({*default_names(model), CONTROL.layout})


def test_names_are_unique_and_the_page_has_all() -> None:
    names = [error.name for error in CATALOGUE]
    assert len(set(names)) == len(names)
    assert [error.name for error in CATALOGUE if not hasattr(error.owner, error.attribute)] == []
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name in names if f"| {name} |" not in page] == []
    (counts,) = re.findall(r"^\d+ of \d+ errors are found, .*$", page, re.MULTILINE)
    assert counts.startswith(f"{sum(not error.unseen for error in CATALOGUE)} of {len(names)} ")
    summary = PAGE.parents[1].joinpath("verification.md").read_text(encoding="utf-8")
    assert counts in " ".join(summary.split())
