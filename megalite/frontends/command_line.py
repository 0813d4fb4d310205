"""Parse the command line of training into a config, and build the texts of `--help` and `--help-all`.

The texts come from the fields and the docstrings under them.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

from megalite.config.arguments import (
    Diagnostics,
    FlagTokens,
    UserSetting,
    nearest,
    nearest_hint,
    parse_value,
    split_tokens,
)
from megalite.config.config import Config, unset_options
from megalite.config.fields import ConfigField, ValueKind, config_fields, field_docs, fields_by_flag
from megalite.config.model.layers import layer_lines
from megalite.config.model.model_config import ModelConfig
from megalite.config.model.transformer import Architecture
from megalite.config.option import flag_of, format_value
from megalite.config.presets import PRESETS
from megalite.config.training import schedule_steps
from megalite.config.validate import problems_of, unused_options
from megalite.config.yaml_file import read_checkpoint_model, read_yaml, to_yaml
from megalite.frontends.deepspeed.file import DeepSpeedFile
from megalite.frontends.megatron.conversions import (
    FSDP_FLAGS,
    LATENT_ROTARY_FLAGS,
    TOKEN_FLAGS,
    fsdp_settings,
    latent_rotary_settings,
    with_token_counts,
)
from megalite.frontends.megatron.rules import (
    REMARKS,
    CommandLine,
    accepted_flags,
    megatron_rules,
    refused_flags,
    rule_of,
)
from megalite.utils.commands import command_name, is_first_rank
from megalite.utils.errors import ConfigError, one_line

_HELP, _HELP_ALL = ("--help", "-h"), "--help-all"
_OVERRIDE, _DEEPSPEED = "--override-flags", "--deepspeed-config"
_PROGRAM_FLAGS = (
    *("--config", "--preset", "--print-config", _OVERRIDE, _DEEPSPEED),
    *(*TOKEN_FLAGS, *_HELP, _HELP_ALL),
)
_ALSO_SETS = {"--activations-checkpoint-method": ("--recompute-granularity", "full")}
"""Flags of earlier versions of Megatron-LM that set a second option."""
TRAINED_BY: Mapping[Architecture, str] = {"gpt": "train", "bert": "train-bert"}
"""The command that trains each architecture."""
NEEDED_TO_TRAIN = ("train_iters", "mock_data", "tokenizer_type")
"""Fields that only training needs: other programs pass them to `parse` as `unneeded`."""


class ParsedRun(NamedTuple):
    """Parsed command line.

    Attributes:
        notices: messages to log once, without those of `unused_options`.
        set_fields: fields that a flag or a file sets.
    """

    config: Config
    notices: list[str]
    set_fields: frozenset[str]


def parse(
    argv: Sequence[str], unneeded: Collection[str] = (), architecture: Architecture | None = None
) -> tuple[Config, list[str]]:
    """Parse a command line as `parse_run` does.

    Returns:
        The config, and notices to log once: options that have no effect, and why.
    """
    config, notices, _ = parse_run(argv, unneeded, architecture)
    unused = unused_options(config, config.dry_run.world_size or _world_size())
    return config, [*notices, *map(one_line, unused)]


def parse_run(
    argv: Sequence[str], unneeded: Collection[str] = (), architecture: Architecture | None = None
) -> ParsedRun:
    """Parse a command line: flags override the YAML file of --config, which overrides the model of --preset.

    The config is not validated yet, since validation needs the number of ranks: call `check_config`.

    Args:
        argv: the arguments, without the program's name.
        unneeded: fields that the caller does not need: an error elsewhere does not report them as missing.
        architecture: the only architecture that the caller accepts; None for any.

    Raises:
        ConfigError: with all errors in the command line, and in the config as far as it could be read.
        SystemExit: after printing --help, --help-all or --print-config.
    """
    diagnostics = Diagnostics()
    flags, stray = split_tokens(argv)
    flags, after_override = _override(flags)
    if any(flag.flag == _HELP_ALL for flag in flags):
        _print_and_exit(full_help(Path(sys.argv[0]).name))
    if any(flag.flag in _HELP for flag in flags):
        _print_and_exit(short_help(Path(sys.argv[0]).name, architecture or "gpt"))
    for token in [*stray, *after_override]:
        diagnostics.add_problem(f"{token!r} does not follow a flag: put its flag in front of it")
    config, set_fields = _config(flags, architecture or "gpt", diagnostics)
    if config.model.architecture != (architecture or config.model.architecture):
        program = command_name(TRAINED_BY[config.model.architecture])
        diagnostics.add_problem(
            f"the model is a {config.model.architecture}, which {program} trains: run it, or choose a "
            f"{architecture}'s --preset or --config"
        )
    _check_megatron_flags(flags, config, diagnostics)
    if diagnostics.problems:
        of_config = problems_of(config, _world_size(), diagnostics.invalid_fields.union(unneeded))
        raise ConfigError([one_line(problem) for problem in (*diagnostics.problems, *of_config)])
    if any(flag.flag == "--print-config" for flag in flags):
        unset = unset_options(config, set_fields)
        remark = ["# The other options of the layout are chosen when the run starts."] if unset else []
        layers = (f"# {line}" for line in layer_lines(config.model))
        _print_and_exit([*remark, to_yaml(config, unset).removesuffix("\n"), *layers])
    return ParsedRun(config, [one_line(notice) for notice in diagnostics.notices], set_fields)


def known_flags() -> list[str]:
    """Return every flag that `parse` knows, with dashes."""
    return [*fields_by_flag(), *megatron_rules(), *_PROGRAM_FLAGS]


def _override(flags: Sequence[FlagTokens]) -> tuple[list[FlagTokens], list[str]]:
    """Apply --override-flags: flags after it silently replace flags before it that set the same field.

    Returns:
        The remaining flags, and any values after --override-flags, which takes none.
    """
    kept: list[FlagTokens] = []
    stray: list[str] = []
    for is_override, group in itertools.groupby(flags, lambda flag: flag.flag == _OVERRIDE):
        later = list(group)
        if is_override:
            stray += [token for flag in later for token in flag.values]
        else:
            replaced = {_option_of(flag) for flag in later}
            kept = [flag for flag in kept if _option_of(flag) not in replaced] + later
    return kept, stray


def _option_of(flag: FlagTokens) -> str:
    """Return the field that a flag sets, or the flag itself if it is not a field's."""
    field = fields_by_flag().get(flag.flag)
    return flag.flag if field is None else field.name


