"""The fields of the config as flags: their names, their types, and suggestions for misspelled names."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, Union

from megalite.config.config import Config
from megalite.config.option import (
    AnyOf,
    OnResume,
    Option,
    Range,
    Setting,
    flag_of,
    flag_with_value,
    format_value,
    option_of,
)

_MIN_SIMILARITY = 0.7
"""Minimum similarity (difflib's ratio, from 0 to 1) of a typo and the name that an error message suggests."""
_MOST_VALUES = 3
"""Most values that a message names."""
MAX_INT = 2**63 - 1
"""Largest whole number of a field. PyTorch's sizes and most file formats cannot be larger."""
SYNONYMS = {
    "batch_size": "micro_batch_size",
    "dtype": "params_dtype",
    "epochs": "train_iters",
    "num_epochs": "train_iters",
    "num_train_epochs": "train_iters",
    "max_steps": "train_iters",
    "num_steps": "train_iters",
    "steps": "train_iters",
    "iterations": "train_iters",
    "learning_rate": "lr",
    "warmup_steps": "lr_warmup_iters",
    "warmup_ratio": "lr_warmup_fraction",
    "lr_scheduler_type": "lr_decay_style",
    "max_grad_norm": "clip_grad",
    "gradient_clipping": "clip_grad",
    "gradient_checkpointing": "recompute_granularity",
    "output_dir": "save",
    "checkpoint_dir": "save",
    "save_dir": "save",
    "save_steps": "save_interval",
    "save_total_limit": "keep_last",
    "resume": "load",
    "resume_from_checkpoint": "load",
    "logging_steps": "log_interval",
    "logging_dir": "tensorboard_dir",
    "eval_steps": "eval_interval",
    "per_device_train_batch_size": "micro_batch_size",
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "sequence_length": "seq_length",
    "context_length": "seq_length",
    "max_seq_len": "seq_length",
    "block_size": "seq_length",
    "n_layer": "num_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "num_hidden_layers": "num_layers",
    "intermediate_size": "ffn_hidden_size",
    "dropout": "hidden_dropout",
    "tensor_parallel_size": "tensor_model_parallel_size",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
    "sequence_parallel_size": "context_parallel_size",
    "tokenizer": "tokenizer_model",
    "dataset": "data_path",
    "train_data": "data_path",
    # nanoGPT
    "out_dir": "save",
    "always_save_checkpoint": "save_interval",
    "init_from": "load",
    "wandb_log": "wandb_project",
    "wandb_run_name": "wandb_exp_name",
    "bias": "add_bias_linear",
    "max_iters": "train_iters",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "grad_clip": "clip_grad",
    "decay_lr": "lr_decay_style",
    "warmup_iters": "lr_warmup_iters",
    "backend": "distributed_backend",
    "device": "distributed_backend",
    # Hugging Face's TrainingArguments
    "gradient_accumulation_steps": "global_batch_size",
    "per_device_eval_batch_size": "micro_batch_size",
    "lr_scheduler_kwargs": "lr_decay_style",
    "optim": "optimizer",
    "adam_epsilon": "adam_eps",
    "activation_checkpointing": "recompute_granularity",
    "activation_checkpointing_kwargs": "recompute_granularity",
    "gradient_checkpointing_kwargs": "recompute_granularity",
    "torch_compile": "compile",
    "logging_strategy": "log_interval",
    "eval_strategy": "eval_interval",
    "save_strategy": "save_interval",
    "save_only_model": "save_optim",
    "do_eval": "eval_interval",
    "report_to": "wandb_project",
    "project": "wandb_project",
    "run_name": "wandb_exp_name",
    "full_determinism": "deterministic",
    "data_seed": "seed",
    "use_cpu": "distributed_backend",
    "no_cuda": "distributed_backend",
    "ddp_backend": "distributed_backend",
    "ddp_timeout": "distributed_timeout_minutes",
    "ddp_bucket_cap_mb": "ddp_bucket_size",
    "fsdp": "zero_stage",
    "fsdp_config": "zero_stage",
}
"""Names that other programs use, and the field that each means."""
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


_GROUPS: Mapping[str, type] = typing.get_type_hints(Config)


class ValueKind(NamedTuple):
    """Type of a field.

    Attributes:
        item: type of the value, or of an element of a tuple.
        choices: the allowed values; empty if any value is allowed.
        is_many: the field is a tuple.
        unpacks_one: a single value is not in a tuple.
        is_optional: the field may be None.
    """

    item: type
    choices: tuple[str, ...]
    is_many: bool
    is_optional: bool
    unpacks_one: bool = False


@dataclass(frozen=True)
class ConfigField:
    """Field of a sub-config, with all its names on the command line."""

    group: str
    name: str
    kind: ValueKind
    default: Any
    flags: tuple[str, ...]
    """Flags that take the field's value; the first is the field's own name."""
    sets: Mapping[str, Any]
    """Flags without a value, each with the value that it sets."""
    choices: Mapping[str, str]
    """The allowed values, by their names in lower case, including names that other programs use."""
    declared: Option
    on_resume: OnResume
    """Rule for a run that resumes with another value."""
    section: str | None
    """Part of the group that the field belongs to in YAML files, such as the model's attention."""


@functools.cache
def config_fields() -> tuple[ConfigField, ...]:
    """Return all fields of the config, group by group."""
    return tuple(field for group, part in _GROUPS.items() for field in _fields_of(group, part))


@functools.cache
def fields_by_name() -> Mapping[str, ConfigField]:
    """Return every field by its name; no two groups share a name."""
    table = {field.name: field for field in config_fields()}
    assert len(table) == len(config_fields())
    return table


def resume_rule(name: str) -> OnResume | None:
    """Return the rule for a run that resumes with another value of a field; None for an unknown name."""
    field = fields_by_name().get(name)
    return None if field is None else field.on_resume


def without_effect(fields: Iterable[ConfigField], values: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields that have no effect with these values of fields, each with the reason."""
    reasons = dict[str, str]()
    for field in fields:
        for needed in field.declared.only_with:
            if not needed.is_met_in(values):
                reasons.setdefault(field.name, _reason(needed, values))
    return reasons


def _reason(needed: Setting | AnyOf, all_values: Mapping[str, Any]) -> str:
    """Return why a condition is not met by other fields' values."""
    if needed.why or isinstance(needed, AnyOf):
        return needed.why
    other, values, value = fields_by_name()[needed.field], needed.values, all_values[needed.field]
    if value is True and other.default is True:
        return f"it needs {next(flag for flag, set_value in other.sets.items() if set_value is False)}"
    if value is False and other.default is not False:
        return f"{flag_with_value(other.name, value)} is set"
    if value is None or value is False or value == ():
        return f"{flag_of(other.name)} is not set"
    if values in ((None,), (False,)):
        return f"{flag_with_value(other.name, value)} is set"
    is_named = not isinstance(values, Range) and values is not None and len(values) <= _MOST_VALUES
    others = f", not {' or '.join(map(str, values or ()))}" if is_named else ""
    return f"{flag_of(other.name)} is {format_value(value)}{others}"


def fields_with(*rules: OnResume) -> frozenset[str]:
    """Return the names of the fields that have one of these rules for resuming."""
    return frozenset(field.name for field in config_fields() if field.on_resume in rules)


@functools.cache
def fields_by_flag() -> Mapping[str, ConfigField]:
    """Return the field of every flag; no two fields share a flag."""
    table: dict[str, ConfigField] = {}
    for field in config_fields():
        for flag in (*field.flags, *field.sets):
            assert flag not in table, flag
            table[flag] = field
    return table


def normalised(name: str) -> str:
    """Return a flag with dashes, as in the tables; `--tensor_model_parallel_size` is accepted too."""
    return name.replace("_", "-")


@functools.cache
def field_docs(group: str) -> Mapping[str, str]:
    """Return the docstring under each field of a group, as one line, read from the source of its classes."""
    docs = {}
    for part in filter(is_dataclass, _GROUPS[group].__mro__):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
        assert isinstance(definition, ast.ClassDef)
        for statement, following in itertools.pairwise(definition.body):
            match statement, following:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=text)):
                    docs[name] = " ".join(str(text).split())
    return docs


