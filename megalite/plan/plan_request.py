"""The planner's command line: its own flags, and training's flags."""

from __future__ import annotations

import argparse
import shlex
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from unittest.mock import patch

import megalite
from megalite.config import Config, DataConfig
from megalite.config.arguments import split_tokens
from megalite.config.config import LAYOUT_FIELDS, LAYOUT_OPTIONS, num_stages
from megalite.config.fields import fields_by_flag, with_fields
from megalite.config.option import flag_with_value
from megalite.config.parallel import LayoutSource
from megalite.config.presets import PRESETS
from megalite.config.training import FP8_BLOCKS
from megalite.config.validate import conflicts, problems_of
from megalite.frontends.command_line import NEEDED_TO_TRAIN, TRAINED_BY, parse
from megalite.frontends.tool_parser import ToolParser, positive_int, positive_number
from megalite.plan.communication import Cluster
from megalite.plan.estimate import Costs, large
from megalite.plan.goodput import Reliability
from megalite.plan.layout_fields import changed_fields, layout_flags, with_even_stages
from megalite.plan.plan_options import (
    Scaling,
    add_cluster,
    add_failures,
    add_scaling,
    cluster_of,
    reliability_of,
    scaling_of,
    unused_options,
)
from megalite.plan.planned_run import PlannedRun, with_any_length
from megalite.utils.commands import torchrun_arguments
from megalite.utils.errors import ConfigError, UserError, first_line
from megalite.utils.hardware.gpus import GPUS, Gpu

DESCRIPTION = """Plan a run without a cluster: memory per rank, time per iteration, price.

megalite plan --preset gpt3-175b --gpu a100-80 --world-size 1024 --tp 8 --pp 8 --global-batch-size 1536
megalite plan --preset llama3-70b --gpu h100 --world-size 256 --global-batch-size 1024 --bf16 --search
megalite plan --for megatron --gpu h100 --world-size 64 FLAGS: what would a flag gain Megatron-LM?

Accepts all flags of training (megalite train --help lists them), and these:"""

USUAL_LENGTH = 8192
"""Tokens of a sample above which pretraining usually begins with shorter samples."""
_RATES = {8: "fp8_tflops", 4: "fp4_tflops"}
"""Figure of a GPU that GEMMs need, by their number of bits."""
DEFAULT_TOP = 10
"""Rows of a search's table."""


@dataclass(frozen=True)
class Request:
    """Request of a command line.

    Attributes:
        config: the config, with the plan's assumptions, and without the length and data, which it ignores.
        training_tokens: training's flags, as tokens.
        assumed_tokens: training's flags that the plan assumes and that the command to start needs.
        fixed_fields: fields that a flag or a file sets: a search does not change them.
        assumed: the assumptions, one line each.
        top: number of layouts that a search prints; None to plan one layout.
        program: file of a program with its own model; None for megalite's.
        provider: builds the stages of that model.
        reliability: how often nodes fail; None to plan a run without failures.
        layout: --layout; with auto, the plan searches the layout that training would choose.
        scaling: numbers of nodes to plan; None to plan one cluster.
    """

    config: Config
    cluster: Cluster
    costs: Costs
    fixed_fields: frozenset[str]
    training_tokens: tuple[str, ...] = ()
    assumed_tokens: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    top: int | None = None
    is_json: bool = False
    program: str | None = None
    provider: Callable[..., Any] | None = None
    reliability: Reliability | None = None
    layout: LayoutSource | None = None
    scaling: Scaling | None = None

    def planned_run(self, config: Config | None = None, cluster: Cluster | None = None) -> PlannedRun:
        """Return the requested run, or the run with another config and cluster."""
        return PlannedRun(config or self.config, cluster or self.cluster, provider=self.provider)

    @property
    def launched(self) -> str:
        """Return torchrun's arguments that start the program."""
        if self.program is not None:
            return shlex.quote(self.program)
        return torchrun_arguments(TRAINED_BY[self.config.model.architecture])

    @property
    def program_arguments(self) -> tuple[str, ...]:
        """Return Python's arguments that start the program where megalite is installed."""
        if self.program is not None:
            return (self.program,)
        return "-m", "megalite", TRAINED_BY[self.config.model.architecture]

    def with_fixed(self, values: Mapping[str, Any]) -> Request:
        """Return the request with these fields of the layout fixed too."""
        new = {name: value for name, value in values.items() if name not in self.fixed_fields}
        return replace(
            self, config=with_fields(self.config, **new), fixed_fields=self.fixed_fields | new.keys()
        )


