"""Record runs on ranks that stay alive from test to test: their start takes a third of a short run's time.

Runs of the tests' own models have new ranks, because a rank keeps what such code changes in it. So do
compiled ones, because torch keeps what it has compiled.
"""

from __future__ import annotations

from functools import partial

from megalite.distributed.local_ranks import LocalRanks
from megalite.verify.record_run import record_run as record_on

RANKS = LocalRanks()
"""Ranks of this process of pytest. `conftest.py` ends them after its last test of this folder."""
record_run = partial(record_on, ranks=RANKS)
