"""Samples as tensors on the device. Shapes: b samples of a microbatch, s tokens of a sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megalite.data.gpt import Dataset, gather


@dataclass(frozen=True)
class Microbatch:
    """What one forward pass takes.

    Attributes:
        tokens: int64 [b, s], the inputs.
        labels: int64 [b, s], the token that follows each input.
        sample_numbers: int64 [b], the samples' numbers in the whole run: dropout is keyed by them.
        position_ids: int64 [b, s], positions in the documents; None for those in the sample.
        document_ids: int64 [b, s], equal in one document; None where attention knows no documents.
        loss_mask: bool [b, s], False for inputs whose loss does not count; None where all do.
    """

    tokens: Tensor
    labels: Tensor
    sample_numbers: Tensor
    position_ids: Tensor | None = None
    document_ids: Tensor | None = None
    loss_mask: Tensor | None = None


@dataclass(frozen=True)
class HostBatch:
    """A microbatch on its way: read, and in memory that the device can copy from.

    Attributes:
        text: int64 [b, s + 1].
        sample_numbers: int64 [b].
    """

    text: Tensor
    sample_numbers: Tensor

    @staticmethod
    def of(text: npt.NDArray[np.int64], samples: npt.NDArray[np.int64], device: torch.device) -> HostBatch:
        """A batch that `device` will take."""
        tensors = torch.from_numpy(text), torch.from_numpy(samples)
        if device.type == "cuda":  # only from pinned memory is a copy asynchronous
            return HostBatch(*(tensor.pin_memory() for tensor in tensors))
        return HostBatch(*tensors)

    def to(self, device: torch.device) -> Microbatch:
        """Starts the copy to the device, on the current stream.

        A stream of its own would save the few microseconds in which some hundred kB go over, and cost as much
        in events. torch keeps the pinned memory from others until the copy is done.
        """
        text = self.text.to(device, non_blocking=True)
        return Microbatch(
            tokens=text[:, :-1].contiguous(),
            labels=text[:, 1:].contiguous(),
            sample_numbers=self.sample_numbers.to(device, non_blocking=True),
        )


def read_batch(dataset: Dataset, samples: npt.NDArray[np.int64], device: torch.device) -> HostBatch:
    """Reads samples of a dataset, for any thread to call."""
    return HostBatch.of(gather(dataset, samples), samples, device)


def load_microbatch(dataset: Dataset, samples: npt.NDArray[np.int64], device: torch.device) -> Microbatch:
    """Reads samples of a dataset and starts their copy to the device, on the current stream."""
    return read_batch(dataset, samples, device).to(device)
