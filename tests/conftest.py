"""What tests of every kind share."""

from collections.abc import Iterator

import hypothesis
import pytest

from megalite.config import ParallelConfig
from megalite.topology import Launch, Topology

hypothesis.settings.register_profile("megalite", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("megalite")


@pytest.fixture
def one_rank() -> Iterator[Topology]:
    """A world of this process alone; its process group ends with the test."""
    with Topology.start(ParallelConfig(distributed_backend="gloo"), Launch.from_environment()) as topology:
        yield topology
