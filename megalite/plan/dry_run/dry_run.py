"""Dry run: run one rank's first training iteration without other ranks and without values, and report.

The samples and epochs of each corpus in the run, and the index sizes, are estimated from .idx files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megalite.checkpoint.progress import TrainingProgress
from megalite.config import CheckpointConfig, Config, LoggingConfig
from megalite.config.data import TOKENIZER_FIELDS
from megalite.config.fields import with_fields
from megalite.data.blend import Coverage, normalized, num_samples_to_build
from megalite.data.corpus_sources import SPLIT_NAMES, Blend, find_sources
from megalite.data.gpt_dataset import index_bytes, plan_epochs
from megalite.data.sharded_dataset import corpus_lengths
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.model.stage import StageProvider
from megalite.observe.meta_tensors import meta_tensors
from megalite.observe.operator_log import ring_bytes
from megalite.optim.offload import OffloadBytes
from megalite.pipeline.schedules import Action, peak_in_flight
from megalite.plan.dry_run.counts import Counts, Repetition, count_iteration, repetition_of
from megalite.plan.layout_fields import routing_line
from megalite.plan.rank_plan import RankPlan
from megalite.plan.units import whole_model
from megalite.train.run_context import Providers, build_data, num_samples_of, resolve_run
from megalite.train.setup import describe_gathering, prepare_process
from megalite.train.train_step import IterationPlanner
from megalite.utils.commands import command_name
from megalite.utils.files import write_output
from megalite.utils.log import log


def dry_run(config: Config, notices: Sequence[str], model: StageProvider | None = None) -> None:
    """Run the rank that the config names, and write the report to the log and to `dry_run_json`.

    Args:
        model: builds the stages of a custom model; by default the model of the config's architecture.

    Raises:
        UserError: a file cannot be read or written.
    """
    world_size = config.dry_run.world_size or config.parallel.mesh.smallest_world
    prepare_process(config, notices, Launch(0, world_size, 0, world_size))
    found = dry_run_of(config, world_size, config.dry_run.rank, model)
    for line in report_lines(found):
        log.info("%s", line)
    if config.dry_run.dry_run_json is not None:
        text = json.dumps(as_object(found), indent=1) + "\n"
        write_output(Path(config.dry_run.dry_run_json), text, "--dry-run-json")


def dry_run_of(config: Config, world_size: int, rank: int, model: StageProvider | None = None) -> DryRun:
    """Run one iteration of one rank on meta tensors, and count.

    Args:
        config: config, validated for `world_size` ranks.
        model: builds the stages of a custom model.
    """
    start = time.monotonic()
    with Topology.fake(config.mesh, world_size, rank) as topology:
        if config.model.vocab_size is None or config.data.resolved_tokenizer_type == "NullTokenizer":
            config = resolve_run(config, topology).config
        corpora = corpora_of(config, topology.sample_ranks.size)
        config_to_run = _without_files(config)
        is_sharded = config.parallel.zero_stage_among(topology.replicas.shard.size) == 3
        with meta_tensors():
            run = resolve_run(config_to_run, topology, providers=Providers(model))
            counts = count_iteration(run, build_data(run), _repetition(config_to_run, topology))
        if is_sharded:
            gathering = RankPlan(config, topology, model).weight_gathering()
            log.info("gathered weights: %s", describe_gathering(gathering, topology.pp.size))
        unnamed = topology.axes.keys() - topology.sizes.keys()
        axes = [axis for axis in topology.groups() if axis is not topology.world and axis.name not in unnamed]
        return DryRun(
            config,
            world_size,
            rank,
            {axis.name: (axis.rank, axis.size) for axis in axes},
            topology.sample_ranks.size,
            whole_model(config.model, topology.tp.size, model).num_parameters,
            counts,
            corpora,
            _learning_rates(config, topology.sample_ranks.size),
            time.monotonic() - start,
        )


def _repetition(config: Config, topology: Topology) -> Repetition | None:
    """Find microbatches of the first iteration that do not need to run."""
    dp = topology.sample_ranks.size
    number = config.batch_size(dp)(0) // (config.training.micro_batch_size * dp)
    found = repetition_of(config, topology.pp, number)
    if found is not None:
        text = "running %d of %d microbatches: the others repeat the same work"
        log.info(text, found.num_microbatches, number)
    return found


def _without_files(config: Config) -> Config:
    """Return a config with random tokens and the attention of a GPU that reads and writes no files."""
    if config.model.attention_backend == "flex":  # FlexAttention does not run on meta tensors
        config = with_fields(config, attention_backend="fused")
    config = replace(config, checkpoint=CheckpointConfig(), logging=LoggingConfig())
    return with_fields(config, mock_data=True, **dict.fromkeys(TOKENIZER_FIELDS))


def _learning_rates(config: Config, dp: int) -> dict[str, tuple[float, float]]:
    planner, number = IterationPlanner(config, dp), config.num_iterations(dp)
    before_last = TrainingProgress(number - 1, config.batch_size(dp).consumed_before(number))
    first, last = planner(TrainingProgress()), planner(before_last)
    rates = {"learning_rate": (first.learning_rate, last.learning_rate)}
    if first.decoupled_learning_rate is not None and last.decoupled_learning_rate is not None:
        rates["decoupled_learning_rate"] = first.decoupled_learning_rate, last.decoupled_learning_rate
    return rates


@dataclass(frozen=True)
class DryRun:
    """Result of a dry run.

    Attributes:
        config: config with a vocabulary size.
        axes: rank and size of each mesh axis, by name.
        num_sample_ranks: number of ranks that read different samples.
        model_parameters: number of parameters of the whole model, including vocabulary padding.
        learning_rates: learning rates of the first and the last iteration, by name.
        seconds: duration of the dry run.
    """

    config: Config
    world_size: int
    rank: int
    axes: dict[str, tuple[int, int]]
    num_sample_ranks: int
    model_parameters: int
    counts: Counts
    corpora: Corpora
    learning_rates: dict[str, tuple[float, float]]
    seconds: float


def report_lines(found: DryRun) -> Iterator[str]:
    """Yield the report as lines of text."""
    axes = ", ".join(f"{name} {rank} of {size}" for name, (rank, size) in found.axes.items())
    yield f"dry run of rank {found.rank} of {found.world_size}: {axes}"
    if routing := routing_line(found.config):
        yield f"assumed: {routing}"
    yield from _memory_lines(found)
    yield from _traffic_lines(found)
    yield from _schedule_lines(found)
    yield from _data_lines(found)
    yield from _run_lines(found)
    yield f"the dry run took {found.seconds:.1f} s: no values were computed, and no other rank was started"


def _memory_lines(found: DryRun) -> Iterator[str]:
    counts = found.counts
    buffers = counts.buffers
    yield f"parameters: {counts.num_parameters:,} on this rank, {found.model_parameters:,} in the whole model"
    yield "memory of this rank:"
    for name, size in asdict(buffers).items():
        yield _row(name.replace("_", " "), size)
    yield _row("all buffers", buffers.total)
    yield _row("other tensors at the peak", counts.peak_bytes)
    for part, size in counts.peak_by_part.most_common():
        yield _row(f"  {part}", size)
    yield _row("total at the peak", buffers.total + counts.peak_bytes)
    if counts.host_bytes:
        yield _row("activations on the host", counts.host_bytes)
        yield "activations that each iteration moves:"
        yield _row("device to host", counts.copied.down)
        yield _row("host to device", counts.copied.up)
    if counts.offload is not None:
        yield from _offload_lines(counts.offload)


def _offload_lines(offload: OffloadBytes) -> Iterator[str]:
    yield "offloaded optimizer state of this rank:"
    yield _row("in host memory", offload.host)
    if offload.file:
        yield _row("on the disk", offload.file)
    yield "each update moves:"
    yield _row("device to host", offload.down)
    yield _row("host to device", offload.up)
    if offload.file:
        yield _row("read from the disk", offload.read)
        yield _row("written to the disk", offload.written)


def _row(name: str, size: int) -> str:
    return f"  {name:<26}{size / 1e9:10.3f} GB {size:22,} bytes"


def _traffic_lines(found: DryRun) -> Iterator[str]:
    calls = found.counts.calls
    if not calls:
        yield "collectives: none, since there is one rank"
        return
    yield "collectives and messages of an iteration:"
    width = max(6, *(len(call.axis) + 2 for call in calls))
    yield f"  {'axis':<{width}}{'kind':<15}{'dtype':<10}{'number':>8}{'bytes of each':>20}{'total bytes':>22}"
    for call, count in sorted(calls.items()):
        yield (
            f"  {call.axis:<{width}}{call.kind:<15}{call.dtype:<10}{count:>8,}{call.num_bytes:>20,}"
            f"{call.num_bytes * count:>22,}"
        )
    sent = {name: ring_bytes(calls, name, size) for name, (_, size) in found.axes.items() if size > 1}
    by_axis = ", ".join(f"{size / 1e9:.3f} GB on {name}" for name, size in sent.items())
    yield f"  this rank sends, with ring collectives: {by_axis}"


def _schedule_lines(found: DryRun) -> Iterator[str]:
    actions = found.counts.actions
    yield (
        f"schedule {found.config.parallel.schedule}: {len(actions)} actions of "
        f"{len({action.microbatch for action in actions})} microbatches, "
        f"at most {peak_in_flight(actions)} in flight"
    )
    yield f"  {summarize_actions(actions)}"


LONGEST_PERIOD = 12
"""Most runs of actions of one kind that a report writes as one repeated part of a schedule."""


def summarize_actions(actions: Sequence[Action]) -> str:
    """List the kinds of actions in order, with counts for repeated kinds and repeated parts of the list."""
    kinds = (
        f"{each.kind.value} of chunk {each.chunk}" if each.chunk else each.kind.value for each in actions
    )
    runs = [(name, len(list(group))) for name, group in groupby(kinds)]
    parts, i = [], 0
    while i < len(runs):
        length, times = _repetition_line(runs[i:])
        part = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in runs[i : i + length])
        parts.append(f"{times} x ({part})" if times > 1 else part)
        i += length * times
    return ", ".join(parts)


def _repetition_line(runs: Sequence[tuple[str, int]]) -> tuple[int, int]:
    """Return how long a part at the start is, and how often it follows itself: 1 and 1 if none repeats.

    Of all parts, it is the shortest of those whose repetitions are longest together.
    """
    found = 1, 1
    for length in range(2, LONGEST_PERIOD + 1):
        times = 1
        while runs[times * length : (times + 1) * length] == runs[:length]:
            times += 1
        if times > 1 and length * times > found[0] * found[1]:
            found = length, times
    return found


def _data_lines(found: DryRun) -> Iterator[str]:
    corpora = found.corpora
    for part in corpora.parts:
        coverage = part.coverage
        yield (
            f"{part.split}: {coverage.num_samples:,.0f} samples of {coverage.prefix}, "
            f"{coverage.epochs_text} epochs of its {coverage.num_tokens:,} tokens; "
            f"its index takes {part.index_bytes:,} bytes"
        )
    if corpora.parts:
        yield f"all data indices: {corpora.index_bytes:,} bytes"
    for reason in corpora.skipped:
        yield f"data skipped: {reason}"


def _run_lines(found: DryRun) -> Iterator[str]:
    samples = found.config.num_samples(found.num_sample_ranks)
    yield (
        f"the run: {found.config.num_iterations(found.num_sample_ranks):,} iterations, {samples:,} samples, "
        f"{samples * found.config.model.seq_length:,} tokens"
    )
    for name, (first, last) in found.learning_rates.items():
        yield f"{name.replace('_', ' ')}: {first:.6g} at the first iteration, {last:.6g} at the last"


def as_object(found: DryRun) -> dict[str, Any]:
    """Return the report as one JSON object."""
    counts, corpora = found.counts, found.corpora
    samples = found.config.num_samples(found.num_sample_ranks)
    return {
        "world_size": found.world_size,
        "rank": found.rank,
        "moe_imbalance": found.config.parallel.planned_imbalance,
        "axes": {name: {"rank": rank, "size": size} for name, (rank, size) in found.axes.items()},
        "parameters": {"rank": counts.num_parameters, "model": found.model_parameters},
        "buffer_bytes": {**asdict(counts.buffers), "total": counts.buffers.total},
        "peak_bytes": counts.peak_bytes,
        "peak_bytes_by_part": dict(counts.peak_by_part),
        "host_bytes": counts.host_bytes,
        "copied_bytes": counts.copied._asdict(),
        **({} if counts.offload is None else {"offload_bytes": counts.offload._asdict()}),
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
        "iterations": found.config.num_iterations(found.num_sample_ranks),
        "consumed_samples": samples,
        "consumed_tokens": samples * found.config.model.seq_length,
        **{name: {"first": first, "last": last} for name, (first, last) in found.learning_rates.items()},
        "seconds": found.seconds,
    }


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
    data, is_bert = config.data, config.model.architecture == "bert"
    reasons = (
        (data.mock_data, "--mock-data reads no corpus"),
        (is_bert, "the samples of a bert depend on its sentences, which a run counts when it starts"),
        (data.sft, "the samples of --sft depend on how conversations fit into them"),
        (data.packs_documents, "the samples of --document-packing depend on how documents fit into them"),
        (data.data_phases, f"{command_name('data-plan')} shows the use of the sources of --data-phases"),
    )
    if reason := next((reason for holds, reason in reasons if holds), None):
        return Corpora(skipped=(reason,))
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
