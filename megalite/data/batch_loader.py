"""Load any microbatch of one rank by its number.

Shapes: b samples of a microbatch, s tokens of a sequence.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megalite.data.document_assignment import assign_documents
from megalite.data.gpt_dataset import Dataset
from megalite.data.microbatch import Microbatch
from megalite.data.samples import Samples
from megalite.distributed.axis import HeldPositions
from megalite.distributed.topology import Topology
from megalite.utils.errors import UserError

NUM_AHEAD = 4
"""Number of microbatches to read ahead."""

ReadMicrobatch = Callable[[npt.NDArray[np.int64], int], Microbatch]
"""Reads the samples with these numbers, each in this many sequences, into host memory."""


def microbatch_samples(
    consumed: int, index: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> npt.NDArray[np.int64]:
    """Return the sample numbers of one microbatch on one data-parallel rank, int64 ``[b]``.

    An iteration takes consecutive blocks of ``b * dp_size`` samples, and each rank takes its slice of each
    block. A global batch is therefore the same set of samples for any dp_size, and resuming only needs the
    number of consumed samples.

    Args:
        consumed: number of samples that the run has consumed before this global batch.
        index: index of the microbatch in the global batch, from 0.
        micro_batch_size: b.
        dp_rank: data-parallel rank.
        dp_size: data-parallel size.
    """
    first = consumed + (index * dp_size + dp_rank) * micro_batch_size
    return np.arange(first, first + micro_batch_size, dtype=np.int64)


def reads_data(topology: Topology, samples: Samples) -> bool:
    """Return whether this rank reads samples: for tokens, for labels, or to find document ends."""
    return topology.pp.is_first or topology.pp.is_last or samples.on_every_stage


class BatchLoader:
    """Loader of microbatch `index` of the global batch that starts at sample `consumed`.

    Only the first stage uses tokens and only the last uses labels. A stage between them gets zeros of the
    same shape, and the sample numbers, which key its dropout. It opens no file, unless its layers must know
    the documents.

    Ranks that hold different positions of the same samples read whole samples, mark their documents and cut
    them then: document ends before a slice determine its documents, and tokens after it are later tokens.
    They do it on the device, or on the host as a part of reading, if each sample's documents are assigned.

    The loader reads ahead in threads: close it, or use it in a ``with`` block.

    Args:
        samples: how the dataset's samples become microbatches.
        num_ahead: number of microbatches to read ahead.
        num_later: number of later tokens to predict besides the next one.
        sequences_per_sample: returns into how many sequences each sample is cut in the global batch that
            starts at a sample.
    """

    def __init__(
        self,
        dataset: Dataset,
        micro_batch_size: int,
        topology: Topology,
        samples: Samples,
        num_ahead: int = NUM_AHEAD,
        num_later: int = 0,
        sequences_per_sample: Callable[[int], int] = lambda _: 1,
    ) -> None:
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.sample_ranks = topology.sample_ranks
        self.positions = topology.positions
        self.device = topology.device
        self.events = topology.events
        self.samples = samples
        self.num_later = num_later
        self.sequences_per_sample = sequences_per_sample
        self.assigner: DocumentAssigner | None = None
        if self.positions.assigns_documents:
            self.assigner = DocumentAssigner(samples, self.positions, num_later)
        stride = micro_batch_size * topology.sample_ranks.size
        self._read = partial(read_microbatch, dataset, topology.device, samples, self.assigner)
        self._prefetcher: Prefetcher | None = None
        if reads_data(topology, samples):
            self._prefetcher = Prefetcher(self._read, len(dataset), stride, topology.device, num_ahead)

    def __call__(self, consumed: int, index: int) -> Microbatch:
        """Load one microbatch to the device.

        Raises:
            UserError: a sample is damaged. `on_one_rank` is set, because other ranks may not have read it.
        """
        read_ahead = None if self._prefetcher is None else self._prefetcher.take
        return self._load(consumed, self._numbers(consumed, index, self.sample_ranks.rank), read_ahead)

    def load_for_replica(self, consumed: int, index: int, replica: int) -> Microbatch:
        """Load a microbatch of another rank of those that read different samples; read nothing ahead."""
        numbers = self._numbers(consumed, index, replica)
        return self._load(consumed, numbers, None if self._prefetcher is None else self._read)

    def _numbers(self, consumed: int, index: int, replica: int) -> npt.NDArray[np.int64]:
        return microbatch_samples(consumed, index, self.micro_batch_size, replica, self.sample_ranks.size)

    def _load(self, consumed: int, numbers: npt.NDArray[np.int64], read: ReadMicrobatch | None) -> Microbatch:
        """Load samples by number to the device; `read` is None on a rank that reads no samples."""
        count = self.sequences_per_sample(consumed)
        if read is None:
            shape = len(numbers), self.samples.seq_length // self.positions.count
            zeros = torch.zeros(shape, dtype=torch.int64)  # not expanded: CUDA cannot pin such a tensor
            microbatch = Microbatch(zeros, zeros, torch.from_numpy(numbers)).in_sequences(count)
            return _on_host(microbatch, self.device).to(self.device)
        try:
            with self.events.during(f"reading data from sample {numbers[0]} on"):
                microbatch = read(numbers, count).to(self.device)
        except UserError as error:
            error.on_one_rank = True
            raise
        if self.assigner is not None:
            return microbatch
        whole = self.samples.marked(microbatch).in_sequences(count).with_later_tokens(self.num_later)
        num_tokens = whole.tokens.shape[1] // self.positions.count
        return whole.cut(self.positions.ranges(num_tokens))

    def close(self, *, waits: bool = True) -> None:
        """End the thread that reads ahead, and free what it has read. A second call does nothing.

        Args:
            waits: wait for the read in progress, which takes long if a file system hangs.
        """
        if self._prefetcher is not None:
            self._prefetcher.close(waits=waits)

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        self.close(waits=error is None)


class Prefetcher:
    """Reader of the microbatches that are likely next, in threads, and of any other on request.

    A rank's next microbatch starts `stride` samples later, even in the next global batch. The result only
    depends on the sample numbers: a wrong guess costs time and changes nothing.
    """

    def __init__(
        self,
        read: ReadMicrobatch,
        num_samples: int,
        stride: int,
        device: torch.device,
        num_ahead: int = NUM_AHEAD,
    ) -> None:
        self._read = read
        self._num_samples = num_samples
        self._num_ahead = num_ahead
        self._stride = stride
        # By the first sample's number, and the sequences of a sample.
        self._reads: OrderedDict[tuple[int, int], Future[Microbatch]] = OrderedDict()
        # The thread must not refer to this object: it would keep the object alive forever.
        # Several threads wait for a store at the same time.
        num_threads = max(1, num_ahead)
        self._pool = ThreadPoolExecutor(num_threads, "prefetch", initializer=_use_device, initargs=(device,))

    def take(self, numbers: npt.NDArray[np.int64], sequences_per_sample: int = 1) -> Microbatch:
        """Return the microbatch of the samples with these numbers, in host memory; see `read_microbatch`."""
        count = sequences_per_sample
        read = self._reads.pop((int(numbers[0]), count), None) or self._pool.submit(
            self._read, numbers, count
        )
        for ahead in range(1, self._num_ahead + 1):
            following = numbers + ahead * self._stride
            key = int(following[0]), count
            if key not in self._reads and int(following[-1]) < self._num_samples:
                self._reads[key] = self._pool.submit(self._read, following, count)
        while len(self._reads) > self._num_ahead:
            self._reads.popitem(last=False)[1].cancel()
        return read.result()

    def close(self, *, waits: bool = True) -> None:
        """Drop what was read ahead and end the threads after the reads in progress."""
        self._reads.clear()
        self._pool.shutdown(wait=waits, cancel_futures=True)


def read_microbatch(
    dataset: Dataset,
    device: torch.device,
    samples: Samples,
    assigner: DocumentAssigner | None,
    numbers: npt.NDArray[np.int64],
    sequences_per_sample: int = 1,
) -> Microbatch:
    """Read samples by number into host memory that `device` can copy from; any thread may call this.

    Args:
        assigner: returns this rank's tokens of the samples; None for whole samples.
        sequences_per_sample: into how many sequences the assigner cuts each sample.

    Raises:
        UserError: a sample is damaged.
    """
    whole = samples.read(dataset, numbers)
    return _on_host(whole if assigner is None else assigner(whole, sequences_per_sample), device)


def _on_host(microbatch: Microbatch, device: torch.device) -> Microbatch:
    return microbatch.pin_memory() if device.type == "cuda" else microbatch


def _use_device(device: torch.device) -> None:
    """Make the rank's GPU current in a new thread: otherwise it would pin memory in GPU 0's context."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


