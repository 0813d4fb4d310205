"""A pipeline of several ranks computes, bit for bit, what one rank computes microbatch by microbatch."""

import weakref

import pytest
import torch
from torch import nn

from megalite.config import ParallelConfig
from megalite.data.microbatch import LossTerm, WithTerms
from megalite.distributed.axis import observing
from megalite.distributed.local_ranks import RankError
from megalite.pipeline.executor import Pipeline, PointToPoint
from megalite.pipeline.messages import MAX_OPEN_BATCHES
from megalite.pipeline.schedules import SCHEDULES, Action, ActionKind, peak_in_flight
from megalite.tensor_parallel.gemm import WeightGradientStore
from megalite.utils.errors import UserError
from tests.live_ranks import run_ranks

WIDTH = 8
SHAPE = (3, WIDTH)
NUM_MICROBATCHES = (1, 2, 5)


class Product(torch.autograd.Function):
    """x @ weight, whose weight gradient goes to the store, as the model's linear layers have it."""

    @staticmethod
    def forward(ctx, x, weight, parameter, store):
        ctx.save_for_backward(x, weight)
        ctx.parameter, ctx.store = parameter, store
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        ctx.store.put(ctx.parameter, lambda: x.t() @ gradient)
        return gradient @ weight.t(), None, None, None


class Link(nn.Module):
    """One stage of a chain of linear layers; the last one ends in a loss."""

    def __init__(self, number, num_stages, store=None):
        super().__init__()
        self.number = number
        self.is_last = number == num_stages - 1
        self.store = store
        generator = torch.Generator().manual_seed(number)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, microbatch, hidden):
        x = (microbatch if hidden is None else hidden) * self.scale
        if self.store is not None:
            product = Product.apply(x, self.weight.detach(), self.weight, self.store)
        else:
            product = x @ self.weight
        x = torch.tanh(product) + x
        return (x - microbatch).square().mean() if self.is_last else x


def load(number):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(100 + number), dtype=torch.float64)


def reference(num_stages, num_microbatches):
    """Losses and each stage's gradients of the composed model, by plain autograd on one rank."""
    links = [Link(number, num_stages) for number in range(num_stages)]
    losses = []
    for number in range(num_microbatches):
        hidden = None
        for link in links:
            hidden = link(load(number), hidden)
        hidden.backward()
        losses.append(hidden.detach())
    return losses, [(link.weight.grad, link.scale.grad) for link in links]


def stage_map(schedule, num_ranks):
    return SCHEDULES[schedule].stage_map(num_ranks, 3)


def pipeline_of(topology, schedule, chunks, store=None):
    exchange = PointToPoint(topology.pp, torch.float64, topology.device)
    return Pipeline(chunks, exchange, schedule, store)


def build(topology, schedule, make=Link):
    """This rank's chunks of a chain, and the pipeline that runs them."""
    stages = stage_map(schedule, topology.pp.size)
    store = WeightGradientStore() if SCHEDULES[schedule].splits_backward else None
    chunks = [make(stage, stages.num_stages, store) for stage in stages.stages_of(topology.pp.rank)]
    return chunks, pipeline_of(topology, schedule, chunks, store)


def run_everything(topology):
    """Losses, gradients and evaluation by schedule and number of microbatches, all by the same ranks."""
    results = {}
    for schedule in SCHEDULES:
        links, pipeline = build(topology, schedule)
        for num_microbatches in NUM_MICROBATCHES:
            evaluated = pipeline.evaluate(num_microbatches, load, SHAPE)
            assert all(link.weight.grad is None for link in links)
            losses = pipeline.train_step(num_microbatches, load, SHAPE)
            evaluated = [{name: term.total for name, term in terms.items()} for terms in evaluated]
            assert not any(loss.requires_grad for terms in losses + evaluated for loss in terms.values())
            gradients = [(link.weight.grad, link.scale.grad) for link in links]
            results[schedule, num_microbatches] = losses, gradients, evaluated
            for link in links:
                link.weight.grad = link.scale.grad = None
    return results


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_same_losses_and_gradients_as_one_rank(num_ranks):
    parallel = ParallelConfig(pipeline_model_parallel_size=num_ranks)
    by_rank = run_ranks(run_everything, parallel.mesh, num_ranks)
    for schedule in SCHEDULES:
        stages = stage_map(schedule, num_ranks)
        for num_microbatches in NUM_MICROBATCHES:
            expected_losses, expected = reference(stages.num_stages, num_microbatches)
            for rank, results in enumerate(by_rank):
                losses, gradients, evaluated = results[schedule, num_microbatches]
                holds_last = stages.num_stages - 1 in stages.stages_of(rank)
                told = [{"lm_loss": loss} for loss in expected_losses] if holds_last else []
                for stage, pair in zip(stages.stages_of(rank), gradients, strict=True):
                    assert all(torch.equal(a, b) for a, b in zip(pair, expected[stage], strict=True))
                assert losses == told
                assert evaluated == told


