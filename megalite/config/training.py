"""Options of the training loop, its GEMMs in 8 or 4 bits and dry runs; the batch size of each iteration."""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, NamedTuple

from megalite.config.model.recurrence import HAS_MAMBA, HAS_RECURRENT_MIXER
from megalite.config.model.transformer import IS_BERT
from megalite.config.option import (
    ABOVE_ONE,
    LOCAL_PATH,
    NOT_NEGATIVE,
    POSITIVE,
    SEED,
    SIZE,
    AnyOf,
    Conflicts,
    OnResume,
    Range,
    Setting,
    option,
    other_than,
)

Fp8Format = Literal["hybrid", "e4m3", "e2m1"]
Fp8Recipe = Literal["tensorwise", "delayed", "blockwise", "mxfp8", "nvfp4"]
AmaxAlgorithm = Literal["most_recent", "max"]


class Blocks(NamedTuple):
    """Sizes of the blocks of a recipe, whose elements have one scale.

    Attributes:
        size: elements along the dimension that a GEMM sums over.
        weight_rows: elements of a weight's block along its other dimension.
    """

    size: int
    weight_rows: int


FP8_BLOCKS = {"blockwise": Blocks(128, 128), "mxfp8": Blocks(32, 1), "nvfp4": Blocks(16, 16)}
"""Blocks by fp8_recipe; tensorwise and delayed have none."""
SPLITS_GEMMS = AnyOf(
    ("fp8_format", "fp8_recipe"),
    "with --fp8-recipe tensorwise or delayed no GEMM is split: torch has no batched GEMM in 8 bits",
    lambda value: value is None or value in FP8_BLOCKS,
)
"""Condition that a GEMM may be computed in parts of its rows."""

_WIDE_EXPERTS = "GEMMs in the dtype of the model; --fp8-recipe blockwise and mxfp8 round operands too"
EXPERT_NOTES = {
    "tensorwise": _WIDE_EXPERTS,
    "delayed": _WIDE_EXPERTS,
    "nvfp4": "gradients are rounded to the nearest, and not at random",
}
"""Differences of the GEMMs of experts, by fp8_recipe, for the log."""


_DELAYED = Setting("fp8_recipe", ("delayed",))


