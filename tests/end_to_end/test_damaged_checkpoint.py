"""The program resumes from what is whole, says what is not, and ends as if nothing had been."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.end_to_end.conftest import RunHere


def losses(output: str) -> dict[int, str]:
    """Of each logged iteration."""
    lines = re.findall(r"iteration +(\d+)/.*lm loss: ([^ ]+)", output)
    return {int(iteration): loss for iteration, loss in lines}


@pytest.fixture
def pretrain_and_tell(pretrain_here: RunHere, monkeypatch: pytest.MonkeyPatch, capsys):
    """Runs the program in this process; gives status, output and error lines."""

    def run(*flags: str) -> tuple[int, str, list[str]]:
        outputs: list[str] = []
        original = capsys.readouterr

        def read():
            captured = original()
            outputs.append(captured.out)
            return captured

        with monkeypatch.context() as patch:
            patch.setattr(capsys, "readouterr", read)
            status, errors = pretrain_here(*flags)
        return status, "".join(outputs), errors

    return run


@pytest.mark.slow
def test_a_damaged_checkpoint_costs_an_interval_and_no_more(pretrain_and_tell, tmp_path: Path) -> None:
    flags = ("--save", str(tmp_path), "--load", str(tmp_path), "--save-interval", "1", "--train-iters", "3")
    status, undisturbed, _ = pretrain_and_tell(*flags)
    assert status == 0
    os.truncate(tmp_path / "iter_0000003" / "pp_00_tp_00.safetensors", 1000)
    status, output, _ = pretrain_and_tell(*flags)
    assert status == 0
    assert "warning: checkpoint" in output
    assert "is damaged and skipped: pp_00_tp_00.safetensors has other contents than SHA256SUMS says" in output
    assert f"resumed from {tmp_path} at iteration 2" in output
    assert losses(output) == {3: losses(undisturbed)[3]}
    status, output, _ = pretrain_and_tell(*flags, "--ckpt-step", "1", "--keep-last", "2")
    assert status == 0
    assert f"resumed from {tmp_path} at iteration 1" in output
    assert losses(output) == {iteration: losses(undisturbed)[iteration] for iteration in (2, 3)}
    assert sorted(entry.name for entry in tmp_path.glob("iter_*")) == ["iter_0000002", "iter_0000003"]
    for checkpoint in tmp_path.glob("iter_*"):
        (checkpoint / "SHA256SUMS").unlink()
    status, _, errors = pretrain_and_tell(*flags)
    assert (status, len(errors)) == (1, 1)
    assert "has no complete checkpoint to load (iter_0000003: SHA256SUMS is missing | iter_" in errors[0]
