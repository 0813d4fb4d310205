"""The microbatches of one rank, by number, from anywhere in the run."""

from __future__ import annotations

import torch

from megalite.data.batch import Microbatch, load_microbatch
from megalite.data.gpt import Dataset
from megalite.data.sampler import microbatch_samples
from megalite.errors import UserError
from megalite.topology import Topology


class BatchLoader:
    """Loads microbatch `index` of the global batch that starts at sample `consumed`.

    Only the first stage reads tokens and only the last reads labels; a stage between them gets the samples'
    numbers alone, which key its dropout, and touches no file.
    """

    def __init__(self, dataset: Dataset, micro_batch_size: int, topology: Topology) -> None:
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.dp = topology.dp
        self.device = topology.device
        self.reads_text = topology.pp.is_first or topology.pp.is_last

    def __call__(self, consumed: int, index: int) -> Microbatch:
        """Loads one microbatch.

        Raises:
            UserError: a sample is damaged; other ranks may not have met it, and the error knows.
        """
        samples = microbatch_samples(consumed, index, self.micro_batch_size, self.dp.rank, self.dp.size)
        if not self.reads_text:
            none = torch.empty(0, dtype=torch.int64)
            return Microbatch(none, none, torch.from_numpy(samples).to(self.device))
        try:
            return load_microbatch(self.dataset, samples, self.device)
        except UserError as error:
            error.on_one_rank = True
            raise
