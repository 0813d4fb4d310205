"""Compute the loss and perplexity of text under a trained model, or its scores in benchmark tasks.

megalite evaluate --load runs/quickstart/checkpoints --split valid
megalite evaluate --load runs/llama/checkpoints --tasks hellaswag,arc_easy

The checkpoint's config defines the model and tokenizer. A checkpoint from any layout can be loaded. Under
torchrun, layers are sharded over tensor-parallel ranks, samples are cut over context-parallel ranks, and the
text is distributed over the replicas. --tasks needs lm-evaluation-harness (pip install "megalite[eval]"),
which loads the data of its tasks.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
from collections.abc import Iterator, Sequence

from megalite.data.tokenizers.tokenizer import check_tokenizer
from megalite.distributed.topology import Topology
from megalite.frontends.tool_parser import ToolParser, local_path, positive_int
from megalite.generate.evaluate_text import (
    EvaluationResult,
    WindowOptions,
    evaluate_corpus,
    evaluate_split,
    evaluate_texts,
)
from megalite.generate.prompts import from_first_rank, read_text
from megalite.generate.trained_model import ModelFlags, TrainedModel, open_trained, start_ranks, tokenizer_of
from megalite.utils.errors import UserError


def main(arguments: Sequence[str]) -> None:
    """Print a line for each text, corpus or dataset."""
    flags = _flags(arguments)
    model_flags = ModelFlags.of(flags)
    with start_ranks(model_flags, vars(flags)) as topology:
        trained = open_trained(model_flags, topology)
        if flags.tasks:
            _print_tasks(flags, model_flags, trained, topology)
            return
        for result in _results(flags, model_flags, trained, topology):
            if topology.rank == 0:
                print(_json(result, trained) if flags.json else _line(result), flush=True)


def _flags(arguments: Sequence[str]) -> argparse.Namespace:
    parser = ToolParser(description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--text", nargs="+", help="files of UTF-8 text, each a document; - for standard input"
    )
    source.add_argument("--data-path", help="prefix of a .bin/.idx pair, all of which is evaluated")
    source.add_argument(
        "--split", choices=("valid", "test"), help="a split of the run's own data, evaluated as in training"
    )
    source.add_argument(
        "--tasks", metavar="NAMES", help="tasks of lm-evaluation-harness, such as arc_easy,mmlu*"
    )
    tasks = parser.add_argument_group("tasks")
    tasks.add_argument(
        "--task-folder", type=local_path, metavar="FOLDER", help="folder of more tasks, as YAML files"
    )
    tasks.add_argument(
        "--num-fewshot", type=int, metavar="N", help="examples before a question (default the task's number)"
    )
    tasks.add_argument("--limit", type=positive_int, metavar="N", help="questions per task (default all)")
    windows = parser.add_argument_group("windows")
    windows.add_argument("--seq-length", type=positive_int, help="tokens per window (default the run's)")
    windows.add_argument(
        "--stride",
        type=positive_int,
        help="tokens from the start of one window to the next; below --seq-length, tokens have more context "
        "(default --seq-length)",
    )
    windows.add_argument(
        "--micro-batch-size",
        type=positive_int,
        help="windows, samples or questions per batch (default the run's)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    ModelFlags.add_to(parser)
    flags = parser.parse_args(arguments)
    others = ("task_folder", "num_fewshot", "limit")
    if not flags.tasks and (passed := [name for name in others if getattr(flags, name) is not None]):
        raise UserError(f"--{passed[0].replace('_', '-')} is for --tasks: remove it, or pass --tasks")
    if flags.tasks and (flags.seq_length or flags.stride):
        raise UserError("--tasks uses the model's own sequence length: remove --seq-length and --stride")
    if flags.split and (flags.seq_length or flags.stride):
        raise UserError("--split uses the run's own samples: remove --seq-length and --stride")
    return flags


def _results(
    flags: argparse.Namespace, model_flags: ModelFlags, trained: TrainedModel, topology: Topology
) -> Iterator[EvaluationResult]:
    if flags.split:
        yield from evaluate_split(
            trained, flags.split, model_flags.parallel, flags.micro_batch_size, topology
        )
        return
    config = trained.config
    seq_length = flags.seq_length or config.model.seq_length
    batch_size = flags.micro_batch_size or config.training.micro_batch_size
    options = WindowOptions(seq_length, flags.stride or seq_length, batch_size)
    if flags.text:
        tokenizer = tokenizer_of(trained, model_flags, topology)
        texts = from_first_rank(lambda: {path: read_text(path, "--text") for path in flags.text}, topology)
        yield from evaluate_texts(trained, texts, tokenizer, options, topology)
        return
    if (model_flags.tokenizer or config.data).resolved_tokenizer_type is not None:
        tokenizer = tokenizer_of(trained, model_flags, topology)
        with topology.agreed():
            check_tokenizer([flags.data_path], tokenizer)
    yield evaluate_corpus(trained, flags.data_path, options, topology)


def _print_tasks(
    flags: argparse.Namespace, model_flags: ModelFlags, trained: TrainedModel, topology: Topology
) -> None:
    """Print the table of the tasks' scores, or the harness's results as JSON.

    Raises:
        UserError: lm_eval is not installed.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError('--tasks needs lm-evaluation-harness: pip install "megalite[eval]"')
    from lm_eval.utils import make_table

    from megalite.generate.benchmark_tasks import evaluate_tasks

    results = evaluate_tasks(
        trained,
        tokenizer_of(trained, model_flags, topology),
        topology,
        flags.tasks.split(","),
        folder=flags.task_folder,
        num_fewshot=flags.num_fewshot,
        limit=flags.limit,
        batch_size=flags.micro_batch_size or trained.config.training.micro_batch_size,
    )
    if topology.rank == 0 and results is not None:
        scores = {name: results[name] for name in ("results", "n-shot", "n-samples")}
        record = {"iteration": trained.iteration, **scores}
        print(json.dumps(record, default=str) if flags.json else make_table(results), flush=True)


def _line(result: EvaluationResult) -> str:
    tokens = "" if result.num_tokens is None else f" | tokens: {result.num_tokens:,}"
    bits = "" if result.bits_per_byte is None else f" | bits per byte: {result.bits_per_byte:.4f}"
    others = "".join(f" | {name.replace('_', ' ')}: {loss:.6E}" for name, loss in result.other_losses.items())
    perplexity = f"perplexity: {result.perplexity:.6E}"
    return f"{result.name} | lm loss: {result.loss:.6E} | {perplexity}{others}{tokens}{bits}"


def _json(result: EvaluationResult, trained: TrainedModel) -> str:
    fields = dataclasses.asdict(result)
    losses = fields.pop("other_losses")
    return json.dumps(
        {"iteration": trained.iteration, "perplexity": result.perplexity, **fields, **losses},
        ensure_ascii=False,
    )
