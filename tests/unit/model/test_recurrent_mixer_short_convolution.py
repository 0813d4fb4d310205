"""The convolution is torch's, from any start on."""

import pytest
import torch
import torch.nn.functional as F

from megalite.model.recurrent_mixer import ShortConvolution
from megalite.tensor_parallel.parameter_spec import LayerContext

S, B, C = 9, 2, 6


@pytest.fixture
def build(one_rank):
    def convolution(kernel):
        module = ShortConvolution(C, kernel, 0.5, LayerContext(one_rank, torch.float64))
        torch.nn.init.normal_(module.weight)
        return module

    return convolution


def tokens(length=S):
    return torch.randn(length, B, C, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kernel", [1, 2, 4, 12])
def test_it_is_a_causal_convolution(kernel, build):
    module, x = build(kernel), tokens()
    rows = F.pad(x.permute(1, 2, 0), (kernel - 1, 0))
    expected = F.silu(F.conv1d(rows, module.weight.unsqueeze(1), groups=C)).permute(2, 0, 1)
    torch.testing.assert_close(module(x)[0], expected)


@pytest.mark.parametrize("kernel", [2, 4, 12])
def test_documents_are_apart(kernel, build):
    module, x = build(kernel), tokens()
    starts = torch.tensor([[0, 0, 0, 0, 4, 5, 5, 5, 5], [0] * S])
    found, _ = module(x, starts)
    apart = torch.cat([module(part[:, :1])[0] for part in x.split((4, 1, 4))])
    torch.testing.assert_close(found[:, :1], apart)
    torch.testing.assert_close(found[:, 1:], module(x)[0][:, 1:])


@pytest.mark.parametrize("kernel", [1, 2, 4, 12])
def test_pieces_give_the_whole(kernel, build):
    module, x, before, found = build(kernel), tokens(), None, []
    for piece in x.split((2, 1, 6)):
        y, before = module(piece, None, before)
        found.append(y)
    torch.testing.assert_close(torch.cat(found), module(x)[0])
