"""A plan's command line: its own flags, and those of training."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_type_hints

from megalite.cli import parse
from megalite.cli.fields import fields_by_flag
from megalite.cli.tool import ToolParser, positive_int, positive_number
from megalite.cli.words import split_words
from megalite.config import Config, DataConfig
from megalite.errors import UserError
from megalite.plan.cluster import Cluster
from megalite.plan.estimate import Costs
from megalite.plan.gpu import GPUS, Gpu, find_gpu
from megalite.plan.job import Job
from megalite.plan.layout import LAYOUT_FIELDS, changed_fields, layout_flags, with_even_stages, with_layout
from megalite.plan.program import OWN, PROGRAMS, program_named

DESCRIPTION = """Plans a run before there is a cluster for it: memory of a rank, time of an iteration, price.

python tools/plan.py --preset gpt3-175b --gpu a100-80 --world-size 1024 --tp 8 --pp 8 --global-batch-size 1536
python tools/plan.py --preset llama3-70b --gpu h100 --world-size 256 --global-batch-size 1024 --bf16 --search

Takes the flags of the run, all that pretrain_gpt.py knows (its --help lists them), and these:"""

DEFAULT_TOP = 10
"""Rows of a search's table."""
_UNNEEDED = ("train_iters", "mock_data", "tokenizer_type")
"""A plan can do without a length and data, and checks by itself that it knows the vocabulary's size."""


@dataclass(frozen=True)
class Request:
    """What was asked.

    Attributes:
        config: as the command line has it, but for what a plan needs not and what `assumed` says.
        cluster: what it runs on.
        words: the flags that belong to training, as they were given.
        given: fields that a flag or a file gives: a search leaves them alone.
        assumed: what the plan takes for granted, in words.
        top: rows of a search's table; None where one layout is planned.
        program: whose run it is, one of PROGRAMS or this program's own.
    """

    config: Config
    cluster: Cluster
    costs: Costs
    words: tuple[str, ...]
    given: frozenset[str]
    assumed: tuple[str, ...]
    notices: tuple[str, ...]
    top: int | None
    is_json: bool
    cp: int
    padded_vocab_size: int | None
    program: str

    def job(self, config: Config | None = None, cluster: Cluster | None = None) -> Job:
        """The request, or what a search makes of it."""
        config = config or self.config
        return Job(config, cluster or self.cluster, program_named(self.program, config.model), self.cp)

    def fixed(self, values: Mapping[str, Any]) -> Request:
        """The same with these fields of the layout given too, but for those that are already."""
        new = {name: value for name, value in values.items() if name not in self.given}
        return replace(self, config=with_layout(self.config, **new), given=self.given | new.keys())


def read_request(arguments: Sequence[str]) -> Request:
    """Reads a command line.

    Raises:
        UserError: with all mistakes.
    """
    own, rest = _parser().parse_known_args(arguments)
    config, notices = parse(rest, _UNNEEDED)
    if config.training.fp8_format is not None:
        raise UserError(
            f"--fp8-format {config.training.fp8_format} cannot be planned: what its products gain, and its "
            "rounding costs, was not measured; leave it out for the plan of bf16"
        )
    notices += _unused_options(own, config)
    given = _fields_given(rest)
    config, assumed = _completed(config, own, rest, given)
    return Request(
        config,
        _cluster(own, config),
        Costs(own.train_tokens, own.watts, own.price_per_gpu_hour),
        tuple(rest),
        frozenset(given) | changed_fields(config),
        assumed,
        tuple(notices),
        (own.top or DEFAULT_TOP) if own.search else None,
        own.json,
        own.context_parallel_size,
        own.padded_vocab_size,
        own.program,
    )


def planning_flags() -> frozenset[str]:
    """Return the flags that `read_request` knows besides those of training."""
    return _parser().flags


