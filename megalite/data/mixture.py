"""Find the source of each sample of a mixture that changes during a run.

A source is an endless stream of samples. Phases only say which source the next sample comes from, so a change
of later phases neither skips nor repeats a sample.

Shapes: D sources, P phases, n samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megalite.data import _index_builder
from megalite.data.blend import BlendedDataset
from megalite.data.corpus_sources import DataPhase, DataPhases
from megalite.data.gpt_dataset import Dataset
from megalite.data.index_cache import Arrays, CacheKey, IndexCache, cached_arrays, reported_progress
from megalite.utils.errors import UserError

NUM_RAMP_STEPS = 1000
"""Number of steps of a ramp, each with constant weights."""
_BLOCK = 1 << 22
"""Number of samples to order at a time."""
_FORMAT = 1
"""Part of a cached order's digest: increase it when the same plan gives another order."""


class MixturePhase(NamedTuple):
    """Phase of a run.

    Attributes:
        first, end: its samples; `end` may be after the run's, and is None for a phase without an end.
        start: weights of the sources at its start if it is a ramp to `weights`; otherwise None.
        weights: weights of the sources, with a sum of 1.
        renormalizes: see `DataPhase`.
    """

    first: int
    end: int | None
    start: tuple[float, ...] | None
    weights: tuple[float, ...]
    renormalizes: bool

    def steps(self, num_samples: int) -> Iterator[tuple[int, int, npt.NDArray[np.float64]]]:
        """Yield the first sample, the end and the weights [D] of parts of constant weights."""
        end = num_samples if self.end is None else self.end
        count = 1 if self.start is None else min(NUM_RAMP_STEPS, end - self.first)
        target = np.array(self.weights)
        for step in range(count):
            begin, stop = (self.first + (end - self.first) * k // count for k in (step, step + 1))
            weights = target
            if self.start is not None:
                weights = np.array(self.start) + (target - np.array(self.start)) * ((step + 0.5) / count)
            for first in range(begin, min(stop, num_samples), _BLOCK):
                yield first, min(stop, num_samples, first + _BLOCK), weights


@dataclass(frozen=True)
class MixturePlan:
    """Mixture of a run, in samples.

    Attributes:
        path: the file, for messages.
        sizes: samples of an epoch of each source.
        limits: most samples that may be read of each source; None for any number.
    """

    path: str
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    limits: tuple[int | None, ...]
    phases: tuple[MixturePhase, ...]

    @classmethod
    def of(
        cls,
        data: DataPhases,
        sizes: Sequence[int],
        num_samples: int,
        seq_length: int,
        consumed_after: Callable[[int], int],
    ) -> MixturePlan:
        """Convert the phases of a file.

        Args:
            sizes: samples of an epoch of each source.
            seq_length: tokens of a sample.
            consumed_after: returns the samples that a number of iterations have consumed.

        Raises:
            UserError: the ends of phases do not rise, or are before the end of the run.
        """
        at = f"--data-phases {data.path}"
        names = tuple(source.name for source in data.sources)
        phases = list[MixturePhase]()
        first = 0
        for number, phase in enumerate(data.phases, 1):
            end = None if phase.until is None else num_samples_until(phase.until, seq_length, consumed_after)
            if end is None and number < len(data.phases):
                raise UserError(f"{at}: phase {number} has no end, and another phase follows")
            if end is not None and end <= first:
                raise UserError(
                    f"{at}: phase {number} ends at sample {end}, and it begins at sample {first}: let each "
                    "phase end after the one before it"
                )
            weights = _phase_weights(phase, names, sizes, 0 if end is None else end - first)
            start = phases[-1].weights if phase.kind == "ramp" else None
            phases.append(MixturePhase(first, end, start, weights, phase.renormalizes))
            first = num_samples if end is None else end
        if first < num_samples:
            raise UserError(
                f"{at}: the last phase ends at sample {first} of {num_samples} of the run: add a phase, or "
                "write until: end"
            )
        limits = tuple(
            None if math.isinf(source.max_epochs) else int(source.max_epochs * size)
            for source, size in zip(data.sources, sizes, strict=True)
        )
        return cls(data.path, names, tuple(sizes), limits, tuple(phases))

    def phase_of(self, sample: int) -> int:
        """Return the index of a sample's phase."""
        return sum(phase.first <= sample for phase in self.phases) - 1

    def record(self, exhausted: npt.NDArray[np.int64]) -> dict[str, Any]:
        """Return all that the order of samples depends on, for a checkpoint; see `first_change`.

        Args:
            exhausted: int64 [D], the sample at which each source ran out, or -1.
        """
        return {
            "names": list(self.names),
            "phases": [
                [
                    phase.first,
                    self._by_name(phase.weights),
                    None if phase.start is None else [phase.end, self._by_name(phase.start)],
                ]
                for phase in self.phases
            ],
            "exhausted": {
                name: at for name, at in zip(self.names, exhausted.tolist(), strict=True) if at >= 0
            },
        }

    def _by_name(self, weights: Sequence[float]) -> dict[str, float]:
        return {name: weight for name, weight in zip(self.names, weights, strict=True) if weight > 0}


def first_change(saved: Mapping[str, Any], here: Mapping[str, Any], num_consumed: int) -> int | None:
    """Return the first sample from which two mixtures differ, of those consumed; None without one.

    Args:
        saved, here: records of `MixturePlan.record`.
    """
    changes = [
        min(phase[0] for phase in pair if phase is not None)
        for pair in zip_longest(saved["phases"], here["phases"])
        if pair[0] != pair[1]
    ]
    for name in saved["exhausted"].keys() | here["exhausted"].keys():
        one, other = (record["exhausted"].get(name) for record in (saved, here))
        if one != other:
            changes.append(min(at for at in (one, other) if at is not None))
    return min((at for at in changes if at < num_consumed), default=None)


def sources_read(record: Mapping[str, Any], num_consumed: int) -> list[str]:
    """Return the names of the sources that the first samples may come from."""
    read = dict[str, None]()
    for first, weights, ramp in record["phases"]:
        if first < num_consumed:
            read |= dict.fromkeys([*weights, *(ramp[1] if ramp else ())])
    return list(read)


def num_samples_until(until: tuple[float, str], seq_length: int, consumed_after: Callable[[int], int]) -> int:
    """Return the samples of a run up to an end of `DataPhase.until`."""
    number, unit = until
    if unit == "iterations":
        return consumed_after(int(number))
    return math.ceil(number / seq_length) if unit == "tokens" else int(number)


def _phase_weights(
    phase: DataPhase, names: Sequence[str], sizes: Sequence[int], num_samples: int
) -> tuple[float, ...]:
    if isinstance(phase.value, Mapping):
        weights = [phase.value.get(name, 0.0) for name in names]
    elif phase.kind == "size_exponent":
        weights = [(size / max(sizes)) ** phase.value for size in sizes]
    else:
        weights = unimax(sizes, num_samples, phase.value)
    total = math.fsum(weights)
    return tuple(weight / total for weight in weights)


def unimax(sizes: Sequence[int], budget: float, max_epochs: float) -> list[float]:
    """Return the samples of each source: as many of each as possible, in at most `max_epochs` epochs.

    Chung et al. 2023, "UniMax: Fairer and More Effective Language Sampling for Large-Scale Multilingual
    Pretraining", algorithm 1: the smallest source first, each gets an equal share of what is left.
    """
    samples = [0.0] * len(sizes)
    for i, d in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        samples[d] = min(budget / (len(sizes) - i), max_epochs * sizes[d])
        budget -= samples[d]
    return samples


class MixtureBlock(NamedTuple):
    """Order of consecutive samples.

    Attributes:
        first: number of the first sample.
        sources: int64 [n], source of each sample.
        numbers: int64 [n], number of each sample in its source's stream.
    """

    first: int
    sources: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int64]


