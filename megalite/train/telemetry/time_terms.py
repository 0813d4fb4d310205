"""Split the time of an iteration into terms, and find the terms that make a run slower than expected."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megalite.distributed.axes import coordinates_text
from megalite.observe.unit_record import ATTENTION, GEMMS, KERNEL_KINDS, MEMORY_BOUND, KernelKind

COMPUTE, LAUNCHES = "compute", "kernel launches"
COMPUTING = (COMPUTE, *KERNEL_KINDS, LAUNCHES)
"""Terms of computation: COMPUTE alone, or all the others."""
STRAGGLER, IMBALANCE, BUBBLE = "straggler", "stage imbalance", "bubble"
DATA, COLLECTION = "data", "garbage collection"
EVALUATION, SAVING, LOGGING, BETWEEN = "evaluation", "saving", "logging", "between iterations"
NAMED_SHARE = 0.1
"""Smallest share of the time that a term must lose to be named."""
_WAIT = " wait"


class _Advice(NamedTuple):
    """Likely cause of a long term, and the options to try."""

    cause: str
    remedy: str


_ADVICE = {
    COMPUTE: _Advice(
        "slow kernels, or a machine that is busy or hot",
        "--profile-modules 10 to see the time of each module",
    ),
    GEMMS: _Advice(
        "a device that is busy or hot, or small GEMMs",
        "--profile-modules 10 to see the time of each module",
    ),
    ATTENTION: _Advice(
        "a slow attention kernel; the log names it at the start", "another --attention-backend"
    ),
    MEMORY_BOUND: _Advice(
        "many kernels between GEMMs, or busy memory",
        "--compile, which fuses kernels, or --profile-modules 10",
    ),
    LAUNCHES: _Advice(
        "the device waits for the host: short kernels, slow Python code, or busy CPU cores",
        "a larger --micro-batch-size, or --compile",
    ),
    STRAGGLER: _Advice("a slow or shared device", "another node instead of this host"),
    IMBALANCE: _Advice(
        "uneven stages, or a slow or shared device",
        "--pipeline-layers for uneven stages; another node instead of this host",
    ),
    BUBBLE: _Advice(
        "few microbatches for the number of stages",
        "more microbatches, or --pipeline-schedule interleaved",
    ),
    DATA: _Advice("a slow disk or too few CPU cores", "a copy of the --data-path files on the node's disk"),
    COLLECTION: _Advice("Python collects garbage often", "--manual-gc, or a larger --manual-gc-interval"),
    EVALUATION: _Advice(
        "evaluations are long or frequent", "a larger --eval-interval, or smaller --eval-iters"
    ),
    SAVING: _Advice("a slow disk, or frequent saves", "--async-save, or a larger --save-interval"),
    LOGGING: _Advice("frequent log lines, or a slow disk", "a larger --log-interval"),
    BETWEEN: _Advice("callbacks of your own, or profilers", "fewer callbacks"),
    f"tp{_WAIT}": _Advice(
        "a slow link, or tensor parallelism over several nodes", "a smaller --tp, or --sequence-parallel"
    ),
    f"dp{_WAIT}": _Advice(
        "a slow link, or little computation to overlap with",
        "a larger --global-batch-size, or --grad-communication-dtype bf16",
    ),
    f"pp{_WAIT}": _Advice("a slow link between stages", "--trace-pipeline 5:6 to see each wait"),
}
_WAITING = _Advice("a slow link", "--trace-pipeline 5:6 to see each wait")


ActionTimes = Mapping[tuple[str, int], float]
"""Mean seconds of a rank's pipeline actions, by kind and chunk."""


@dataclass(frozen=True)
class RankTime:
    """Time of one rank in one iteration.

    Attributes:
        coordinates: the rank's coordinate along each axis.
        seconds: seconds by term; the terms do not overlap, and those of `COMPUTING` are everything else.
        actions: seconds of its pipeline actions without waits; empty if it had none.
    """

    rank: int
    host: str
    coordinates: Mapping[str, int]
    seconds: Mapping[str, float]
    actions: ActionTimes = field(default_factory=dict)

    @property
    def waiting(self) -> float:
        """Return the seconds that the rank waits for others."""
        return sum(seconds for term, seconds in self.seconds.items() if term.endswith(_WAIT))

    @property
    def computing(self) -> float:
        """Return the seconds of computation."""
        return _computing(self.seconds)


