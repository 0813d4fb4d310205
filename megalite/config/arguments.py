"""Parse the arguments of a command line: flags, their values, errors in them, and suggestions for typos."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, NamedTuple

from megalite.config.fields import MAX_INT, ConfigField, normalised
from megalite.config.option import flag_of, format_value
from megalite.utils.errors import shortened

_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")
_MAX_TIMES = 4096  # repetitions in a list, so that a typo does not fill the memory
_KIND_NAMES = {int: "a whole number", float: "a number", bool: "True or False", str: "a string"}

_MIN_SIMILARITY = 0.7
"""Minimum similarity (difflib's ratio, from 0 to 1) of a typo and the name that an error message suggests."""
_SYNONYMS = {
    "micro_batch_size": "batch_size per_device_train_batch_size "
    "train_micro_batch_size_per_gpu per_device_eval_batch_size",
    "params_dtype": "dtype",
    "train_iters": "epochs num_epochs num_train_epochs max_steps num_steps steps iterations max_iters",
    "lr": "learning_rate",
    "lr_warmup_iters": "warmup_steps warmup_iters",
    "lr_warmup_fraction": "warmup_ratio",
    "lr_decay_style": "lr_scheduler_type decay_lr lr_scheduler_kwargs",
    "clip_grad": "max_grad_norm gradient_clipping grad_clip",
    "recompute_granularity": "gradient_checkpointing activation_checkpointing "
    "activation_checkpointing_kwargs gradient_checkpointing_kwargs",
    "save": "output_dir checkpoint_dir save_dir out_dir",
    "save_interval": "save_steps always_save_checkpoint save_strategy",
    "keep_last": "save_total_limit",
    "load": "resume resume_from_checkpoint init_from",
    "log_interval": "logging_steps logging_strategy",
    "tensorboard_dir": "logging_dir",
    "eval_interval": "eval_steps eval_strategy do_eval",
    "global_batch_size": "train_batch_size gradient_accumulation_steps",
    "seq_length": "sequence_length context_length max_seq_len block_size",
    "num_layers": "n_layer num_hidden_layers",
    "num_attention_heads": "n_head",
    "hidden_size": "n_embd",
    "ffn_hidden_size": "intermediate_size",
    "hidden_dropout": "dropout",
    "tensor_model_parallel_size": "tensor_parallel_size",
    "pipeline_model_parallel_size": "pipeline_parallel_size",
    "context_parallel_size": "sequence_parallel_size",
    "tokenizer_model": "tokenizer",
    "data_path": "dataset train_data",
    "wandb_project": "wandb_log report_to project",
    "wandb_exp_name": "wandb_run_name run_name",
    "add_bias_linear": "bias",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "distributed_backend": "backend device use_cpu no_cuda ddp_backend",
    "optimizer": "optim",
    "adam_eps": "adam_epsilon",
    "compile": "torch_compile",
    "save_optim": "save_only_model",
    "deterministic": "full_determinism",
    "seed": "data_seed",
    "distributed_timeout_minutes": "ddp_timeout",
    "ddp_bucket_size": "ddp_bucket_cap_mb",
    "zero_stage": "fsdp fsdp_config",
}
"""Names of other programs, such as nanoGPT and Hugging Face's Trainer, by the field that they mean."""
SYNONYMS = {name: field for field, names in _SYNONYMS.items() for name in names.split()}
_WITHOUT = """
    optim_args optim_target_modules average_tokens_across_devices label_smoothing_factor bf16_full_eval
    fp16_full_eval tf32 torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config
    use_cache neftune_noise_alpha torch_empty_cache_steps auto_find_batch_size logging_first_step
    log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen disable_tqdm trackio_space_id
    trackio_bucket_id trackio_static_space_id eval_delay prediction_loss_only eval_on_start
    eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics
    batch_eval_metrics save_on_each_node enable_jit_checkpoint push_to_hub hub_token hub_private_repo
    hub_model_id hub_strategy hub_always_push hub_revision load_best_model_at_end metric_for_best_model
    greater_is_better ignore_data_skip restore_callback_states_from_checkpoint accelerator_config
    parallelism_config dataloader_drop_last dataloader_num_workers dataloader_pin_memory
    dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context
    dataloader_in_order remove_unused_columns label_names train_sampling_strategy length_column_name
    ddp_find_unused_parameters ddp_broadcast_buffers ddp_static_graph debug skip_memory_metrics do_train
    do_predict
"""
WITHOUT_COUNTERPART = frozenset(_WITHOUT.split())
"""Names of Hugging Face's TrainingArguments that no option replaces: similar names mean other things."""


class FlagTokens(NamedTuple):
    """Flag of the command line and its values.

    Attributes:
        name: the flag as the user wrote it.
        flag: the same with dashes, as in the tables of flags.
        values: the tokens between it and the next flag.
    """

    name: str
    flag: str
    values: tuple[str, ...]

    @property
    def tokens(self) -> tuple[str, ...]:
        """Return the argument tokens that `split_tokens` would read as this flag."""
        if self.values and _is_flag(self.values[0]):
            return f"{self.name}={self.values[0]}", *self.values[1:]
        return self.name, *self.values


class UserSetting(NamedTuple):
    """Value that a user set for a field.

    Attributes:
        name: what the user wrote: `--tp`, or `run.yaml line 3: tp`.
        text: the value as the user wrote it, if it does not come from a flag.
    """

    field: ConfigField
    value: Any
    name: str
    text: str | None = None


@dataclass
class Diagnostics:
    """Errors and notices, collected so that one run reports all of them."""

    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    invalid_fields: set[str] = field(default_factory=set)
    """Fields whose value could not be read. Rules that depend on them are not checked."""

    def add_problem(self, problem: str, *invalid_fields: str) -> None:
        """Add an error, and the fields that have no valid value because of it."""
        self.problems.append(problem)
        self.invalid_fields.update(invalid_fields)

    def by_field(self, settings: Iterable[UserSetting]) -> dict[str, UserSetting]:
        """Return the last setting of each field; two names of a field with different values are an error."""
        chosen: dict[str, UserSetting] = {}
        for setting in settings:
            name = setting.field.name
            before = chosen.get(name, setting)
            if before.value != setting.value:
                both = f"{_as_written(before)} and {_as_written(setting)}"
                if before.name == setting.name:
                    self.notices.append(f"{both} are both passed: the last one is used")
                else:
                    self.add_problem(f"{both} set the same option: remove one", name)
            chosen[name] = setting
        return chosen


def _as_written(setting: UserSetting) -> str:
    is_valueless = setting.name.replace("_", "-") in setting.field.sets  # --bf16
    text = format_value(setting.value) if setting.text is None else setting.text
    return setting.name if is_valueless else f"{setting.name} {text}"


def split_tokens(argv: Sequence[str]) -> tuple[list[FlagTokens], list[str]]:
    """Split an argument list before each flag.

    Returns:
        The flags, and the tokens before the first one.
    """
    stray: list[str] = []
    flags: list[FlagTokens] = []
    for token in argv:
        if _is_flag(token):
            name, equals, value = token.partition("=")
            flags.append(FlagTokens(name, normalised(name), (value,) if equals else ()))
        elif flags:
            flags[-1] = flags[-1]._replace(values=(*flags[-1].values, token))
        else:
            stray.append(token)
    return flags, stray


def _is_flag(token: str) -> bool:
    if not token.startswith("-") or token == "-":
        return False
    try:
        float(token)  # a negative number is a value
    except ValueError:
        return True
    return False


def parse_value(field: ConfigField, tokens: Sequence[str]) -> Any:
    """Parse the value of a field from its tokens.

    Raises:
        ValueError: the tokens are not a value of the field; the message continues the field's name.
    """
    kind = field.kind
    if kind.is_many:
        if not tokens:
            raise ValueError(f"needs at least one value, {_KIND_NAMES[kind.item]}")
        items = tuple(_parse_item(field, item) for token in tokens for item in _listed(token, kind.item))
        return items[0] if kind.unpacks_one and len(items) == 1 else items
    if kind.item is bool and not tokens:
        return True
    if len(tokens) != 1:
        found = f"{len(tokens)}: {' '.join(tokens)}" if tokens else "none"
        raise ValueError(f"takes one value, {_KIND_NAMES[kind.item]}, but got {found}")
    return _parse_item(field, tokens[0])


def _listed(token: str, item: type) -> Sequence[str]:
    """Return the items of a token, which may be a list of numbers in Python: `(3,5)`, `[1]*3+[0]`."""
    if item is not int or not any(character in token for character in ",[("):
        return (token,)
    try:
        value = _list_value(ast.parse(token, mode="eval").body)
    except (SyntaxError, ValueError):
        return (token,)  # the error message contains the whole token
    return [str(number) for number in value]


def _list_value(node: ast.expr) -> list[int]:
    match node:
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return [ast.literal_eval(item) for item in items]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _list_value(left) + _list_value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=ast.Constant(value=int(times))) if times <= _MAX_TIMES:
            return _list_value(left) * times
        case ast.Constant(value=int(number)):  # in parentheses
            return [number]
    raise ValueError


