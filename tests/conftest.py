"""What tests of every kind share."""

import logging
from collections.abc import Iterator

import hypothesis
import pytest

from megalite.config import ParallelConfig
from megalite.log import log
from megalite.topology import Launch, Topology

hypothesis.settings.register_profile("megalite", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("megalite")


@pytest.fixture(autouse=True)
def logger_as_imported() -> Iterator[None]:
    """What a program run in this process, by a test or a wider fixture, made of the logger ends there."""
    _reset_logger()
    yield
    _reset_logger()


def _reset_logger() -> None:
    log.handlers.clear()
    log.setLevel(logging.NOTSET)
    log.propagate = True


@pytest.fixture
def one_rank() -> Iterator[Topology]:
    """A world of this process alone; its process group ends with the test."""
    with Topology.start(ParallelConfig(distributed_backend="gloo"), Launch.from_environment()) as topology:
        yield topology