class Watched:
    """A stage that counts, at each forward, which hidden states live on: its outputs, the last's inputs."""

    def __init__(self, number, num_stages, store):
        self.link = Link(number, num_stages, store)
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


def count_alive(topology, schedule, train):
    chunks, pipeline = build(topology, schedule, Watched)
    (pipeline.train_step if train else pipeline.evaluate)(30, load, SHAPE)
    return [chunk.most_alive for chunk in chunks], sum(chunk.num_alive() for chunk in chunks)


@pytest.mark.parametrize("train", [False, True])
def test_what_was_sent_is_let_go(train):
    """Left are the new output, the one before it, and the sends that may be under way."""
    counts = run_ranks(count_alive, ParallelConfig(pipeline_model_parallel_size=3).mesh, 3, "gpipe", train)
    *senders, (last,) = (most for most, _ in counts)
    assert [after for _, after in counts] == [0, 0, 0]
    assert max(most for (most,) in senders) <= 2 + MAX_OPEN_BATCHES
    # The last stage's inputs: their gradients are owed until the backward.
    assert last == 30 if train else last <= 2 + MAX_OPEN_BATCHES


class Holding(torch.autograd.Function):
    """Counts the forwards whose backward, its weights' part too, is still to come."""

    @staticmethod
    def forward(ctx, x, link, tracker):
        ctx.link, ctx.tracker = link, tracker
        tracker.now += 1
        tracker.most = max(tracker.most, tracker.now)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.link.store is not None:
            ctx.link.store.put(ctx.link.weight, lambda tracker=ctx.tracker, link=ctx.link: tracker.done(link))
        else:
            ctx.tracker.now -= 1
        return gradient, None, None


class Tracker:
    now = most = 0

    def done(self, link):
        self.now -= 1
        return torch.zeros_like(link.weight)


def peak_of_rank(topology, schedule, num_microbatches):
    tracker = Tracker()

    class Tracked(Link):
        def forward(self, microbatch, hidden):
            if hidden is None:
                hidden = microbatch.clone().requires_grad_()
            return super().forward(microbatch, Holding.apply(hidden, self, tracker))

    _, pipeline = build(topology, schedule, Tracked)
    pipeline.train_step(num_microbatches, load, SHAPE)
    assert tracker.now == 0
    return tracker.most


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_activations_in_flight_are_the_simulators(schedule):
    peaks = run_ranks(peak_of_rank, ParallelConfig(pipeline_model_parallel_size=2).mesh, 2, schedule, 7)
    stages = stage_map(schedule, 2)
    assert peaks == [peak_in_flight(SCHEDULES[schedule].train(rank, stages, 7)) for rank in range(2)]


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
    losses = pipeline_of(topology, "1f1b", [stage]).train_step(2, load, SHAPE)
    return losses or (stage.weight.grad if topology.pp.is_first else None)


def test_stages_without_layers():
    gradient, _, losses = run_ranks(run_empty_stages, ParallelConfig(pipeline_model_parallel_size=3).mesh, 3)
    link, tail = Link(0, 3), Tail()
    expected = [tail(load(number), link(load(number), None)) for number in range(2)]
    for loss in expected:
        loss.backward()
    assert torch.equal(gradient, link.weight.grad)
    assert losses == [{"lm_loss": loss} for loss in expected]


class Adding(Link):
    """A stage that adds a term to the loss; it has the name of its number's parity."""

    def forward(self, microbatch, hidden):
        output = super().forward(microbatch, hidden)
        if self.is_last:
            return output
        term = LossTerm(output.square().sum(), "sample", scale=0.25)
        return WithTerms(output, {f"{self.number % 2}_loss": term})


def run_terms(topology):
    results = {}
    for schedule in SCHEDULES:
        links, pipeline = build(topology, schedule, Adding)
        evaluated = [
            {name: term.value(DIVISORS[term.per]) for name, term in terms.items()}
            for terms in pipeline.evaluate(2, load, SHAPE)
        ]
        losses = pipeline.train_step(2, load, SHAPE, divisors=DIVISORS, loss_scale=16.0)
        results[schedule] = evaluated, losses, [link.weight.grad for link in links]
    return results


