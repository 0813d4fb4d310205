"""Run this rank's part of a pipeline schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalite.distributed.observer import Observer
from megalite.distributed.topology import Axis
from megalite.pipeline.messages import Batch, Step, plan_rank, reader_of, source_of
from megalite.pipeline.point_to_point import PointToPoint
from megalite.pipeline.schedules import (
    SCHEDULES,
    Action,
    ActionKind,
    ScheduleFunction,
    ScheduleName,
    StageMap,
    actions_by_rank,
)
from megalite.tensor_parallel.weight_gradient_store import WeightGradient, WeightGradientStore, run_stored

M = TypeVar("M")
M_contra = TypeVar("M_contra", contravariant=True)


class StageFunction(Protocol[M_contra]):
    """Forward of one pipeline stage on one microbatch."""

    def __call__(self, microbatch: M_contra, hidden: Tensor | None) -> Tensor:
        """Return hidden states for the next stage, or the loss on the last: a scalar, or a vector of several.

        Args:
            hidden: from the previous stage; None on the first.
        """


class InFlight(NamedTuple):
    """Hold what a backward needs of its forward, besides autograd's graph.

    Neither input nor output is kept: once the output has been sent, the memory of both is free unless the
    graph itself saved it.

    Attributes:
        input_gradient: backward puts the input's gradient there.
        end: root of the backward: the output's edge, or the loss on the last stage.
    """

    input_gradient: list[Tensor]
    end: Tensor | GradientEdge


class _StageInput(torch.autograd.Function):
    """Return a stage's input as a part of the graph, which does not keep it; backward returns its gradient.

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
    """One training step or evaluation on this rank: runs its actions and keeps what is in flight.

    Where the next stage is on this rank too (the tip of a V), an output becomes its input without a message
    or a copy.

    Attributes:
        losses: detached, by microbatch; filled on the rank of the last stage.
    """

    def __init__(
        self,
        chunks: Sequence[StageFunction[M]],
        stages: StageMap,
        rank: int,
        exchange: PointToPoint,
        load: Callable[[int], M],
        store: WeightGradientStore,
        run_weight_gradients: Callable[[Sequence[WeightGradient]], None],
        num_tokens: float | Tensor,
        loss_scale: float,
    ) -> None:
        self.losses: dict[int, Tensor] = {}
        self._chunks = chunks
        self._stages = stages
        self._rank = rank
        self._exchange = exchange
        self._load = load
        self._store = store
        self._run_weight_gradients = run_weight_gradients
        self._num_tokens = num_tokens
        self._loss_scale = loss_scale
        self._compute = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.BACKWARD_INPUT: self._backward_input,
            ActionKind.BACKWARD_WEIGHT: self._backward_weight,
        }
        self._microbatches: dict[int, M] = {}
        self._in_flight: dict[tuple[int, int], InFlight] = {}  # by microbatch and chunk, as the next
        self._stored: dict[tuple[int, int], list[WeightGradient]] = {}
        self._local_inputs: dict[Action, Tensor] = {}  # by the action of this rank that reads it

    def __call__(self, action: Action) -> Tensor | None:
        """Run an action; return its output if another rank reads it."""
        output = self._compute[action.kind](action)
        if output is None:
            return None
        reader = reader_of(self._rank, action, self._stages)
        if reader is not None and reader[0] == self._rank:
            self._local_inputs[reader[1]] = output
            return None
        return output

    def _input(self, action: Action) -> Tensor | None:
        """Return the output of the previous stage on the action's way; None for the first stage."""
        source = source_of(self._rank, action, self._stages)
        if source is None:
            return None
        if source[0] == self._rank:
            return self._local_inputs.pop(action)
        return self._exchange.received(action)

    def _forward(self, action: Action) -> Tensor | None:
        number, chunk = action.microbatch, action.chunk
        microbatch = self._microbatch(action)  # loaded while the hidden states arrive
        hidden = self._input(action)
        training = torch.is_grad_enabled()
        gradient: list[Tensor] = []
        if hidden is not None and training:
            # The anchor makes the result a part of the graph; it has no gradient.
            anchor = torch.empty(0, device=hidden.device, requires_grad=True)
            hidden = _StageInput.apply(hidden, anchor, gradient)
        output = self._chunks[chunk](microbatch, hidden)
        is_last = self._is_last(action)
        if is_last:
            output = output / self._num_tokens
        if training:
            end = output if is_last else get_gradient_edge(output)
            self._in_flight[number, chunk] = InFlight(gradient, end)
        if is_last:
            self.losses[number] = output.detach()
            return None
        return output.detach()

    def _microbatch(self, action: Action) -> M:
        """Return the microbatch: loaded for the first of this rank's chunks, kept until the last."""
        if action.chunk == 0:
            self._microbatches[action.microbatch] = self._load(action.microbatch)
        if action.chunk == self._stages.num_chunks - 1:
            return self._microbatches.pop(action.microbatch)
        return self._microbatches[action.microbatch]

    def _backward(self, action: Action) -> Tensor | None:
        input_gradient, end = self._in_flight.pop((action.microbatch, action.chunk))
        gradient = self._input(action)
        if self._is_last(action):
            assert isinstance(end, Tensor)
            gradient = torch.full_like(end, self._loss_scale)
        torch.autograd.backward(end, gradient)
        return input_gradient.pop() if input_gradient else None

    def _is_last(self, action: Action) -> bool:
        return self._stages.stage_of(self._rank, action.chunk) == self._stages.num_stages - 1

    def _backward_input(self, action: Action) -> Tensor | None:
        with self._store.collect() as stored:
            gradient = self._backward(action)
        self._stored[action.microbatch, action.chunk] = stored
        return gradient

    def _backward_weight(self, action: Action) -> None:
        self._run_weight_gradients(self._stored.pop((action.microbatch, action.chunk)))


