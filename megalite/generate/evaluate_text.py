"""Evaluate a trained model on texts, on a corpus, or on the validation or test split of its run.

Texts and corpora are streams of tokens, which the model reads in windows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from megalite.config import Config, ParallelConfig, RecomputeConfig, check_config
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.microbatch import LM_LOSS, Microbatch, WithTerms
from megalite.data.samples import DocumentEnds
from megalite.data.sharded_dataset import open_dataset
from megalite.data.tokenizers.tokenizer import Tokenizer, configured_tokenizer, end_of_document
from megalite.distributed.collectives import all_reduce
from megalite.distributed.topology import Topology
from megalite.generate.generator import broadcast_from_last, run_in_order
from megalite.generate.trained_model import TrainedModel, load_model
from megalite.model.transformer_stage import TransformerStage
from megalite.train.global_batch import Evaluator
from megalite.train.run_context import build_data, document_ends, resolve_run
from megalite.train.trainer import build_pipeline
from megalite.utils.errors import UserError
from megalite.utils.log import LineInterval, log


class Window(NamedTuple):
    """Tokens that the model reads as one sequence.

    Attributes:
        text: int64 ``[s + 1]``. The inputs are all tokens except the last, the labels all except the first.
            The end of a stream is padded with zeros.
        counted: labels whose loss counts; labels before them are context, and count in an earlier window.
    """

    text: npt.NDArray[np.int64]
    counted: slice


def windows(pieces: Iterable[npt.NDArray[Any]], seq_length: int, stride: int) -> Iterator[Window]:
    """Yield windows over a stream of tokens, with only a part of the stream in memory.

    Every token except the first is counted once.

    Args:
        pieces: the stream, in pieces of any length.
        seq_length: s.
        stride: tokens from the start of one window to the next, at most s. A token has at least s - stride
            tokens of context, if the stream has them.
    """
    assert 0 < stride <= seq_length
    buffer = np.empty(0, np.int64)
    num_counted = 0  # labels at the start of the buffer that are already counted
    for piece in pieces:
        buffer = np.concatenate((buffer, piece))
        first = 0
        while len(buffer) - first > seq_length:
            yield Window(buffer[first : first + seq_length + 1], slice(num_counted, seq_length))
            num_counted = seq_length - stride
            first += stride
        buffer = buffer[first:]
    num_labels = len(buffer) - 1
    if num_labels > num_counted:
        text = np.zeros(seq_length + 1, np.int64)
        text[: len(buffer)] = buffer
        yield Window(text, slice(num_counted, num_labels))


@dataclass(frozen=True)
class LossMeter:
    """Loss of windows with one model. Every rank must pass the same windows.

    Args:
        ends: treatment of document ends, as in training; None to ignore them.
        batch_size: windows per batch of a replica.
    """

    stage: TransformerStage
    topology: Topology
    ends: DocumentEnds | None
    batch_size: int

    @torch.inference_mode()
    def __call__(self, windows: Iterable[Window]) -> tuple[float, int]:
        """Return the summed loss of the counted tokens, in nats, and their number.

        Batches are distributed over data-parallel replicas.
        """
        ranks, device = self.topology.sample_ranks, self.topology.device
        sums = torch.zeros(2, dtype=torch.float64, device=device)  # losses and tokens
        interval, num_windows = LineInterval(), 0
        for number, batch in enumerate(_batches(windows, self.batch_size)):
            if number % ranks.size == ranks.rank:
                sums += self._sums(batch)
            num_windows += len(batch)
            if interval.is_over():
                log.info("evaluated %s windows", f"{num_windows:,}")
        sums = broadcast_from_last(all_reduce(sums, self.topology.loss_ranks), self.stage)
        total, num_tokens = sums.tolist()
        return total, int(num_tokens)

    def _sums(self, batch: list[Window]) -> torch.Tensor:
        """Return the summed loss and the number of the counted tokens of a batch, ``[2]``.

        Stages before the last return zeros.
        """
        text = torch.from_numpy(np.stack([window.text for window in batch]))
        sample_numbers = torch.zeros(len(batch), dtype=torch.int64)
        microbatch = Microbatch.of(text, sample_numbers).to(self.topology.device)
        if self.ends is not None:
            microbatch = self.ends.marked(microbatch)
        counts = torch.zeros(microbatch.labels.shape, dtype=torch.bool)
        for row, window in enumerate(batch):
            counts[row, window.counted] = True
        counts = counts.to(self.topology.device)
        if microbatch.loss_mask is not None:
            counts &= microbatch.loss_mask
        own = self.topology.positions
        runs = own.ranges(counts.shape[1] // own.count)
        microbatch = replace(microbatch, loss_mask=counts).cut(runs)
        loss = run_in_order(self.stage, microbatch, self._output)
        if not self.stage.is_last:
            return torch.zeros(2, dtype=torch.float64, device=counts.device)
        assert microbatch.loss_mask is not None
        return torch.stack((loss.double(), microbatch.loss_mask.sum().double()))

    def _output(self, microbatch: Microbatch, hidden: torch.Tensor | None) -> torch.Tensor:
        """Return what the next stage reads; on the last stage, the summed loss of the predicted tokens."""
        if not self.stage.is_last:
            return self.stage.hidden_states(microbatch, hidden)
        return WithTerms.of_last(self.stage(microbatch, hidden)).terms[LM_LOSS].total


def _batches(windows: Iterable[Window], size: int) -> Iterator[list[Window]]:
    iterator = iter(windows)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


@dataclass(frozen=True)
class EvaluationResult:
    """Result of one evaluation.

    Attributes:
        name: name of the text, corpus or dataset.
        loss: mean over the tokens.
        num_tokens: number of tokens in the mean; None if unknown.
        bits_per_byte: loss per byte of text in UTF-8, which compares models with different tokenizers; None
            if the size in bytes is unknown.
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
    def of(name: str, total: float, num_tokens: int, num_bytes: int = 0) -> EvaluationResult:
        """Return the result for a sum of losses, in nats, over a text of `num_bytes`, 0 if unknown.

        Raises:
            UserError: there is no token to predict.
        """
        if num_tokens == 0:
            raise UserError(f"{name} has no token to predict: pass more text")
        bits_per_byte = total / math.log(2.0) / num_bytes if num_bytes else None
        return EvaluationResult(name, total / num_tokens, num_tokens, bits_per_byte)


