"""A pipeline of several ranks computes, bit for bit, what one rank computes microbatch by microbatch."""

import weakref

import pytest
import torch
from torch import nn

from megalite.config import ParallelConfig
from megalite.local_ranks import RankError, run_ranks
from megalite.pipeline.exchange import MAX_PENDING_SENDS
from megalite.pipeline.executor import Pipeline
from megalite.pipeline.schedule import SCHEDULES

WIDTH = 8
SHAPE = (3, WIDTH)
NUM_MICROBATCHES = (1, 2, 5)


class Link(nn.Module):
    """One stage of a chain of linear layers; the last one ends in a loss."""

    def __init__(self, number, num_stages):
        super().__init__()
        self.is_last = number == num_stages - 1
        generator = torch.Generator().manual_seed(number)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64))

    def forward(self, microbatch, hidden):
        x = microbatch if hidden is None else hidden
        x = torch.tanh(x @ self.weight) + x
        return (x - microbatch).square().mean() if self.is_last else x


def load(number):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(100 + number), dtype=torch.float64)


def reference(num_stages, num_microbatches):
    """Losses and each stage's gradient of the composed model, by plain autograd on one rank."""
    links = [Link(number, num_stages) for number in range(num_stages)]
    losses = []
    for number in range(num_microbatches):
        hidden = None
        for link in links:
            hidden = link(load(number), hidden)
        hidden.backward()
        losses.append(hidden.detach())
    return losses, [link.weight.grad for link in links]


def pipeline_of(topology, schedule, link):
    return Pipeline(link, topology.pp, schedule, SHAPE, torch.float64, topology.device)


def run_everything(topology):
    """Losses, gradient and evaluation by schedule and number of microbatches, all by the same ranks."""
    results = {}
    for schedule in SCHEDULES:
        link = Link(topology.pp.rank, topology.pp.size)
        pipeline = pipeline_of(topology, schedule, link)
        for num_microbatches in NUM_MICROBATCHES:
            evaluated = pipeline.evaluate(num_microbatches, load)
            assert link.weight.grad is None
            losses = pipeline.train_step(num_microbatches, load)
            assert not any(loss.requires_grad for loss in losses + evaluated)
            results[schedule, num_microbatches] = losses, link.weight.grad, evaluated
            link.weight.grad = None
    return results


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_same_losses_and_gradients_as_one_rank(num_stages):
    parallel = ParallelConfig(pipeline_model_parallel_size=num_stages)
    by_rank = run_ranks(run_everything, parallel, num_stages)
    for schedule in SCHEDULES:
        for num_microbatches in NUM_MICROBATCHES:
            expected_losses, expected_gradients = reference(num_stages, num_microbatches)
            for rank, results in enumerate(by_rank):
                losses, gradient, evaluated = results[schedule, num_microbatches]
                told = expected_losses if rank == num_stages - 1 else []
                assert torch.equal(gradient, expected_gradients[rank])
                assert [loss.item() for loss in losses] == [loss.item() for loss in told]
                assert [loss.item() for loss in evaluated] == [loss.item() for loss in told]


class Watched:
    """A stage that counts, at each forward, which hidden states live on: its outputs, the last's inputs."""

    def __init__(self, number, num_stages):
        self.link = Link(number, num_stages)
        self.seen = []
        self.most_alive = 0

    def __call__(self, microbatch, hidden):
        output = self.link(microbatch, hidden)
        between = hidden if self.link.is_last else output
        self.seen.append(weakref.ref(between.untyped_storage()))
        self.most_alive = max(self.most_alive, self.num_alive())
        return output

    def num_alive(self):
        return sum(storage() is not None for storage in self.seen)


def count_alive(topology, train):
    stage = Watched(topology.pp.rank, topology.pp.size)
    pipeline = pipeline_of(topology, "gpipe", stage)
    (pipeline.train_step if train else pipeline.evaluate)(30, load)
    return stage.most_alive, stage.num_alive()


@pytest.mark.parametrize("train", [False, True])
def test_what_was_sent_is_let_go(train):
    """Left are the new output, the one before it, and the sends that may be under way."""
    counts = run_ranks(count_alive, ParallelConfig(pipeline_model_parallel_size=3), 3, train)
    *senders, last = (most for most, _ in counts)
    assert [after for _, after in counts] == [0, 0, 0]
    assert max(senders) <= 2 + MAX_PENDING_SENDS
    assert last == 30 if train else last <= 2  # inputs: their gradients are owed until the backward


class Tail:
    """A last stage without layers."""

    def __call__(self, microbatch, hidden):
        return hidden.sum() * microbatch.sum()


class Through:
    """A middle stage without layers: its output is its input."""

    def __call__(self, microbatch, hidden):
        return hidden


def run_empty_stages(topology):
    stage = (Link(0, 3), Through(), Tail())[topology.pp.rank]
    losses = pipeline_of(topology, "1f1b", stage).train_step(2, load)
    return losses or (stage.weight.grad if topology.pp.is_first else None)


def test_stages_without_layers():
    gradient, _, losses = run_ranks(run_empty_stages, ParallelConfig(pipeline_model_parallel_size=3), 3)
    link, tail = Link(0, 3), Tail()
    expected = [tail(load(number), link(load(number), None)) for number in range(2)]
    for loss in expected:
        loss.backward()
    assert torch.equal(gradient, link.weight.grad)
    assert [loss.item() for loss in losses] == [loss.item() for loss in expected]


def give_a_wrong_shape(topology):
    def stage(microbatch, hidden):
        return microbatch[:, :1] if hidden is None else hidden

    pipeline_of(topology, "1f1b", stage).evaluate(1, load)


def test_a_stage_that_gives_another_shape_is_named():
    with pytest.raises(RankError, match=r"a stage gave \(3, 1\), not \(3, 8\)"):
        run_ranks(give_a_wrong_shape, ParallelConfig(pipeline_model_parallel_size=2), 2, timeout=30)