def _computing(seconds: Mapping[str, float]) -> float:
    return sum(seconds.get(term, 0.0) for term in COMPUTING)


def compute_terms(computing: float, kernels: Mapping[KernelKind, float] | None) -> dict[str, float]:
    """Split the seconds of computation into kernels and the gaps between them.

    Args:
        kernels: seconds of kernels by kind; None if they are not known.
    """
    if kernels is None:
        return {COMPUTE: computing}
    running = sum(kernels.values())
    share = min(1.0, computing / running) if running else 0.0  # kernels may overlap with waits
    return {kind: seconds * share for kind, seconds in kernels.items()} | {
        LAUNCHES: max(0.0, computing - running)
    }


@dataclass(frozen=True)
class TimeSample:
    """Terms of one iteration, and of the time between iterations since the last sample.

    The terms inside the iteration are the times of the rank that waits least: the other ranks wait for it.
    Its computation is split: the computation of the median stage, the excess of its own stage
    (`IMBALANCE`), and its own excess over the median of its stage (`STRAGGLER`). Its waits along the pipeline
    are split too: `BUBBLE` is the wait that the schedule causes with the measured times of the stages.

    Attributes:
        num_iterations: number of iterations since the last sample.
        rank: the rank that waits least; with its host and its coordinates along the axes.
        layout: number of coordinates along each axis.
        compared: number of ranks of its stage that its computation is compared with.
        seconds: seconds of the iteration by term.
        between: seconds outside of iterations since the last sample, by term.
    """

    iteration: int
    num_iterations: int
    rank: int
    host: str
    coordinates: Mapping[str, int]
    layout: Mapping[str, int]
    compared: int
    seconds: Mapping[str, float]
    between: Mapping[str, float]

    @property
    def rank_name(self) -> str:
        return f"rank {self.rank} ({self.host}, {coordinates_text(self.coordinates)})"


def time_sample(
    iteration: int,
    num_iterations: int,
    ranks: Sequence[RankTime],
    layout: Mapping[str, int],
    between: Mapping[str, float],
    step_seconds: Callable[[Sequence[ActionTimes]], float],
) -> TimeSample:
    """Return the terms of an iteration from the times of all ranks.

    Args:
        step_seconds: returns the seconds of all microbatches without messages from the times of the stages,
            by pipeline rank.
    """
    critical = min(ranks, key=lambda each: each.waiting)
    stage = critical.coordinates["pp"]
    peers = [each for each in ranks if each is not critical and each.coordinates["pp"] == stage]
    usual = min(critical, _median(peers or [critical]), key=lambda each: each.computing)
    stages = [
        usual if number == stage else _median([each for each in ranks if each.coordinates["pp"] == number])
        for number in sorted({each.coordinates["pp"] for each in ranks})
    ]
    median = min(usual, _median(stages), key=lambda each: each.computing)
    seconds = {term: median.seconds[term] for term in COMPUTING if term in median.seconds}
    seconds[STRAGGLER] = critical.computing - usual.computing
    seconds |= {term: value for term, value in critical.seconds.items() if term not in COMPUTING}
    if len(stages) > 1:
        bubble = min(_bubble(stages, stage, step_seconds), seconds[f"pp{_WAIT}"])
        seconds[IMBALANCE] = usual.computing - median.computing
        seconds[BUBBLE] = bubble
        seconds[f"pp{_WAIT}"] -= bubble
    return TimeSample(
        iteration,
        num_iterations,
        critical.rank,
        critical.host,
        critical.coordinates,
        layout,
        len(peers),
        seconds,
        between,
    )