def read_request(arguments: Sequence[str]) -> Request:
    """Parse the command line of a plan.

    Raises:
        UserError: the command line, or the config that it describes, is invalid.
    """
    own, rest = _parser().parse_known_args(arguments)
    table, (flags, _) = fields_by_flag(), split_tokens(rest)
    # Without --save, other flags of checkpoints, which the plan of failures reads, have no effect.
    saves = not own.node_mtbf or any(flag.flag == "--save" for flag in flags)
    config, notices = parse(rest if saves else [*rest, "--save", "runs"], NEEDED_TO_TRAIN)
    layout = config.parallel.layout
    if problems := [each.text for each in conflicts(config, None) if "layout" in each.fields]:
        raise ConfigError(problems)
    parsed = config
    config = with_fields(config, layout=None)
    num_layouts = own.top or (DEFAULT_TOP if own.search else 1)
    own.search = own.search or layout == "auto"
    if own.search:  # which tries other --ep and --cp
        of_axes = ("--moe-imbalance ", "--cp-comm-type ")
        notices = [text for text in notices if not text.startswith(of_axes)]
    notices += unused_options(own, config)
    set_fields = {table[flag.flag].name for flag in flags if flag.flag in table}
    presets = [" ".join(flag.values) for flag in flags if flag.flag == "--preset"]
    if "seq_length" not in set_fields:
        notices += _notices_of_length(config, presets)
    provider = None if own.program is None else model_of(Path(own.program))
    has_model = bool(presets) or any(flag.flag == "--config" for flag in flags)
    may_assume = not has_model and _is_gpt(provider)
    config, assumed, assumed_tokens = _complete(config, own, set_fields, may_assume)
    # Check all options as training does, also those that a plan ignores, such as options of data.
    assigns_documents = parsed.parallel.dynamic_context_parallel
    whole = with_fields(replace(config, data=parsed.data), dynamic_context_parallel=assigns_documents)
    searched = LAYOUT_OPTIONS - set_fields if own.search else ()
    if problems := problems_of(with_any_length(whole), None, {*NEEDED_TO_TRAIN, *searched}):
        raise ConfigError(problems)
    cluster = cluster_of(own, config)
    if own.search and "micro_batch_size" not in set_fields:
        notices += _notices_of_microbatches(config)
    if own.calibrate:
        from megalite.plan.calibrate import with_local_defaults  # imports torch

        config = with_local_defaults(config)
    return Request(
        config=config,
        cluster=cluster,
        costs=Costs(own.train_tokens, own.watts, own.price_per_gpu_hour),
        training_tokens=tuple(rest),
        assumed_tokens=assumed_tokens,
        fixed_fields=frozenset(set_fields) | changed_fields(config),
        assumed=assumed,
        notices=(*notices, *_notices_of_fp8(config, cluster.gpu, own.gpu)),
        top=num_layouts if own.search else None,
        is_json=own.json,
        program=own.program,
        provider=provider,
        reliability=reliability_of(own),
        layout=layout,
        scaling=scaling_of(own, config, cluster),
    )


def _notices_of_length(config: Config, presets: Sequence[str]) -> list[str]:
    """Return a line if samples are as long as a preset's context, and longer than in usual pretraining."""
    length, samples = config.model.seq_length, config.training.global_batch_size
    if length <= USUAL_LENGTH or length not in (PRESETS[name].seq_length for name in presets):
        return []
    batch = "" if samples is None else f", so that an iteration has {large(samples * length)} tokens"
    return [
        f"--seq-length {length} is the longest context of --preset {presets[-1]}{batch}: pass --seq-length "
        f"{USUAL_LENGTH // 2} or {USUAL_LENGTH} for usual pretraining"
    ]


def _notices_of_microbatches(config: Config) -> list[str]:
    """Return a line if a search does not change the micro-batch size, which no flag sets."""
    flag = f"--micro-batch-size {config.training.micro_batch_size}"
    kept = f"{flag} is kept, because another one trains another run"
    return [kept] if config.depends_on_micro_batch else []


