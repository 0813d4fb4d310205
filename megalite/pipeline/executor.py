"""Run this rank's part of a pipeline schedule, and exchange hidden states and gradients with other stages."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalite.data.microbatch import LossTerm, Terms, WithTerms, add_terms
from megalite.distributed.axis import Axis
from megalite.distributed.collectives import OverlapSlots
from megalite.pipeline.messages import (
    MAX_OPEN_BATCHES,
    Batch,
    StageMessage,
    Step,
    plan_rank,
)
from megalite.pipeline.schedules import (
    SCHEDULES,
    Action,
    ActionKind,
    Direction,
    ScheduleFunction,
    ScheduleName,
    StageMap,
    actions_by_rank,
)
from megalite.tensor_parallel.gemm import WeightGradient, WeightGradientStore, run_stored
from megalite.utils.errors import UserError

Parcel = tuple[Tensor, int]
"""A tensor to send or to receive into, and the other rank's coordinate along the axis."""

Launched = tuple[list[dist.Work], "dist.Work | None"]
"""The works of a batch's receives, and the work of its send."""


class PointToPoint:
    """Messages of one rank of a pipeline. All tensors of a step have the same shape.

    Args:
        dtype, device: those of the hidden states.
    """

    def __init__(self, pp: Axis, dtype: torch.dtype, device: torch.device) -> None:
        self.pp, self._dtype, self._device = pp, dtype, device
        self._launch = _launch_together if device.type == "cuda" else _launch_each  # by NCCL, and by gloo
        backward = pp.backward_group or pp.group
        self._groups: dict[Direction, dist.ProcessGroup] = {"forward": pp.group, "backward": backward}
        # Sends, oldest first, each with its message and its tensor, which must live until it has been sent.
        self._pending: dict[Direction, deque[tuple[dist.Work, StageMessage, Tensor]]] = defaultdict(deque)
        self._arriving: dict[Action, tuple[dist.Work, Tensor, StageMessage]] = {}  # by its reader

    def start(self, batch: Batch, outgoing: Tensor | None, shape: tuple[int, ...]) -> None:
        """Start a batch without waiting for it.

        Args:
            batch: a batch of this rank's plan; see `plan_rank`.
            outgoing: the tensor to send, if the batch has a send.
        """
        send: Parcel | None = None
        if batch.send:
            self._wait_for_sends(batch.direction, MAX_OPEN_BATCHES - 1)
            assert outgoing is not None
            send = self._checked(outgoing, shape), batch.send.receiver
        receives = [
            (torch.empty(shape, dtype=self._dtype, device=self._device), message.sender)
            for message in batch.receives
        ]
        received, sent = self._launch(self._groups[batch.direction], receives, send)
        for message, work, (tensor, _) in zip(batch.receives, received, receives, strict=True):
            self._arriving[message.reader] = work, tensor, message
        if send and sent:
            assert batch.send is not None
            self._pending[batch.direction].append((sent, batch.send, send[0]))

    def received(self, reader: Action) -> Tensor:
        """Wait for the input of `reader` and return it; an earlier batch has started to receive it."""
        work, tensor, message = self._arriving.pop(reader)
        self._wait(work, f"{message.direction}-recv", reader, message.sender)
        return tensor

    def finish(self) -> None:
        """Wait for every send."""
        for direction in self._groups:
            self._wait_for_sends(direction, 0)

    def _wait_for_sends(self, direction: Direction, num_left: int) -> None:
        pending = self._pending[direction]
        while len(pending) > num_left:
            work, message, _ = pending.popleft()
            self._wait(work, f"{direction}-send", message.reader, message.receiver)

    def _wait(self, work: dist.Work, what: str, reader: Action, peer: int) -> None:
        self.pp.wait_begins(what, reader, self.pp.ranks[peer])
        work.wait()
        self.pp.wait_ends(what, reader, self.pp.ranks[peer])

    def _checked(self, outgoing: Tensor, shape: tuple[int, ...]) -> Tensor:
        # The receiver does not check the size, and a different number of bytes would abort it.
        assert outgoing.shape == shape, f"a stage returned {tuple(outgoing.shape)}, not {shape}"
        assert outgoing.dtype == self._dtype, f"a stage returned {outgoing.dtype}, not {self._dtype}"
        return outgoing.contiguous()


def _launch_together(group: dist.ProcessGroup, receives: Sequence[Parcel], send: Parcel | None) -> Launched:
    """Start all messages as one NCCL operation with one work.

    A single message is also started this way, because NCCL may use different communicators for batches and
    single messages, and the other rank may have the message in a batch.
    """
    operations = [
        dist.P2POp(dist.irecv, tensor, group=group, group_peer=sender) for tensor, sender in receives
    ]
    if send:
        operations.append(dist.P2POp(dist.isend, send[0], group=group, group_peer=send[1]))
    work = dist.batch_isend_irecv(operations)[-1]
    return [work] * len(receives), work if send else None


