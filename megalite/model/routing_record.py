"""Record the experts of each token in one run, and send the tokens of another run to them.

Layouts sum in other orders, so two scores that are equal up to rounding may change places between them. With
the same experts, the rest of the runs can be compared.

Shapes: s tokens of a rank's samples, b microbatch, e experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

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
    """Interface of a function that sees the experts that a router selects, and may replace them."""

    def __call__(self, experts: Tensor, ranking: Tensor, sample_numbers: Tensor, positions: Tensor) -> Tensor:
        """Return the experts that the tokens go to, ``[s, b, k]``.

        Args:
            experts: those that the router selects, ``[s, b, k]``.
            ranking: numbers ``[s, b, e]`` in the order in which it prefers the experts.
            sample_numbers: ``[b]``.
            positions: of the tokens in their samples, ``[s, b]``.
        """
        ...


@dataclass(frozen=True)
class RoutingRecord:
    """Holds the experts of whole samples, ``[s, k]``, by layer and number of the sample."""

    experts: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens, counted in each layer."""
        return sum(len(each) for each in self.experts.values())


@dataclass(frozen=True)
class ChoiceRecorder:
    """Adds the experts of whole samples to a record."""

    layer: str
    record: RoutingRecord

    def __call__(self, experts: Tensor, ranking: Tensor, sample_numbers: Tensor, positions: Tensor) -> Tensor:
        assert len(positions) == positions[-1, 0] + 1, "samples are recorded on one rank"
        for index, sample in enumerate(sample_numbers.tolist()):
            self.record.experts[self.layer, sample] = experts[:, index].cpu()
        return experts


@dataclass(frozen=True)
class ChoiceReplayer:
    """Returns recorded experts.

    Attributes:
        others: tokens for which the router selects other experts, and by how much the lowest score of these
            is above the lowest score of the recorded ones.
    """

    layer: str
    record: RoutingRecord
    others: dict[RoutedToken, float]

    def __call__(self, experts: Tensor, ranking: Tensor, sample_numbers: Tensor, positions: Tensor) -> Tensor:
        samples, own = sample_numbers.tolist(), positions.cpu()
        of_samples = [
            self.record.experts[self.layer, sample][own[:, column]] for column, sample in enumerate(samples)
        ]
        recorded = torch.stack(of_samples, dim=1).to(experts.device)  # [s, b, k]
        gaps = ranking.gather(-1, experts).amin(-1) - ranking.gather(-1, recorded).amin(-1)  # [s, b]
        is_other = (experts.sort(-1).values != recorded.sort(-1).values).any(-1)
        for row, column in is_other.nonzero().tolist():
            token = RoutedToken(self.layer, samples[column], int(own[row, column]))
            self.others[token] = max(gaps[row, column].item(), self.others.get(token, 0.0))
        return recorded


def largest_gap(others: Mapping[RoutedToken, float]) -> float:
    """Return the largest difference of scores at which tokens changed their experts; 0 if none did."""
    return max(others.values(), default=0.0)