@dataclass(frozen=True)
class DocumentAssigner:
    """Assignment of a rank's tokens of whole samples, on the host, which must know the assignments.

    Attributes:
        samples: mark the documents of a microbatch.
        positions: the rank among those that hold different tokens of the same samples.
        num_later: number of later tokens to predict besides the next one.
    """

    samples: Samples
    positions: HeldPositions
    num_later: int

    def __call__(self, microbatch: Microbatch, sequences_per_sample: int = 1) -> Microbatch:
        """Return the rank's tokens of a microbatch that was read, with all fields of a microbatch."""
        whole = self.samples.marked(microbatch).in_sequences(sequences_per_sample)
        whole = whole.with_later_tokens(self.num_later)
        assert whole.document_ids is not None, "samples have no documents to assign"
        lengths = map(document_lengths, whole.document_ids)
        assignments = tuple(assign_documents(each, self.positions.count) for each in lengths)
        return whole.rank_part(assignments, self.positions.index)


def own_tokens_of(whole: Microbatch, positions: HeldPositions) -> Microbatch:
    """Return a rank's tokens of a microbatch of whole samples, each of which is one document."""
    length = whole.tokens.shape[1]
    if not positions.assigns_documents:
        return whole.cut(positions.ranges(length // positions.count))
    assignment = assign_documents([length], positions.count)
    return whole.rank_part((assignment,) * len(whole.tokens), positions.index)


def document_lengths(document_ids: Tensor) -> list[int]:
    """Return the number of tokens of each document of a sample: of each run of equal ids, int64 ``[s]``."""
    lengths: list[int] = torch.unique_consecutive(document_ids, return_counts=True)[1].tolist()
    return lengths
