"""Judge another program: whether it trains the same run in any layout.

megalite judge megatron-core --layouts tp2,tp2+sp,dp2+zero1,tp2pp2dp2
megalite judge examples/judge/judged_program.py --layouts dp2,tp2

It runs the program on this machine's CPU, in each layout and on one rank, from the same weights and on the
same samples, in fp64. A layout whose losses, gradients, gradient norm or weights differ by more than rounding
trains another run: it is traced, and the first tensor that differs is named. Runs also save, and the next
layout resumes. The exit status is 1 if a layout trains another run.

A program is an adapter of megalite (deepspeed, megatron-core, torchtitan, transformers), or a script of your
own that defines build(layout, config, options): see docs/judge.md.

It takes the flags of megalite train for the model and the batch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import torch
from torch import Tensor

from megalite.config import Config, check_config
from megalite.config.data import DOCUMENT_OPTIONS
from megalite.config.fields import MODEL_FIELDS, fields_by_name, with_fields
from megalite.config.option import flag_of
from megalite.distributed.local_ranks import LocalRanks
from megalite.frontends.command_line import NEEDED_TO_TRAIN, parse_run
from megalite.frontends.tool_parser import ToolParser, positive_int
from megalite.observe.judge.judge import ProgramJudge, Verdict
from megalite.observe.judge.rank_record import Task, adapter_names, import_adapter
from megalite.observe.verify.layouts import Layout
from megalite.utils.errors import UserError
from megalite.utils.log import configure_logging, log

DEFAULTS = {
    "vocab_size": 128,
    "seq_length": 16,
    "global_batch_size": 8,
    "micro_batch_size": 1,
    "lr": 1e-3,
    "lr_decay_style": "constant",
}
"""Fields that no flag has to set."""
READ_FIELDS = {"micro_batch_size", "global_batch_size", "seed", "moe_token_dispatcher_type"}
"""Fields that a judgement reads beside those of the model, the optimizer and the data."""
UNREAD_FIELDS = {"params_dtype", "sft", "document_packing", *DOCUMENT_OPTIONS}
"""Fields of the model and the data that it does not read: a program gets tokens, and names its own dtypes."""


def main(arguments: Sequence[str]) -> None:
    """Judge the program, and exit with status 1 if a layout trains another run."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("program", help=f"{', '.join(adapter_names())}, or the path of a script")
    parser.add_argument(
        "--layouts", help="names as in megalite verify: tp2,pp2,dp2+zero1 (default: those of the program)"
    )
    parser.add_argument("--iterations", type=positive_int, default=3, help="iterations per run (default 3)")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="options of the program's own config"
    )
    parser.add_argument("--quick", action="store_true", help="do not save and resume")
    parser.add_argument(
        "--own-precision", action="store_true", help="keep the dtypes that the program names, instead of fp64"
    )
    own, rest = parser.parse_known_args(arguments)
    configure_logging(rank=0)
    module = import_adapter(own.program)
    names = own.layouts.split(",") if own.layouts else getattr(module, "LAYOUTS", None)
    if not names:
        raise UserError(f"{own.program} defines no LAYOUTS: pass some, such as --layouts tp2,pp2,dp2")
    layouts = [Layout.parse(name) for name in names]
    _log_version(module)
    config = judge_config(rest, own.iterations, module)
    options, is_wide = _options(own.set), not own.own_precision
    task = Task(own.program, Layout(), config, options, random_samples(config), is_wide=is_wide)
    with TemporaryDirectory(prefix="megalite-judge-") as folder, LocalRanks() as ranks:
        verdict = ProgramJudge(module, task, ranks, None if own.quick else Path(folder)).run(layouts)
    _log_verdict(verdict)
    sys.exit(1 if verdict.different or not {*map(str, layouts)} & {*verdict.same} else 0)


def judge_config(flags: Sequence[str], num_iterations: int, module: ModuleType) -> Config:
    """Return the model and the batch that flags of training set; a small Llama by default, without dropout.

    Args:
        module: the adapter or the script; its ``DEFAULTS`` are values of fields that no flag sets.
    """
    names = {flag.partition("=")[0] for flag in flags}
    model = [] if names & {"--preset", "--config", "--num-layers"} else ["--preset", "llama-tiny"]
    config, notices, set_fields = parse_run([*model, *flags], (*NEEDED_TO_TRAIN, *DEFAULTS))
    for notice in notices:
        log.info("%s", notice)
    has_own_run = hasattr(module, "from_megalite")
    groups = {"model", "optimizer", *["data"] * has_own_run}  # megalite's run reads the data
    unread = {each for each in set_fields - READ_FIELDS if fields_by_name()[each].group not in groups}
    unread |= set_fields & UNREAD_FIELDS
    if unread:
        log.info("without effect in a judgement: %s", ", ".join(sorted(map(flag_of, unread))))
    values = DEFAULTS | getattr(module, "DEFAULTS", {})
    changes = {name: value for name, value in values.items() if name not in set_fields}
    changes |= {name: fields_by_name()[name].default for name in unread}
    if dropouts := [
        each for each in MODEL_FIELDS if each.endswith("dropout") and getattr(config.model, each)
    ]:
        log.info("dropout is switched off: %s", ", ".join(dropouts))
    # One that is None by default follows another, which is switched off.
    changes |= {each: None if MODEL_FIELDS[each].default is None else 0.0 for each in dropouts}
    changes["train_iters"] = num_iterations
    config = with_fields(config, **changes)
    config = with_fields(config, mock_data=not config.data.corpus_options())
    check_config(config, 1)
    return config


def random_samples(config: Config) -> Tensor:
    """Return tokens of all iterations, ``[iterations, global batch, sequence + 1]``, by the seed."""
    training, model = config.training, config.model
    assert training.train_iters and training.global_batch_size and model.vocab_size
    shape = (training.train_iters, training.global_batch_size, model.seq_length + 1)
    generator = torch.Generator().manual_seed(training.seed)
    return torch.randint(model.vocab_size, shape, generator=generator)


def _log_version(module: ModuleType) -> None:
    """Log the version of an adapter's package, and whether the adapter was tried with it."""
    if not hasattr(module, "VERSIONS"):
        return
    try:
        version = metadata.version(module.PACKAGE).partition("+")[0]
    except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        version = "without a version"
    tried = (
        ""
        if version in module.VERSIONS
        else f"; the adapter was tried with {', '.join(module.VERSIONS)} only"
    )
    log.info("judging %s %s%s", module.PACKAGE, version, tried)


def _options(pairs: Sequence[str]) -> dict[str, str]:
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise UserError(f"--set {wrong[0]} has no value: write --set {wrong[0]}=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


def _log_verdict(verdict: Verdict) -> None:
    if verdict.different:
        log.info("NOT the same run: %s", ", ".join(verdict.different))
    elif verdict.same:
        log.info("every layout that can run trains the same run")
    if verdict.refused:
        log.info("not judged: %s", ", ".join(verdict.refused))