def _notices_of_fp8(config: Config, gpu: Gpu, name: str | None) -> list[str]:
    """Return what a plan assumes about GEMMs in 8 or 4 bits.

    Args:
        name: of the GPU; None if it is this machine's.

    Raises:
        UserError: the GPU has none, or the run emulates them.
    """
    training = config.training
    if training.fp8_format is None:
        return []
    if training.emulate:
        raise UserError(
            f"{training.fp8_flag} with --emulate cannot be planned: remove --emulate to plan GEMMs in "
            f"{training.gemm_bits} bits"
        )
    if not has_gemms(gpu, config):
        usable = ", ".join(name for name, other in GPUS.items() if has_gemms(other, config))
        owner = "this machine" if name is None else f"--gpu {name}"
        widths = ["16", *(str(bits) for bits, rate in _RATES.items() if getattr(gpu, rate) > 0)]
        setting = f", or their rate as in --gpu-set {_RATES[training.gemm_bits]}=2000"
        if gpu.has_mxfp4_alone:
            widths[-1], setting = "4 (MXFP4)", ""
        raise UserError(
            f"{training.fp8_flag} needs a GPU with such GEMMs, and {owner} has GEMMs in {', '.join(widths)} "
            f"bits: pass --gpu with one of {usable}{setting}"
        )
    if training.fp8_recipe not in FP8_BLOCKS:
        return []
    return [
        f"--fp8-recipe {training.fp8_recipe} has no GPU kernels yet: the plan assumes kernels as fast as "
        "those of tensorwise"
    ]


def has_gemms(gpu: Gpu, config: Config) -> bool:
    """Return whether a GPU has GEMMs in the run's number of bits."""
    training = config.training
    if training.fp8_format is None:
        return True
    lacks_format = training.fp8_recipe == "nvfp4" and gpu.has_mxfp4_alone
    return getattr(gpu, _RATES[training.gemm_bits]) > 0 and not lacks_format


def planning_flags() -> frozenset[str]:
    """Return the plan's own flags."""
    return _parser().flags


def _parser() -> ToolParser:
    parser = ToolParser(description=DESCRIPTION)
    add = parser.add_argument
    add_cluster(parser)
    add(
        "--padded-vocab-size",
        type=positive_int,
        help="vocabulary size including padding, if there is no tokenizer",
    )
    add(
        "--program",
        type=_python_file,
        metavar="FILE.py",
        help="plan your own program: the model that it passes to megalite.pretrain",
    )
    add("--train-tokens", type=positive_number, help="tokens of the whole run, such as 300e9, to show days")
    add("--watts", type=positive_number, help="power of a GPU with its part of the node, to show the energy")
    add("--price-per-gpu-hour", type=positive_number, help="price of a GPU per hour, to show the price")
    add_failures(parser)
    add_scaling(parser)
    add("--search", action="store_true", help="try every layout; options that flags set stay fixed")
    add("--top", type=positive_int, help=f"layouts that --search prints (default: {DEFAULT_TOP})")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def _python_file(text: str) -> str:
    if not text.endswith(".py"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a Python file")
    return text


def _is_gpt(provider: Callable[..., Any] | None) -> bool:
    """Return whether a program trains GPT or a subclass of it, which have attention."""
    if provider is None:
        return True
    from megalite.model.transformer_stage import GPT  # imports torch

    return isinstance(provider, type) and issubclass(provider, GPT)


class _PretrainCalled(BaseException):
    """Raised in place of training; not an `Exception`, so that a program does not handle it.

    Attributes:
        model: the program's model provider.
    """

    def __init__(self, model: Callable[..., Any] | None) -> None:
        super().__init__()
        self.model = model


def model_of(path: Path) -> Callable[..., Any]:
    """Run a program of the user's own up to its call of `megalite.pretrain`; return the model that it passes.

    Raises:
        UserError: there is no such program, it has an error, or it passes no model.
    """
    flag = f"--program {path}"
    try:
        code = compile(path.read_bytes(), str(path), "exec")
    except OSError as error:
        raise UserError(f"{flag} cannot be read ({error.strerror}): pass your program's file") from None
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{flag} is not a Python program: {first_line(error)}") from None
    try:
        with _as_main(path):
            exec(code, ModuleType("__main__").__dict__ | {"__file__": str(path)})
    except _PretrainCalled as called:
        if called.model is None:
            raise UserError(
                f"{flag} passes no model to megalite.pretrain: remove --program to plan the flags' model"
            ) from None
        from megalite.model.stage import check_model_provider  # imports torch

        check_model_provider(called.model)
        return called.model
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)
        ]
        raise UserError(
            f"{flag}, line {lines[-1] if lines else 1}, raises {type(error).__name__}: {first_line(error)}"
        ) from None
    raise UserError(f"{flag} does not call megalite.pretrain with a model: pass the program that trains it")


