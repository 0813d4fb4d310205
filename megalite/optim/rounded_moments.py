"""AdamW's moments in 16 or 8 bits, which an update widens range by range and rounds at random."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.config import OptimizerConfig
from megalite.distributed.topology import Topology
from megalite.kernels import round_moments_, site_key, wide_exp_avg
from megalite.optim import RANGE_SIZE
from megalite.optim.flat_buffers import BucketEntry, overlap
from megalite.tensor_parallel.counter_random import EvenRuns, even_runs
from megalite.tensor_parallel.fp8 import E4M3

EXP_AVG, EXP_AVG_SQ = MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's moments, by torch's names."""
_DTYPES = {"bf16": torch.bfloat16, "fp8": E4M3}


class _Span(NamedTuple):
    """Elements [start, stop) of a state that are evenly spaced runs of a full parameter.

    Attributes:
        first: position of the first element in the runs.
        key: key of the parameter's random numbers.
    """

    start: int
    stop: int
    first: int
    runs: EvenRuns
    key: int


class RoundedMoments:
    """Rounding of the moments of one state. See `megalite.kernels.moments` for the formats.

    The random numbers depend on seed, parameter, element and update, so the moments are the same in every
    layout and at every ZeRO stage.

    Attributes:
        dtypes: dtypes of the moments between updates, by torch's names; at least one is narrow.
    """

    def __init__(
        self,
        dtypes: Mapping[str, torch.dtype],
        entries: Sequence[BucketEntry],
        owned: slice,
        seed: int,
        topology: Topology,
    ) -> None:
        """Locate the elements in their full parameters.

        Args:
            entries: parameters of the state.
            owned: elements of the bucket in the state.
            seed: seed of the run.
        """
        self.dtypes = dtypes
        self._spans = [span for entry in entries for span in _spans(entry, owned, seed, topology)]

    @staticmethod
    def constructor(
        config: OptimizerConfig, main_dtype: torch.dtype, seed: int, topology: Topology
    ) -> Callable[[Sequence[BucketEntry], slice], RoundedMoments] | None:
        """Return what makes the rounding of a state; None if moments have the dtype of the main weights."""
        names = {EXP_AVG: config.exp_avg_dtype, EXP_AVG_SQ: config.exp_avg_sq_dtype}
        if not _DTYPES.keys() & names.values():
            return None
        dtypes = {moment: _DTYPES.get(name, main_dtype) for moment, name in names.items()}
        return partial(RoundedMoments, dtypes, seed=seed, topology=topology)

    def widen(self, moments: Mapping[str, Tensor], elements: slice, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return moments of the elements in the dtype of the main weights: copies, or views of such."""
        own = {name: moment[elements] for name, moment in moments.items()}
        if self.copies_for_checkpoint:
            own[EXP_AVG] = wide_exp_avg(own[EXP_AVG], own[EXP_AVG_SQ])
        return {name: moment.to(dtype) for name, moment in own.items()}

    def store(
        self, moments: Mapping[str, Tensor], wide: Mapping[str, Tensor], elements: slice, number: Tensor
    ) -> None:
        """Round what `widen` returned, after an update has changed it.

        Args:
            number: number of the update, an fp32 scalar on the device.
        """
        exact = {name: moment.float() for name, moment in wide.items()}
        is_narrow = {name: moments[name].dtype != wide[name].dtype for name in MOMENTS}
        for span in self._spans:
            held = overlap(slice(span.start, span.stop), elements)
            if held.start >= held.stop:
                continue
            within = slice(held.start - elements.start, held.stop - elements.start)
            round_moments_(
                exact[EXP_AVG][within],
                exact[EXP_AVG_SQ][within],
                moments[EXP_AVG][held] if is_narrow[EXP_AVG] else None,
                moments[EXP_AVG_SQ][held] if is_narrow[EXP_AVG_SQ] else None,
                number,
                span.key,
                base=span.runs.base,
                first=span.first + held.start - span.start,
                run_length=span.runs.length,
                run_stride=span.runs.stride,
            )

    @property
    def copies_for_checkpoint(self) -> bool:
        """Return whether `for_checkpoint` returns copies instead of views."""
        return self.dtypes[EXP_AVG] == E4M3

    def for_checkpoint(self, moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return moments for a checkpoint, which any run can load: fp8 as bf16, in host memory, exactly."""
        if not self.copies_for_checkpoint:
            return dict(moments)
        codes = moments[EXP_AVG]
        device = codes.device if codes.is_meta else "cpu"
        copy = torch.empty(codes.shape, dtype=torch.bfloat16, device=device)
        for own in ranges_in(codes.numel()):
            copy[own] = self.widen(moments, own, torch.bfloat16)[EXP_AVG].to(device)
        return {**moments, EXP_AVG: copy}


def ranges_in(numel: int) -> Iterator[slice]:
    """Yield the ranges of elements that an update widens at once, so that copies need little memory."""
    for start in range(0, numel, RANGE_SIZE):
        yield slice(start, min(start + RANGE_SIZE, numel))


def _spans(entry: BucketEntry, owned: slice, seed: int, topology: Topology) -> Iterator[_Span]:
    held = overlap(slice(entry.start, entry.end), owned)
    key = site_key(seed, f"{entry.name}.moments")
    parts = list(even_runs(entry.spec, topology))
    size = (entry.end - entry.start) // len(parts)
    for number, runs in enumerate(parts):
        start = entry.start + number * size
        part = overlap(slice(start, start + size), held)
        if part.start < part.stop:
            yield _Span(part.start - owned.start, part.stop - owned.start, part.start - start, runs, key)