@dataclass(frozen=True)
class Fp8Options:
    """Which linear layers multiply numbers of 8 or 4 bits, and which numbers share a scale."""

    section: ClassVar[str] = "fp8"

    fp8_format: Fp8Format | None = option(
        None, "--fp4-format", sets={"--fp8": "hybrid", "--fp8-hybrid": "hybrid", "--fp8-e4m3": "e4m3"}
    )
    """Use 8-bit GEMMs, or with e2m1 4-bit ones, in the linear layers of a bf16 model. hybrid is e4m3 with
    gradients in e5m2."""
    fp8_recipe: Fp8Recipe = option(
        "tensorwise",
        "--fp4-recipe",
        only_with="fp8_format",
        missing={"custom": "pass another"},
    )
    """Numbers with one scale: a tensor's, measured now (tensorwise) or in earlier iterations (delayed);
    blockwise, 128 and 128 x 128 of weights; mxfp8, 32; nvfp4, 16, 16 x 16."""
    fp8_amax_history_len: int = option(1, allowed=SIZE, only_with=_DELAYED)
    """Number of iterations whose largest magnitudes a scale can follow from."""
    fp8_amax_compute_algo: AmaxAlgorithm = option("most_recent", only_with=_DELAYED)
    """Magnitude that sets a scale: the last iteration's, or the largest of --fp8-amax-history-len."""
    fp8_margin: int = option(0, allowed=NOT_NEGATIVE, only_with=_DELAYED)
    """Powers of two between that magnitude and the largest number of the 8-bit format."""
    fp8_wgrad: bool = option(True, only_with=Setting("fp8_recipe", tuple(FP8_BLOCKS)))
    """With recipes of blocks: round the operands of weight gradients too, except those of experts."""
    first_last_layers_bf16: bool = option(False, only_with="fp8_format")
    """Compute the first and last layers in 16 bits."""
    num_layers_at_start_in_bf16: int = option(1, allowed=NOT_NEGATIVE, only_with="first_last_layers_bf16")
    """Number of first layers in 16 bits."""
    num_layers_at_end_in_bf16: int = option(1, allowed=NOT_NEGATIVE, only_with="first_last_layers_bf16")
    """Number of last layers in 16 bits."""
    emulate: bool = option(False, on_resume=OnResume.LOGGED, only_with="fp8_format")
    """Round numbers as for 8-bit GEMMs, but multiply them in the dtype of the model, on any device. Slower
    than without fp8; with --params-dtype fp64 it verifies layouts."""
    fp8_weight_cache: bool = option(True, on_resume=OnResume.FREE, only_with="fp8_format")
    """Keep FP8 copies of weights for all microbatches of an iteration, 2 bytes per linear layer's weight."""
    fp8_param_gather: bool = option(False, on_resume=OnResume.FREE, only_with="fp8_format")
    """With ZeRO, gather linear layers' weights in 8 bits: half the bytes and memory, and the same results."""

    conflicts: ClassVar[Conflicts] = {
        Setting("fp8_recipe", ("tensorwise", "delayed")): {
            "multi_latent_attention": (
                ": latents have no scale for a tensor; pass --fp8-recipe blockwise or mxfp8"
            ),
        },
        "fp8_format": {
            (HAS_RECURRENT_MIXER, HAS_MAMBA): ": recurrent layers need more than 8 bits; remove it"
        },
        Setting("fp8_format", ("e2m1",)): {
            Setting("fp8_recipe", other_than("nvfp4")): (
                ": for 4 bits pass --fp4-format e2m1 --fp4-recipe nvfp4"
            ),
        },
        Setting("fp8_format", other_than("e2m1")): {
            Setting("fp8_recipe", ("nvfp4",)): ": for 4 bits pass --fp4-format e2m1 --fp4-recipe nvfp4",
        },
        Setting("fp8_recipe", tuple(FP8_BLOCKS)): {
            Setting("mlp_chunks", ABOVE_ONE): (
                ", which cuts a sample within blocks of its tokens: remove it, or pass --fp8-recipe "
                "tensorwise"
            ),
            Setting("tp_comm_overlap_method", ("symmetric_memory",)): (
                ", whose operators gather a gradient and multiply it without rounding: pass chunks"
            ),
        },
        _DELAYED: {
            "compile": ", whose graphs have no history of magnitudes: remove one",
        },
        "fp8_param_gather": {
            Setting("fp8_recipe", ("mxfp8",)): (
                ", which rounds a weight to other 8 bits for each of its two GEMMs: remove it, or pass "
                "--fp8-recipe blockwise"
            ),
            Setting("fp8_recipe", ("nvfp4",)): ", whose weights have 4 bits: remove it",
            "compile": ", whose graphs round weights of 16 bits: remove one",
        },
    }

    @property
    def gemm_bits(self) -> int:
        """Return the bits of the numbers that GEMMs with `fp8_format` multiply."""
        return 4 if self.fp8_format == "e2m1" else 8

    @property
    def fp8_flag(self) -> str:
        """Return the flag of the format, by the name for its number of bits."""
        return f"--fp{self.gemm_bits}-format {self.fp8_format}"

    @property
    def fp8_description(self) -> str:
        """Return the precision for the log: `8-bit GEMMs (hybrid, mxfp8, emulated)`."""
        emulated = ", emulated" if self.emulate else ""
        return f"{self.gemm_bits}-bit GEMMs ({self.fp8_format}, {self.fp8_recipe}{emulated})"

    @property
    def depends_on_micro_batch(self) -> bool:
        """Return whether another micro-batch size rounds to other numbers: a scale is of a whole tensor."""
        return self.fp8_format is not None and self.fp8_recipe == "tensorwise"

    @property
    def splits_gemms(self) -> bool:
        """Return whether a GEMM may be computed in parts of its rows."""
        return SPLITS_GEMMS.is_met_in(vars(self))

    @property
    def fp8_copies(self) -> int:
        """Return the number of 8-bit copies of a weight: one if both its GEMMs have the same blocks."""
        blocks = FP8_BLOCKS.get(self.fp8_recipe)
        return 1 if blocks is not None and blocks.size == blocks.weight_rows else 2

    @property
    def fp8_options(self) -> Fp8Options | None:
        """Return these options alone; None without 8-bit GEMMs."""
        if self.fp8_format is None:
            return None
        return Fp8Options(**{each.name: getattr(self, each.name) for each in fields(Fp8Options)})

    def is_layer_in_fp8(self, number: int, num_layers: int) -> bool:
        """Return whether a layer of a model with this many has 8-bit GEMMs, by its number."""
        if self.fp8_format is None or not self.first_last_layers_bf16:
            return self.fp8_format is not None
        return self.num_layers_at_start_in_bf16 <= number < num_layers - self.num_layers_at_end_in_bf16


