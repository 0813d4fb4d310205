"""Microbatches: their samples, what they hold, and reading them ahead."""

from __future__ import annotations

import dataclasses
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from megalite.config import ParallelConfig
from megalite.data.batch_loader import (
    NUM_AHEAD,
    BatchLoader,
    Prefetcher,
    microbatch_samples,
    read_microbatch,
    reads_data,
)
from megalite.data.build_datasets import DatasetSplits, NamedDataset
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.microbatch import Microbatch
from megalite.data.samples import DocumentEnds, GPTSamples
from megalite.distributed.topology import Topology
from megalite.train.run_context import UnreadDataset, datasets_on_every_stage
from megalite.utils.errors import UserError

PLAIN = GPTSamples(8, seed=1)
CPU = torch.device("cpu")


class Recorder:
    """Sample i is i ten times over; sample `bad` is damaged."""

    def __init__(self, size: int, bad: int = -1) -> None:
        self.size, self.bad = size, bad
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> np.ndarray:
        if index == self.bad:
            raise UserError(f"sample {index} is damaged")
        if index >= self.size:
            raise IndexError(index)
        self.read.append(index)
        return np.full(10, index)


def test_what_is_read_ahead_is_what_is_asked_for() -> None:
    with Topology.fake(ParallelConfig().mesh, 3, 1, device="cpu") as topology:
        dataset = Recorder(48)
        load = BatchLoader(dataset, 2, topology, PLAIN)
        for consumed in (0, 12, 24, 36):
            for index in range(2):
                first = consumed + (index * 3 + 1) * 2
                batch = load(consumed, index)
                assert batch.tokens[:, 0].tolist() == batch.sample_numbers.tolist() == [first, first + 1]
                assert batch.labels.shape == (2, 9)
    assert sorted(dataset.read) == [s for s in range(48) if s // 2 % 3 == 1]  # each once, none of other ranks


@pytest.mark.parametrize("order", [[3, 2, 1, 0], [0, 1, 0, 1, 2, 3], [5, 0, 5, 0, 11]])
def test_any_order_gives_the_same(order: list[int]) -> None:
    recorder = Recorder(24)
    prefetcher = Prefetcher(partial(read_microbatch, recorder, CPU, PLAIN, None), len(recorder), 2, CPU)
    for index in order:
        samples = np.arange(2 * index, 2 * index + 2)
        batch = prefetcher.take(samples)
        assert batch.tokens[:, 0].tolist() == batch.sample_numbers.tolist() == samples.tolist()
        assert len(prefetcher._reads) <= NUM_AHEAD


def test_a_damaged_sample_is_an_error_when_it_is_asked_for() -> None:
    with Topology.fake(ParallelConfig().mesh, 1, 0, device="cpu") as topology:
        load = BatchLoader(Recorder(8, bad=3), 1, topology, PLAIN)
        for index in range(3):
            load(0, index)
        with pytest.raises(UserError, match="sample 3 is damaged") as caught:
            load(0, 3)
        assert caught.value.on_one_rank
        assert load(0, 4).sample_numbers.tolist() == [4]


def _readers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("prefetch")}


def test_a_closed_loader_leaves_no_thread() -> None:
    others = _readers()
    with Topology.fake(ParallelConfig().mesh, 1, 0, device="cpu") as topology:
        with BatchLoader(Recorder(24), 2, topology, PLAIN) as load:
            load(0, 0)
            assert 1 <= len(_readers() - others) <= NUM_AHEAD
        assert _readers() <= others
        load.close()  # once more does nothing


def test_a_loader_that_an_error_closes_leaves_no_thread() -> None:
    """It does not wait for the read that is under way, which may hang as the error's cause does."""
    others, readers = _readers(), set[threading.Thread]()

    def fail() -> None:
        with (
            Topology.fake(ParallelConfig().mesh, 1, 0, device="cpu") as topology,
            BatchLoader(Recorder(24), 2, topology, PLAIN) as load,
        ):
            load(0, 0)
            readers.update(_readers() - others)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert readers
    for reader in readers:
        reader.join(60.0)
        assert not reader.is_alive()


