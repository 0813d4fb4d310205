"""`megalite data-plan`: the table of a mixture, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megalite.cli.datasets import data_plan
from megalite.data.dataset_merge import list_shards
from megalite.data.indexed_dataset import IndexedWriter
from megalite.utils.errors import UserError

PHASES = """
sources: {{web: {{path: {0}/web}}, code: {{path: {0}/code, max_epochs: 2}}}}
phases:
- {{until: 2 iterations, weights: {{web: 3, code: 1}}}}
- {{until: end, weights: {{web: 1, code: 1}}, when_exhausted: {1}}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, length in (("web", 401), ("code", 41)):
        with IndexedWriter(str(tmp_path / name), "uint16") as writer:
            writer.add_document([np.zeros(length, np.uint16)])
    (tmp_path / "web.idx").rename(tmp_path / "part.idx")  # web is a corpus in one shard
    (tmp_path / "web.bin").rename(tmp_path / "part.bin")
    list_shards([str(tmp_path / "part")], str(tmp_path / "web"), False)
    return tmp_path


def planned(folder: Path, policy: str, *flags: str) -> None:
    (folder / "f.yaml").write_text(PHASES.format(folder, policy))
    data_plan([str(folder / "f.yaml"), "--seq-length", "4", "--split", "1", *flags])


FLAGS = "--tokens", "400", "--global-batch-size", "8"


def test_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Code gives 4 of the first 16 samples, then every second one until its 20 are read."""
    planned(folder, "renormalize", *FLAGS)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1:4] == [
        ["web", "401", "0.120", "0.680", "0.800"],
        ["code", "41", "0.400", "1.600", "2.000"],
        ["samples", "16", "84", "100"],
    ]
    assert " ".join(rows[4]).startswith("code runs out at sample 4")


def test_a_source_that_runs_out_is_an_error_after_the_table(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="source code has no sample left for sample 4"):
        planned(folder, "error", *FLAGS)
    assert "samples" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tokens", "400"), "pass the run's --global-batch-size"),
        (("--tokens", "end"), "--tokens end is no length"),
        (("--tokens", "x"), "--tokens: until is x"),
        ((*FLAGS, "--split", "0,1"), "source web has 0 tokens to train on, less than a sample"),
    ],
)
def test_mistakes_are_named(folder: Path, flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        planned(folder, "error", *flags)
