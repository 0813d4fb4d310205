"""Mixtures that change during a run: against plain Python, and under changes of their future and past."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megalite.data import mixture
from megalite.data.corpus_sources import DataPhase, DataPhases, Source
from megalite.data.mixture import (
    MixtureDataset,
    MixtureOrder,
    MixturePhase,
    MixturePlan,
    first_change,
    sources_read,
    unimax,
)
from megalite.utils.errors import UserError
from tests.corpora import Numbers

NAMES = "web", "code", "math", "law"


def drawn_by(plan: MixturePlan, num_samples: int) -> list[tuple[int, int]]:
    """Return the source and its sample for each sample: the one furthest behind, in plain Python."""
    taken, owed, order = [0] * len(plan.names), [0.0] * len(plan.names), list[tuple[int, int]]()
    for phase in plan.phases:
        for first, end, weights in phase.steps(num_samples):
            sample = first
            while sample < end:
                left = [limit is None or taken[d] < limit for d, limit in enumerate(plan.limits)]
                live = [d for d, w in enumerate(weights) if w > 0 and (left[d] or not phase.renormalizes)]
                if not live:
                    raise UserError("no source")
                total = np.array([weights[d] for d in live]).sum()
                shares, counts, start = {d: weights[d] / total for d in live}, dict.fromkeys(live, 0), sample
                level = {d: -owed[d] for d in live}
                while sample < end:
                    position = max(sample - start, 1)
                    behind = {d: shares[d] * position - level[d] for d in live}
                    d = max(live, key=lambda d: (behind[d], -d))
                    if plan.limits[d] is not None and taken[d] == plan.limits[d]:
                        if not phase.renormalizes:
                            raise UserError("ran out")
                        break
                    order.append((d, taken[d]))
                    level[d] += 1.0
                    taken[d], counts[d], sample = taken[d] + 1, counts[d] + 1, sample + 1
                for d in live:
                    owed[d] += shares[d] * (sample - start) - counts[d]
    return order


def ordered(plan: MixturePlan, num_samples: int) -> list[tuple[int, int]]:
    blocks = list(MixtureOrder(plan).blocks(num_samples))
    assert [block.first for block in blocks] == np.cumsum([0, *(len(b.sources) for b in blocks)])[
        :-1
    ].tolist()
    return [pair for b in blocks for pair in zip(b.sources.tolist(), b.numbers.tolist(), strict=True)]


@st.composite
def phases_from(draw: Any, first: int, renormalizes: bool) -> tuple[MixturePhase, ...]:
    """Draw phases from a sample on; the last one has no end."""
    count, found, previous = draw(st.integers(1, 4)), [], None
    for number in range(count):
        raw = draw(st.lists(st.integers(0, 5), min_size=4, max_size=4).filter(any))
        weights = tuple(weight / sum(raw) for weight in raw)
        end = None if number == count - 1 else first + draw(st.integers(1, 120))
        start = previous if end is not None and draw(st.booleans()) else None
        found.append(MixturePhase(first, end, start, weights, renormalizes))
        previous, first = weights, end or 0
    return tuple(found)


def plan_of(phases: tuple[MixturePhase, ...], limits: Any = (None,) * 4) -> MixturePlan:
    return MixturePlan("f.yaml", NAMES, (10, 20, 30, 40), tuple(limits), phases)


LIMITS = st.lists(st.none() | st.integers(0, 60), min_size=4, max_size=4)


@given(phases_from(0, True) | phases_from(0, False), LIMITS, st.integers(1, 300), st.integers(3, 50))
@settings(max_examples=100, deadline=None)
def test_order_is_that_of_a_look_at_each_sample(
    phases: tuple[MixturePhase, ...], limits: Any, size: int, block: int
) -> None:
    """With blocks of any size, ramps of a few steps, and sources that run out."""
    plan = plan_of(phases, limits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixture, "_BLOCK", block)
        patch.setattr(mixture, "NUM_RAMP_STEPS", 7)
        try:
            expected = drawn_by(plan, size)
        except UserError:
            with pytest.raises(UserError, match=r"no sample left for sample \d+ of the run, in phase"):
                ordered(plan, size)
            return
        assert ordered(plan, size) == expected
        assert ordered(plan, max(1, size // 2)) == expected[: max(1, size // 2)]


@given(st.data(), LIMITS)
@settings(max_examples=100, deadline=None)
def test_a_change_of_the_future_neither_skips_nor_repeats_a_sample(data: st.DataObject, limits: Any) -> None:
    """Over several restarts, each with other phases from some later sample on."""
    limits = (None, *limits[1:])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixture, "NUM_RAMP_STEPS", 7)
        plan = plan_of(data.draw(phases_from(0, True)), limits)
        read, size = list[tuple[int, int]](), 300
        for _ in range(3):
            consumed = data.draw(st.integers(len(read), size))
            try:
                read += ordered(plan, size)[len(read) : consumed]
            except UserError:
                assume(False)
            change = data.draw(st.integers(consumed, size))
            kept = [phase for phase in plan.phases if phase.first < change]
            if kept and kept[-1].end is None:
                kept[-1] = kept[-1]._replace(end=change)
            elif kept and kept[-1].end > change:  # a ramp that has begun keeps its end
                change = kept[-1].end if kept[-1].start else change
                kept[-1] = kept[-1]._replace(end=change)
            elif kept:
                change = kept[-1].end
            changed = dataclasses.replace(plan, phases=(*kept, *data.draw(phases_from(change, True))))
            saved, here = plan.record(_ends(plan, consumed)), changed.record(_ends(changed, consumed))
            assert first_change(saved, here, consumed) is None
            plan = changed
        for d in range(4):
            numbers = [number for source, number in read if source == d]
            assert numbers == list(range(len(numbers)))  # each sample of a stream once, so once in an epoch
            assert limits[d] is None or len(numbers) <= limits[d]


def _ends(plan: MixturePlan, num_samples: int) -> np.ndarray:
    order = MixtureOrder(plan)
    list(order.blocks(num_samples))
    return order.exhausted


@given(phases_from(0, True), phases_from(0, True), LIMITS, LIMITS, st.integers(1, 200))
@settings(max_examples=100, deadline=None)
def test_a_change_of_the_past_is_found_before_the_first_sample_that_differs(
    phases: Any, others: Any, limits: Any, other_limits: Any, consumed: int
) -> None:
    one, other = plan_of(phases, (None, *limits[1:])), plan_of(others, (None, *other_limits[1:]))
    try:
        orders = [ordered(plan, consumed) for plan in (one, other)]
    except UserError:
        assume(False)
    change = first_change(*(plan.record(_ends(plan, consumed)) for plan in (one, other)), consumed)
    differs = [i for i, pair in enumerate(zip(*orders, strict=True)) if pair[0] != pair[1]]
    if differs:
        assert change is not None and change <= differs[0]


def test_weights_are_kept_to_within_a_sample_through_a_ramp() -> None:
    """A source of 2% gets its 2%, although no step of the ramp has 50 samples."""
    ramp = MixturePhase(100, 20_100, (0.98, 0.02, 0.0, 0.0), (0.96, 0.02, 0.02, 0.0), False)
    plan = plan_of((MixturePhase(0, 100, None, ramp.start, False), ramp))
    order = MixtureOrder(plan)
    list(order.blocks(20_100))
    assert order.drawn[1].tolist() == pytest.approx([19_400, 400, 200, 0], abs=2)


def of(*phases: DataPhase, num_samples: int = 100, max_epochs: float = 2.0) -> MixturePlan:
    data = DataPhases("f.yaml", (Source("web", "a", max_epochs), Source("code", "b")), phases)
    return MixturePlan.of(data, (30, 10), num_samples, 8, lambda iterations: 4 * iterations)


END = DataPhase(None, "weights", {"code": 2.0}, False)


def test_ends_are_tokens_samples_or_iterations() -> None:
    plan = of(
        DataPhase((81, "tokens"), "weights", {"web": 3.0, "code": 1.0}, False),
        DataPhase((20, "samples"), "ramp", {"code": 1.0}, True),
        DataPhase((10, "iterations"), "size_exponent", 0.5, False),
        END,
    )
    assert [(phase.first, phase.end) for phase in plan.phases] == [(0, 11), (11, 20), (20, 40), (40, None)]
    assert plan.phases[0].weights == (0.75, 0.25) == plan.phases[1].start
    root = 3**0.5
    assert plan.phases[2].weights == pytest.approx((root / (1 + root), 1 / (1 + root)))
    assert plan.limits == (60, None)
    assert [plan.phase_of(sample) for sample in (0, 10, 11, 39, 40, 999)] == [0, 0, 1, 2, 3, 3]


def test_unimax_is_the_papers_algorithm() -> None:
    """Chung et al. 2023: uniform, but for the sources of which four epochs are less than their share."""
    assert unimax([10, 1000, 100], 900, 4) == [40, 460, 400]
    assert unimax([10, 1000, 100], 90, 4) == [30, 30, 30]
    assert unimax([10, 20], 900, 4) == [40, 80]
    (phase,) = of(DataPhase((100, "samples"), "unimax", 4, False)).phases
    assert phase.weights == pytest.approx((0.6, 0.4))


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ((END, END), "phase 1 has no end, and another phase follows"),
        (
            (
                DataPhase((20, "samples"), "size_exponent", 1.0, False),
                DataPhase((160, "tokens"), "unimax", 4, False),
            ),
            "phase 2 ends at sample 20, and it begins at sample 20",
        ),
        ((DataPhase((99, "samples"), "size_exponent", 1.0, False),), "ends at sample 99 of 100 of the run"),
    ],
)
def test_impossible_ends_are_named(phases: tuple[DataPhase, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        of(*phases)


def test_a_source_that_runs_out_is_named_with_its_sample() -> None:
    plan = of(DataPhase((80, "samples"), "weights", {"web": 3.0, "code": 1.0}, False), END, max_epochs=1.0)
    with pytest.raises(UserError, match="source web has no sample left for sample 40 of the run, in phase 1"):
        ordered(plan, 100)


def test_dataset_reads_the_streams_and_knows_source_and_phase() -> None:
    plan = of(DataPhase((60, "samples"), "weights", {"web": 1.0, "code": 1.0}, True), END, max_epochs=0.5)
    dataset = MixtureDataset(plan, 100, Numbers)
    assert [tuple(dataset[i].tolist()) for i in range(100)] == ordered(plan, 100)
    assert dataset.drawn.tolist() == [[15, 45], [0, 40]]
    assert dataset.describe(0) == "source web, phase 1"
    assert dataset.describe(60) == "source code, phase 2"
    (at,) = plan.record(dataset.exhausted)["exhausted"].values()
    assert 29 <= at <= 30
    assert sources_read(plan.record(dataset.exhausted), 10) == ["web", "code"]