DIVISORS = {"token": 2.0, "sample": 8.0}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_any_stage_may_add_a_term_of_the_loss(num_ranks):
    by_rank = run_ranks(run_terms, ParallelConfig(pipeline_model_parallel_size=num_ranks).mesh, num_ranks)
    for schedule in SCHEDULES:
        stages = stage_map(schedule, num_ranks)
        links = [Link(number, stages.num_stages) for number in range(stages.num_stages)]
        expected = []
        for number in range(2):
            hidden, terms = None, {"0_loss": 0.0, "1_loss": 0.0}
            for link in links[:-1]:
                hidden = link(load(number), hidden)
                terms[f"{link.number % 2}_loss"] += hidden.square().sum() * 0.25 / 8.0
            terms["lm_loss"] = links[-1](load(number), hidden) / 2.0
            (16.0 * sum(terms.values())).backward()
            expected.append({each: torch.as_tensor(term).item() for each, term in terms.items()})
        evaluated, trained = ([dict.fromkeys(terms, 0.0) for terms in expected] for _ in range(2))
        for rank, results in enumerate(by_rank):
            *of_runs, gradients = results[schedule]
            for found, losses in zip((evaluated, trained), of_runs, strict=True):
                for terms, own in zip(found, losses, strict=False):  # no loss of a rank without terms
                    for each, term in own.items():
                        terms[each] += term.item()
            for stage, gradient in zip(stages.stages_of(rank), gradients, strict=True):
                torch.testing.assert_close(gradient, links[stage].weight.grad, rtol=1e-12, atol=1e-14)
        assert evaluated == trained == [pytest.approx(terms, rel=1e-12) for terms in expected]


def test_a_term_per_something_unknown(one_rank):
    stage = lambda microbatch, hidden: WithTerms(None, {"a_loss": LossTerm(microbatch.sum(), "word")})  # noqa: E731
    message = r"the term a_loss of the loss is a mean per word, and this run counts no words: use per='token'"
    with pytest.raises(UserError, match=message):
        pipeline_of(one_rank, "1f1b", [stage]).train_step(1, load, SHAPE)


class Turning:
    """A stage on either side of the turn; notes where the hidden states lie that it gives and gets."""

    def __init__(self, addresses, link):
        self.addresses, self.link = addresses, link

    def __call__(self, microbatch, hidden):
        if hidden is not None:
            self.addresses.append(hidden.data_ptr())
        output = self.link(microbatch, hidden)
        self.addresses.append(output.data_ptr())
        return output


def test_what_stays_on_a_rank_is_not_copied(one_rank):
    addresses = []
    chunks = [Turning(addresses, Link(stage, 2)) for stage in range(2)]
    pipeline_of(one_rank, "zb-v", chunks, WeightGradientStore()).evaluate(1, load, SHAPE)
    given, taken, _ = addresses
    assert given == taken


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_the_loss_is_a_mean_over_tokens_and_its_gradient_is_scaled(one_rank, schedule):
    (plain,), ((weight_grad, scale_grad),) = reference(1, 1)
    store = WeightGradientStore() if schedule == "zb-h1" else None
    link = Link(0, 1, store)
    (losses,) = pipeline_of(one_rank, schedule, [link], store).train_step(
        1, load, SHAPE, divisors={"token": 4.0}, loss_scale=8.0
    )
    assert losses == {"lm_loss": plain / 4}
    torch.testing.assert_close(link.weight.grad, 2 * weight_grad, rtol=1e-12, atol=0)
    torch.testing.assert_close(link.scale.grad, 2 * scale_grad, rtol=1e-12, atol=0)
    (evaluated,) = pipeline_of(one_rank, schedule, [link], store).evaluate(1, load, SHAPE)
    assert evaluated == {"lm_loss": LossTerm(plain)}


class Notes:
    def __init__(self):
        self.begun, self.ended = [], []

    def begins(self, what):
        self.begun += [what] if isinstance(what, Action) else []

    def ends(self, what):
        self.ended += [what] if isinstance(what, Action) else []


def observe(topology):
    _, pipeline = build(topology, "zb-h1")
    notes = Notes()
    with observing(topology.observers, notes):
        pipeline.evaluate(3, load, SHAPE)
        pipeline.train_step(3, load, SHAPE)
    return notes.begun, notes.ended


def test_an_observer_sees_each_action_of_an_evaluation_and_of_a_training_step():
    stages = stage_map("zb-h1", 2)
    observed = run_ranks(observe, ParallelConfig(pipeline_model_parallel_size=2).mesh, 2)
    for rank, (begun, ended) in enumerate(observed):
        schedule = SCHEDULES["zb-h1"]
        assert begun == ended == schedule.evaluate(rank, stages, 3) + schedule.train(rank, stages, 3)
        assert {action.kind for action in begun} == set(ActionKind) - {ActionKind.BACKWARD}


def give_a_wrong_shape(topology):
    def stage(microbatch, hidden):
        return microbatch[:, :1] if hidden is None else hidden

    pipeline_of(topology, "1f1b", [stage]).evaluate(1, load, SHAPE)


def test_a_stage_that_gives_another_shape_is_named():
    with pytest.raises(RankError, match=r"a stage returned \(3, 1\), not \(3, 8\)"):
        run_ranks(give_a_wrong_shape, ParallelConfig(pipeline_model_parallel_size=2).mesh, 2)