def _launch_each(group: dist.ProcessGroup, receives: Sequence[Parcel], send: Parcel | None) -> Launched:
    """Start messages one by one, for gloo, which matches sends and receives in any order.

    This calls the methods of the process group, because torch.distributed's functions add slow checks.
    """
    works = [group.recv([tensor], sender, 0) for tensor, sender in receives]
    return works, group.send([send[0]], send[1], 0) if send else None


NO_DIVISORS: Mapping[str, float | Tensor] = {"token": 1.0, "sample": 1.0}
"""Divisors that leave sums as they are."""

M = TypeVar("M")
M_contra = TypeVar("M_contra", contravariant=True)


def divisor_of(name: str, per: str, divisors: Mapping[str, float | Tensor]) -> float | Tensor:
    """Return the number of a term's units, or 1 if there are none.

    Args:
        name: name of the term, for the error.
        per: see `LossTerm`.
        divisors: numbers of units by the name of `LossTerm.per`.

    Raises:
        UserError: the run does not count these units.
    """
    if per in divisors:
        number = divisors[per]
        return number.clamp_min(1.0) if isinstance(number, Tensor) else number
    raise UserError(
        f"the term {name} of the loss is a mean per {per}, and this run counts no {per}s: use per="
        f"{' or '.join(map(repr, divisors))}"
    )


class StageFunction(Protocol[M_contra]):
    """Forward of one pipeline stage on one microbatch."""

    def __call__(self, microbatch: M_contra, hidden: Tensor | None) -> Tensor | WithTerms:
        """Return hidden states for the next stage; the last stage returns the loss. Each may add terms.

        Args:
            hidden: hidden states of the previous stage; None on the first stage.
        """


class InFlight(NamedTuple):
    """Values that a backward needs from its forward, in addition to the autograd graph.

    Input and output are not kept: once the output has been sent, their memory is free unless the graph itself
    saved it.

    Attributes:
        input_gradient: receives the gradient of the input in backward.
        output: root of the backward: the autograd edge of the hidden states; None on the last stage.
        losses: further roots: the terms of the loss, on any stage.
        before_backward: called before the backward, and before each part of one.
    """

    input_gradient: list[Tensor]
    output: GradientEdge | None
    losses: Sequence[Tensor]
    before_backward: Callable[[], None]