class MixtureOrder:
    """Order of a mixture's samples: each comes from the source that is furthest behind its share.

    What a source is behind at the end of a phase, or of a step of a ramp, goes on into the next one.

    Attributes:
        drawn: int64 [P, D], samples that each phase takes from each source, of the blocks so far.
        exhausted: int64 [D], the sample at which each source ran out, or -1.
    """

    def __init__(self, plan: MixturePlan) -> None:
        self._plan = plan
        self.drawn = np.zeros((len(plan.phases), len(plan.names)), np.int64)
        self.exhausted = np.full(len(plan.names), -1, np.int64)

    def blocks(
        self, num_samples: int, progress: _index_builder.Progress | None = None
    ) -> Iterator[MixtureBlock]:
        """Yield the order of the first samples of the run.

        Raises:
            UserError: a source runs out in a phase that does not renormalize, or all of a phase do.
        """
        owed = np.zeros(len(self._plan.names))
        for i, phase in enumerate(self._plan.phases):
            for first, end, weights in phase.steps(num_samples):
                while first < end:
                    block = self._block(i, first, end, weights, owed, progress)
                    yield block
                    first += len(block.sources)

    def _block(
        self,
        i: int,
        first: int,
        end: int,
        weights: npt.NDArray[np.float64],
        owed: npt.NDArray[np.float64],
        progress: _index_builder.Progress | None,
    ) -> MixtureBlock:
        """Order samples of phase i up to `end`, or up to the one at which a source runs out."""
        taken = self.drawn.sum(0)
        has_more = np.array(
            [limit is None or n < limit for n, limit in zip(taken, self._plan.limits, strict=True)]
        )
        renormalizes = self._plan.phases[i].renormalizes
        if renormalizes:  # also of a source whose last sample was the last one before this block
            self.exhausted[(weights > 0) & ~has_more & (self.exhausted < 0)] = first
        live = np.flatnonzero((weights > 0) & (has_more | (not renormalizes)))
        if not len(live):
            raise self._ran_out(i, first, "all its sources have")
        shares = weights[live] / weights[live].sum()
        chosen, numbers = _index_builder.build_blend_index(
            shares.tolist(), end - first, progress, owed[live].tolist()
        )
        sources = live[chosen]
        count = end - first
        for d in live.tolist():
            limit = self._plan.limits[d]
            if limit is not None:
                beyond = np.flatnonzero(sources == d)[limit - taken[d] :].tolist()
                count = min([count, *beyond[:1]])
        if count < end - first:
            out = int(sources[count])
            if not renormalizes:
                raise self._ran_out(i, first + count, f"source {self._plan.names[out]} has")
            self.exhausted[out] = first + count
        sources, numbers = sources[:count], numbers[:count] + taken[sources[:count]]
        drawn = np.bincount(sources, minlength=len(taken))
        self.drawn[i] += drawn
        owed[live] += shares * count - drawn[live]
        return MixtureBlock(first, sources, numbers)

    def _ran_out(self, i: int, sample: int, who: str) -> UserError:
        return UserError(
            f"--data-phases {self._plan.path}: {who} no sample left for sample {sample:,} of the run, in "
            f"phase {i + 1}: raise max_epochs, lower the weight, or set when_exhausted: renormalize"
        )