ExitSignal = Literal["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP"]

GemmEpilogues = Literal["auto", "on", "off"]


def iteration_range(text: str) -> range | None:
    """Return the iterations that `FIRST:LAST`, `FIRST-LAST` or one number names; None for any other text."""
    match = re.fullmatch(r"(\d{1,18})(?:[:-](\d{1,18}))?", text)
    first, last = (int(number or match[1]) for number in match.groups()) if match else (0, 0)
    return range(first, last + 1) if 1 <= first <= last else None


ITERATIONS = Range(
    iteration_range, "FIRST:LAST counted from 1, as in 5:6, or one iteration", "is not a range: pass"
)
_IN_16_BITS = Setting("params_dtype", ("bf16", "fp16"), "only GEMMs in bf16 and fp16 have epilogues")
_COMPUTES = Setting("dry_run", (False,), "a dry run computes nothing")


@dataclass(frozen=True)
class TrainingConfig(Fp8Options):
    """Options of the training loop: batch sizes, length, evaluation, and when to stop."""

    default_on_resume: ClassVar[OnResume] = OnResume.SETTING

    micro_batch_size: int = option(1, allowed=SIZE, on_resume=OnResume.FREE)
    """Samples per forward pass on one replica."""
    global_batch_size: int | None = option(None, allowed=SIZE, on_resume=OnResume.RUN)
    """Samples per optimizer step, over all replicas. By default micro-batch size x data-parallel size."""
    rampup_batch_size: tuple[int, ...] | None = option(None, allowed=POSITIVE, on_resume=OnResume.RUN)
    """Ramp up the global batch size: START INCREMENT SAMPLES. It grows from START by INCREMENT at a time,
    over SAMPLES samples."""
    step_batch_size_schedule: tuple[str, ...] | None = option(None, on_resume=OnResume.RUN)
    """Change the global batch size after given numbers of tokens: TOKENS:SIZE ..., as in 0:16 2.4B:320
    12B:1536. The last size is --global-batch-size."""
    seq_length_schedule: tuple[str, ...] | None = option(None, on_resume=OnResume.RUN)
    """Train on shorter sequences first: TOKENS:LENGTH ..., as in 0:2048 100B:8192. The last length is
    --seq-length; shorter ones cut its samples into parts."""
    train_iters: int | None = option(None, allowed=POSITIVE, on_resume=OnResume.LOGGED)
    """Length of the run in optimizer steps. Either this or --train-samples is required."""
    train_samples: int | None = option(None, allowed=POSITIVE, on_resume=OnResume.LOGGED)
    """Length of the run in samples, instead of --train-iters. An incomplete last batch is dropped."""
    eval_interval: int = option(1000, allowed=POSITIVE, on_resume=OnResume.LOGGED)
    """Iterations between evaluations on the validation set."""
    eval_iters: int | None = option(None, allowed=NOT_NEGATIVE, on_resume=OnResume.LOGGED)
    """Global batches per evaluation; 0 turns evaluation off. By default 100, or in short runs a tenth of the
    iterations."""
    full_validation: bool = option(False, on_resume=OnResume.LOGGED)
    """Evaluate on each whole validation set, every sample once, instead of on --eval-iters batches of it."""
    eval_tasks: str | None = option(None, on_resume=OnResume.FREE, only_with=_COMPUTES)
    """Tasks of lm-evaluation-harness to evaluate during training, such as arc_easy,hellaswag. They must not
    generate text."""
    eval_tasks_interval: int | None = option(
        None, allowed=POSITIVE, on_resume=OnResume.FREE, only_with="eval_tasks"
    )
    """Iterations between evaluations of --eval-tasks. By default --eval-interval."""
    eval_tasks_folder: str | None = option(
        None, on_resume=OnResume.FREE, only_with="eval_tasks", allowed=LOCAL_PATH
    )
    """Folder of further tasks for --eval-tasks, as YAML files."""
    eval_tasks_num_fewshot: int | None = option(
        None, allowed=NOT_NEGATIVE, on_resume=OnResume.FREE, only_with="eval_tasks"
    )
    """Examples before each question of --eval-tasks. By default the task's own number."""
    eval_tasks_limit: int | None = option(
        None, allowed=POSITIVE, on_resume=OnResume.FREE, only_with="eval_tasks"
    )
    """Largest number of questions of each task of --eval-tasks. By default all."""
    exit_interval: int | None = option(None, allowed=POSITIVE, on_resume=OnResume.FREE)
    """Save and exit at the first iteration that is a multiple of this number."""
    exit_duration_in_mins: float | None = option(None, allowed=POSITIVE, on_resume=OnResume.FREE)
    """Save and exit after this many minutes, at the end of an iteration."""
    exit_signals: tuple[ExitSignal, ...] = option(
        ("SIGTERM", "SIGUSR1"),
        "--exit-signal",
        on_resume=OnResume.FREE,
        sets={"--exit-signal-handler": ("SIGTERM", "SIGUSR1"), "--no-exit-signal-handler": ()},
    )
    """Signals on which a run finishes its iteration, saves, and exits with status 75. Ctrl-C does the same
    with status 130."""
    kill_switch_path: str | None = option(
        None, "--kill-switch-file", on_resume=OnResume.FREE, allowed=LOCAL_PATH
    )
    """File whose existence makes a run save and exit. If it exists at the start, the run does not start."""
    seed: int = option(1234, allowed=SEED, on_resume=OnResume.RUN)
    """Random seed for initial weights, dropout and the order of samples."""
    check_for_nan_in_loss_and_grad: bool = option(True, on_resume=OnResume.LOGGED)
    """Skip updates whose loss or gradient is NaN or infinite, and log the layer where the NaN began."""
    check_for_spiky_loss: bool = option(False, on_resume=OnResume.LOGGED)
    """Skip updates whose loss is far above the previous losses, and log the samples that caused it."""
    spiky_loss_factor: float = option(
        10.0, allowed=ABOVE_ONE, on_resume=OnResume.LOGGED, only_with="check_for_spiky_loss"
    )
    """With --check-for-spiky-loss: largest accepted loss, as a multiple of the median of the last 100."""
    audit_interval: int | None = option(
        None, "--check-weight-hash-across-dp-replicas-interval", allowed=POSITIVE, on_resume=OnResume.FREE
    )
    """Iterations between audits, which compare replicas bit by bit and run a microbatch again on another one.
    A difference ends the run. By default none."""
    iterations_to_skip: tuple[str, ...] = option(
        (), "--skip-train-iteration-range", allowed=ITERATIONS, on_resume=OnResume.LOGGED
    )
    """Iterations whose samples are skipped without training, such as 120:125 (both included) or 130."""
    replay_routing_from: str | None = option(None, on_resume=OnResume.LOGGED)
    """Send tokens to the experts in this folder of --record-routing. Iterations without recorded samples
    route as usual."""
    hang_timeout: float | None = option(None, allowed=NOT_NEGATIVE, on_resume=OnResume.FREE)
    """Seconds without progress before the watchdog writes a report and ends the run; 0 turns it off. By
    default half of --distributed-timeout-minutes."""
    manual_gc: bool = option(True, on_resume=OnResume.FREE)
    """Run Python's garbage collection between iterations only, on all ranks at the same ones, so that no rank
    pauses within a step."""
    manual_gc_interval: int = option(50, allowed=NOT_NEGATIVE, on_resume=OnResume.FREE, only_with="manual_gc")
    """Iterations between garbage collections with --manual-gc; 0 for none between iterations."""
    manual_gc_eval: bool = option(
        True, on_resume=OnResume.FREE, sets={"--disable-manual-gc-eval": False}, only_with="manual_gc"
    )
    """With --manual-gc: also collect garbage before and after each evaluation."""
    compile: bool = option(False, on_resume=OnResume.LOGGED, only_with=_COMPUTES)
    """Compile the transformer layers with torch.compile (docs/precision.md)."""
    gemm_epilogues: GemmEpilogues = option(
        "auto", on_resume=OnResume.LOGGED, only_with=(_COMPUTES, _IN_16_BITS)
    )
    """Compute GELU and bias gradients in the neighbouring GEMMs on a GPU. auto times both forms when the run
    starts; with --deterministic it is off."""
    deterministic: bool = option(False, "--deterministic-mode", on_resume=OnResume.LOGGED)
    """Use only deterministic operations: results are bitwise equal from run to run, on GPUs too."""

    conflicts: ClassVar[Conflicts] = {
        "compile": {
            (HAS_RECURRENT_MIXER, HAS_MAMBA): ": recurrences are not compiled; remove --compile",
            "emulate": ", whose operators are not compiled: remove --compile",
        },
        "replay_routing_from": {
            "moe_router_force_load_balancing": ": both select the experts of tokens; remove one",
        },
        ("record_routing", "replay_routing_from"): {
            "seq_length_schedule": (
                ", which cuts samples: files have the experts of whole samples; remove one"
            ),
        },
        "eval_tasks": {IS_BERT: ", which does not predict next tokens: remove it"},
        "train_iters": {"train_samples": ", which also sets the length of the run: remove one"},
        "step_batch_size_schedule": {"rampup_batch_size": ", which contradicts it: remove one"},
        "full_validation": {"mock_data": ", whose random tokens never end: remove it"},
        "seq_length_schedule": {(IS_BERT, "sft"): ", whose samples it would cut: remove it"},
    }

    @property
    def is_counted_in_samples(self) -> bool:
        """Return whether the run's length and its schedules are counted in samples, not in iterations."""
        return self.train_samples is not None

    @property
    def length(self) -> int:
        """Return the length of the run, in iterations or in samples."""
        length = self.train_iters if self.train_samples is None else self.train_samples
        assert length is not None
        return length

    def position(self, iteration: int, consumed_samples: int) -> int:
        """Return the progress of the run after `iteration`, in the unit of `length`."""
        return consumed_samples if self.is_counted_in_samples else iteration

    def is_skipped(self, iteration: int) -> bool:
        """Return whether --iterations-to-skip names this iteration, counted from 1."""
        ranges = map(iteration_range, self.iterations_to_skip)
        return any(found is not None and iteration in found for found in ranges)

    def skips_any(self, num_iterations: int) -> bool:
        """Return whether --iterations-to-skip names any of the first `num_iterations` iterations."""
        ranges = map(iteration_range, self.iterations_to_skip)
        return any(found is None or found.start <= num_iterations for found in ranges)


