"""Rules of what a run needs besides a model and a layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megalite.config.config import Config
from megalite.config.data import split_weights
from megalite.config.flags import flag_of
from megalite.config.problem import Problem
from megalite.config.training import iteration_range

LOCAL_PATHS: Mapping[str, tuple[str, ...]] = {
    "checkpoint": ("save", "load", "non_persistent_local_ckpt_dir"),
    "data": (
        "data_args_path",
        "per_split_data_args_path",
        "train_weighted_split_paths_path",
        "valid_weighted_split_paths_path",
        "test_weighted_split_paths_path",
        "data_cache_path",
        "tokenizer_model",
        "vocab_file",
        "merge_file",
        "tokenizer_name_or_path",
    ),
    "logging": (
        "tensorboard_dir",
        "wandb_save_dir",
        "metrics_file",
        "trace_pipeline_path",
        "memory_snapshot_path",
    ),
    "training": ("kill_switch_path",),
    "dry_run": ("dry_run_json",),
}
"""Fields that name a folder or a file of this machine or of a file system that it mounts, by their group."""


def local_paths(config: Config, world_size: int | None) -> Iterator[Problem]:
    """No URL stands where a path is needed: it would name a folder such as `s3:` in the working directory."""
    for group, names in LOCAL_PATHS.items():
        for name in names:
            path = getattr(getattr(config, group), name)
            if path is not None and "://" in path:
                yield Problem(
                    (name,),
                    f"{flag_of(name)} {path} is a URL: give a path of this machine or of a mounted file "
                    "system; corpora alone may be in object storage",
                )


def required(config: Config, world_size: int | None) -> Iterator[Problem]:
    """What has no default that could be right."""
    training = config.training
    if training.train_iters is None and training.train_samples is None:
        yield Problem(
            ("train_iters", "train_samples"),
            "--train-iters is missing: give the number of optimizer steps, or --train-samples",
        )
    elif training.train_iters is not None and training.train_samples is not None:
        yield Problem(
            ("train_iters", "train_samples"),
            f"--train-iters {training.train_iters} and --train-samples {training.train_samples} both give "
            "the length of the run: leave one out",
        )


def skipped_iterations(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Each word of --iterations-to-skip is a range of iterations."""
    for word in config.training.iterations_to_skip:
        if iteration_range(word) is None:
            yield Problem(
                ("iterations_to_skip",),
                f"--iterations-to-skip {word} is no range: give FIRST:LAST counted from 1, as in 120:125, "
                "or one iteration",
            )


def hang_timeout(config: Config, world_size: int | None) -> Iterator[Problem]:
    """The watchdog's report comes before the errors of collectives, which tell less."""
    minutes = config.parallel.distributed_timeout_minutes
    latest = minutes * 60 * 3 / 4  # the others must be heard, or found silent
    if config.hang_timeout > latest:
        yield Problem(
            ("hang_timeout", "distributed_timeout_minutes"),
            f"--hang-timeout {config.hang_timeout:g} leaves no time for its report before collectives fail "
            f"by --distributed-timeout-minutes {minutes}: give at most {latest:g}, or more minutes there",
        )


def pipeline_trace(config: Config, world_size: int | None) -> Iterator[Problem]:
    """The trace is of a range of iterations, and has a place to go to."""
    logging = config.logging
    if logging.trace_pipeline is None:
        return
    if not logging.traced_iterations:
        yield Problem(
            ("trace_pipeline",),
            f"--trace-pipeline {logging.trace_pipeline} is no range: give FIRST:LAST counted from 1, as in "
            "5:6, or one iteration",
        )
    places = logging.trace_pipeline_path, logging.tensorboard_dir, config.checkpoint.save
    if all(place is None for place in places):
        yield Problem(
            ("trace_pipeline", "trace_pipeline_path", "tensorboard_dir", "save"),
            "--trace-pipeline has nowhere to write to: give --tensorboard-dir, or --trace-pipeline-path",
        )


def split(config: Config, world_size: int | None) -> Iterator[Problem]:
    """The split is one to three weights."""
    text = config.data.split
    if not split_weights(text):
        yield Problem(
            ("split",),
            f"--split {text} is no split: give the weights of train, validation and test, as in 949,50,1",
        )


def tokenizer(config: Config, world_size: int | None) -> Iterator[Problem]:
    """The vocabulary's size comes from a tokenizer that has its files, or is given."""
    data = config.data
    kind = data.resolved_tokenizer_type
    if kind is None or kind == "NullTokenizer":
        if config.model.vocab_size is None:
            yield Problem(
                ("tokenizer_type", "vocab_size", "tokenizer_model", "vocab_file", "tokenizer_name_or_path"),
                "the vocabulary is not known: give --vocab-size, or the --tokenizer-type that the corpus was "
                "made with and its files (byte needs none)",
            )
        return
    for flags in data.files_missing_for(kind):
        yield Problem(
            ("tokenizer_type", "vocab_file", "merge_file", "tokenizer_model", "tokenizer_name_or_path"),
            f"tokenizer {kind} needs {flags}: give it, or another --tokenizer-type",
        )


def profiler(config: Config, world_size: int | None) -> Iterator[Problem]:
    """The profiler's trace has a folder to go to, and some iterations and ranks to be of."""
    logging = config.logging
    if logging.profile_execution and logging.tensorboard_dir is None:
        yield Problem(
            ("profile_execution", "tensorboard_dir"),
            "--profile-execution needs --tensorboard-dir: the trace is written there",
        )
    if not logging.profile:
        return
    if logging.profile_execution:
        yield Problem(
            ("profile", "profile_execution"),
            "--profile and --profile-execution both start the profiler: leave one out",
        )
    if logging.use_pytorch_profiler and logging.tensorboard_dir is None:
        yield Problem(
            ("use_pytorch_profiler", "tensorboard_dir"),
            "--profile --use-pytorch-profiler needs --tensorboard-dir: the trace is written there",
        )
    start, end = logging.profile_step_start, logging.profile_step_end
    if end <= start:
        yield Problem(
            ("profile_step_start", "profile_step_end"),
            f"--profile-step-start {start} and --profile-step-end {end} leave no iteration to profile: the "
            "first is the one after the start, the last is the end",
        )


def profiled_ranks(config: Config, world_size: int | None) -> Iterator[Problem]:
    """The ranks to profile exist."""
    logging = config.logging
    if world_size is None or not (logging.profile or logging.record_memory_history):
        return
    if unknown := [rank for rank in logging.profile_ranks if rank >= world_size]:
        yield Problem(
            ("profile_ranks",),
            f"--profile-ranks {' '.join(map(str, unknown))}: the run's ranks are 0 to {world_size - 1}",
        )


def layer_norms(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Histograms have a place to go to."""
    logging = config.logging
    if logging.log_layer_grad_norms_interval and not (logging.tensorboard_dir or logging.wandb_project):
        yield Problem(
            ("log_layer_grad_norms_interval", "tensorboard_dir", "wandb_project"),
            "--log-layer-grad-norms-interval has nowhere to write to: give --tensorboard-dir",
        )