def test_a_loader_that_nobody_closes_ends_with_its_last_reference() -> None:
    others = _readers()
    with Topology.fake(ParallelConfig().mesh, 1, 0, device="cpu") as topology:
        load = BatchLoader(Recorder(24), 2, topology, PLAIN)
        load(0, 0)
        readers = _readers() - others
        assert readers
        del load
        for reader in readers:
            reader.join(60.0)
            assert not reader.is_alive()


def test_middle_stages_read_nothing() -> None:
    parallel = ParallelConfig(pipeline_model_parallel_size=3)
    with Topology.fake(parallel.mesh, 3, 1, device="cpu") as topology:
        dataset: Any = UnreadDataset(8)
        batch = BatchLoader(dataset, 2, topology, PLAIN)(4, 1)
        assert (
            batch.tokens.shape == batch.labels.shape == (2, PLAIN.seq_length)
        )  # attention asks for the length
        assert batch.tokens.is_contiguous()  # CUDA does not pin expanded memory
        assert batch.sample_numbers.tolist() == [6, 7]


@pytest.mark.parametrize("on_every_stage", [False, True])
def test_middle_stages_read_documents_where_layers_need_them(on_every_stage: bool) -> None:
    ends = DocumentEnds(5, True, True, True, on_every_stage)
    samples = GPTSamples(8, seed=1, ends=ends)
    parallel = ParallelConfig(pipeline_model_parallel_size=3)
    with Topology.fake(parallel.mesh, 3, 1, device="cpu") as topology:
        assert reads_data(topology, samples) == on_every_stage
        batch = BatchLoader(Recorder(8), 2, topology, samples)(4, 0)
    assert batch.sample_numbers.tolist() == [4, 5]
    if on_every_stage:
        assert batch.document_ids is not None and batch.position_ids is not None
        assert batch.document_ids.tolist() == [[0] * 9, list(range(9))]  # sample 5 is ends of documents alone
        assert batch.position_ids.tolist() == [list(range(9)), [0] * 9]
    else:
        assert batch.document_ids is None and batch.position_ids is None


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_gpu_takes_is_pinned_and_not_waited_for(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every stage: a copy from memory that is not pinned waits for all that the GPU has to do."""
    pinned: list[int] = []
    sent: list[tuple[bool, bool]] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.data_ptr())
        return tensor

    def send(tensor: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
        assert device.type == "cuda"
        sent.append((tensor.data_ptr() in pinned, non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", send)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    with Topology.fake(
        ParallelConfig(pipeline_model_parallel_size=3).mesh, 3, rank, device="cpu"
    ) as topology:
        on_gpu = dataclasses.replace(topology, device=torch.device("cuda"))
        BatchLoader(Recorder(8), 2, on_gpu, PLAIN)(0, 0)
    assert sent == [(True, True)] * 3  # tokens, labels, sample numbers


def test_middle_stages_learn_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = ParallelConfig(pipeline_model_parallel_size=3)
    sent: list[Any] = []
    splits = DatasetSplits(Recorder(8), None, Recorder(3), (NamedDataset("valid", "law", Recorder(5)),))
    with Topology.fake(parallel.mesh, 3, 0, device="cpu") as topology:
        monkeypatch.setattr("torch.distributed.broadcast_object_list", lambda told, *_: sent.extend(told))
        assert datasets_on_every_stage(splits, topology) is splits
    with Topology.fake(parallel.mesh, 3, 1, device="cpu") as topology:
        monkeypatch.setattr(
            "torch.distributed.broadcast_object_list", lambda told, *_: told.__setitem__(0, sent[0])
        )
        told = datasets_on_every_stage(None, topology)
    assert list(told.sizes()) == list(splits.sizes()) == [("train", 8), ("test", 3), ("valid law", 5)]


def test_microbatch(write_dataset: Any) -> None:
    dataset = GPTDataset(IndexedDataset(write_dataset([50, 60])), range(2), 12, 8, seed=1)
    samples = microbatch_samples(6, 0, 3, 0, 1)
    batch = read_microbatch(dataset, torch.device("cpu"), GPTSamples(8, seed=1), None, samples)
    assert batch.tokens.shape == batch.labels.shape == (3, 8)
    assert batch.tokens.dtype == batch.labels.dtype == batch.sample_numbers.dtype == torch.int64
    assert batch.tokens.is_contiguous() and batch.labels.is_contiguous()
    assert batch.sample_numbers.tolist() == [6, 7, 8]
    for row, number in enumerate([6, 7, 8]):
        assert batch.tokens[row].tolist() == dataset[number][:-1].tolist()
        assert batch.labels[row].tolist() == dataset[number][1:].tolist()


def step(consumed: int, global_batch: int, micro: int, dp: int) -> list[int]:
    """All samples of a global batch, in the order of microbatches and ranks."""
    return [
        int(sample)
        for index in range(global_batch // (micro * dp))
        for rank in range(dp)
        for sample in microbatch_samples(consumed, index, micro, rank, dp)
    ]


@pytest.mark.parametrize("dp", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("micro", [1, 2, 4])
def test_a_step_takes_the_next_samples_for_any_layout(dp: int, micro: int) -> None:
    assert step(2**33, 48, micro, dp) == list(range(2**33, 2**33 + 48))


def test_blocks_and_slices() -> None:
    assert microbatch_samples(100, 1, 2, 1, 3).tolist() == [108, 109]
    assert microbatch_samples(2**40, 0, 4, 0, 1).dtype == np.int64


def test_a_slice_of_a_microbatch() -> None:
    tokens, numbers = torch.arange(12).view(2, 6), torch.tensor([4, 5])
    whole = Microbatch(tokens, tokens + 1, numbers, document_ids=tokens // 4, loss_mask=tokens > 3)
    part = whole.cut([range(2, 4)])
    assert part.tokens.tolist() == [[2, 3], [8, 9]]
    assert part.labels.tolist() == [[3, 4], [9, 10]]
    assert part.loss_mask is not None and part.loss_mask.tolist() == [[False, False], [True, True]]
    assert part.document_ids is whole.document_ids and part.sample_numbers is numbers
    assert part.position_ids is None
    assert whole.cut([range(6)]) is whole


_RUNS = {
    False: ([range(4)], [range(4, 8)]),
    True: ([range(2), range(6, 8)], [range(2, 4), range(4, 6)]),
}


@pytest.mark.parametrize("is_zigzag", [False, True])
def test_a_slice_has_the_selected_positions_of_its_tokens(is_zigzag: bool) -> None:
    """They come first, and the others have no loss."""
    tokens = torch.arange(16).view(2, 8)
    positions, has_loss = torch.tensor([[0, 5, 6], [4, 1, 3]]), torch.tensor([[1, 1, 1], [1, 0, 1]]).bool()
    whole = Microbatch(
        tokens,
        tokens.gather(1, positions),
        torch.arange(2),
        loss_mask=has_loss,
        label_positions=positions,
        order_labels=torch.tensor([1, 0]),
    )
    found = set()
    for runs in _RUNS[is_zigzag]:
        part = whole.cut(runs)
        assert part.label_positions is not None and part.loss_mask is not None
        assert part.order_labels is whole.order_labels
        predicted = part.tokens.gather(1, part.label_positions)
        assert torch.equal(predicted[part.loss_mask], part.labels[part.loss_mask])
        found |= {int(label) for label in part.labels[part.loss_mask]}
    assert found == {0, 5, 6, 12, 11}
