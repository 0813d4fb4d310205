"""What a dry run has found."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config import Config
from megalite.dryrun.corpora import Corpora
from megalite.dryrun.counts import Counts


@dataclass(frozen=True)
class DryRun:
    """All that is told of a rank.

    Attributes:
        config: its vocabulary's size known.
        places: of the rank on each axis, with the axis' size, by name.
        model_parameters: of the whole model, with its vocabulary's padding.
        learning_rates: of the first and the last iteration.
        seconds: that it took to find out.
    """

    config: Config
    world_size: int
    rank: int
    places: dict[str, tuple[int, int]]
    model_parameters: int
    counts: Counts
    corpora: Corpora
    learning_rates: tuple[float, float]
    seconds: float

    @property
    def dp(self) -> int:
        return self.places["dp"][1]
