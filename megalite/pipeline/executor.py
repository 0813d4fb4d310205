"""Runs this rank's part of a pipeline schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from megalite.observer import Observer
from megalite.parallel.weight_gradient_store import WeightGradientStore
from megalite.pipeline.action import Action
from megalite.pipeline.exchange import Exchange
from megalite.pipeline.messages import Batch, Step, plan_rank
from megalite.pipeline.schedule import SCHEDULES, Order
from megalite.pipeline.work import Chunk, Work
from megalite.topology import Axis

M = TypeVar("M")


class Pipeline(Generic[M]):
    """Runs a schedule on this rank's chunks, in exchange with the other ranks.

    Every rank of the axis must call the same method with the same number of microbatches. One rank alone runs
    the same code and has no messages.

    Attributes:
        stages: where the global stages are.
        observers: told of each action, of training steps and of evaluations.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk[M]],
        pp: Axis,
        schedule: str,
        hidden_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        store: WeightGradientStore | None = None,
    ) -> None:
        """Builds the pipeline; nothing is sent yet.

        Args:
            chunks: what this rank computes, as many as the schedule has; on every rank alike.
            pp: the axis that the stages lie along.
            schedule: a name of SCHEDULES.
            hidden_shape: of one microbatch's hidden states between two stages.
            dtype: of the hidden states.
            device: where they are.
            store: takes the weight gradients of the chunks' layers, for a schedule that computes them later.
        """
        self._chunks = chunks
        self._pp = pp
        self._schedule = SCHEDULES[schedule]
        self.stages = self._schedule.stage_map(pp.size, len(chunks))
        assert self.stages.num_chunks == len(chunks), (schedule, len(chunks))
        self.observers: list[Observer[Action]] = []
        self._exchange = Exchange(pp, hidden_shape, dtype, device)
        self._store = store or WeightGradientStore()
        self._steps: dict[tuple[Order, int], list[Step]] = {}

    def train_step(self, num_microbatches: int, load: Callable[[int], M]) -> list[Tensor]:
        """Runs forwards and backwards of all microbatches; gradients add up in the parameters' ``.grad``.

        Args:
            num_microbatches: any number, fewer than stages too.
            load: gives a microbatch by its number within the step; called once for each, before its forward.

        Returns:
            Detached losses by microbatch on the rank of the last stage, nothing on the others.
        """
        return self._run(self._schedule.train, num_microbatches, load)

    @torch.no_grad()
    def evaluate(self, num_microbatches: int, load: Callable[[int], M]) -> list[Tensor]:
        """Runs forwards alone, in memory that does not grow with their number.

        Arguments and result are those of `train_step`.
        """
        return self._run(self._schedule.evaluate, num_microbatches, load)

    def _run(self, order: Order, num_microbatches: int, load: Callable[[int], M]) -> list[Tensor]:
        work = Work(self._chunks, self.stages, self._pp.rank, self._exchange, load, self._store)
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
        """Return how many actions this rank runs in a training step."""
        return len(self._schedule.train(self._pp.rank, self.stages, num_microbatches))

    def _steps_of(self, order: Order, num_microbatches: int) -> list[Step]:
        key = order, num_microbatches
        if key not in self._steps:
            actions = [order(rank, self.stages, num_microbatches) for rank in range(self._pp.size)]
            self._steps[key] = plan_rank(self._pp.rank, actions, self.stages)
        return self._steps[key]
