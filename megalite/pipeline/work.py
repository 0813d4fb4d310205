"""What a rank computes in one pass over a step's microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalite.parallel.weight_gradient_store import WeightGradient, WeightGradientStore, run_stored
from megalite.pipeline.action import Action, Kind
from megalite.pipeline.exchange import Exchange
from megalite.pipeline.stages import StageMap
from megalite.pipeline.timing import reader_of, source_of

M = TypeVar("M")
M_contra = TypeVar("M_contra", contravariant=True)


class Chunk(Protocol[M_contra]):
    """A stage of the model, as it computes for one microbatch."""

    def __call__(self, microbatch: M_contra, hidden: Tensor | None) -> Tensor:
        """Computes hidden states for the next stage, or on the last one the loss, a scalar.

        `hidden` comes from the stage before; None on the first.
        """


class InFlight(NamedTuple):
    """What is kept of a forward for its backward.

    Of an output, the place in the graph is kept and not the tensor: once it has been sent, its memory is free
    unless the graph itself saved it.

    Attributes:
        hidden: the input, which its gradient will be read from.
        end: where the backward begins; on the last stage the loss.
    """

    hidden: Tensor | None
    end: Tensor | GradientEdge


class Work(Generic[M]):
    """One pass over a step's microbatches: what is in flight, and what is done.

    Where the pipeline turns on this rank, an output becomes the next action's input as it is: nothing is
    sent, nothing is copied.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk[M]],
        stages: StageMap,
        rank: int,
        exchange: Exchange,
        load: Callable[[int], M],
        store: WeightGradientStore,
    ) -> None:
        self.losses: dict[int, Tensor] = {}
        self._chunks = chunks
        self._stages = stages
        self._rank = rank
        self._exchange = exchange
        self._load = load
        self._store = store
        self._compute = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
        }
        self._microbatches: dict[int, M] = {}
        self._in_flight: dict[tuple[int, int], InFlight] = {}  # by microbatch and chunk, as the next
        self._stored: dict[tuple[int, int], list[WeightGradient]] = {}
        self._handed_over: dict[Action, Tensor] = {}  # by the action of this rank that reads it

    def __call__(self, action: Action) -> Tensor | None:
        """Runs an action; gives what the rank of the next one is to get."""
        output = self._compute[action.kind](action)
        if output is None:
            return None
        reader = reader_of(self._rank, action, self._stages)
        if reader is not None and reader[0] == self._rank:
            self._handed_over[reader[1]] = output
            return None
        return output

    def _input(self, action: Action) -> Tensor | None:
        """What the action's pass brings from the stage before, None where it begins."""
        source = source_of(self._rank, action, self._stages)
        if source is None:
            return None
        if source[0] == self._rank:
            return self._handed_over.pop(action)
        return self._exchange.received(action)

    def _forward(self, action: Action) -> Tensor | None:
        number, chunk = action.microbatch, action.chunk
        microbatch = self._microbatch(action)  # while the hidden states are on their way
        hidden = self._input(action)
        training = torch.is_grad_enabled()
        if hidden is not None:
            hidden.requires_grad_(training)
        output = self._chunks[chunk](microbatch, hidden)
        is_last = self._stages.stage_of(self._rank, chunk) == self._stages.num_stages - 1
        if training:
            end = output if is_last else get_gradient_edge(output)
            self._in_flight[number, chunk] = InFlight(hidden, end)
        if is_last:
            self.losses[number] = output.detach()
            return None
        return output.detach()

    def _microbatch(self, action: Action) -> M:
        """Loads a microbatch for the first of this rank's chunks and keeps it up to the last."""
        if action.chunk == 0:
            self._microbatches[action.microbatch] = self._load(action.microbatch)
        if action.chunk == self._stages.num_chunks - 1:
            return self._microbatches.pop(action.microbatch)
        return self._microbatches[action.microbatch]

    def _backward(self, action: Action) -> Tensor | None:
        hidden, end = self._in_flight.pop((action.microbatch, action.chunk))
        gradient = self._input(action)  # None on the last stage, where the graph ends in a scalar
        torch.autograd.backward(end, gradient)
        return None if hidden is None else hidden.grad

    def _backward_input(self, action: Action) -> Tensor | None:
        with self._store.collect() as stored:
            gradient = self._backward(action)
        self._stored[action.microbatch, action.chunk] = stored
        return gradient

    def _backward_weight(self, action: Action) -> None:
        run_stored(self._stored.pop((action.microbatch, action.chunk)))
