"""Scale a run to other sizes of its model (shapes, length, batch size, learning rate), and write the configs.

The config that is scaled is the reference: its learning rate and batch size suit its size. By default, with N
the parameters that `scaling_parameters` counts:

    batch size    grows as N^(2/3)
    learning rate falls as N^(-1/3)

OLMo-core's ladder uses these exponents. They are from Porian et al. 2024 (arXiv 2406.19146). With muP, the
learning rate stays, since muP scales it with the width.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Literal

from megalite.config import Config, ModelConfig, OptimizerConfig, to_yaml
from megalite.config.model.model_config import flops_per_token, round_up
from megalite.config.option import flag_of
from megalite.data.tokenizers.tokenizer import configured_tokenizer
from megalite.plan.estimate import plain
from megalite.plan.units import whole_model
from megalite.train.run_context import with_vocab_size
from megalite.utils.errors import UserError
from megalite.utils.files import replace_file

Dimension = Literal["depth", "width"]

CONFIG_FILE = "config.yaml"
HEADS = ("run", "layers", "hidden", "heads", "parameters", "batch", "iterations", "tokens", "lr", "FLOPs")

BATCH_EXPONENT = 2 / 3
LR_EXPONENT = -1 / 3
EVAL_ITERS = 10
"""Global batches of the reference in an evaluation, without --eval-iters."""
_FFN_MULTIPLE = 64
_SHARES = ("lr_warmup_iters", "lr_decay_iters", "lr_wsd_decay_iters", "weight_decay_incr_iters")
"""Numbers of iterations that keep their share of the run's length."""
_NOT_SCALED = {
    **dict.fromkeys(("train_samples", "rampup_batch_size", "step_batch_size_schedule"), "training"),
    **dict.fromkeys(("exit_interval", "exit_duration_in_mins"), "training"),
    **dict.fromkeys(("lr_warmup_samples", "lr_decay_samples", "lr_wsd_decay_samples"), "optimizer"),
    "weight_decay_incr_samples": "optimizer",
    **dict.fromkeys(("save", "load"), "checkpoint"),
    **dict.fromkeys(("metrics_file", "tensorboard_dir"), "logging"),
}
"""Fields that a ladder refuses, each with its group: they would be the same for all sizes."""


@dataclass(frozen=True)
class ScalingRules:
    """Rules by which a run changes with its size.

    Attributes:
        dimension: what the sizes name. A depth changes the width too: their ratio is kept.
        batch_exponent, lr_exponent: exponents of the parameters, relative to those of the reference.
    """

    dimension: Dimension
    batch_exponent: float = BATCH_EXPONENT
    lr_exponent: float = LR_EXPONENT


@dataclass(frozen=True)
class LadderRun:
    """Run of a ladder.

    Attributes:
        parameters: see `scaling_parameters`.
        all_parameters: parameters with the embedding tables.
        tokens: tokens that it trains on.
        flops: model FLOPs of the whole run.
    """

    name: str
    config: Config
    vocab_size: int | None
    parameters: int
    all_parameters: int
    tokens: int
    flops: float


def default_lr_exponent(model: ModelConfig) -> float:
    """Return the exponent of the learning rate: muP has its own rule for the width."""
    return LR_EXPONENT if model.mup_base_width is None else 0.0


def vocab_size_of(config: Config) -> int | None:
    """Return the vocabulary size that training will use; None if neither a flag nor a tokenizer has one."""
    if config.data.resolved_tokenizer_type is None:
        return config.model.vocab_size
    tokenizer = configured_tokenizer(config.data, config.model.vocab_size)
    return with_vocab_size(config, tokenizer).model.vocab_size


def measured_run(name: str, config: Config, vocab_size: int | None, tokens: int) -> LadderRun:
    """Return a run with its counts.

    Args:
        vocab_size: see `vocab_size_of`.

    Raises:
        UserError: the vocabulary size is unknown.
    """
    model, tp = replace(config.model, vocab_size=vocab_size), config.parallel.tp
    return LadderRun(
        name,
        config,
        vocab_size,
        parameters=scaling_parameters(model, tp),
        all_parameters=whole_model(model, tp).num_parameters,
        tokens=tokens,
        flops=tokens * flops_per_token(model, tp),
    )


def scaling_parameters(model: ModelConfig, tp: int) -> int:
    """Return the parameters of the layers and the output layer, which all take part in a token's GEMMs.

    Tables of tokens and positions are not counted. A tied table counts as the output layer.
    """
    units = whole_model(model, tp)
    return units.head.num_parameters + sum(units.layers[kind].num_parameters for kind in units.kinds)