class _StageInput(torch.autograd.Function):
    """Input of a stage in the graph, not kept in memory; backward captures its gradient.

    A leaf tensor with a ``.grad`` would stay in memory until backward.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, anchor: Tensor, gradient: list[Tensor]) -> Tensor:
        ctx.gradient = gradient
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.gradient.append(grad)
        return None, None, None


class ScheduleRun(Generic[M]):
    """One training step or evaluation on this rank: its actions and the microbatches in flight.

    If this rank also holds the next stage (at the tip of a V), an output becomes its input without a message
    or a copy.

    Attributes:
        terms: detached terms of the loss, for each microbatch; only terms of this rank's stages. In training
            they are divided: their totals are parts of the summands of the global batch's loss.
    """

    def __init__(
        self,
        chunks: Sequence[StageFunction[M]],
        stages: StageMap,
        exchange: PointToPoint,
        load: Callable[[int], M],
        store: WeightGradientStore,
        divisors: Mapping[str, float | Tensor],
        loss_scale: float,
        before_backward: Callable[[M], None],
    ) -> None:
        self.terms: dict[int, Terms] = {}
        self._chunks = chunks
        self._stages = stages
        self._exchange = exchange
        self._rank = exchange.pp.rank
        self._load = load
        self._store = store
        self._divisors = divisors
        self._loss_scale = loss_scale
        self._before_backward = before_backward
        self._microbatches: dict[int, M] = {}
        self._in_flight: dict[tuple[int, int], InFlight] = {}  # by microbatch and chunk, like the next one
        self._stored: dict[tuple[int, int], tuple[Callable[[], None], list[WeightGradient]]] = {}
        self._local_inputs: dict[Action, Tensor] = {}  # by the action of this rank that reads it

    def __call__(self, action: Action) -> Tensor | None:
        """Run an action, and return its output if another rank reads it."""
        output = _COMPUTE[action.kind](self, action)
        if output is None:
            return None
        reader = self._stages.reader_of(self._rank, action)
        if reader is not None and reader[0] == self._rank:
            self._local_inputs[reader[1]] = output
            return None
        return output

    def _input(self, action: Action) -> Tensor | None:
        """Return the input of an action, from the stage before it in its direction; None if there is none."""
        source = self._stages.source_of(self._rank, action)
        if source is None:
            return None
        if source[0] == self._rank:
            return self._local_inputs.pop(action)
        return self._exchange.received(action)

    def _forward(self, action: Action) -> Tensor | None:
        number, chunk = action.microbatch, action.chunk
        microbatch = self._microbatch(action)  # load it while the hidden states arrive
        hidden = self._input(action)
        training = torch.is_grad_enabled()
        gradient: list[Tensor] = []
        if hidden is not None and training:
            # The anchor requires a gradient, which makes the result a part of the graph.
            anchor = torch.empty(0, device=hidden.device, requires_grad=True)
            hidden = _StageInput.apply(hidden, anchor, gradient)
        result = self._chunks[chunk](microbatch, hidden)
        output, terms, _ = WithTerms.of_last(result) if self._is_last(action) else WithTerms.of(result)
        if training:
            terms = {
                name: LossTerm(term.value(divisor_of(name, term.per, self._divisors)), term.per)
                for name, term in terms.items()
            }
            edge = None if output is None else get_gradient_edge(output)
            losses = [term.total for term in terms.values()]
            before_backward = partial(self._before_backward, microbatch)
            self._in_flight[number, chunk] = InFlight(gradient, edge, losses, before_backward)
        if terms:
            detached = {name: term._replace(total=term.total.detach()) for name, term in terms.items()}
            self.terms[number] = add_terms(self.terms.get(number, {}), detached)
        return None if output is None else output.detach()

    def _microbatch(self, action: Action) -> M:
        """Return the microbatch; it is loaded for this rank's first chunk and kept until the last."""
        if action.chunk == 0:
            self._microbatches[action.microbatch] = self._load(action.microbatch)
        if action.chunk == self._stages.num_chunks - 1:
            return self._microbatches.pop(action.microbatch)
        return self._microbatches[action.microbatch]

    def _backward(self, action: Action) -> Tensor | None:
        in_flight = self._in_flight.pop((action.microbatch, action.chunk))
        input_gradient, output, losses, before_backward = in_flight
        before_backward()
        roots: list[Any] = [*losses]
        gradients = [torch.full_like(loss, self._loss_scale) for loss in losses]
        if output is not None:
            gradient = self._input(action)
            assert gradient is not None
            roots.append(output)
            gradients.append(gradient)
        torch.autograd.backward(roots, gradients)
        return input_gradient.pop() if input_gradient else None

    def _is_last(self, action: Action) -> bool:
        return self._stages.stage_of(self._rank, action.chunk) == self._stages.num_stages - 1

    def _backward_input(self, action: Action) -> Tensor | None:
        before_backward = self._in_flight[action.microbatch, action.chunk].before_backward
        with self._store.collect() as stored:
            gradient = self._backward(action)
        self._stored[action.microbatch, action.chunk] = before_backward, stored
        return gradient

    def _backward_weight(self, action: Action) -> None:
        before_backward, stored = self._stored.pop((action.microbatch, action.chunk))
        before_backward()
        run_stored(stored)


_COMPUTE: Mapping[ActionKind, Callable[[ScheduleRun[Any], Action], Tensor | None]] = {
    ActionKind.FORWARD: ScheduleRun._forward,
    ActionKind.BACKWARD: ScheduleRun._backward,
    ActionKind.BACKWARD_INPUT: ScheduleRun._backward_input,
    ActionKind.BACKWARD_WEIGHT: ScheduleRun._backward_weight,
}
"""By kind. If a run held these as bound methods, it would refer to itself, and keep its microbatches until
the next garbage collection."""


