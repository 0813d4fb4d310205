"""Rules for data, batch sizes, schedules, the length of a run, checkpoints, traces and dry runs."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

from megalite.config.config import Config
from megalite.config.data import CORPUS_FIELDS, TOKENIZER_FIELDS
from megalite.config.option import flag_of, flag_with_value
from megalite.config.rules.parallel_rules import sample_ranks, sequence_divisor, whole_microbatches
from megalite.config.training import BatchSize, schedule_steps
from megalite.utils.commands import command_name
from megalite.utils.errors import Problem

_RAMPUP, _FULL, _STEPS = "rampup_batch_size", "global_batch_size", "step_batch_size_schedule"
_LENGTHS = "seq_length_schedule"


def ramp_up(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that a ramp-up reaches the global batch in whole increments."""
    rampup, full = config.training.rampup_batch_size, config.training.global_batch_size
    if rampup is None:
        return
    current = flag_with_value(_RAMPUP, rampup)
    if len(rampup) != 3:
        yield Problem((_RAMPUP,), f"{current} has {len(rampup)} numbers: pass three, START INCREMENT SAMPLES")
    elif full is None:
        yield Problem((_RAMPUP, _FULL), f"{current} needs --global-batch-size: pass the final batch size")
    elif rampup[0] >= full:
        yield Problem(
            (_RAMPUP, _FULL),
            f"{current} starts at {rampup[0]}, not below --global-batch-size {full}: change one of them",
        )
    elif (full - rampup[0]) % rampup[1]:
        yield Problem(
            (_RAMPUP, _FULL),
            f"{current} does not reach --global-batch-size {full}: {full} - {rampup[0]} is not divisible by "
            f"the increment {rampup[1]}; pass --global-batch-size {full + (rampup[0] - full) % rampup[1]}",
        )
    else:
        named = zip(("start", "increment"), rampup, strict=False)
        sizes = {f"{current}: the {what} {number}": number for what, number in named}
        yield from whole_microbatches(config, world_size, (_RAMPUP,), sizes)


