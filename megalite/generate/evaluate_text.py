"""Evaluate a trained model on texts, on a corpus, or on the validation or test split of its run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from megalite.config import Config, ParallelConfig, RecomputeConfig, check_config
from megalite.data.document_ends import DocumentEnds
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.tokenizers.tokenizer import Tokenizer, configured_tokenizer
from megalite.distributed.topology import Topology
from megalite.errors import UserError
from megalite.generate.text_loss import LossMeter, TextLoss, windows
from megalite.generate.trained_model import TrainedModel, end_of_document, load_model
from megalite.loss_terms import LM_LOSS
from megalite.train.evaluator import Evaluator
from megalite.train.run_context import document_ends, resolve_run
from megalite.train.run_datasets import build_data
from megalite.train.trainer import build_pipeline


@dataclass(frozen=True)
class EvaluationResult:
    """Holds the result of one evaluation.

    Attributes:
        name: name of the text, corpus or dataset.
        loss: mean over the tokens.
        num_tokens: number of tokens in the mean; None if unknown.
        bits_per_byte: loss per byte of text; None if the size in bytes is unknown.
        other_losses: means of further terms of the loss by name.
    """

    name: str
    loss: float
    num_tokens: int | None = None
    bits_per_byte: float | None = None
    other_losses: Mapping[str, float] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """Return exp(loss), capped as in the training log."""
        return math.exp(min(self.loss, 20.0))

    @staticmethod
    def of(name: str, measured: TextLoss) -> EvaluationResult:
        """Return the result for a measured loss.

        Raises:
            UserError: there is no token to predict.
        """
        if measured.num_tokens == 0:
            raise UserError(f"{name} has no token to predict: pass more text")
        return EvaluationResult(name, measured.mean, measured.num_tokens, measured.bits_per_byte)


@dataclass(frozen=True)
class WindowOptions:
    """Describes the windows in which the model reads a stream of tokens.

    Attributes:
        seq_length: tokens in a window.
        stride: tokens from the start of one window to the next.
        batch_size: windows per batch of a replica.
    """

    seq_length: int
    stride: int
    batch_size: int

    def check(self, config: Config, cp: int) -> None:
        """Check the options against the model, and against the number of context-parallel ranks.

        Raises:
            UserError: the stride skips tokens, the model has too few positions, or ranks cannot cut a window.
        """
        if cp > 1 and self.seq_length % (2 * cp):
            multiple = -(-self.seq_length // (2 * cp)) * 2 * cp
            raise UserError(
                f"--cp {cp} cuts a window into {2 * cp} slices, which --seq-length {self.seq_length} is not "
                f"divisible by: pass --seq-length {multiple}, or another --cp"
            )
        if self.stride > self.seq_length:
            raise UserError(
                f"--stride {self.stride} is more than the {self.seq_length} tokens of a window: "
                "it would skip tokens"
            )
        model = config.model
        if model.position_embedding_type == "learned_absolute" and self.seq_length > model.num_positions:
            raise UserError(
                f"--seq-length {self.seq_length} is more than the model's {model.num_positions} positions"
            )


def evaluate_texts(
    trained: TrainedModel,
    texts: dict[str, str],
    tokenizer: Tokenizer,
    options: WindowOptions,
    topology: Topology,
) -> Iterator[EvaluationResult]:
    """Yield the loss of each text; for several texts, also yield their total loss.

    A text is a document: an end-of-document token precedes it, so its first token is also predicted.

    Args:
        texts: texts by name.
    """
    meter = _meter(trained, options, topology)
    eod = end_of_document(tokenizer)
    start = [] if eod is None else [eod]
    results = []
    for name, text in texts.items():
        ids = np.array(start + tokenizer.encode(text), np.int64)
        sums = meter(windows([ids], options.seq_length, options.stride))
        results.append(dataclasses.replace(sums, num_bytes=len(text.encode())))
        yield EvaluationResult.of(name, results[-1])
    if len(results) > 1:
        total = TextLoss(
            sum(each.total for each in results),
            sum(each.num_tokens for each in results),
            sum(each.num_bytes or 0 for each in results),
        )
        yield EvaluationResult.of("all", total)


def evaluate_corpus(
    trained: TrainedModel, prefix: str, options: WindowOptions, topology: Topology
) -> EvaluationResult:
    """Return the loss of an indexed dataset, with its sequences joined to one stream as in training.

    Raises:
        UserError: the dataset cannot be read, or has a token that is not in the model's vocabulary.
    """
    with topology.agreed():
        corpus = IndexedDataset(prefix)
    stream = _sequences(corpus, trained.vocab_size)
    sums = _meter(trained, options, topology)(windows(stream, options.seq_length, options.stride))
    return EvaluationResult.of(prefix, sums)


def _sequences(corpus: IndexedDataset, vocab_size: int) -> Iterator[npt.NDArray[Any]]:
    for number in range(len(corpus)):
        tokens = corpus[number]
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
            raise UserError(
                f"sequence {number} of {corpus.prefix} has token {int(tokens.max())}, but the model has "
                f"{vocab_size} tokens: the dataset was made with another tokenizer"
            )
        yield tokens


def _meter(trained: TrainedModel, options: WindowOptions, topology: Topology) -> LossMeter:
    options.check(trained.config, topology.positions.count)
    trained.check_is_gpt("--text and --data-path evaluate")
    ends = _document_ends(trained.config, topology)
    stage = load_model(trained, topology, has_documents=trained.config.data.masks_attention)
    return LossMeter(stage, topology, ends, options.batch_size)


def _document_ends(config: Config, topology: Topology) -> DocumentEnds | None:
    if not config.data.document_options:
        return None
    with topology.agreed():
        has_tokenizer = config.data.resolved_tokenizer_type is not None
        tokenizer = configured_tokenizer(config.data, config.model.vocab_size) if has_tokenizer else None
        return document_ends(config, tokenizer)


def evaluate_split(
    trained: TrainedModel,
    split: str,
    parallel: ParallelConfig,
    micro_batch_size: int | None,
    topology: Topology,
) -> Iterator[EvaluationResult]:
    """Yield the loss of each dataset of a split, as training logs it after the checkpoint's iteration.

    Args:
        parallel: layout of this process.
        micro_batch_size: None for the micro-batch size of the run; it does not change the result.
    """
    config = _run_config(trained, parallel, micro_batch_size)
    check_config(config, topology.world_size)
    if config.num_eval_iters(topology.sample_ranks.size) == 0:
        raise UserError("the run has no evaluations (--eval-iters 0): pass --data-path instead of --split")
    run = resolve_run(config, topology)
    datasets = build_data(run, [split])
    if not datasets.evaluated(split):
        raise UserError(f"the {split} split of the run's data is empty: pass --data-path")
    has_documents = config.data.masks_attention
    stage = load_model(trained, topology, has_documents=has_documents, has_router_losses=True)
    evaluator = Evaluator(run, [stage], build_pipeline([stage], config, topology))
    first = evaluator.first_sample(split, trained.iteration)
    for name, dataset in datasets.evaluated(split):
        losses = evaluator(dataset, first)
        yield EvaluationResult(name or split, losses.pop(LM_LOSS), other_losses=losses)


def _run_config(trained: TrainedModel, parallel: ParallelConfig, micro_batch_size: int | None) -> Config:
    """Return the run's config for this process' layout, with the global batch size of the checkpoint."""
    training = trained.config.training
    saved = trained.manifest.description["run"].get("global_batch_size")
    return dataclasses.replace(
        trained.config,
        parallel=parallel,
        recompute=RecomputeConfig(),
        training=dataclasses.replace(
            training,
            micro_batch_size=micro_batch_size or training.micro_batch_size,
            global_batch_size=saved or training.global_batch_size,
            compile=False,
            seq_length_schedule=None,
        ),
    )
