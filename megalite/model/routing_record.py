"""Record the experts of each token in one run, and send the tokens of another run to them.

Layouts sum in other orders, so two scores that are equal up to rounding may change places between them. With
the same experts, the rest of the runs can be compared.

Shapes: S tokens of a sample, s of them on this rank, b microbatch, e experts, k experts of a token.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor


class RoutedToken(NamedTuple):
    """Names a token in one layer.

    Attributes:
        sample: number of its sample in the run.
        position: its position in the sample.
    """

    layer: str
    sample: int
    position: int


class ChoiceObserver(Protocol):
    """Declares a function that sees the experts that a router selects, and may replace them."""

    def __call__(self, experts: Tensor, ranking: Tensor, sample_numbers: Tensor, positions: Tensor) -> Tensor:
        """Return the experts that the tokens go to, ``[s, b, k]``.

        Args:
            experts: those that the router selects, ``[s, b, k]``.
            ranking: numbers ``[s, b, e]`` in the order in which it prefers the experts.
            sample_numbers: ``[b]``.
            positions: of the tokens in their samples, ``[s, b]``.
        """
        ...


class RecordedChoices(Protocol):
    """Declares the interface of the experts of a run's tokens, in memory or in files."""

    def sample_experts(self, layer: str, sample: int, topk: int) -> Tensor:
        """Return the experts of a whole sample, int64 ``[S, k]``.

        Args:
            layer: name of the router in the model.
            topk: number of experts of a token.
        """
        ...


@dataclass(frozen=True)
class RoutingRecord:
    """Experts of whole samples, ``[S, k]``, by layer and number of the sample."""

    experts: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens, counted in each layer."""
        return sum(len(each) for each in self.experts.values())

    def sample_experts(self, layer: str, sample: int, topk: int) -> Tensor:
        """Return the experts of a sample; see `RecordedChoices`."""
        return self.experts[layer, sample].long()


@dataclass
class ChoiceRecorder:
    """Keeps the experts of a router's tokens, without waiting for the device.

    Attributes:
        samples: numbers of the samples of each microbatch, ``[b]``.
        experts: experts of their tokens, ``[b, s, k]``.
        positions: positions of the tokens in their samples, ``[b, s]``.
    """

    samples: list[Tensor] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)
    positions: list[Tensor] = field(default_factory=list)

    def __call__(self, experts: Tensor, ranking: Tensor, sample_numbers: Tensor, positions: Tensor) -> Tensor:
        self.samples.append(sample_numbers)
        self.experts.append(experts.transpose(0, 1).to(torch.int16))
        self.positions.append(positions.t())
        return experts

    def by_sample(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the samples ``[n]`` in order, and the positions and experts of their tokens, in host memory.

        The positions are ``[n, s]``, and the experts ``[n, s, k]``. Samples that an audit or a profile of
        modules runs again are returned once.
        """
        samples, kept = np.unique(torch.cat(self.samples).cpu().numpy(), return_index=True)
        positions, experts = (torch.cat(each).cpu()[kept] for each in (self.positions, self.experts))
        return torch.from_numpy(samples), positions, experts


@dataclass
class ChoiceReplayer:
    """Returns recorded experts.

    Attributes:
        gaps: by number of the sample, by how much the lowest score of the router's own experts is above the
            lowest score of the recorded ones, ``[s]``; -inf for tokens with the same experts.
        positions: by number of the sample, positions of these tokens in it, ``[s]``.
    """

    layer: str
    recorded: RecordedChoices
    gaps: dict[int, Tensor] = field(default_factory=dict)
    positions: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, experts: Tensor, ranking: Tensor, sample_numbers: Tensor, positions: Tensor) -> Tensor:
        numbers, own, topk = sample_numbers.tolist(), positions.t().cpu(), experts.shape[-1]
        samples = [
            self.recorded.sample_experts(self.layer, number, topk)[held]
            for number, held in zip(numbers, own, strict=True)
        ]
        recorded = torch.stack(samples, dim=1).to(experts.device)  # [s, b, k]
        gaps = ranking.gather(-1, experts).amin(-1) - ranking.gather(-1, recorded).amin(-1)  # [s, b]
        is_other = (experts.sort(-1).values != recorded.sort(-1).values).any(-1)
        gaps = gaps.where(is_other, -math.inf)
        self.gaps.update(zip(numbers, gaps.unbind(1), strict=True))
        self.positions.update(zip(numbers, own, strict=True))
        return recorded

    def rerouted(self) -> Iterator[tuple[RoutedToken, float]]:
        """Yield the tokens for which the router selects other experts, with their gaps."""
        for sample, gaps in self.gaps.items():
            for position, gap in zip(self.positions[sample].tolist(), gaps.tolist(), strict=True):
                if gap != -math.inf:
                    yield RoutedToken(self.layer, sample, position), gap


def largest_gap(others: Mapping[RoutedToken, float]) -> float:
    """Return the largest difference of scores at which tokens changed their experts; 0 if none did."""
    return max(others.values(), default=0.0)


class RoutingStatistics:
    """Adds up what a router does with this rank's tokens, from microbatch to microbatch.

    Attributes:
        num_tokens: number of tokens that selected each expert, ``[e]``, int64.
        num_dropped: number of these choices that were dropped because the expert was at capacity.
        entropy: sum over the tokens of the entropy of their probabilities, in nats, a fp64 scalar.
    """

    def __init__(self, num_experts: int, device: torch.device) -> None:
        self.num_tokens = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.num_dropped = torch.zeros((), dtype=torch.int64, device=device)
        self.entropy = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, counts: Tensor, shares: Tensor, is_real: Tensor | None) -> None:
        """Add a microbatch.

        Args:
            counts: number of tokens of each expert, ``[e]``, without padding.
            shares: the tokens' probabilities of experts, ``[s, b, e]``.
            is_real: bool ``[s, b]``, False for padding; None without padding.
        """
        self.num_tokens += counts
        entropies = torch.special.entr(shares)
        entropies = entropies if is_real is None else entropies.where(is_real.unsqueeze(-1), 0.0)
        self.entropy += entropies.sum(dtype=torch.float64)


class KeptChoices:
    """Choices of a function's first run, in their order, for its second run."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._next: int | None = None  # of the choice to repeat; None in the first run

    @contextmanager
    def first_run(self) -> Iterator[None]:
        """Keep the choices that this thread makes in the block."""
        with _active(self):
            yield

    @contextmanager
    def second_run(self) -> Iterator[None]:
        """Repeat them in the block."""
        self._next = 0
        with _active(self):
            yield

    def choose(self, compute: Callable[[], Tensor]) -> tuple[Tensor, bool]:
        """Return the choice, and whether this is the first run."""
        if self._next is None:
            self._kept.append(compute().detach())
            return self._kept[-1], True
        self._next += 1
        return self._kept[self._next - 1], False


class _ThreadState(threading.local):
    """Choices of the function that this thread runs; a GPU's backward has a thread of its own."""

    choices: KeptChoices | None = None


_THIS_THREAD = _ThreadState()


@contextmanager
def _active(choices: KeptChoices) -> Iterator[None]:
    outer, _THIS_THREAD.choices = _THIS_THREAD.choices, choices
    try:
        yield
    finally:
        _THIS_THREAD.choices = outer


def choose(compute: Callable[[], Tensor]) -> tuple[Tensor, bool]:
    """Return what `compute` returned in forward, and False if this is a second run that repeats it."""
    choices = _THIS_THREAD.choices
    return (compute(), True) if choices is None else choices.choose(compute)
