"""Ranks that were started with different flags: one message with their numbers, and status 1 on each."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from tests.end_to_end.conftest import ROOT, TINY_FLAGS


def test_ranks_with_different_flags_end_before_they_train(corpus: str) -> None:
    """The other layout alone would leave both in a collective that the other never joins."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = {1: ["--lr", "0.0002", "--tp", "2"]}
    ranks = []
    for rank in range(2):
        variables = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_PORT": port}
        ranks.append(
            subprocess.Popen(
                [sys.executable, "pretrain_gpt.py", *TINY_FLAGS, "--data-path", corpus, *own.get(rank, [])],
                cwd=ROOT,
                env={
                    **os.environ,
                    **{name: str(value) for name, value in variables.items()},
                    "MASTER_ADDR": "127.0.0.1",
                    "PYTHONPATH": str(ROOT),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1] * 2
    assert outputs[0][1].splitlines() == [
        f"error: {flag} differs between ranks: rank 1 has {one}, rank 0 has {zero}; start every rank with "
        "the same"
        for flag, one, zero in (("--lr", "0.0002", "0.0003"), ("--tensor-model-parallel-size", "2", "1"))
    ]
    assert not any("iteration" in out for out, _ in outputs)
    assert not any(errors for _, errors in outputs[1:])
