"""Estimate the samples and epochs of each corpus in a run, and the index sizes, from .idx files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megalite.config import Config
from megalite.data.blend import Coverage, normalized, num_samples_to_build
from megalite.data.corpus_sources import SPLIT_NAMES, Blend, find_sources
from megalite.data.gpt_dataset import index_bytes, plan_epochs
from megalite.data.sharded_dataset import corpus_lengths
from megalite.train.run_context import num_samples_of
from megalite.utils.commands import command_name

Lengths = Mapping[str, npt.NDArray[np.int32]]
"""Sequence lengths in tokens of each corpus on this machine, by prefix."""

BLEND_BYTES = 2 + 8
"""Bytes per sample in the index of a blend: the corpus, and the sample number within it."""


@dataclass(frozen=True)
class CorpusPart:
    """Use of one corpus by one split of a run.

    Attributes:
        split: train, valid or test, with the name of the dataset if it has one.
        coverage: tokens, samples and epochs.
        index_bytes: size of the document, sample and shuffle index.
    """

    split: str
    coverage: Coverage
    index_bytes: int


@dataclass(frozen=True)
class Corpora:
    """Use of all corpora by a run.

    Attributes:
        parts: use of each corpus on this machine.
        blend_bytes: size of the indices of blends.
        skipped: reasons for skipped corpora.
    """

    parts: tuple[CorpusPart, ...] = ()
    blend_bytes: int = 0
    skipped: tuple[str, ...] = ()

    @property
    def index_bytes(self) -> int:
        """Return the size of all indices that the run builds."""
        return sum(part.index_bytes for part in self.parts) + self.blend_bytes


def corpora_of(config: Config, dp: int) -> Corpora:
    """Estimate the use of corpora by a run on `dp` replicas; blends with a missing corpus are skipped.

    Raises:
        UserError: an .idx file is damaged, or the flags that name corpora are malformed.
    """
    if config.data.mock_data:
        return Corpora(skipped=("--mock-data reads no corpus",))
    if config.model.architecture == "bert":
        return Corpora(
            skipped=("the samples of a bert depend on its sentences, which a run counts when it starts",)
        )
    if config.data.sft:
        return Corpora(skipped=("the samples of --sft depend on how conversations fit into them",))
    if config.data.packs_documents:
        return Corpora(skipped=("the samples of --document-packing depend on how documents fit into them",))
    if config.data.data_phases is not None:
        return Corpora(
            skipped=(f"{command_name('data-plan')} shows the use of the sources of --data-phases",)
        )
    sources = find_sources(config.data)
    num_samples = dict(zip(SPLIT_NAMES, num_samples_of(config, dp), strict=True))
    draws = [
        _Draw(
            *(split, blend, num_samples[split], config.model.seq_length, config.data.blend_by),
            has_index=not config.data.reads_windows,
        )
        for split in SPLIT_NAMES
        for blend in sources[split]
        if num_samples[split]
    ]
    prefixes = dict.fromkeys(source.prefix for draw in draws for source in draw.blend.sources)
    found = {prefix: corpus_lengths(prefix) for prefix in prefixes}
    here = {prefix: lengths for prefix, lengths in found.items() if lengths is not None}
    known = [draw for draw in draws if all(source.prefix in here for source in draw.blend.sources)]
    return Corpora(
        tuple(part for draw in known for part in draw.parts(here)),
        sum(draw.blend_bytes for draw in known),
        tuple(f"{prefix}.idx is not on this machine" for prefix in prefixes if prefix not in here),
    )


@dataclass(frozen=True)
class _Draw:
    """Dataset of a split, as `data.build_datasets` builds it."""

    split: str
    blend: Blend
    num_samples: int
    seq_length: int
    blend_by: str
    has_index: bool

    @property
    def blend_bytes(self) -> int:
        """Return the size of the index that maps samples to corpora; 0 for a single corpus."""
        is_blended = len(self.blend.sources) > 1 or self.blend.weights is not None
        return BLEND_BYTES * self.num_samples if is_blended else 0

    def parts(self, lengths: Lengths) -> Iterator[CorpusPart]:
        """Yield the part of each corpus that has enough tokens for a sample in this split."""
        sources = self.blend.sources
        ranges = [source.sequences(len(lengths[source.prefix])) for source in sources]
        tokens = [
            int(lengths[source.prefix][part.start : part.stop].sum(dtype=np.int64))
            for source, part in zip(sources, ranges, strict=True)
        ]
        kept = [i for i, number in enumerate(tokens) if number > self.seq_length]
        if not kept:
            return
        shares = normalized(self._weights(kept, ranges, tokens))
        for i, share, built in zip(kept, shares, self._built(kept, shares, tokens), strict=True):
            prefix = sources[i].prefix
            yield CorpusPart(
                f"{self.split} {self.blend.name}".rstrip(),
                Coverage.of(
                    *(prefix, tokens[i], self.seq_length, self.num_samples * share),
                    built if self.has_index else None,
                ),
                index_bytes(ranges[i], plan_epochs(tokens[i], built, self.seq_length)) * self.has_index,
            )

    def _weights(
        self, kept: Sequence[int], ranges: Sequence[range], tokens: Sequence[int]
    ) -> Sequence[float]:
        if self.blend.weights is not None:
            return [self.blend.weights[i] for i in kept]
        if self.blend_by == "documents":
            return [len(ranges[i]) for i in kept]
        return self._samples_of_an_epoch(kept, tokens)

    def _built(
        self, kept: Sequence[int], shares: Sequence[float], tokens: Sequence[int]
    ) -> Sequence[int | None]:
        """Return the number of samples for which each corpus' index is built; None for one epoch."""
        if self.blend.weights is None and len(self.blend.sources) == 1:
            return [self.num_samples]
        is_by_size = self.blend.weights is None and self.blend_by == "tokens"
        if is_by_size and self.num_samples <= sum(self._samples_of_an_epoch(kept, tokens)):
            return [None] * len(kept)
        return [num_samples_to_build(self.num_samples, share) for share in shares]

    def _samples_of_an_epoch(self, kept: Sequence[int], tokens: Sequence[int]) -> list[int]:
        return [plan_epochs(tokens[i], None, self.seq_length).num_samples for i in kept]