def check_reference(config: Config) -> None:
    """Refuse options that cannot be scaled.

    Raises:
        UserError: with the option's flag.
    """
    defaults = Config().values()
    for name, group in _NOT_SCALED.items():
        value = getattr(getattr(config, group), name)
        if value != defaults[name]:
            raise UserError(f"{flag_of(name)} would be the same for all sizes of the ladder: remove it")
    optimizer = config.optimizer
    shares = [name for name in _SHARES if getattr(optimizer, name)]
    if shares and config.training.train_iters is None:
        raise UserError(
            f"{flag_of(shares[0])} {getattr(optimizer, shares[0])} is a share of a run without a length: "
            "pass --train-iters of the reference too, or --lr-warmup-fraction"
        )
    if config.training.eval_iters == 0:
        raise UserError("--eval-iters 0: a ladder compares validation losses, pass at least 1")


def scaled_run(reference: LadderRun, rules: ScalingRules, size: int, ratio: float, name: str) -> LadderRun:
    """Return the run of another size.

    Args:
        reference: `check_reference` has accepted its config; its tokens have no effect.
        size: its layers or its hidden size, by `rules.dimension`.
        ratio: tokens to train on, per parameter.

    Raises:
        UserError: the width has no whole number of heads, or the run has no iterations.
    """
    config = reference.config
    model = scaled_model(config, rules.dimension, size)
    parameters = scaling_parameters(replace(model, vocab_size=reference.vocab_size), config.parallel.tp)
    growth = parameters / reference.parameters
    batch = _scaled_batch(config, growth**rules.batch_exponent)
    iterations = round(ratio * parameters / (batch * model.seq_length))
    if iterations < 1:
        raise UserError(
            f"{name} trains on {ratio * parameters:,.0f} tokens, less than half of a global batch of {batch} "
            f"samples: pass a smaller --global-batch-size, or more --tokens-per-parameter"
        )
    samples = (config.training.eval_iters or EVAL_ITERS) * _reference_batch(config)
    training = replace(
        config.training,
        global_batch_size=batch,
        train_iters=iterations,
        eval_interval=iterations,  # once, so that all sizes evaluate the same first samples
        eval_iters=-(-samples // batch),
    )
    length = iterations / (config.training.train_iters or 1)
    optimizer = _scaled_optimizer(config.optimizer, growth**rules.lr_exponent, length)
    scaled = replace(config, model=model, training=training, optimizer=optimizer)
    return measured_run(name, scaled, reference.vocab_size, iterations * batch * model.seq_length)


def scaled_model(config: Config, dimension: Dimension, size: int) -> ModelConfig:
    """Return the model with `size` layers or this hidden size.

    The ratios of its widths, the size of a head, the query heads of a group and the share of layers with keys
    of earlier ones are kept.

    Raises:
        UserError: the width has no whole number of heads or, with tensor parallelism, of heads per rank.
    """
    model = config.model
    groups = [spec.num_kv_heads for spec in model.head_specs]
    shared = math.lcm(*(model.num_attention_heads // count for count in groups if count > 1))
    heads_per_step = shared * config.parallel.tp
    step = model.hidden_size // model.num_attention_heads * heads_per_step
    if dimension == "depth":
        layers, hidden = size, round_up(-(-size * model.hidden_size // model.num_layers), step)
    else:
        layers, hidden = model.num_layers, size
    if hidden % step:
        below = hidden // step * step
        raise UserError(
            f"--widths {size} is not a multiple of {step}, the width of {heads_per_step} of the heads: pass "
            + (f"{below} or {below + step}" if below else str(step))
        )
    heads = hidden // step * heads_per_step
    factor, growth = model.embedding_multiplier, Fraction(hidden, model.hidden_size)
    return replace(
        model,
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=_scaled_groups(model.num_query_groups, heads, model.num_attention_heads),
        full_attention_query_groups=_scaled_groups(
            model.full_attention_query_groups, heads, model.num_attention_heads
        ),
        num_kv_shared_layers=model.num_kv_shared_layers * layers // model.num_layers,
        kv_shared_ffn_hidden_size=_scaled_ffn(model.kv_shared_ffn_hidden_size, growth),
        ffn_hidden_size=_scaled_ffn(model.ffn_hidden_size, growth),
        moe_ffn_hidden_size=_scaled_ffn(model.moe_ffn_hidden_size, growth),
        moe_shared_expert_intermediate_size=_scaled_ffn(model.moe_shared_expert_intermediate_size, growth),
        moe_latent_size=_scaled_ffn(model.moe_latent_size, growth),
        # Gemma's factor is the root of the width.
        embedding_multiplier=hidden**0.5 if math.isclose(factor, model.hidden_size**0.5) else factor,
    )


def _reference_batch(config: Config) -> int:
    return config.global_batch(config.parallel.data_parallel_size or 1)


def _scaled_batch(config: Config, factor: float) -> int:
    """Return the nearest global batch that has whole microbatches on each replica."""
    step = config.training.micro_batch_size * (config.parallel.data_parallel_size or 1)
    return step * max(1, round(_reference_batch(config) * factor / step))


def _scaled_optimizer(optimizer: OptimizerConfig, lr_factor: float, length: float) -> OptimizerConfig:
    """Return the optimizer with learning rates times `lr_factor`, and with iterations times `length`."""
    rates = ("lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "lr_warmup_init")
    set_rates = {name: value for name in rates if (value := getattr(optimizer, name)) is not None}
    counts = {name: value for name in _SHARES if (value := getattr(optimizer, name))}
    return replace(
        optimizer,
        **{name: value * lr_factor for name, value in set_rates.items()},
        **{name: max(1, round(value * length)) for name, value in counts.items()},
    )


def _scaled_ffn(width: int | None, growth: Fraction) -> int | None:
    return width if width is None or growth == 1 else round_up(math.ceil(width * growth), _FFN_MULTIPLE)


def _scaled_groups(groups: int | None, heads: int, old_heads: int) -> int | None:
    """Return the number of key/value heads for this number of query heads; one remains one."""
    return groups if groups is None or groups == 1 else heads * groups // old_heads


def ladder_runs(
    config: Config, rules: ScalingRules, sizes: Sequence[int], ratios: Sequence[float]
) -> list[LadderRun]:
    """Return a run for each size and number of tokens per parameter.

    Args:
        config: the reference.

    Raises:
        UserError: the reference or a size is invalid, or two sizes are the same.
    """
    check_reference(config)
    flag = f"--{rules.dimension}s"
    if twice := [size for size in dict.fromkeys(sizes) if sizes.count(size) > 1]:
        raise UserError(f"{flag} has {twice[0]} twice: remove one")
    if ties := [ratio for ratio in dict.fromkeys(ratios) if ratios.count(ratio) > 1]:
        raise UserError(f"--tokens-per-parameter has {plain(ties[0])} twice: remove one")
    reference = measured_run("", config, vocab_size_of(config), tokens=0)
    runs = []
    for size, ratio in itertools.product(sizes, ratios):
        name = f"{rules.dimension}-{size}" + (f"-tokens-{ratio:g}" if len(ratios) > 1 else "")
        runs.append(scaled_run(reference, rules, size, ratio, name))
    return runs


def write_configs(runs: Sequence[LadderRun], folder: Path, set_fields: Collection[str]) -> Iterator[Path]:
    """Write the config of each run into a folder of its own, where the run will save; yield the files.

    Args:
        set_fields: fields that a flag or a file of the reference sets.

    Raises:
        UserError: a folder has the config of another run, or cannot be written.
    """
    texts = {folder / run.name / CONFIG_FILE: _text(run, folder / run.name, set_fields) for run in runs}
    for file, text in texts.items():
        if file.exists() and file.read_text(encoding="utf-8") != text:
            raise UserError(f"{file} is of another ladder: remove {file.parent}, or pass another --output")
    for file, text in texts.items():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with replace_file(file) as stream:
                stream.write(text.encode())
        except OSError as error:
            raise UserError(f"{file} cannot be written ({error.strerror}): pass another --output") from None
        yield file


def table_lines(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table whose first column is aligned to the left, and all others to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in (heads, *rows)
    ]


def ladder_lines(runs: Sequence[LadderRun]) -> list[str]:
    """Return the table of the runs, in `HEADS`."""
    rows = [
        (
            run.name,
            f"{run.config.model.num_layers}",
            f"{run.config.model.hidden_size}",
            f"{run.config.model.num_attention_heads}",
            f"{run.parameters:,}",
            f"{run.config.training.global_batch_size}",
            f"{run.config.training.train_iters:,}",
            f"{run.tokens:,}",
            f"{run.config.optimizer.lr:.2e}",
            f"{run.flops:.2e}",
        )
        for run in runs
    ]
    return table_lines(HEADS, rows)


def _text(run: LadderRun, folder: Path, set_fields: Collection[str]) -> str:
    """Return the run's config as YAML, without fields that are not set and have their defaults."""
    checkpoint = replace(run.config.checkpoint, save=str(folder), load=str(folder))
    config, defaults = replace(run.config, checkpoint=checkpoint), Config().values()
    unset = {
        name for name, value in config.values().items() if value == defaults[name] and name not in set_fields
    }
    return (
        f"# {run.name}: {run.parameters:,} parameters of layers and output layer, {run.all_parameters:,} in "
        f"all, {run.tokens:,} tokens, {run.flops:.3e} model FLOPs\n{to_yaml(config, unset)}"
    )
