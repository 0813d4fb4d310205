"""Evaluate a model on a dataset, during training and after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megalite.data.batch_loader import BatchLoader
from megalite.data.gpt_dataset import Dataset
from megalite.microbatch import Microbatch
from megalite.model.experts import names_of_terms
from megalite.model.multi_token_prediction import mtp_loss_names, mtp_router_terms
from megalite.model.stage import Stage
from megalite.pipeline.executor import Pipeline
from megalite.train.model_chunks import hidden_shape
from megalite.train.run_context import RunContext
from megalite.train.train_step import GlobalBatches, LossMasks, global_losses


class Evaluator:
    """Evaluates a rank's part of the model, together with the other ranks.

    Args:
        chunks: this rank's model chunks.
        pipeline: runs the chunks.

    Attributes:
        num_batches: number of global batches in an evaluation.
    """

    def __init__(self, run: RunContext, chunks: Sequence[Stage], pipeline: Pipeline[Microbatch]) -> None:
        self.run = run
        self.chunks = chunks
        self.pipeline = pipeline
        self.global_batch_size = run.config.global_batch(run.topology.sample_ranks.size)
        self.num_batches = run.config.num_eval_iters(run.topology.sample_ranks.size)
        self.num_microbatches = run.config.num_microbatches(run.topology.sample_ranks.size)
        self.batches = GlobalBatches(run)

    def __call__(
        self, dataset: Dataset, first_sample: int, before_batch: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Return the mean of each term of the loss over `num_batches` global batches, without dropout.

        A term's mean is over all tokens that have a loss, or over all samples. A module of multi-token
        prediction and a term of routers have the mean of their batches' means. An error that `before_batch`
        raises ends the evaluation.
        """
        config, topology = self.run.config, self.run.topology
        names = self.chunks[0].loss_names
        for chunk in self.chunks:
            chunk.eval()
        masks = LossMasks()
        total = torch.zeros(len(names), dtype=torch.float64, device=topology.device)
        with BatchLoader(
            dataset,
            config.training.micro_batch_size,
            topology,
            self.run.samples,
            num_later=config.model.mtp_num_layers,
        ) as loader:
            for batch in range(self.num_batches):
                before_batch()
                consumed = first_sample + batch * self.global_batch_size

                def read(index: int, consumed: int = consumed) -> Microbatch:
                    return masks.counted(loader(consumed, index))

                load, divisors = self.batches.open(
                    read,
                    self.num_microbatches,
                    self.global_batch_size,
                    config.model.seq_length,
                    counts_afterwards=config.data.masks_loss,
                )
                shape = hidden_shape(config, config.model.seq_length)
                losses = self.pipeline.evaluate(self.num_microbatches, load, shape, divisors=divisors)
                total += global_losses(losses, names, topology)
        means = dict(zip(names, (topology.to_host(total) / self.num_batches).tolist(), strict=True))
        if config.data.masks_loss:
            ratio = topology.to_host(masks.token_ratio(topology)).item()
            model = config.model
            others = {*names_of_terms(model), *mtp_loss_names(model), *mtp_router_terms(model)}
            means = {name: mean if name in others else mean * ratio for name, mean in means.items()}
        return means

    def first_sample(self, split: str, iteration: int) -> int:
        """Return the first sample of the evaluation after an iteration.

        Each evaluation on the validation split starts where the previous one ended. The test split starts at
        0, and so does every split that an evaluation reads at most once.
        """
        if self.run.samples.are_whole_documents:
            return 0
        interval = self.run.config.training.eval_interval
        num_before = (iteration - 1) // interval if split == "valid" else 0
        return num_before * self.num_batches * self.global_batch_size