def _config(
    flags: Sequence[FlagTokens], architecture: Architecture, diagnostics: Diagnostics
) -> tuple[Config, frozenset[str]]:
    """Apply preset or checkpoint, YAML file and flags, in this order; return the fields that are set too."""
    base = _preset(_program_value("--preset", flags, diagnostics), architecture, diagnostics)
    path = _program_value("--config", flags, diagnostics)
    from_file = {} if path is None else read_yaml(path, diagnostics)
    from_flags = list(_settings(flags, diagnostics))
    deepspeed_path = _program_value(_DEEPSPEED, flags, diagnostics)
    deepspeed = None if deepspeed_path is None else DeepSpeedFile.read(deepspeed_path, diagnostics)
    if deepspeed is not None:
        from_deepspeed = deepspeed.settings(diagnostics)
        diagnostics.by_field([*from_file.values(), *from_deepspeed])  # report contradictions of the YAML file
        from_flags = [*from_deepspeed, *from_flags]
        soft = {each.field.name: each for each in deepspeed.soft_settings(diagnostics)}
        from_file = {**soft, **from_file}
    by_flags = diagnostics.by_field(from_flags)
    settings = {**from_file, **by_flags}
    config = _with_full_batch(_with(base, settings))
    if config.checkpoint.use_checkpoint_args:
        model = read_checkpoint_model(config.checkpoint, diagnostics)
        config = _with_full_batch(_with(base, {**model, **settings}))
        if any(flag.flag == "--preset" for flag in flags):
            diagnostics.add_problem("--preset and --use-checkpoint-args both set the whole model: remove one")
    of_megatron = {
        **latent_rotary_settings(config.model, by_flags, flags, diagnostics),
        **fsdp_settings(by_flags, flags, diagnostics),
    }
    config, settings = _with(config, of_megatron), {**settings, **of_megatron}
    if deepspeed is not None:
        config = deepspeed.completed(config, _world_size(), diagnostics)
    # A DeepSpeed file sets some fields by their differences. None is the default of its field.
    defaults = Config().values()
    changed = {name for name, value in config.values().items() if value != defaults[name]}
    passed = {name for name, setting in settings.items() if setting.value is not None}
    return with_token_counts(config, flags, diagnostics), frozenset(changed | passed)


def _with_full_batch(config: Config) -> Config:
    """Return the config with the last size of --step-batch-size-schedule as the global batch size."""
    training = config.training
    steps = schedule_steps(training.step_batch_size_schedule, 1)
    if not steps or training.global_batch_size is not None:
        return config
    return replace(config, training=replace(training, global_batch_size=steps[-1][1]))