def _fields_of(group: str, part: Any) -> list[ConfigField]:
    hints = typing.get_type_hints(part)
    found = []
    for field in fields(part):
        kind, declared = _kind(hints[field.name]), option_of(field)
        flags, sets = (flag_of(field.name), *declared.aliases), dict(declared.sets or {})
        if kind.item is bool:
            sets |= {f"--no-{name[2:]}": False for name in flags}
        names = {choice: choice for choice in kind.choices} | dict(declared.choices or {})
        choices = {name.lower(): choice for name, choice in names.items()}
        rule = declared.on_resume or part.default_on_resume
        (owner,) = (each for each in part.__mro__ if field.name in vars(each).get("__annotations__", {}))
        section = vars(owner).get("section")
        found.append(
            ConfigField(group, field.name, kind, field.default, flags, sets, choices, declared, rule, section)
        )
    return found


def _kind(hint: Any) -> ValueKind:
    """Read a type hint such as `int`, `int | None`, `tuple[int, ...] | None`, `Literal[...]`.

    `T | tuple[T, ...]` is one or more values: a tuple of several.
    """
    is_optional = is_many = unpacks_one = False
    if typing.get_origin(hint) in (Union, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        is_optional, unpacks_one = len(members) < len(typing.get_args(hint)), len(members) > 1
        hint = members[-1]
    if typing.get_origin(hint) is tuple:
        hint, _ = typing.get_args(hint)
        is_many = True
    if typing.get_origin(hint) is Literal:
        return ValueKind(str, typing.get_args(hint), is_many, is_optional, unpacks_one)
    return ValueKind(hint, (), is_many, is_optional, unpacks_one)
