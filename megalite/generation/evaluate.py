"""What a trained model makes of texts, of a corpus, and of the run's own validation and test split."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megalite.config import Config, ParallelConfig, RecomputeConfig, check_config
from megalite.data.indexed import IndexedDataset
from megalite.data.tokenizer import Tokenizer
from megalite.errors import UserError
from megalite.generation.text_loss import LossMeter, TextLoss
from megalite.generation.trained import Trained, end_of_document, load_model
from megalite.generation.windows import windows
from megalite.model.attention_core import SdpaCore
from megalite.topology import Topology
from megalite.train.evaluation import Evaluator
from megalite.train.prepare import build_data, document_ends
from megalite.train.step import BatchTokens, build_pipeline
from megalite.train.telemetry.timers import Timers


@dataclass(frozen=True)
class Result:
    """One evaluation.

    Attributes:
        name: of what was evaluated on.
        loss: mean over its tokens.
        num_tokens: whose loss counts; None where only the mean is known.
        bits_per_byte: of a text; None where its bytes are not known.
    """

    name: str
    loss: float
    num_tokens: int | None = None
    bits_per_byte: float | None = None

    @property
    def perplexity(self) -> float:
        """exp(loss), capped as in the log of a run."""
        return math.exp(min(self.loss, 20.0))

    @staticmethod
    def of(name: str, measured: TextLoss) -> Result:
        """What was measured under a name.

        Raises:
            UserError: it has no token to predict.
        """
        if measured.num_tokens == 0:
            raise UserError(f"{name} has no token whose loss counts: give more text")
        return Result(name, measured.mean, measured.num_tokens, measured.bits_per_byte)


@dataclass(frozen=True)
class Reading:
    """How much of a stream of tokens the model sees at a time.

    Attributes:
        seq_length: of a window.
        stride: between the beginnings of two windows.
        batch_size: windows that are run together on a replica.
    """

    seq_length: int
    stride: int
    batch_size: int

    def check(self, config: Config) -> None:
        """Refuses what cannot be.

        Raises:
            UserError: the stride leaves tokens out, or the model has fewer positions.
        """
        if self.stride > self.seq_length:
            raise UserError(
                f"--stride {self.stride} is more than the {self.seq_length} tokens of a window: "
                "it would leave tokens out"
            )
        model = config.model
        if model.position_embedding_type == "learned_absolute" and self.seq_length > model.num_positions:
            raise UserError(
                f"--seq-length {self.seq_length} is more than the model's {model.num_positions} positions"
            )


def evaluate_texts(
    trained: Trained, texts: dict[str, str], tokenizer: Tokenizer, reading: Reading, topology: Topology
) -> Iterator[Result]:
    """Of each text, by name, the loss; where there are several, of all together too.

    A text is read as a document: the token that ends one comes before it, so that its first token is
    predicted too.
    """
    meter = _meter(trained, reading, topology)
    eod = end_of_document(tokenizer)
    start = [] if eod is None else [eod]
    results = []
    for name, text in texts.items():
        ids = np.array(start + tokenizer.encode(text), np.int64)
        sums = meter(windows([ids], reading.seq_length, reading.stride))
        results.append(dataclasses.replace(sums, num_bytes=len(text.encode())))
        yield Result.of(name, results[-1])
    if len(results) > 1:
        total = TextLoss(
            sum(each.total for each in results),
            sum(each.num_tokens for each in results),
            sum(each.num_bytes or 0 for each in results),
        )
        yield Result.of("all", total)


def evaluate_corpus(trained: Trained, prefix: str, reading: Reading, topology: Topology) -> Result:
    """The loss of an indexed dataset, its sequences one after the other, as samples are in training.

    Raises:
        UserError: it cannot be read, or has a token that the model does not know.
    """
    with topology.agreed():
        corpus = IndexedDataset(prefix)
    stream = _sequences(corpus, trained.vocab_size)
    sums = _meter(trained, reading, topology)(windows(stream, reading.seq_length, reading.stride))
    return Result.of(prefix, sums)


def _sequences(corpus: IndexedDataset, vocab_size: int) -> Iterator[npt.NDArray[Any]]:
    for number in range(len(corpus)):
        tokens = corpus[number]
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
            raise UserError(
                f"sequence {number} of {corpus.prefix} has token {int(tokens.max())}, and the model "
                f"{vocab_size} tokens: it was made with another tokenizer"
            )
        yield tokens


def _meter(trained: Trained, reading: Reading, topology: Topology) -> LossMeter:
    reading.check(trained.config)
    ends = document_ends(trained.config, topology)
    return LossMeter(load_model(trained, topology, SdpaCore), topology, ends, reading.batch_size)


def evaluate_split(
    trained: Trained, split: str, parallel: ParallelConfig, micro_batch_size: int | None, topology: Topology
) -> Iterator[Result]:
    """Of each of the run's datasets of a split, what training tells after the checkpoint's iteration.

    Args:
        parallel: the layout here.
        micro_batch_size: None for the run's; the result is the same.
    """
    config = _run_config(trained, parallel, micro_batch_size)
    check_config(config, topology.world_size)
    if config.training.eval_iters == 0:
        raise UserError("the run evaluates nothing (--eval-iters 0): give --data-path in place of --split")
    datasets = build_data(config, topology, Timers(), [split])
    if not datasets.evaluated(split):
        raise UserError(f"the run's data leave nothing to its {split} split: give --data-path")
    stage = load_model(trained, topology)
    tokens = BatchTokens(0)
    pipeline = build_pipeline([stage], config, topology, tokens)
    evaluator = Evaluator([stage], pipeline, config, topology, tokens, datasets.ends)
    first = evaluator.first_sample(split, trained.iteration)
    for name, dataset in datasets.evaluated(split):
        yield Result(name or split, evaluator(dataset, first))


def _run_config(trained: Trained, parallel: ParallelConfig, micro_batch_size: int | None) -> Config:
    """The run's config in the layout here, with the global batch that it came to there."""
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
        ),
    )
