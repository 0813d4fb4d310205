"""A dry run in words, and as an object for machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from megalite.dryrun.result import DryRun
from megalite.dryrun.traffic import ring_bytes
from megalite.pipeline.action import Action
from megalite.pipeline.check import peak_in_flight


def report_lines(found: DryRun) -> Iterator[str]:
    """What was found, for people."""
    places = ", ".join(f"{name} {rank} of {size}" for name, (rank, size) in found.places.items())
    yield f"dry run of rank {found.rank} of {found.world_size}: {places}"
    yield from _memory_lines(found)
    yield from _traffic_lines(found)
    yield from _schedule_lines(found)
    yield from _data_lines(found)
    yield from _run_lines(found)
    yield f"nothing was computed, and no other rank asked: it took {found.seconds:.1f} s"


def _memory_lines(found: DryRun) -> Iterator[str]:
    counts = found.counts
    buffers = counts.buffers
    yield f"parameters: {counts.num_parameters:,} on this rank, {found.model_parameters:,} in the whole model"
    yield "memory that this rank holds:"
    for name, size in asdict(buffers).items():
        yield _row(name.replace("_", " "), size)
    yield _row("buffers in all", buffers.total)
    yield _row("other tensors at the peak", counts.peak_bytes)
    yield _row("in all at the peak", buffers.total + counts.peak_bytes)


def _row(name: str, size: int) -> str:
    return f"  {name:<26}{size / 1e9:10.3f} GB {size:22,} bytes"


def _traffic_lines(found: DryRun) -> Iterator[str]:
    calls = found.counts.calls
    if not calls:
        yield "collectives: none, there is one rank"
        return
    yield "collectives and messages of an iteration:"
    yield f"  {'axis':<6}{'kind':<15}{'dtype':<10}{'number':>8}{'bytes of each':>20}{'bytes in all':>22}"
    for call, count in sorted(calls.items()):
        yield (
            f"  {call.axis:<6}{call.kind:<15}{call.dtype:<10}{count:>8,}{call.num_bytes:>20,}"
            f"{call.num_bytes * count:>22,}"
        )
    sent = {name: ring_bytes(calls, name, size) for name, (_, size) in found.places.items() if size > 1}
    told = ", ".join(f"{size / 1e9:.3f} GB on {name}" for name, size in sent.items())
    yield f"  this rank sends, where collectives run in rings: {told}"


def _schedule_lines(found: DryRun) -> Iterator[str]:
    actions = found.counts.actions
    yield (
        f"schedule {found.config.parallel.schedule}: {len(actions)} actions of "
        f"{len({action.microbatch for action in actions})} microbatches, "
        f"{peak_in_flight(actions)} in flight at the most"
    )
    yield f"  {in_words(actions)}"


def in_words(actions: Sequence[Action]) -> str:
    """Actions without their microbatches, which follow one another; what repeats is told once."""
    runs = [(name, len(list(group))) for name, group in groupby(map(_kind, actions))]
    told, place = [], 0
    while place < len(runs):
        pair, times = runs[place : place + 2], 1
        while len(pair) == 2 and runs[place + 2 * times : place + 2 * times + 2] == pair:
            times += 1
        if times > 1:
            told.append(f"{times} x ({', '.join(map(_run, pair))})")
            place += 2 * times
        else:
            told.append(_run(runs[place]))
            place += 1
    return ", ".join(told)


def _kind(action: Action) -> str:
    return f"{action.kind.value} of chunk {action.chunk}" if action.chunk else action.kind.value


def _run(run: tuple[str, int]) -> str:
    name, count = run
    return name if count == 1 else f"{count} x {name}"


def _data_lines(found: DryRun) -> Iterator[str]:
    corpora = found.corpora
    for part in corpora.parts:
        coverage = part.coverage
        yield (
            f"{part.split}: {coverage.num_samples:,.0f} samples of {coverage.prefix}, "
            f"{coverage.epochs_text} epochs of its {coverage.num_tokens:,} tokens; "
            f"its order takes {part.index_bytes:,} bytes"
        )
    if corpora.parts:
        yield f"data indices: {corpora.index_bytes:,} bytes in all"
    for reason in corpora.skipped:
        yield f"data not told of: {reason}"


def _run_lines(found: DryRun) -> Iterator[str]:
    first, last = found.learning_rates
    samples = found.config.num_samples(found.dp)
    yield (
        f"the run: {found.config.num_iterations(found.dp):,} iterations, {samples:,} samples, "
        f"{samples * found.config.model.seq_length:,} tokens"
    )
    yield f"learning rate: {first:.6g} at the first iteration, {last:.6g} at the last"


def as_object(found: DryRun) -> dict[str, Any]:
    """What was found, for machines."""
    counts, corpora = found.counts, found.corpora
    samples = found.config.num_samples(found.dp)
    return {
        "world_size": found.world_size,
        "rank": found.rank,
        "axes": {name: {"rank": rank, "size": size} for name, (rank, size) in found.places.items()},
        "parameters": {"rank": counts.num_parameters, "model": found.model_parameters},
        "buffer_bytes": {**asdict(counts.buffers), "total": counts.buffers.total},
        "peak_bytes": counts.peak_bytes,
        "collectives": [{**call._asdict(), "count": count} for call, count in sorted(counts.calls.items())],
        "schedule": {
            "name": found.config.parallel.schedule,
            "actions": [str(action) for action in counts.actions],
            "peak_in_flight": peak_in_flight(counts.actions),
        },
        "data": {
            "parts": [
                {"split": part.split, **asdict(part.coverage), "index_bytes": part.index_bytes}
                for part in corpora.parts
            ],
            "index_bytes": corpora.index_bytes,
            "skipped": list(corpora.skipped),
        },
        "iterations": found.config.num_iterations(found.dp),
        "consumed_samples": samples,
        "consumed_tokens": samples * found.config.model.seq_length,
        "learning_rate": dict(zip(("first", "last"), found.learning_rates, strict=True)),
        "seconds": found.seconds,
    }