@dataclass(frozen=True)
class WindowOptions:
    """Windows in which the model reads a stream of tokens.

    Attributes:
        seq_length: tokens in a window.
        stride: tokens from the start of one window to the next.
        batch_size: windows per batch of a replica.
    """

    seq_length: int
    stride: int
    batch_size: int

    def check(self, config: Config, topology: Topology) -> None:
        """Check the options against the model, and against the ranks that cut a window.

        Raises:
            UserError: the stride skips tokens, the model has too few positions, or ranks cannot cut a window.
        """
        ranks = topology.position_ranks
        num_slices = 2 * ranks.size
        if ranks.size > 1 and self.seq_length % num_slices:
            multiple = -(-self.seq_length // num_slices) * num_slices
            raise UserError(
                f"--{ranks.name} {ranks.size} cuts a window into {num_slices} slices, which --seq-length "
                f"{self.seq_length} is not divisible by: pass --seq-length {multiple}, or another "
                f"--{ranks.name}"
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
    """
    meter = _meter(trained, options, topology)
    eod = end_of_document(tokenizer)
    start = [] if eod is None else [eod]
    total, total_tokens, total_bytes = 0.0, 0, 0
    for name, text in texts.items():
        ids = np.array(start + tokenizer.encode(text), np.int64)
        loss, num_tokens = meter(windows([ids], options.seq_length, options.stride))
        num_bytes = len(text.encode())
        yield EvaluationResult.of(name, loss, num_tokens, num_bytes)
        total, total_tokens, total_bytes = total + loss, total_tokens + num_tokens, total_bytes + num_bytes
    if len(texts) > 1:
        yield EvaluationResult.of("all", total, total_tokens, total_bytes)


def evaluate_corpus(
    trained: TrainedModel, prefix: str, options: WindowOptions, topology: Topology
) -> EvaluationResult:
    """Return the loss of an indexed dataset, with its sequences joined to one stream as in training.

    Raises:
        UserError: the dataset cannot be read, or has a token that is not in the model's vocabulary.
    """
    with topology.agreed():
        corpus = open_dataset(prefix)
    stream = _sequences(corpus, trained.vocab_size)
    sums = _meter(trained, options, topology)(windows(stream, options.seq_length, options.stride))
    return EvaluationResult.of(prefix, *sums)


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
    options.check(trained.config, topology)
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
        losses = evaluator(dataset, first, num_samples=evaluator.num_samples(split, dataset))
        yield EvaluationResult(name or split, losses.pop(LM_LOSS), other_losses=losses)


def _run_config(trained: TrainedModel, parallel: ParallelConfig, micro_batch_size: int | None) -> Config:
    """Return the run's config for this process' layout, with the global batch size of the checkpoint."""
    training = trained.config.training
    saved = trained.manifest.description["run"].get("global_batch_size")
    return replace(
        trained.config,
        parallel=parallel,
        recompute=RecomputeConfig(),
        training=replace(
            training,
            micro_batch_size=micro_batch_size or training.micro_batch_size,
            global_batch_size=saved or training.global_batch_size,
            compile=False,
            seq_length_schedule=None,
        ),
    )