@contextmanager
def _as_main(path: Path) -> Iterator[None]:
    """Run a program in this block with its own arguments and folder; training ends it."""

    def pretrain(model_provider: Callable[..., Any] | None = None, *_: Any, **__: Any) -> NoReturn:
        raise _PretrainCalled(model_provider)

    with (
        patch.object(megalite, "pretrain", pretrain),
        patch.object(sys, "argv", [str(path)]),
        patch.object(sys, "path", [str(path.parent.resolve()), *sys.path]),
    ):
        yield


def _complete(
    config: Config, own: argparse.Namespace, set_fields: Collection[str], may_assume: bool
) -> tuple[Config, tuple[str, ...], tuple[str, ...]]:
    """Complete a config with assumptions for fields that a plan needs and flags do not set.

    Args:
        set_fields: fields that flags set.
        may_assume: whether attention dropout may be assumed to be 0: neither a preset nor a file sets the
            fields that flags do not set, and the model has attention.

    Returns:
        The config, the assumptions, and the flags that a command to start the run needs for them.

    Raises:
        UserError: the run cannot be planned.
    """
    assumed, tokens = list[str](), list[str]()
    model = config.model
    vocabulary = own.padded_vocab_size or (model.pad_vocab_size_to if model.vocab_size is None else None)
    if vocabulary is not None:
        model = replace(model, vocab_size=min(model.vocab_size or vocabulary, vocabulary))
        model = replace(model, pad_vocab_size_to=vocabulary)
    elif model.vocab_size is None:
        raise UserError("the vocabulary size is unknown: pass --padded-vocab-size or --vocab-size")
    if own.padded_vocab_size is not None:
        tokens += ["--pad-vocab-size-to", str(own.padded_vocab_size)]
    if "attention_dropout" not in set_fields and may_assume:
        why = _why_no_dropout(config)
        if why is not None:
            model = replace(model, attention_dropout=0.0)
            tokens += ["--attention-dropout", "0"]
            assumed.append(
                f"--attention-dropout 0, {why}: training's default, 0.1, needs slower attention; pass "
                "--attention-dropout 0.1 to plan it"
            )
    if config.parallel.dynamic_context_parallel:
        assumed.append(
            "one document per sample, though --dynamic-context-parallel assigns several: their attention and "
            "messages are less"
        )
    before = replace(config, model=model, data=DataConfig(mock_data=True))
    before = with_fields(before, dynamic_context_parallel=False)
    config = before if own.search else with_even_stages(before)
    if config is not before:
        layers = flag_with_value("pipeline_layers", config.parallel.pipeline_layers)
        assumed.append(
            f"{layers}, since {num_stages(config)} stages do not divide --num-layers {model.num_layers}"
        )
    return config, tuple(assumed), tuple(tokens)


def _why_no_dropout(config: Config) -> str | None:
    """Return why attention is planned without training's default dropout; None if it has that dropout."""
    if config.model.position_embedding_type == "rope":
        return "as is usual with rotary positions"
    recompute = config.recompute
    if recompute.recompute_granularity == "full" or "core_attn" in recompute.modules:
        return None  # recomputed attention saves memory with dropout too
    return "for PyTorch's attention kernels"


def training_tokens(request: Request, config: Config) -> list[str]:
    """Return the requested training flags, with `config`'s layout and the plan's assumptions."""
    table, (flags, _) = fields_by_flag(), split_tokens(request.training_tokens)
    kept: list[str] = []
    for flag in flags:
        if flag.flag not in table or table[flag.flag].name not in (*LAYOUT_FIELDS, "layout"):
            kept += flag.tokens
    is_in_file = request.layout == "auto" and not any(flag.flag == "--layout" for flag in flags)
    source = ["--layout", "manual"] if is_in_file else []
    return [*kept, *layout_flags(config), *source, *request.assumed_tokens]


def job_tokens(request: Request, config: Config) -> list[str]:
    """Return the training flags of a job: with --layout auto, each start chooses its layout again."""
    if request.layout == "auto":
        return [*request.training_tokens, *request.assumed_tokens]
    return training_tokens(request, config)


def start_command(request: Request, config: Config) -> str:
    """Return the command that starts the run on the request's cluster, on each of its nodes."""
    cluster = request.cluster
    launch = f"torchrun --nproc-per-node {cluster.ranks_per_node}"
    if cluster.num_nodes > 1:  # without a rendezvous, each node would wait for the others at its own address
        launch += f" --nnodes {cluster.num_nodes} --rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29500"
    return f"{launch} {request.launched} {shlex.join(training_tokens(request, config))}"
