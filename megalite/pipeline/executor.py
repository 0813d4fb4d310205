"""Runs this rank's part of a pipeline schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalite.pipeline.exchange import Exchange
from megalite.pipeline.messages import Batch, Step, steps_of
from megalite.pipeline.schedule import SCHEDULES, Kind, Schedule, forward_only
from megalite.topology import Axis

M = TypeVar("M")
M_contra = TypeVar("M_contra", contravariant=True)


class Stage(Protocol[M_contra]):
    """What a rank computes for one microbatch."""

    def __call__(self, microbatch: M_contra, hidden: Tensor | None) -> Tensor:
        """Computes hidden states for the next stage, or on the last one the loss, a scalar.

        `hidden` comes from the stage before; None on the first.
        """


class Pipeline(Generic[M]):
    """Runs a schedule on this rank's stage, in exchange with the neighbouring ones.

    Every rank of the axis must call the same method with the same number of microbatches. One rank alone runs
    the same code and has no messages.
    """

    def __init__(
        self,
        stage: Stage[M],
        pp: Axis,
        schedule: str,
        hidden_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Builds the pipeline; nothing is sent yet.

        Args:
            stage: what this rank computes.
            pp: the axis that the stages lie along.
            schedule: a name of SCHEDULES.
            hidden_shape: of one microbatch's hidden states between two stages.
            dtype: of the hidden states.
            device: where they are.
        """
        self._stage = stage
        self._pp = pp
        self._schedule = SCHEDULES[schedule]
        self._exchange = Exchange(pp, hidden_shape, dtype, device)
        self._steps: dict[tuple[Schedule, int], list[Step]] = {}

    def train_step(self, num_microbatches: int, load: Callable[[int], M]) -> list[Tensor]:
        """Runs forwards and backwards of all microbatches; gradients add up in the parameters' ``.grad``.

        Args:
            num_microbatches: any number, fewer than stages too.
            load: gives a microbatch by its number within the step; called once for each, before its forward.

        Returns:
            Detached losses by microbatch on the last stage, nothing on the others.
        """
        return self._run(self._schedule, num_microbatches, load)

    @torch.no_grad()
    def evaluate(self, num_microbatches: int, load: Callable[[int], M]) -> list[Tensor]:
        """Runs forwards alone, in memory that does not grow with their number.

        Arguments and result are those of `train_step`.
        """
        return self._run(forward_only, num_microbatches, load)

    def _run(self, schedule: Schedule, num_microbatches: int, load: Callable[[int], M]) -> list[Tensor]:
        step = _Pass(self._stage, self._exchange, self._pp.is_last, load)
        compute = {Kind.FORWARD: step.forward, Kind.BACKWARD: step.backward}
        outgoing: Tensor | None = None
        for todo in self._steps_of(schedule, num_microbatches):
            if isinstance(todo, Batch):
                self._exchange.start(todo, outgoing)
            else:
                outgoing = compute[todo.kind](todo.microbatch)
        self._exchange.finish()
        return [step.losses[microbatch] for microbatch in sorted(step.losses)]

    def _steps_of(self, schedule: Schedule, num_microbatches: int) -> list[Step]:
        key = schedule, num_microbatches
        if key not in self._steps:
            actions = schedule(self._pp.rank, self._pp.size, num_microbatches)
            self._steps[key] = steps_of(actions, self._pp.rank, self._pp.size)
        return self._steps[key]


class _Pass(Generic[M]):
    """One pass over a step's microbatches: what is in flight, and what is done.

    Of an output that is sent, the place in the graph is kept and not the tensor: once it has left, its memory
    is free unless the graph itself saved it.
    """

    def __init__(self, stage: Stage[M], exchange: Exchange, is_last: bool, load: Callable[[int], M]) -> None:
        self.losses: dict[int, Tensor] = {}
        self._stage = stage
        self._exchange = exchange
        self._is_last = is_last
        self._load = load
        # By microbatch: the input, which its gradient will be read from, and the end of the graph.
        self._in_flight: dict[int, tuple[Tensor | None, Tensor | GradientEdge]] = {}

    def forward(self, number: int) -> Tensor | None:
        """Runs microbatch `number` forward; gives what the next stage is to get."""
        microbatch = self._load(number)  # while the hidden states are on their way
        hidden = self._exchange.received()
        training = torch.is_grad_enabled()
        if hidden is not None:
            hidden.requires_grad_(training)
        output = self._stage(microbatch, hidden)
        if training:
            self._in_flight[number] = hidden, output if self._is_last else get_gradient_edge(output)
        if self._is_last:
            self.losses[number] = output.detach()
            return None
        return output.detach()

    def backward(self, number: int) -> Tensor | None:
        """Runs microbatch `number` backward; gives what the stage before is to get, None on the first."""
        hidden, end = self._in_flight.pop(number)
        gradient = self._exchange.received()  # None on the last stage, where the graph ends in a scalar
        torch.autograd.backward(end, gradient)
        return None if hidden is None else hidden.grad
