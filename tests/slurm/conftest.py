"""A cluster for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Slurm, slurm_cluster


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster
