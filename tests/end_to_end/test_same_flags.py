"""Ranks that were started with different flags: one message with their numbers, and status 1 on each."""

from __future__ import annotations

from tests.end_to_end.conftest import TINY_FLAGS
from tests.programs import run_program_on_ranks


def test_ranks_with_different_flags_end_before_they_train(corpus: str) -> None:
    """The other layout alone would leave both in a collective that the other never joins."""
    flags = (*(each for each in TINY_FLAGS if each not in ("--layout", "manual")), "--data-path", corpus)
    first, second = run_program_on_ranks("pretrain_gpt.py", flags, (*flags, "--lr", "0.0002", "--tp", "2"))
    assert (first.returncode, second.returncode) == (1, 1)
    assert first.stderr.splitlines() == [
        f"error: {flag} differs between ranks: rank 1 has {one}, rank 0 has {zero}; start every rank with "
        "the same"
        for flag, one, zero in (
            ("--layout", "manual", "auto"),  # by default, since only rank 1 has an option of the layout
            ("--lr", "0.0002", "0.0003"),
            ("--tensor-model-parallel-size", "2", "1"),
        )
    ]
    assert "iteration" not in first.stdout + second.stdout
    assert not second.stderr