def mixture_lines(plan: MixturePlan, drawn: npt.NDArray[np.int64], seq_length: int) -> Iterator[str]:
    """Yield a line for each phase that the run reaches: its samples, and the epochs of each source.

    Args:
        drawn: int64 [P, D], see `MixtureOrder`.
    """
    for i, (phase, counts) in enumerate(zip(plan.phases, drawn, strict=True), 1):
        if total := int(counts.sum()):
            parts = ", ".join(
                f"{name} {count / total:.1%} ({count / size:.3g} epochs)"
                for name, count, size in zip(plan.names, counts.tolist(), plan.sizes, strict=True)
                if count
            )
            tokens = (phase.first + total) * seq_length
            last = phase.first + total - 1
            yield f"phase {i}, samples {phase.first:,} to {last:,}, to token {tokens:,}: {parts}"


class MixtureDataset(BlendedDataset):
    """Samples of a mixture that changes during the run.

    Attributes:
        drawn, exhausted: see `MixtureOrder`.
    """

    def __init__(
        self,
        plan: MixturePlan,
        num_samples: int,
        new_dataset: Callable[[int, int], Dataset],
        cache: IndexCache | None = None,
        prefix: str = "",
    ) -> None:
        """Order the samples.

        Args:
            new_dataset: returns a source by its index, with this many samples.
            cache: stores and maps the order; None to build it in memory.
            prefix: prefix of the first corpus; the default cache is beside it.

        Raises:
            UserError: a source runs out.
        """
        self.plan = plan
        names = ("dataset_index", "dataset_sample_index", "drawn", "exhausted")

        def build() -> Arrays:
            sources, numbers = np.empty(num_samples, np.int16), np.empty(num_samples, np.int64)
            order = MixtureOrder(plan)
            with reported_progress("the order of the mixture", "samples", num_samples) as progress:
                for block in order.blocks(num_samples, progress):
                    rows = slice(block.first, block.first + len(block.sources))
                    sources[rows], numbers[rows] = block.sources, block.numbers
            return dict(zip(names, (sources, numbers, order.drawn, order.exhausted), strict=True))

        values = {
            "phases": [list(phase) for phase in plan.phases],
            "limits": plan.limits,
            "num_samples": num_samples,
            "format": _FORMAT,
        }
        key = CacheKey("Mixture", "train", values, 2 * num_samples, prefix)
        cached = cached_arrays(cache, key, names, build)
        self.drawn, self.exhausted = (np.array(cached.arrays[name]) for name in names[2:])
        counts = self.drawn.sum(0).tolist()
        self._use([new_dataset(d, count) for d, count in enumerate(counts)], cached)

    def describe(self, index: int) -> str:
        """Return the source and the phase of a sample."""
        return f"source {self.plan.names[self.dataset_index[index]]}, phase {self.plan.phase_of(index) + 1}"