class Pipeline(Generic[M]):
    """This rank's chunks and schedule, and its messages to and from other ranks.

    Every rank of the axis must call the same method with the same number of microbatches. A pipeline of one
    rank runs the same code without messages.

    Attributes:
        stages: maps ranks and chunks to global stages.
    """

    def __init__(
        self,
        chunks: Sequence[StageFunction[M]],
        exchange: PointToPoint,
        schedule: ScheduleName,
        store: WeightGradientStore | None = None,
        overlap_slots: OverlapSlots | None = None,
        before_backward: Callable[[M], None] = lambda _: None,
    ) -> None:
        """Build the pipeline without communication.

        Args:
            chunks: this rank's stages, one for each chunk of the schedule; the same number on every rank.
            exchange: sends hidden states and their gradients along the pipeline axis.
            schedule: a key of SCHEDULES.
            store: collects the weight-gradient GEMMs of the chunks' layers, for a schedule with split
                backward.
            overlap_slots: runs the pairs of actions of a schedule that overlaps them; by default, they run
                one after the other.
            before_backward: called with a microbatch before its backward, and before each part of a split
                one.
        """
        self._chunks = chunks
        self._exchange, self._pp = exchange, exchange.pp
        self._schedule = SCHEDULES[schedule]
        self.stages = self._schedule.stage_map(self._pp.size, len(chunks))
        assert self.stages.num_chunks == len(chunks), (schedule, len(chunks))
        self._store = store or WeightGradientStore()
        self.overlap_slots = overlap_slots
        self._before_backward = before_backward
        self._steps: dict[tuple[ScheduleFunction, int], list[Step]] = {}

    def train_step(
        self,
        num_microbatches: int,
        load: Callable[[int], M],
        hidden_shape: tuple[int, ...],
        *,
        divisors: Mapping[str, float | Tensor] = NO_DIVISORS,
        loss_scale: float = 1.0,
    ) -> list[dict[str, Tensor]]:
        """Run the forward and backward of all microbatches, and accumulate the parameters' gradients.

        Each term of a microbatch's loss is divided by a number of the whole global batch, such as its tokens.
        Sums over microbatches and data-parallel ranks are therefore means.

        Args:
            num_microbatches: any number, even fewer than stages.
            load: returns a microbatch by its number in the step; called once for each, before its forward.
            hidden_shape: shape of one microbatch's hidden states between two stages.
            divisors: number of the global batch's units, by the name of `LossTerm.per`.
            loss_scale: multiplies the gradients, to keep them in fp16's range.

        Returns:
            Detached losses by name, without `loss_scale`, for each microbatch; only the terms of this rank's
            stages, and an empty list if they have none.
        """
        work = self._work(load, divisors, loss_scale)
        found = self._run(work, self._schedule.train, num_microbatches, hidden_shape)
        return [{name: term.total for name, term in terms.items()} for terms in found]

    @torch.no_grad()
    def evaluate(
        self,
        num_microbatches: int,
        load: Callable[[int], M],
        hidden_shape: tuple[int, ...],
    ) -> list[Terms]:
        """Run the forward of all microbatches; memory does not grow with their number.

        Arguments are as in `train_step`.

        Returns:
            The terms of the loss for each microbatch, not divided by anything; only the terms of this rank's
            stages, and an empty list if they have none.
        """
        return self._run(self._work(load), self._schedule.evaluate, num_microbatches, hidden_shape)

    def _work(
        self,
        load: Callable[[int], M],
        divisors: Mapping[str, float | Tensor] = NO_DIVISORS,
        loss_scale: float = 1.0,
    ) -> ScheduleRun[M]:
        return ScheduleRun(
            self._chunks,
            self.stages,
            self._exchange,
            load,
            self._store,
            divisors,
            loss_scale,
            self._before_backward,
        )

    def _run(
        self,
        work: ScheduleRun[M],
        order: ScheduleFunction,
        num_microbatches: int,
        hidden_shape: tuple[int, ...],
    ) -> list[Terms]:
        outgoing: Mapping[Direction, Tensor | None] = {}
        for group in self.stages.groups(self._steps_of(order, num_microbatches)):
            if isinstance(group[0], Batch):
                self._exchange.start(group[0], outgoing.get(group[0].direction), hidden_shape)
            else:
                outgoing = self._compute([step for step in group if isinstance(step, Action)], work)
        self._exchange.finish()
        return [work.terms[microbatch] for microbatch in sorted(work.terms)]

    def _compute(self, actions: Sequence[Action], work: ScheduleRun[M]) -> Mapping[Direction, Tensor | None]:
        """Run an action, or two together, and return the outputs by their directions."""
        if self.overlap_slots is not None and len(actions) == 2:
            with self._observed(*actions):
                outputs = self.overlap_slots.run(*(partial(work, action) for action in actions))
        else:
            outputs = []
            for action in actions:
                with self._observed(action):
                    outputs.append(work(action))
        return dict(zip((action.direction for action in actions), outputs, strict=True))

    @contextmanager
    def _observed(self, *actions: Action) -> Iterator[None]:
        for observer in self._pp.observers:
            for action in actions:
                observer.begins(action)
        yield
        for observer in self._pp.observers:
            for action in reversed(actions):
                observer.ends(action)

    def num_actions(self, num_microbatches: int) -> int:
        """Return the number of actions of this rank in a training step."""
        return len(self._schedule.train(self._pp.rank, self.stages, num_microbatches))

    def _steps_of(self, order: ScheduleFunction, num_microbatches: int) -> list[Step]:
        key = order, num_microbatches
        if key not in self._steps:
            actions = actions_by_rank(order, self.stages, num_microbatches)
            self._steps[key] = plan_rank(self._pp.rank, actions, self.stages)
        return self._steps[key]
