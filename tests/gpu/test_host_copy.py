"""Copies of a GPU's tensors in pinned memory, taken anew where a save is larger than the one before."""

import pytest
import torch

from megalite.checkpoint.saver import HostCopy
from megalite.checkpoint.tensor_files import FilePiece

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_larger_and_larger_saves() -> None:
    device = torch.device("cuda", 0)
    copy = HostCopy(device)
    for size in (0, 1000, 3_000_000, 500, 20_000_000):
        x = torch.arange(size, device=device, dtype=torch.float32)
        found = copy.take({"x": FilePiece(x, None)})["x"]
        copy.fill()
        assert torch.equal(found.tensor, x.cpu())
