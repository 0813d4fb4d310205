"""The microbatches of one rank, by number, from anywhere in the run."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from megalite.data.batch import HostBatch, Microbatch, read_batch
from megalite.data.build import DatasetSplits
from megalite.data.document_ends import DocumentEnds
from megalite.data.gpt import Dataset
from megalite.data.sampler import microbatch_samples
from megalite.errors import UserError
from megalite.topology import Topology

NUM_AHEAD = 4
"""Microbatches that are read before they are asked for."""

_NO_TEXT = np.empty((0, 1), np.int64)


class BatchLoader:
    """Loads microbatch `index` of the global batch that starts at sample `consumed`.

    Only the first stage reads tokens and only the last reads labels; a stage between them gets the samples'
    numbers alone, which key its dropout, and touches no file, unless its layers must know the documents.

    It reads ahead in a thread: close it, or use it in a ``with`` block, once no more microbatches are needed.

    Args:
        ends: what happens at the ends of documents; None for samples that are taken whole.
    """

    def __init__(
        self,
        dataset: Dataset,
        micro_batch_size: int,
        topology: Topology,
        ends: DocumentEnds | None = None,
    ) -> None:
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.dp = topology.dp
        self.device = topology.device
        stride = micro_batch_size * topology.dp.size
        self.ends = ends
        reads_text = reads_data(topology, ends)
        self._prefetcher = Prefetcher(dataset, stride, topology.device) if reads_text else None

    def __call__(self, consumed: int, index: int) -> Microbatch:
        """Loads one microbatch.

        Raises:
            UserError: a sample is damaged; other ranks may not have met it, and the error knows.
        """
        samples = microbatch_samples(consumed, index, self.micro_batch_size, self.dp.rank, self.dp.size)
        if self._prefetcher is None:
            return HostBatch.of(_NO_TEXT, samples, self.device).to(self.device)
        try:
            microbatch = self._prefetcher.take(samples).to(self.device)
        except UserError as error:
            error.on_one_rank = True
            raise
        return microbatch if self.ends is None else self.ends.marked(microbatch)

    def close(self, *, waits: bool = True) -> None:
        """End the thread that reads ahead and free what it has read; a second call does nothing.

        Args:
            waits: for the read that is under way, which takes long where a file system hangs.
        """
        if self._prefetcher is not None:
            self._prefetcher.close(waits=waits)

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(waits=error is None)


def reads_data(topology: Topology, ends: DocumentEnds | None = None) -> bool:
    """Whether this rank reads samples: for their tokens or labels, or for where their documents end."""
    at_edge = topology.pp.is_first or topology.pp.is_last
    return at_edge or (ends is not None and ends.on_every_stage)


class UnreadDataset:
    """How many samples a dataset of other ranks holds: all that a stage which reads none must know of it."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        raise AssertionError("a stage that reads no data was asked for a sample")


def datasets_on_every_stage(datasets: DatasetSplits | None, topology: Topology) -> DatasetSplits:
    """Tells the stages that open no file which datasets the others have, so that all evaluate alike.

    Args:
        datasets: None on those stages.
    """
    if topology.pp.size <= 2:
        assert datasets is not None
        return datasets
    told = [None if datasets is None else _unread(datasets)]
    dist.broadcast_object_list(told, src=0)  # rank 0 is of the first stage
    assert told[0] is not None
    return told[0] if datasets is None else datasets


def _unread(datasets: DatasetSplits) -> DatasetSplits:
    """Every dataset by its length alone."""

    def unread(dataset: Dataset | None) -> UnreadDataset | None:
        return None if dataset is None else UnreadDataset(len(dataset))

    named = tuple(each._replace(dataset=UnreadDataset(len(each.dataset))) for each in datasets.named)
    return DatasetSplits(unread(datasets.train), unread(datasets.valid), unread(datasets.test), named)


class Prefetcher:
    """Reads the microbatches that are likely next in a thread, and any other one when it is asked for.

    A rank's next microbatch is `stride` samples on, from one global batch into the next too. What is read
    depends on the samples' numbers alone: a guess that fails costs time and changes nothing.
    """

    def __init__(self, dataset: Dataset, stride: int, device: torch.device) -> None:
        self._dataset = dataset
        self._stride = stride
        self._device = device
        self._reads: OrderedDict[int, Future[HostBatch]] = OrderedDict()  # by the first sample's number
        # The thread must not refer to this object: an object that its own thread keeps alive is never freed.
        self._pool = ThreadPoolExecutor(1, "prefetch", initializer=_use_device, initargs=(device,))

    def take(self, samples: npt.NDArray[np.int64]) -> HostBatch:
        """The batch of these samples.

        Raises:
            UserError: a sample is damaged.
        """
        read = self._reads.pop(int(samples[0]), None) or self._start(samples)
        for ahead in range(1, NUM_AHEAD + 1):
            following = samples + ahead * self._stride
            if int(following[0]) not in self._reads and int(following[-1]) < len(self._dataset):
                self._reads[int(following[0])] = self._start(following)
        while len(self._reads) > NUM_AHEAD:
            self._reads.popitem(last=False)[1].cancel()
        return read.result()

    def _start(self, samples: npt.NDArray[np.int64]) -> Future[HostBatch]:
        return self._pool.submit(read_batch, self._dataset, samples, self._device)

    def close(self, *, waits: bool = True) -> None:
        """Drop what was read ahead and end the thread after the read that is under way."""
        self._reads.clear()
        self._pool.shutdown(wait=waits, cancel_futures=True)


def _use_device(device: torch.device) -> None:
    """Make the rank's GPU current in a new thread, which would else pin memory through GPU 0's context."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
