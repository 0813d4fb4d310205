"""Megatron-DeepSpeed's flags for lengths in tokens, and their conversion to samples."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megalite.config.arguments import Diagnostics, FlagTokens
from megalite.config.config import Config
from megalite.config.flags import flag_with_value
from megalite.config.rules.training_rules import batch_size_schedule, ramp_up
from megalite.config.validate import range_problems

TOKEN_FLAGS = {
    "--train-tokens": "End the run once it has consumed this many tokens, if it has not ended earlier.",
    "--lr-decay-tokens": "Consumed tokens at which the decay of the learning rate ends.",
    "--lr-warmup-tokens": "Tokens of the learning rate's linear warm-up.",
}
"""The flags, with their help."""
_SCHEDULES = ("lr_decay", "lr_warmup", "lr_wsd_decay", "weight_decay_incr")
_REPLACED = {
    "--lr-decay-tokens": ("lr_decay_iters", "lr_decay_samples"),
    "--lr-warmup-tokens": ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"),
}
"""Fields that a flag replaces, as in Megatron-DeepSpeed."""


def with_token_counts(config: Config, flags: Sequence[FlagTokens], diagnostics: Diagnostics) -> Config:
    """Return the config with lengths in tokens converted to samples of --seq-length tokens.

    The length of such a run is counted in samples: lengths in iterations are converted too.
    """
    tokens = {name: count for name in TOKEN_FLAGS if (count := _count(name, flags, diagnostics)) is not None}
    if not tokens:
        return config
    if not _has_batches(
        config
    ):  # the rules of the config report errors, except that a length set by no other flag is fine
        if config.training.train_iters is None and config.training.train_samples is None:
            config = replace(config, training=replace(config.training, train_samples=max(tokens.values())))
        return config
    if config.training.global_batch_size is None:
        diagnostics.add_problem(f"{next(iter(tokens))} needs --global-batch-size: pass it", "train_iters")
        return config
    return _with_run_length(
        _in_samples(config, tokens, diagnostics), tokens.get("--train-tokens"), diagnostics
    )


def _has_batches(config: Config) -> bool:
    """Return whether the batch sizes and lengths are valid."""
    rules = (range_problems(config), ramp_up(config, None), batch_size_schedule(config, None))
    return not any(itertools.chain(*rules))


def _count(name: str, flags: Sequence[FlagTokens], diagnostics: Diagnostics) -> int | None:
    """Return the value of a flag, such as 300000000000 or 300e9; None if it is not passed."""
    passed = [flag for flag in flags if flag.flag == name]
    if not passed:
        return None
    values = passed[-1].values
    try:
        (count,) = (float(value) for value in values)
        if count >= 1 and count.is_integer():
            return int(count)
    except ValueError:
        pass
    found = " ".join(values) or "none"
    diagnostics.add_problem(
        f"{name} takes one whole number of tokens above 0, but got {found}", "train_iters"
    )
    return None


def _in_samples(config: Config, tokens: dict[str, int], diagnostics: Diagnostics) -> Config:
    """Return the config with the run and its schedules in samples."""
    batch, optimizer, training = config.batch_size(1), config.optimizer, config.training
    defaults, changes = Config().optimizer, dict[str, Any]()
    for name in _SCHEDULES:
        if iterations := getattr(optimizer, f"{name}_iters"):
            changes[f"{name}_iters"] = getattr(defaults, f"{name}_iters")
            changes[f"{name}_samples"] = batch.consumed_before(iterations + 1)
    for flag, replaced in _REPLACED.items():
        if flag not in tokens:
            continue
        for name in replaced:
            if (value := getattr(optimizer, name)) != getattr(defaults, name):
                diagnostics.notices.append(
                    f"{flag_with_value(name, value)} has no effect: {flag} replaces it"
                )
            changes[name] = getattr(defaults, name)
        changes[replaced[1]] = tokens[flag] // config.model.seq_length
    if training.train_iters is not None and training.train_samples is None:
        samples = batch.consumed_before(training.train_iters + 1)
        training = replace(training, train_iters=None, train_samples=samples)
    return replace(config, training=training, optimizer=replace(optimizer, **changes))


def _with_run_length(config: Config, tokens: int | None, diagnostics: Diagnostics) -> Config:
    """Return the config with the samples of the iterations that consume these tokens.

    As in Megatron-DeepSpeed, the schedules keep the length that the run would have without --train-tokens.
    """
    if tokens is None:
        return config
    batch, optimizer, longest = config.batch_size(1), config.optimizer, config.training.train_samples
    samples = -(-tokens // config.model.seq_length)
    iterations = batch.num_iterations(samples)
    if batch.consumed_before(iterations + 1) < samples:
        iterations += 1
    samples = batch.consumed_before(iterations + 1)
    if longest is not None:
        if longest <= samples:
            diagnostics.notices.append(f"--train-tokens {tokens} has no effect: the run ends earlier")
            return config
        diagnostics.notices.append(f"--train-tokens {tokens} ends the run after {iterations} iterations")
        optimizer = replace(optimizer, lr_decay_samples=optimizer.lr_decay_samples or longest)
        if optimizer.weight_decay_incr_style != "constant":
            wd_samples = optimizer.weight_decay_incr_samples or longest
            optimizer = replace(optimizer, weight_decay_incr_samples=wd_samples)
    return replace(config, optimizer=optimizer, training=replace(config.training, train_samples=samples))