@dataclass(frozen=True)
class DryRunConfig:
    """Options of a dry run: it reports what one rank would hold, compute and send, without other ranks."""

    default_on_resume: ClassVar[OnResume] = OnResume.FREE

    # In a run of several ranks, these have no effect.
    dry_run: bool = option(False, differs_between_ranks=True)
    """Report what one rank would hold, compute and send, and exit. Nothing is computed."""
    world_size: int | None = option(None, allowed=SIZE, differs_between_ranks=True, only_with="dry_run")
    """With --dry-run: number of ranks of the run. By default tp x pp x dp."""
    rank: int = option(0, allowed=NOT_NEGATIVE, differs_between_ranks=True, only_with="dry_run")
    """With --dry-run: the rank to report."""
    dry_run_json: str | None = option(
        None, differs_between_ranks=True, only_with="dry_run", allowed=LOCAL_PATH
    )
    """With --dry-run: also write the report to this file, as a JSON object."""
    verify_layouts: str | None = option(None, differs_between_ranks=True)
    """Compare short runs in these layouts (tp2,pp2dp2+sp, default or all) with one rank, and exit.
    Use it in programs with their own model; otherwise use megalite verify."""


SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


class BatchSize:
    """Global batch size by the samples consumed so far: there is no state to save.

    A ramp-up begins with START samples and grows by INCREMENT in equal steps over the first SAMPLES samples
    until it reaches the full batch (Megatron-LM's formula, rounding included). A step changes the size after
    a given number of consumed samples.

    Args:
        full: the global batch size after the ramp-up or the last step; without either, of every iteration.
        rampup: START, INCREMENT and SAMPLES; START plus a number of increments is `full`.
        steps: pairs of consumed samples and the size from there on, in order. The first pair begins at 0, and
            the last one's size is `full`. See `schedule_steps`.
    """

    def __init__(
        self, full: int, rampup: tuple[int, ...] | None = None, steps: Sequence[tuple[int, int]] = ()
    ) -> None:
        self.full = full
        self.start, self.increment, self._rampup_samples = rampup or (full, 0, 0)
        self._num_steps = (full - self.start) // self.increment if rampup else 0
        self._steps = steps
        if steps:
            self.start = steps[0][1]

    def __call__(self, consumed_samples: int) -> int:
        """Return the global batch size of the iteration after `consumed_samples` samples."""
        if self._steps:
            return value_at(self._steps, consumed_samples)
        if self._num_steps == 0 or consumed_samples > self._rampup_samples:
            return self.full
        return self.start + int(consumed_samples / (self._rampup_samples / self._num_steps)) * self.increment

    def consumed_before(self, iteration: int) -> int:
        """Return the samples consumed before `iteration`, counted from 1."""
        for number, consumed in self._rampup():
            if number == iteration - 1:
                return consumed
        return consumed + (iteration - 1 - number) * self.full

    def num_iterations(self, num_samples: int) -> int:
        """Return the largest number of iterations that consume at most `num_samples` samples."""
        for number, consumed in self._rampup():
            if consumed + self(consumed) > num_samples:
                return number
        return number + (num_samples - consumed) // self.full

    def _rampup(self) -> Iterator[tuple[int, int]]:
        """Yield the iterations done and the samples consumed, until the batch reaches its full size."""
        number, consumed = 0, 0
        while self(consumed) != self.full or (self._steps and consumed < self._steps[-1][0]):
            yield number, consumed
            consumed += self(consumed)
            number += 1
        yield number, consumed


