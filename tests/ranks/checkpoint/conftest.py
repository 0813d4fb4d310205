"""One rank in the test's own process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megalite.config import ParallelConfig
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology


@pytest.fixture
def topology() -> Iterator[Topology]:
    with Topology.start(ParallelConfig(distributed_backend="gloo").mesh, Launch(0, 1, 0, 1)) as topology:
        yield topology