class Pipeline(Generic[M]):
    """Runs a schedule on this rank's chunks and exchanges messages with the other ranks.

    Every rank of the axis must call the same method with the same number of microbatches. A pipeline of one
    rank runs the same code without messages.

    Attributes:
        stages: map of the global stages.
        observers: notified of each action, in training steps and evaluations.
    """

    def __init__(
        self,
        chunks: Sequence[StageFunction[M]],
        pp: Axis,
        schedule: ScheduleName,
        hidden_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        store: WeightGradientStore | None = None,
        run_weight_gradients: Callable[[Sequence[WeightGradient]], None] = run_stored,
    ) -> None:
        """Build the pipeline without any communication.

        Args:
            chunks: this rank's stages, as many as the schedule has; the same number on every rank.
            pp: the pipeline axis.
            schedule: a key of SCHEDULES.
            hidden_shape: shape of one microbatch's hidden states between two stages.
            dtype: of the hidden states.
            device: of the hidden states.
            store: collects the weight gradients of the chunks' layers, for a schedule with split backward.
            run_weight_gradients: computes and accumulates them.
        """
        self._chunks = chunks
        self._pp = pp
        self._schedule = SCHEDULES[schedule]
        self.stages = self._schedule.stage_map(pp.size, len(chunks))
        assert self.stages.num_chunks == len(chunks), (schedule, len(chunks))
        self.observers: list[Observer[Action]] = []
        self._exchange = PointToPoint(pp, hidden_shape, dtype, device)
        self._store = store or WeightGradientStore()
        self._run_weight_gradients = run_weight_gradients
        self._steps: dict[tuple[ScheduleFunction, int], list[Step]] = {}

    def train_step(
        self,
        num_microbatches: int,
        load: Callable[[int], M],
        *,
        num_tokens: float | Tensor = 1.0,
        loss_scale: float = 1.0,
    ) -> list[Tensor]:
        """Run the forward and backward of all microbatches; gradients add up in the parameters' ``.grad``.

        Every microbatch's loss is divided by the tokens of the whole global batch, so that sums over
        microbatches and data-parallel ranks are means, whatever their number.

        Args:
            num_microbatches: any number, also fewer than stages.
            load: returns a microbatch by its number in the step; called once for each, before its forward.
            num_tokens: divides the last stage's output, the sum of a microbatch's token losses; a tensor
                divides each of several losses by its own number.
            loss_scale: multiplies the gradients, to keep them in fp16's range.

        Returns:
            Detached losses by microbatch, not scaled, on the rank of the last stage; an empty list elsewhere.
        """
        return self._run(self._schedule.train, num_microbatches, load, num_tokens, loss_scale)

    @torch.no_grad()
    def evaluate(
        self, num_microbatches: int, load: Callable[[int], M], *, num_tokens: float | Tensor = 1.0
    ) -> list[Tensor]:
        """Run the forward of all microbatches, in memory that does not grow with their number.

        Arguments and result are those of `train_step`.
        """
        return self._run(self._schedule.evaluate, num_microbatches, load, num_tokens)

    def _run(
        self,
        order: ScheduleFunction,
        num_microbatches: int,
        load: Callable[[int], M],
        num_tokens: float | Tensor,
        loss_scale: float = 1.0,
    ) -> list[Tensor]:
        work = ScheduleRun(
            self._chunks,
            self.stages,
            self._pp.rank,
            self._exchange,
            load,
            self._store,
            self._run_weight_gradients,
            num_tokens,
            loss_scale,
        )
        outgoing: Tensor | None = None
        for step in self._steps_of(order, num_microbatches):
            if isinstance(step, Batch):
                self._exchange.start(step, outgoing)
                continue
            for observer in self.observers:
                observer.begins(step)
            outgoing = work(step)
            for observer in self.observers:
                observer.ends(step)
        self._exchange.finish()
        return [work.losses[microbatch] for microbatch in sorted(work.losses)]

    def num_actions(self, num_microbatches: int) -> int:
        """Return the number of actions of this rank in a training step."""
        return len(self._schedule.train(self._pp.rank, self.stages, num_microbatches))

    def _steps_of(self, order: ScheduleFunction, num_microbatches: int) -> list[Step]:
        key = order, num_microbatches
        if key not in self._steps:
            actions = actions_by_rank(order, self.stages, num_microbatches)
            self._steps[key] = plan_rank(self._pp.rank, actions, self.stages)
        return self._steps[key]