def _settings(flags: Sequence[FlagTokens], diagnostics: Diagnostics) -> Iterator[UserSetting]:
    """Yield the values of the flags that set a field; report unknown flags."""
    before: FlagTokens | None = None
    for flag in flags:
        field = fields_by_flag().get(flag.flag)
        if (
            before is not None
            and not flag.name.startswith("--")
            and flag.flag not in _HELP
            and _lacks_value(before)
        ):
            diagnostics.problems[-1] += f": write {before.name}={flag.tokens[0]}"
        elif field is None:
            if flag.flag not in _PROGRAM_FLAGS and rule_of(flag.flag) is None:
                supported = [*fields_by_flag(), *accepted_flags(), *_PROGRAM_FLAGS]
                meant = fields_by_flag().get(nearest(flag.flag, supported) or "")
                diagnostics.add_problem(
                    f"unknown flag {flag.name}{nearest_hint(flag.flag, supported)} (--help-all lists all)",
                    *((meant.name,) if meant else ()),
                )
        elif flag.flag in field.sets and flag.values:
            values = " ".join(flag.values)
            diagnostics.add_problem(f"{flag.name} takes no value, but got {values}", field.name)
        elif flag.flag in field.sets:
            yield UserSetting(field, field.sets[flag.flag], flag.name)
        else:
            try:
                yield UserSetting(field, parse_value(field, flag.values), flag.name)
            except ValueError as error:
                diagnostics.add_problem(f"{flag.name} {error}", field.name)
        if flag.flag in _ALSO_SETS:
            other, value = _ALSO_SETS[flag.flag]
            yield UserSetting(fields_by_flag()[other], value, flag.name)
        before = flag


def _lacks_value(flag: FlagTokens) -> bool:
    """Return whether a flag of a field has no value, but needs one."""
    field = fields_by_flag().get(flag.flag)
    return (
        field is not None and flag.flag not in field.sets and not flag.values and field.kind.item is not bool
    )


def _program_value(name: str, flags: Sequence[FlagTokens], diagnostics: Diagnostics) -> str | None:
    values = [value for flag in flags if flag.flag == name for value in flag.values]
    if len(values) == 1:
        return values[0]
    if any(flag.flag == name for flag in flags):
        diagnostics.add_problem(f"{name} takes one value, but got {' '.join(values) or 'none'}")
    return None


def _preset(name: str | None, architecture: Architecture, diagnostics: Diagnostics) -> Config:
    if name is None:
        return Config(model=ModelConfig(architecture=architecture))
    if name not in PRESETS:
        guess = nearest_preset(name)
        hint = f"; nearest is {guess}" if guess else ""
        diagnostics.add_problem(
            f"--preset {name} is not known: choose one of {', '.join(PRESETS)}{hint}",
            *(field.name for field in fields(Config().model)),
        )
        return Config()
    return Config(model=PRESETS[name])


def nearest_preset(name: str) -> str | None:
    """Return the preset that a name means, as in `llama3` or `Qwen/Qwen3-8B`; None if no name is similar."""
    known = {"".join(filter(str.isalnum, preset)): preset for preset in PRESETS}
    model = "".join(filter(str.isalnum, name.rpartition("/")[2].lower()))
    return known.get(nearest(model, known) or "")


def _with(base: Config, settings: Mapping[str, UserSetting]) -> Config:
    changes: dict[str, dict[str, object]] = {}
    for name, setting in settings.items():
        changes.setdefault(setting.field.group, {})[name] = setting.value
    return replace(
        base, **{group: replace(getattr(base, group), **values) for group, values in changes.items()}
    )


def _check_megatron_flags(flags: Sequence[FlagTokens], config: Config, diagnostics: Diagnostics) -> None:
    line = CommandLine(config, {flag.flag: flag for flag in flags})
    for flag in line.flags.values():
        is_own = flag.flag in fields_by_flag() or flag.flag in _PROGRAM_FLAGS
        if rule := REMARKS.get(flag.flag) if is_own else rule_of(flag.flag):
            try:
                if notice := rule(flag, line):
                    diagnostics.notices.append(notice)
            except ValueError as problem:
                diagnostics.add_problem(str(problem))


def _world_size() -> int | None:
    """Return the number of ranks that the launcher started, or None without a launcher."""
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdecimal() else None


def _print_and_exit(lines: Iterable[str]) -> None:
    if is_first_rank():
        sys.stdout.writelines(f"{line}\n" for line in lines)
    raise SystemExit(0)


_METAVARS = {int: "INT", float: "FLOAT", str: "TEXT"}


_EVERYDAY = {
    "model": "num_layers hidden_size num_attention_heads seq_length params_dtype",
    "layout": (
        "layout tensor_model_parallel_size pipeline_model_parallel_size zero_stage recompute_granularity"
    ),
    "data": "data_path tokenizer_model mock_data",
    "training": "train_iters micro_batch_size global_batch_size lr lr_warmup_iters lr_decay_style",
    "checkpoints and logs": "save load save_interval tensorboard_dir",
}
"""The fields that most runs set, under the titles of the short help."""


