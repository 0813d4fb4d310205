"""The loss of a model on a dataset, in training and after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from megalite.config import Config
from megalite.data.batch import Microbatch
from megalite.data.document_ends import DocumentEnds
from megalite.data.gpt import Dataset
from megalite.model.stage import GPTStage
from megalite.pipeline.executor import Pipeline
from megalite.topology import Topology
from megalite.train.batches import BatchLoader
from megalite.train.counted_tokens import CountedTokens
from megalite.train.step import BatchTokens, total_loss


class Evaluator:
    """Evaluates a rank's part of the model, together with the other ranks.

    Args:
        config: validated, its vocabulary size known.
        batch_tokens: what the pipeline divides losses by; set here to the full global batch's.
        ends: what happens at the ends of documents; None where samples are taken whole.
    """

    def __init__(
        self,
        chunks: Sequence[GPTStage],
        pipeline: Pipeline[Microbatch],
        config: Config,
        topology: Topology,
        batch_tokens: BatchTokens,
        ends: DocumentEnds | None,
    ) -> None:
        self.chunks = chunks
        self.pipeline = pipeline
        self.config = config
        self.topology = topology
        self.batch_tokens = batch_tokens
        self.ends = ends
        self.global_batch_size = config.global_batch(topology.dp.size)
        self.num_microbatches = config.num_microbatches(topology.dp.size)

    def __call__(
        self, dataset: Dataset, first_sample: int, before_batch: Callable[[], None] = lambda: None
    ) -> float:
        """Mean loss of `eval_iters` global batches from `first_sample` on, without dropout.

        The mean is over all of their tokens that have a loss. What `before_batch` raises ends it.
        """
        for chunk in self.chunks:
            chunk.eval()
        training = self.config.training
        counted = CountedTokens(self.topology)
        self.batch_tokens.number = self.global_batch_size * self.config.model.seq_length
        total = torch.zeros((), dtype=torch.float64, device=self.topology.device)
        with BatchLoader(dataset, training.micro_batch_size, self.topology, self.ends) as loader:

            def load(consumed: int, index: int) -> Microbatch:
                return counted.noted(consumed, index, loader(consumed, index))

            for batch in range(training.eval_iters):
                before_batch()
                consumed = first_sample + batch * self.global_batch_size
                losses = self.pipeline.evaluate(self.num_microbatches, partial(load, consumed))
                total += total_loss(losses, self.topology)
        if self.config.data.eod_mask_loss:
            total *= counted.scale()
        return total.item() / training.eval_iters

    def first_sample(self, split: str, iteration: int) -> int:
        """Where the evaluation after an iteration begins: in validation after those before it, else at 0."""
        training = self.config.training
        num_before = (iteration - 1) // training.eval_interval if split == "valid" else 0
        return num_before * training.eval_iters * self.global_batch_size
