"""Where a pipeline's global stages stand: on which rank, as which of its chunks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StageMap:
    """The way of a microbatch through the ranks, which passes each of them once a chunk.

    Attributes:
        turns: it comes back over the ranks in reverse, as a V (ZB-V, Qi et al. 2024): the last of a rank's
            chunks and the first of the next are neighbours on one rank. Otherwise it starts at rank 0 again,
            as interleaved stages do (Narayanan et al. 2021).
    """

    num_ranks: int
    num_chunks: int = 1
    turns: bool = False

    @property
    def num_stages(self) -> int:
        """Global stages, over all ranks."""
        return self.num_ranks * self.num_chunks

    def stage_of(self, rank: int, chunk: int) -> int:
        """The global stage that a rank's chunk is."""
        return chunk * self.num_ranks + self._along(rank, chunk)

    def holder_of(self, stage: int) -> tuple[int, int]:
        """The rank and the chunk there that a global stage is."""
        chunk, along = divmod(stage, self.num_ranks)
        return self._along(along, chunk), chunk

    def _along(self, place: int, chunk: int) -> int:
        """From rank to position within one pass and back: the same either way."""
        return self.num_ranks - 1 - place if self.turns and chunk % 2 else place

    def stages_of(self, rank: int) -> list[int]:
        """The global stages of a rank's chunks, in order."""
        return [self.stage_of(rank, chunk) for chunk in range(self.num_chunks)]
