"""Which tests are near a change."""

from __future__ import annotations

import pytest

from tests.changes import names_of


@pytest.mark.parametrize(
    ("changed", "test"),
    [
        ("megalite/data/samples.py", "tests/unit/data/test_corpus.py"),
        ("megalite/data/samples.py", "tests/unit/data/nested/test_corpus.py"),
        ("megalite/train/callbacks/audit.py", "tests/ranks/train/test_resume.py"),
        ("megalite/utils/torch_private.py", "tests/unit/utils/test_torch_private.py"),
        ("docs/plan.md", "tests/unit/plan/test_search.py"),
        ("tests/unit/optim/test_muon.py", "tests/unit/optim/test_muon.py"),
    ],
)
def test_near(changed: str, test: str) -> None:
    assert names_of(test) & names_of(changed)


def test_folders_of_all_tests_are_near_nothing() -> None:
    names = names_of("megalite/optim/muon.py") | names_of("tests/unit/plan/test_search.py")
    assert not names_of("tests/unit/data/test_corpus.py") & names