def _parser() -> ToolParser:
    parser = ToolParser(description=DESCRIPTION)
    parser.add_argument("--gpu", help=f"kind of GPU: {', '.join(GPUS)}")
    parser.add_argument(
        "--gpu-set", nargs="+", default=[], metavar="NAME=VALUE", help="figures of it that are others"
    )
    parser.add_argument(
        "--calibrate", action="store_true", help="measure this machine's rates, plan with them"
    )
    parser.add_argument("--world-size", type=positive_int, help="GPUs; default tp x pp x dp")
    parser.add_argument("--gpus-per-node", type=positive_int, help="by default what such servers have")
    parser.add_argument(
        "--node-gbps", type=positive_number, help="gigabytes/s of a GPU to its node's others, one way"
    )
    parser.add_argument(
        "--network-gbps", type=positive_number, help="gigabytes/s of a GPU to other nodes, one way"
    )
    parser.add_argument("--padded-vocab-size", type=positive_int, help="rows of the vocabulary's table")
    parser.add_argument(
        "--context-parallel-size", type=positive_int, default=1, help="of another program's run; none here"
    )
    parser.add_argument(
        "--program", choices=(OWN, *PROGRAMS), default=OWN, help="plan another program's run of these flags"
    )
    parser.add_argument("--train-tokens", type=positive_number, help="of the whole run, as in 300e9")
    parser.add_argument(
        "--watts", type=positive_number, help="of a GPU and its part of the node: tells the energy"
    )
    parser.add_argument(
        "--price-per-gpu-hour", type=positive_number, help="tells the price, in the same currency"
    )
    parser.add_argument("--search", action="store_true", help="try every layout; what is given stays")
    parser.add_argument(
        "--top", type=positive_int, help=f"rows of the search's table (default {DEFAULT_TOP})"
    )
    parser.add_argument("--json", action="store_true", help="print one object")
    return parser


def _unused_options(own: argparse.Namespace, config: Config) -> list[str]:
    """Return one line for each option that changes nothing beside the others that are given."""
    training, lines = config.training, list[str]()
    lengths = {"--train-iters": training.train_iters, "--train-samples": training.train_samples}
    given = [f"{flag} {value}" for flag, value in lengths.items() if value is not None]
    if own.train_tokens is not None and given:
        lines.append(f"{given[0]} has no effect on the plan: --train-tokens is the length of the run")
    elif own.train_tokens is None and not given:
        costs = {"--watts": own.watts, "--price-per-gpu-hour": own.price_per_gpu_hour}
        lines += [
            f"{flag} {value:g} has no effect: the run has no length, pass --train-tokens or --train-iters"
            for flag, value in costs.items()
            if value is not None
        ]
    if own.top is not None and not own.search:
        lines.append(f"--top {own.top} has no effect without --search")
    return lines


def _fields_given(words: Sequence[str]) -> set[str]:
    table, (flags, _) = fields_by_flag(), split_words(words)
    return {table[flag.flag].name for flag in flags if flag.flag in table}


def _completed(
    config: Config, own: argparse.Namespace, words: Sequence[str], given: set[str]
) -> tuple[Config, tuple[str, ...]]:
    """With what a plan does not need left at something sound, and what it needs and nobody said."""
    assumed: list[str] = []
    model = config.model
    vocabulary = own.padded_vocab_size or (model.pad_vocab_size_to if model.vocab_size is None else None)
    if vocabulary is not None:
        model = replace(model, vocab_size=min(model.vocab_size or vocabulary, vocabulary))
        model = replace(model, pad_vocab_size_to=vocabulary)
    elif model.vocab_size is None:
        raise UserError("the vocabulary's size is not known: give --padded-vocab-size or --vocab-size")
    if own.program == OWN and "attention_dropout" not in given and not _is_described(words):
        why = _why_no_dropout(config)
        if why is not None:
            model = replace(model, attention_dropout=0.0)
            assumed.append(f"--attention-dropout 0, {why}: give --attention-dropout 0.1 to plan that")
    before = replace(config, model=model, data=DataConfig(mock_data=True))
    config = with_even_stages(before)
    if config is not before and config.parallel.pipeline_layers is not None and not own.search:
        counts = " ".join(map(str, config.parallel.pipeline_layers))
        assumed.append(f"--pipeline-layers {counts}, since the stages do not divide --num-layers")
    return before if own.search else config, tuple(assumed)


