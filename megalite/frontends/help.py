"""Build the texts of `--help` and `--help-all` from the fields and the docstrings under them."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping

from megalite.config.fields import ConfigField, ValueKind, config_fields, field_docs, fields_by_flag
from megalite.config.model.transformer import Architecture
from megalite.config.option import flag_of, format_value
from megalite.config.presets import PRESETS
from megalite.frontends.megatron.conversions import FSDP_FLAGS, LATENT_ROTARY_FLAGS, TOKEN_FLAGS
from megalite.frontends.megatron.rules import accepted_flags, refused_flags

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
    yield from _entry(
        ["--config FILE.yaml"], "Read settings from a YAML file, as --print-config writes them."
    )
    yield from _entry(["--deepspeed_config FILE.json"], "Read settings from a DeepSpeed JSON file.")
    yield from _entry(
        ["--override-flags"],
        "Let flags after this one replace flags before it, for scripts that pass on a user's flags.",
    )
    for name, text in TOKEN_FLAGS.items():
        yield from _entry([f"{name} INT"], f"{text} Converted to samples of --seq-length tokens.")
    for name, text in (LATENT_ROTARY_FLAGS | FSDP_FLAGS).items():
        yield from _entry([name], text)
    yield from _entry(["--print-config"], "Print all settings as YAML, and exit.")
    yield from _entry(["--help", "-h"], "Print the flags that most runs need, and exit.")
    yield from _entry(["--help-all"], "Print this help, and exit.")
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
