"""The child process with a fake CUDA device, which the tests of this folder share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.fake_cuda.child import FakeGpu, fake_gpu


@pytest.fixture(scope="session")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGpu]:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    with fake_gpu(tmp_path_factory.mktemp("fake_cuda")) as started:
        yield started
