"""Samples as tensors on the device. Shapes: b samples of a microbatch, s tokens of a sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megalite.data.gpt import Dataset


@dataclass(frozen=True)
class Microbatch:
    """What one forward pass takes.

    Attributes:
        tokens: int64 [b, s], the inputs.
        labels: int64 [b, s], the token that follows each input.
        sample_numbers: int64 [b], the samples' numbers in the whole run: dropout is keyed by them.
    """

    tokens: Tensor
    labels: Tensor
    sample_numbers: Tensor


def load_microbatch(dataset: Dataset, samples: npt.NDArray[np.int64], device: torch.device) -> Microbatch:
    """Gathers samples of a dataset and starts their copy to the device, on the current stream."""
    text = torch.from_numpy(np.stack([dataset[i] for i in samples.tolist()]))  # [b, s + 1]
    numbers = torch.from_numpy(samples)
    if device.type == "cuda":  # only from pinned memory is a copy asynchronous
        text, numbers = text.pin_memory(), numbers.pin_memory()
    text = text.to(device, non_blocking=True)
    return Microbatch(
        tokens=text[:, :-1].contiguous(),
        labels=text[:, 1:].contiguous(),
        sample_numbers=numbers.to(device, non_blocking=True),
    )