_EXAMPLES: Mapping[Architecture, tuple[str, str]] = {
    "gpt": (
        "124M parameters",
        "--preset gpt2-124m --data-path my_text_document \\\n    --tokenizer-model tokenizer.json",
    ),
    "bert": ("110M parameters", "--preset bert-base --data-path my_text_sentence --vocab-file vocab.txt"),
}
"""Size of the model in the short help's example, and its flags for model and data."""


def short_help(program: str, architecture: Architecture) -> Iterator[str]:
    """Yield the lines of --help: an example, and the flags that most runs need."""
    yield from _usage(program)
    size, flags = _EXAMPLES[architecture]
    yield f"example, a model of {size} on 4 GPUs or on 4 processes of a laptop:"
    yield ""
    module = "-m " if program.startswith("megalite ") else ""
    yield f"  torchrun --nproc-per-node 4 {module}{program} --tp 2 --bf16 \\"
    yield f"    {flags} \\"
    yield "    --train-iters 10000 --micro-batch-size 4 --global-batch-size 64 \\"
    yield "    --lr 6e-4 --save checkpoints"
    for title, names in _EVERYDAY.items():
        yield from ("", f"{title}:")
        for name in names.split():
            field = fields_by_flag()[flag_of(name)]
            yield from _entry(_names(field), f"{field_docs(field.group)[name]} {_default(field)}")
    yield ""
    yield from _wrapped(
        "--help-all lists all flags; --dry-run shows what a run would hold and send, without training.", 0
    )


def _usage(program: str) -> Iterator[str]:
    yield f"usage: {program} [--preset NAME] [--config FILE.yaml] [flags]"
    yield ""
    yield from _wrapped(
        "Flags override the YAML file, which overrides the preset. Names may be written with - or _.", 0
    )
    yield ""
    yield from _entry(["--preset NAME"], f"A published or tiny model: {', '.join(PRESETS)}.")
    yield ""


def full_help(program: str) -> Iterator[str]:
    """Yield the lines of --help-all: every flag, with its field's docstring and default."""
    yield from _usage(program)
    own = {
        "--config FILE.yaml": "Read settings from a YAML file, as --print-config writes them.",
        "--deepspeed_config FILE.json": "Read settings from a DeepSpeed JSON file.",
        "--override-flags": "Let flags after this one replace flags before it, for scripts that pass on a "
        "user's flags.",
        **{
            f"{name} INT": f"{text} Converted to samples of --seq-length tokens."
            for name, text in TOKEN_FLAGS.items()
        },
        **(LATENT_ROTARY_FLAGS | FSDP_FLAGS),
        "--print-config": "Print all settings as YAML, and exit.",
        "--help, -h": "Print the flags that most runs need, and exit.",
        "--help-all": "Print this help, and exit.",
    }
    for name, text in own.items():
        yield from _entry([name], text)
    title = ""
    for field in config_fields():
        section = f"{field.group}, {field.section}" if field.section else field.group
        if section != title:
            title = section
            yield from ("", f"{title}:")
        yield from _entry(_names(field), f"{field_docs(field.group)[field.name]} {_default(field)}")
    unneeded = [flag for flag in accepted_flags() if flag not in LATENT_ROTARY_FLAGS | FSDP_FLAGS]
    for title, flags in (
        ("accepted from existing command lines, but not needed (the log says why)", unneeded),
        ("not supported yet: an error says what to use instead", sorted(refused_flags())),
    ):
        yield from ("", f"{title}:")
        yield from _wrapped(" ".join(flags), 2)


def _entry(names: Iterable[str], text: str) -> Iterator[str]:
    yield from _wrapped(", ".join(names), 2)
    yield from _wrapped(text, 6)


def _wrapped(text: str, indent: int) -> list[str]:
    margin = " " * indent
    return textwrap.wrap(
        text,
        min(110, shutil.get_terminal_size().columns),
        initial_indent=margin,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _names(field: ConfigField) -> list[str]:
    value = _metavar(field.kind)
    return [*(f"{flag} {value}".rstrip() for flag in field.flags), *field.sets]


def _metavar(kind: ValueKind) -> str:
    if kind.item is bool:
        return "[True|False]"
    one = "{" + ", ".join(kind.choices) + "}" if kind.choices else _METAVARS[kind.item]
    return f"{one} [{one} ...]" if kind.is_many else one


def _default(field: ConfigField) -> str:
    if field.default is None or field.default == ():
        return ""
    return f"(default: {format_value(field.default)})"
