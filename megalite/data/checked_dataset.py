"""Check each sample of a program's own dataset when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megalite.data.gpt_dataset import Dataset
from megalite.utils.errors import UserError, kind_of


class CheckedDataset:
    """Samples of a dataset, unchanged; samples that the model cannot read are refused.

    Args:
        name: name of the dataset, for messages.
        lengths: length of each field of a sample; the key is empty if a sample is one array.
        vocab_size: tokens and labels must be smaller than this.
    """

    def __init__(self, dataset: Dataset, name: str, lengths: Mapping[str, int], vocab_size: int) -> None:
        self._dataset = dataset
        self._name = name
        self._lengths = lengths
        self._vocab_size = vocab_size
        # Values are smaller than these; None for bools.
        self._limits = {"loss_mask": None, "is_real": None, "position_ids": max(lengths.values())}

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        """Return a sample.

        Raises:
            UserError: it has other fields, lengths or dtypes than the run's samples, or a value out of range.
        """
        sample = self._dataset[index]
        if "" in self._lengths:
            self._check(index, "", sample)
            return sample
        if not isinstance(sample, Mapping) or not self._lengths.keys() <= sample.keys():
            has = (
                f"the fields {', '.join(map(str, sample))}"
                if isinstance(sample, Mapping)
                else kind_of(sample)
            )
            raise UserError(f"{self._of(index)} is {has}: it needs the fields {', '.join(self._lengths)}")
        for field in self._lengths:
            self._check(index, field, sample[field])
        return sample

    def _check(self, index: int, field: str, values: Any) -> None:
        array = np.asarray(values)
        limit = self._limits.get(field, self._vocab_size)
        wanted = np.bool_ if limit is None else np.int64
        length = self._lengths[field]
        if array.shape != (length,) or array.dtype != wanted:
            more = "" if field else ", one token more than --seq-length"
            raise UserError(
                f"{self._of(index, field)} has shape {list(array.shape)} in {array.dtype}: it needs shape "
                f"[{length}] in {np.dtype(wanted)}{more}"
            )
        if limit is None:
            return
        smallest, largest = int(array.min()), int(array.max())
        if smallest < 0 or largest >= limit:
            more = "make the dataset for this model, or change the model's size"
            if field == "labels" and smallest < 0:
                more = "set labels without a loss to any token id, and loss_mask to False there"
            what = "positions" if field == "position_ids" else "token ids"
            size = f"--seq-length is {limit}" if field == "position_ids" else f"the vocabulary has {limit}"
            raise UserError(
                f"{self._of(index, field)} has {what} from {smallest} to {largest}, and {size}: {more}"
            )

    def _of(self, index: int, field: str = "") -> str:
        return f"{field} of sample {index} of the {self._name} dataset".removeprefix(" of ")
