"""The causal convolution is torch's, and each document's is that of the document alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.visible_keys import document_starts
from megalite.model.causal_convolution import CausalConvolution, causal_convolution
from megalite.tensor_parallel.counter_random import initialize
from megalite.tensor_parallel.parameter_spec import LayerContext

CHANNELS = 6
EXACT = {"rtol": 1e-13, "atol": 1e-13}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("kernel_size", [1, 2, 4])
@pytest.mark.parametrize("num_tokens", [1, 3, 17])
@pytest.mark.parametrize("has_bias", [True, False])
def test_is_torchs_convolution(kernel_size: int, num_tokens: int, has_bias: bool) -> None:
    x, weight = drawn(num_tokens, 2, CHANNELS), drawn(CHANNELS, kernel_size, seed=1)
    bias = drawn(CHANNELS, seed=2) if has_bias else None
    padded = F.pad(x.permute(1, 2, 0), (kernel_size - 1, 0))
    expected = F.conv1d(padded, weight.unsqueeze(1), bias, groups=CHANNELS).permute(2, 0, 1)
    torch.testing.assert_close(causal_convolution(x, weight, bias), expected, **EXACT)


def test_documents_are_separate() -> None:
    x, weight = drawn(9, 2, CHANNELS), drawn(CHANNELS, 4, seed=1)
    lengths = ((2, 1, 6), (5, 1, 3))
    ids = torch.stack([torch.arange(3).repeat_interleave(torch.tensor(row)) for row in lengths])
    y = causal_convolution(x, weight, None, document_starts(ids))
    for sample, row in enumerate(lengths):
        parts = [causal_convolution(part, weight, None) for part in x[:, sample : sample + 1].split(row)]
        torch.testing.assert_close(y[:, sample : sample + 1], torch.cat(parts), **EXACT)


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_goes_on_after_its_last_inputs(cut: int, one_rank) -> None:
    layer = CausalConvolution(CHANNELS, 4, LayerContext(one_rank, torch.float64), bias=True)
    initialize(layer, 3, one_rank)
    x, starts = drawn(9, 2, CHANNELS), torch.tensor([[0] * 4 + [4] * 5, [0] * 9])
    first, second = x.split((cut, 9 - cut))
    before = layer.last_inputs(first)
    assert before.shape == (3, 2, CHANNELS)
    y = torch.cat((layer(first, starts[:, :cut]), layer(second, starts[:, cut:] - cut, before)))
    torch.testing.assert_close(y, layer(x, starts), **EXACT)
    torch.testing.assert_close(layer.last_inputs(second, before), x[-3:], rtol=0, atol=0)
