"""What the tests of kernels share."""

import pytest
import torch

from megalite.kernels import library


@pytest.fixture
def compiled() -> None:
    """Skips where plain PyTorch serves: there is nothing to compare it with."""
    if library.LOAD_ERROR:
        pytest.skip(library.LOAD_ERROR)


@pytest.fixture(params=[torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Each dtype that the kernels know."""
    return request.param