def _median(ranks: Sequence[RankTime]) -> RankTime:
    """Return the rank of median computation; the lower of two."""
    return sorted(ranks, key=lambda each: each.computing)[(len(ranks) - 1) // 2]


def _bubble(
    stages: Sequence[RankTime], stage: int, step_seconds: Callable[[Sequence[ActionTimes]], float]
) -> float:
    """Return the seconds that a stage waits in the schedule if messages take no time."""
    actions = [each.actions for each in stages]
    if not all(actions):  # an excluded iteration
        return 0.0
    alone = [
        {key: seconds if number == stage else 0.0 for key, seconds in times.items()}
        for number, times in enumerate(actions)
    ]
    return step_seconds(actions) - step_seconds(alone)


def sample_in(record: object) -> TimeSample | None:
    """Return the sample in a line of a metrics file; None if it has none, or a damaged one."""
    if not isinstance(record, dict) or record.keys() != TimeSample.__dataclass_fields__.keys():
        return None
    numbers = [record[name] for name in ("iteration", "num_iterations", "rank", "compared")]
    by_name = [record[name] for name in ("coordinates", "layout", "seconds", "between")]
    if not (
        all(type(number) is int for number in numbers)
        and record["num_iterations"] > 0
        and all(isinstance(each, dict) for each in by_name)
        and all(type(x) in (int, float) and 0 <= x < 1e9 for each in by_name for x in each.values())
    ):
        return None
    return TimeSample(**record)


@dataclass(frozen=True)
class TimeTerm:
    """Term of the mean iteration.

    Attributes:
        seconds: measured seconds per iteration.
        expected: expected seconds per iteration.
        evidence: what was measured, as text.
    """

    name: str
    seconds: float
    expected: float
    evidence: str

    @property
    def lost(self) -> float:
        return max(0.0, self.seconds - self.expected)


@dataclass(frozen=True)
class TimeComparison:
    """Mean iteration of a run, compared with what was expected.

    Attributes:
        terms: terms of the iteration, then of the time between iterations.
        num_samples: number of iterations that were measured.
        source: source of the expected times, as text.
    """

    terms: Sequence[TimeTerm]
    num_samples: int
    source: str

    @property
    def seconds(self) -> float:
        return sum(term.seconds for term in self.terms)

    @property
    def expected(self) -> float:
        return sum(term.expected for term in self.terms)

    def slow_terms(self) -> list[TimeTerm]:
        """Return the terms that lose a large share of the time, the largest first."""
        slow = [term for term in self.terms if term.lost >= NAMED_SHARE * self.seconds > 0]
        return sorted(slow, key=lambda term: -term.lost)

    def findings(self) -> Iterator[str]:
        """Yield a line for each slow term: its evidence, the likely cause, and what to try."""
        for term in self.slow_terms():
            advice = _ADVICE.get(term.name, _WAITING)
            lost = f"{1e3 * term.lost:.1f} ms ({term.lost / self.seconds:.0%})"
            yield (
                f"{term.name} cost {lost} of an iteration: "
                f"{term.evidence}; likely cause: {advice.cause}; try {advice.remedy}"
            )

    def summary(self) -> str:
        """Return the first finding, and the names of the other slow terms; empty if there are none."""
        slow = [f"{term.name} {term.lost / self.seconds:.0%}" for term in self.slow_terms()]
        also = f"; also {', '.join(slow[1:])}" if slow[1:] else ""
        return next(self.findings(), "") + also

    def table(self) -> list[tuple[str, ...]]:
        """Return the heads and rows of a waterfall from the expected to the measured time."""
        heads = ("term", "measured ms", "expected ms", "difference", "share")
        shown = [term for term in self.terms if max(term.seconds, term.expected) >= 5e-5]
        rows = [self._row(term.name, term.seconds, term.expected) for term in shown]
        return [heads, *rows, self._row("iteration", self.seconds, self.expected)]

    def _row(self, name: str, seconds: float, expected: float) -> tuple[str, ...]:
        share = seconds / self.seconds if self.seconds else 0.0
        times = (f"{1e3 * value:.1f}" for value in (seconds, expected))
        return name, *times, f"{1e3 * (seconds - expected):+.1f}", f"{share:.0%}"

    def note(self) -> str:
        """Return how the times were measured, and the source of the expected ones."""
        plural = "" if self.num_samples == 1 else "s"
        return f"mean of {self.num_samples} measured iteration{plural}; expected: {self.source}"

    def lines(self) -> Iterator[str]:
        """Yield the comparison as lines of text."""
        yield self.note()
        for name, *cells in self.table():
            yield f"{name:<20}" + "".join(f"{cell:>13}" for cell in cells)
        yield from self.findings()
        if not self.slow_terms():
            yield f"no term loses {NAMED_SHARE:.0%} of the time"


OWN = "only the fastest computation of these iterations, since there is no plan"


def compare(
    samples: Sequence[TimeSample], planned: Mapping[str, float] | None = None, source: str = OWN
) -> TimeComparison:
    """Compare the mean of the samples with a plan, or with the run's own fastest iteration.

    Args:
        samples: samples of the run, at least one.
        planned: planned seconds by term; other terms are expected to take no time. Its computation may be
            split even if that of a sample is not.
    """
    num_iterations = sum(sample.num_iterations for sample in samples)
    by_sample = [sample.seconds for sample in samples]
    if not all(LAUNCHES in seconds for seconds in by_sample):
        by_sample = list(map(_merged, by_sample))
        planned = None if planned is None else _merged(planned)
    inside = {
        name: statistics.fmean(seconds.get(name, 0.0) for seconds in by_sample)
        for name in dict.fromkeys(name for seconds in by_sample for name in seconds)
    }
    outside = {
        name: sum(sample.between.get(name, 0.0) for sample in samples) / num_iterations
        for name in dict.fromkeys(name for sample in samples for name in sample.between)
    }
    if planned is None:
        fastest = min(by_sample, key=_computing)
        planned = {term: fastest[term] for term in COMPUTING if term in fastest}
    names = dict.fromkeys((*inside, *planned, *outside))
    measured = {name: inside.get(name, 0.0) + outside.get(name, 0.0) for name in names}
    terms = [
        TimeTerm(name, seconds, planned.get(name, 0.0), _evidence(name, seconds, planned, samples))
        for name, seconds in measured.items()
    ]
    return TimeComparison(terms, len(samples), source)


def _merged(seconds: Mapping[str, float]) -> dict[str, float]:
    others = {term: value for term, value in seconds.items() if term not in COMPUTING}
    return {COMPUTE: _computing(seconds), **others}


def _evidence(name: str, seconds: float, planned: Mapping[str, float], samples: Sequence[TimeSample]) -> str:
    worst = max(samples, key=lambda sample: sample.seconds.get(name, 0.0))
    milliseconds, most = f"{1e3 * seconds:.1f} ms", f"{1e3 * worst.seconds.get(name, 0.0):.1f} ms"
    if name in COMPUTING:
        return f"it takes {milliseconds}, {1e3 * planned.get(name, 0.0):.1f} ms expected"
    if name == STRAGGLER:
        peers = "the other rank" if worst.compared == 1 else f"the median of {worst.compared} others"
        times = sum(sample.rank == worst.rank for sample in samples)
        return (
            f"{worst.rank_name} computes {most} longer than {peers} in iteration {worst.iteration}, and is "
            f"the last in {times} of {len(samples)}"
        )
    if name == IMBALANCE:
        return (
            f"the stage of {worst.rank_name} computes {most} longer than the median of {worst.layout['pp']} "
            f"stages in iteration {worst.iteration}"
        )
    if name == BUBBLE:
        return (
            f"{worst.rank_name} waits {most} in iteration {worst.iteration} because of the schedule, by "
            "the measured times of the stages"
        )
    if name == DATA:
        return f"{worst.rank_name} waits {most} for samples in iteration {worst.iteration}"
    if name.endswith(_WAIT):
        return f"even {worst.rank_name}, which waits least, waits {most} in iteration {worst.iteration}"
    return f"it takes {milliseconds} per iteration"