def batch_size_schedule(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that the batch-size schedule is valid, and that it ends at the global batch size."""
    training = config.training
    if training.step_batch_size_schedule is None:
        return
    current = flag_with_value(_STEPS, training.step_batch_size_schedule)
    steps = schedule_steps(training.step_batch_size_schedule, config.model.seq_length)
    if not steps:
        yield Problem(
            (_STEPS,),
            f"{current} is not a schedule: pass TOKENS:SIZE entries whose tokens rise from 0, as in "
            "0:16 2.4B:320 12B:1536",
        )
        return
    last = steps[-1][1]
    if training.global_batch_size != last:
        yield Problem(
            (_STEPS, _FULL),
            f"{current} ends with batches of {last} samples, but --global-batch-size is "
            f"{training.global_batch_size}: pass --global-batch-size {last}",
        )
    else:
        sizes = {f"{current}: the size {size}": size for _, size in steps}
        yield from whole_microbatches(config, world_size, (_STEPS,), sizes)


def seq_length_schedule(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that the lengths cut samples evenly, fit the layout, and end at the full length."""
    schedule, full = config.training.seq_length_schedule, config.model.seq_length
    if schedule is None:
        return
    current = flag_with_value(_LENGTHS, schedule)
    steps = schedule_steps(schedule, full)
    if not steps:
        yield Problem(
            (_LENGTHS,),
            f"{current} is not a schedule: pass TOKENS:LENGTH entries whose tokens rise from 0, as in "
            "0:2048 100B:8192",
        )
        return
    if (last := steps[-1][1]) != full:
        yield Problem(
            (_LENGTHS, "seq_length"),
            f"{current} ends with {last} tokens, but --seq-length is {full}: pass --seq-length {last}",
        )
        return
    divisor = sequence_divisor(config)
    if full % divisor:
        return  # no length fits: the rule for --seq-length says so
    least = max(divisor, config.model.mtp_num_layers + 1)
    for _, length in steps:
        if full % length or length % divisor or length < least:
            layout = f" and are multiples of {divisor}, which the layout needs" if divisor > 1 else ""
            possible = [n for n in range(least, full) if full % n == 0 and n % divisor == 0]
            nearest = min(possible, key=lambda n: abs(n - length), default=full)
            yield Problem(
                (_LENGTHS, "seq_length", *(axis.field for axis in config.parallel.mesh.model.axes)),
                f"{current} has sequences of {length} tokens: pass lengths that divide --seq-length {full}"
                f"{layout}, such as {nearest}",
            )


def enough_samples(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that a run in samples has at least one batch."""
    training, dp = config.training, sample_ranks(config, world_size)
    full = training.global_batch_size or training.micro_batch_size * (dp or 1)
    rampup = training.rampup_batch_size
    steps = schedule_steps(training.step_batch_size_schedule, config.model.seq_length)
    first = BatchSize(full, rampup if rampup is not None and len(rampup) == 3 else None, steps).start
    if training.train_samples is not None and training.train_samples < first:
        yield Problem(
            ("train_samples", _FULL, _RAMPUP, _STEPS, "micro_batch_size"),
            f"--train-samples {training.train_samples} is less than the first batch of {first} samples: "
            "pass more samples, or a smaller batch",
        )


def warmup(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that the warm-up ends before the decay ends."""
    optimizer, (decay, decay_name) = config.optimizer, _decay(config)
    name = f"lr_warmup_{_unit(config)}"
    length = getattr(optimizer, name)
    if optimizer.lr_step_timing == "deepspeed":  # DeepSpeed's rate falls to the minimum after the warm-up
        return
    if decay is not None and length >= decay:
        yield Problem(
            (name, decay_name),
            f"{flag_of(name)} {length} does not end before {flag_of(decay_name)} {decay}: "
            f"pass less than {decay}",
        )


def step_timing(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that a schedule with DeepSpeed's timing has a warm-up."""
    optimizer = config.optimizer
    has_warmup = optimizer.lr_warmup_iters >= 2 and optimizer.lr_warmup_fraction is None
    if optimizer.lr_step_timing == "deepspeed" and not (config.training.is_counted_in_samples or has_warmup):
        yield Problem(
            ("lr_step_timing", "lr_warmup_iters", "lr_warmup_fraction"),
            "--lr-step-timing deepspeed needs a warm-up: pass --lr-warmup-iters of at least 2",
        )


def wsd(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that the length of WSD's decay is set."""
    unit, name = _unit(config), f"lr_wsd_decay_{_unit(config)}"
    if config.optimizer.lr_decay_style == "WSD" and getattr(config.optimizer, name) is None:
        yield Problem(
            ("lr_decay_style", name),
            f"--lr-decay-style WSD needs {flag_of(name)}: pass the {_UNIT_NAMES[unit]} of its decay",
        )


_UNIT_NAMES = {"iters": "iterations", "samples": "samples"}


def _unit(config: Config) -> str:
    """Return the suffix of the names of fields that are in the run's unit."""
    return "samples" if config.training.is_counted_in_samples else "iters"


def _decay(config: Config) -> tuple[int | None, str]:
    """Return the end of the decay, and the field that sets it."""
    unit = _unit(config)
    decay: int | None = getattr(config.optimizer, f"lr_decay_{unit}")
    if decay is not None:
        return decay, f"lr_decay_{unit}"
    name = f"train_{unit}"
    return getattr(config.training, name), name


def run_length(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that the length of the run, which has no default, is set."""
    training = config.training
    if training.train_iters is None and training.train_samples is None:
        yield Problem(
            ("train_iters", "train_samples"),
            "--train-iters is missing: pass the number of optimizer steps, or --train-samples",
        )


def eval_tasks(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that the model of a run with tasks of lm-evaluation-harness predicts text."""
    if config.training.eval_tasks is None:
        return
    current = f"--eval-tasks {config.training.eval_tasks}"
    if config.data.resolved_tokenizer_type in (None, "NullTokenizer"):
        yield Problem(
            ("eval_tasks", "tokenizer_type"),
            f"{current} needs a tokenizer: pass --tokenizer-type and its files, or remove it",
        )


def hang_timeout(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that the watchdog reports before collectives time out, since their errors say less."""
    minutes = config.parallel.distributed_timeout_minutes
    latest = minutes * 60 * 3 / 4  # the report waits for the other ranks
    if config.hang_timeout > latest:
        yield Problem(
            ("hang_timeout", "distributed_timeout_minutes"),
            f"--hang-timeout {config.hang_timeout:g} leaves no time for its report before collectives time "
            f"out after --distributed-timeout-minutes {minutes}: pass at most --hang-timeout {latest:g}, or "
            "a larger --distributed-timeout-minutes",
        )


def pipeline_trace(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that the trace has a file."""
    logging = config.logging
    folders = (logging.trace_pipeline_path, logging.tensorboard_dir, config.checkpoint.save)
    if logging.trace_pipeline is not None and not any(folders):
        yield Problem(
            ("trace_pipeline", "trace_pipeline_path", "tensorboard_dir", "save"),
            "--trace-pipeline has no folder to write to: pass --tensorboard-dir, or --trace-pipeline-path",
        )


def profiled_ranks(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that the ranks to profile exist."""
    logging = config.logging
    if world_size is None or not (logging.profile or logging.record_memory_history):
        return
    if unknown := [rank for rank in logging.profile_ranks if rank >= world_size]:
        yield Problem(
            ("profile_ranks",),
            f"--profile-ranks {' '.join(map(str, unknown))}: the run's ranks are 0 to {world_size - 1}",
        )


def layer_norms(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that histograms of gradient norms have a writer."""
    logging = config.logging
    if logging.log_layer_grad_norms_interval and not logging.has_dashboards:
        yield Problem(
            ("log_layer_grad_norms_interval", "tensorboard_dir", "wandb_project"),
            "--log-layer-grad-norms-interval has no folder to write to: pass --tensorboard-dir",
        )


def corpus(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that there is a corpus, and that it is set in only one way."""
    data = config.data
    if data.mock_data:
        return
    ways = data.corpus_options()
    if not ways:
        yield Problem(
            (*CORPUS_FIELDS, "mock_data"),
            f"--data-path is missing: pass the prefix of a .bin/.idx pair of {command_name('preprocess')}, "
            "or --mock-data",
        )
    for one, other in itertools.pairwise(ways):
        yield Problem(
            (*one, *other),
            f"{flag_of(one[0])} and {flag_of(other[0])} both set the corpora: remove one",
        )


def training_split(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that separate validation or test data are passed together with training data."""
    data = config.data
    for way in [] if data.mock_data else data.corpus_options():
        others = [name for name in way if name.startswith(("valid_", "test_"))]
        if others and not any(name.startswith("train_") for name in way):
            _, _, kind = others[0].removesuffix("_path").partition("_")
            train = flag_of("train_data_path" if kind == "data" else "train_weighted_split_paths")
            yield Problem(
                (*CORPUS_FIELDS, "mock_data"),
                f"{flag_of(others[0])} is set, but {train} is not: pass {train}",
            )


def fill_in_middle(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that the tokenizer can split documents: it must be the corpus's own and must not add tokens."""
    data = config.data
    kind = data.resolved_tokenizer_type
    unsuitable = (None, "byte", "NullTokenizer", "Llama2Tokenizer")
    if data.fim_rate > 0 and not data.mock_data and kind in unsuitable:
        current = f"--tokenizer-type {kind}" if kind else "no tokenizer"
        yield Problem(
            ("fim_rate", *TOKENIZER_FIELDS),
            f"--fim-rate {data.fim_rate} with {current}: pass the tokenizer of the corpus, whose vocabulary "
            "must have the --fim-prefix-token, --fim-middle-token and --fim-suffix-token",
        )


def document_ends(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that options for document boundaries have a tokenizer, whose end-of-document token marks them."""
    data = config.data
    options = data.document_options
    is_packed = data.sft or data.packs_documents
    if options and data.resolved_tokenizer_type is None and not data.mock_data and not is_packed:
        yield Problem(
            (*options, *TOKENIZER_FIELDS),
            f"{' '.join(map(flag_of, options))} without a tokenizer: pass the corpus's --tokenizer-type, "
            "whose end-of-document token separates the documents",
        )


def tokenizer(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that the vocabulary size is set, or that a tokenizer with all its files determines it."""
    data = config.data
    kind = data.resolved_tokenizer_type
    if kind is None or kind == "NullTokenizer":
        if config.model.vocab_size is None:
            yield Problem(
                ("vocab_size", *TOKENIZER_FIELDS),
                "the vocabulary size is unknown: pass --vocab-size, or the --tokenizer-type of the corpus "
                "and its files (byte needs none)",
            )
        return
    for flags in data.files_missing_for(kind):
        yield Problem(
            TOKENIZER_FIELDS,
            f"tokenizer {kind} needs {flags}: pass it, or another --tokenizer-type",
        )


def finetune(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that a new run does not save over the run that it loads."""
    checkpoint = config.checkpoint
    if checkpoint.finetune and checkpoint.loads_own:
        yield Problem(
            ("finetune", "save", "load"),
            f"--finetune starts a new run at iteration 0, but --save {checkpoint.save} is also --load: "
            "pass another --save",
        )


def no_load_optim(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that a restarted run does not drop the optimizer state that it saved."""
    checkpoint = config.checkpoint
    drops_own = not checkpoint.load_optim and checkpoint.save_optim and checkpoint.loads_own
    if drops_own and not checkpoint.finetune:
        yield Problem(
            ("load_optim", "save", "load"),
            "--no-load-optim would drop the optimizer state at every restart, since --save "
            f"{checkpoint.save} is also --load: pass another --save, or --no-save-optim too",
        )


def dry_run_rank(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that the reported rank of a dry run exists."""
    dry_run = config.dry_run
    if dry_run.dry_run and world_size is not None and dry_run.rank >= world_size:
        yield Problem(
            ("rank", "world_size"),
            f"--rank {dry_run.rank} is not one of {world_size} ranks: pass 0 to {world_size - 1}, or a "
            "larger --world-size",
        )


def dry_run_json(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that the folder for the dry run's report exists, before any work is done."""
    path = config.dry_run.dry_run_json
    if config.dry_run.dry_run and path is not None and not os.path.isdir(os.path.dirname(path) or "."):
        yield Problem(
            ("dry_run_json",),
            f"--dry-run-json {path} cannot be written: there is no folder {os.path.dirname(path)}",
        )