def schedule_steps(schedule: Sequence[str] | None, seq_length: int) -> list[tuple[int, int]]:
    """Parse a schedule into steps: consumed samples, and the size from there on.

    Args:
        schedule: entries TOKENS:SIZE as in Megatron-LM, such as 2.4B:320; a string may hold several. A size
            is a batch size or a sequence length.
        seq_length: tokens per sample, to convert the thresholds to samples.

    Returns:
        The steps; empty if an entry has another form, or if the thresholds do not rise from 0.
    """
    steps = []
    for entry in " ".join(schedule or ()).replace(",", " ").upper().split():
        match = re.fullmatch(r"(\d{1,18}|\d{0,18}\.\d{1,18})([KMBT]?):(\d{1,18})", entry)
        if match is None:
            return []
        tokens, suffix, size = match.groups()
        steps.append((int(float(tokens) * SUFFIXES[suffix]) // seq_length, int(size)))
    thresholds = [samples for samples, _ in steps]
    rises = all(samples < later for samples, later in itertools.pairwise(thresholds))
    return steps if thresholds[:1] == [0] and rises and all(size > 0 for _, size in steps) else []


def value_at(steps: Sequence[tuple[int, int]], consumed_samples: int) -> int:
    """Return the size of the iteration after `consumed_samples` samples, from `schedule_steps`."""
    return steps[bisect.bisect(steps, consumed_samples, key=lambda step: step[0]) - 1][1]