def _parse_item(field: ConfigField, token: str) -> Any:
    kind = field.kind
    if kind.choices:
        if token.lower() in field.choices:
            return field.choices[token.lower()]
        if fix := (field.declared.missing or {}).get(token.lower()):
            raise ValueError(f"{token} is not supported in this version: {fix}")
        raise ValueError(
            f"cannot be {token!r}: choose one of {', '.join(kind.choices)}{nearest_hint(token, kind.choices)}"
        )
    if kind.item is bool:
        if token.lower() not in _TRUE + _FALSE:
            raise ValueError(f"takes {_KIND_NAMES[bool]}, not {token!r}")
        return token.lower() in _TRUE
    if kind.item is str and token.startswith("~/"):  # a shell expands it, but not in a file or after `=`
        token = os.path.expanduser(token)
    try:
        value = kind.item(token)
    except ValueError:
        raise ValueError(f"takes {_KIND_NAMES[kind.item]}, not {shortened(token)!r}") from None
    if isinstance(value, int) and abs(value) > MAX_INT:
        raise ValueError(f"takes {_KIND_NAMES[kind.item]} of at most 2**63 - 1, not {shortened(token)!r}")
    return value


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that the user meant: a synonym, the shortest with this prefix, or the nearest.

    Args:
        name: what the user wrote.
        known: names to choose from; all flags, or all names of fields.

    Returns:
        None if no name is similar.
    """
    names = sorted(known)
    plain = name.lstrip("-").replace("-", "_").lower()
    if plain in WITHOUT_COUNTERPART:
        return None
    synonym = SYNONYMS.get(plain, "")
    for candidate in (synonym, flag_of(synonym)):
        if candidate in names:
            return candidate
    begins = [candidate for candidate in names if candidate.startswith(name)]
    if begins:
        return min(begins, key=len)
    return next(iter(get_close_matches(name, names, n=1, cutoff=_MIN_SIMILARITY)), None)


def nearest_hint(name: str, known: Iterable[str]) -> str:
    """Return `; nearest is NAME` for an error message; empty if no name is similar."""
    guess = nearest(name, known)
    return "" if guess is None else f"; nearest is {guess}"