def _is_described(words: Sequence[str]) -> bool:
    """Whether a preset or a file says what the flags do not."""
    return any(flag.flag in ("--preset", "--config") for flag in split_words(words)[0])


def _why_no_dropout(config: Config) -> str | None:
    """Why attention is planned without the dropout that training has by default; None where it is not."""
    if config.model.position_embedding_type == "rope":
        return "as models with rotary positions are trained; training's default of 0.1 takes a slower product"
    if not _recomputes_scores(config):
        return "for the fused attention product; training's default of 0.1 takes a slower one"
    return None


def _recomputes_scores(config: Config) -> bool:
    """Whether backward makes the attention product again: who saves memory so is not after the fused one."""
    recompute = config.recompute
    return recompute.recompute_granularity == "full" or "core_attn" in recompute.modules


def _cluster(own: argparse.Namespace, config: Config) -> Cluster:
    if own.calibrate:
        if own.gpu is not None:
            raise UserError(
                f"--calibrate plans with this machine's own rates, not --gpu {own.gpu}'s: give one of both"
            )
        from megalite.plan.calibrate import measured_gpu  # torch, which nothing else here needs

        gpu = measured_gpu(config.model.params_dtype)
    elif own.gpu is None:
        raise UserError(
            f"--gpu is missing: give one of {', '.join(GPUS)}, or --calibrate for this machine's own"
        )
    else:
        gpu = find_gpu(own.gpu)
    gpu = _changed(gpu, own.gpu_set)
    parallel, cp = config.parallel, own.context_parallel_size
    if own.world_size is not None and own.world_size % cp:
        raise UserError(f"--world-size {own.world_size} is not divisible by --context-parallel-size {cp}")
    smallest = parallel.tp * parallel.pp * cp
    return Cluster(
        gpu,
        own.world_size or smallest * (parallel.data_parallel_size or 1),
        own.gpus_per_node or gpu.gpus_per_node,
        own.node_gbps or gpu.node_gbps,
        own.network_gbps or gpu.network_gbps,
    )


def _changed(gpu: Gpu, words: Sequence[str]) -> Gpu:
    """With the figures of --gpu-set."""
    kinds = {name: kind for name, kind in get_type_hints(Gpu).items() if kind in (int, float)}
    for word in words:
        name, _, text = word.partition("=")
        if name not in kinds:
            raise UserError(f"--gpu-set {word}: a GPU has no {name!r}, choose of {', '.join(kinds)}")
        try:
            value = positive_number(text)
        except argparse.ArgumentTypeError as error:
            raise UserError(f"--gpu-set {word}: {error}") from None
        gpu = replace(gpu, **{name: kinds[name](value)})
    return gpu


def training_words(request: Request, config: Config) -> list[str]:
    """The words that were given, with this layout in the place of theirs, and with what the plan assumes."""
    table, (flags, _) = fields_by_flag(), split_words(request.words)
    kept: list[str] = []
    for flag in flags:
        if flag.flag not in table or table[flag.flag].name not in LAYOUT_FIELDS:
            kept += [flag.name, *flag.words]
    kept += layout_flags(config)
    if request.padded_vocab_size is not None:
        kept += ["--pad-vocab-size-to", str(request.padded_vocab_size)]
    if any(text.startswith("--attention-dropout") for text in request.assumed):
        kept += ["--attention-dropout", "0"]
    return kept


def start_command(request: Request, config: Config) -> str:
    """What starts the run on the request's cluster."""
    cluster = request.cluster
    nodes = f"--nnodes {cluster.num_nodes} " if cluster.num_nodes > 1 else ""
    ranks = min(cluster.world_size, cluster.gpus_per_node)
    words = shlex.join(training_words(request, config))
    return f"torchrun {nodes}--nproc-per-node {ranks} pretrain_gpt.py {words}"
