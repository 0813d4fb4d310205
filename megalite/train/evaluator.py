"""Evaluate a model on a dataset, during training and after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from megalite.batch.loss_terms import Terms, add_terms
from megalite.batch.microbatch import Microbatch
from megalite.data.batch_loader import BatchLoader
from megalite.data.gpt_dataset import Dataset
from megalite.model.stage import Stage
from megalite.pipeline.executor import Pipeline, divisor_of
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

        A term's mean is over all of its units in these batches, such as all tokens that have a loss. An error
        that `before_batch` raises ends the evaluation.
        """
        config, topology = self.run.config, self.run.topology
        names = self.chunks[0].loss_names
        for chunk in self.chunks:
            chunk.eval()
        masks = LossMasks()
        terms: Terms = {}  # of this rank, in all batches
        counts: Mapping[str, float | Tensor] = {}
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

                load, numbers = self.batches.open(
                    read,
                    self.num_microbatches,
                    self.global_batch_size,
                    config.model.seq_length,
                    counts_afterwards=config.data.masks_loss,
                )
                shape = hidden_shape(config, config.model.seq_length)
                for each in self.pipeline.evaluate(self.num_microbatches, load, shape):
                    wide = {name: term._replace(total=term.total.double()) for name, term in each.items()}
                    terms = add_terms(terms, wide)
                counts = {unit: counts.get(unit, 0) + number for unit, number in numbers.items()}
        if config.data.masks_loss:
            counts = {**counts, "token": counts["token"] / masks.token_ratio(topology)}
        own = {name: term.value(divisor_of(name, term.per, counts)) for name, term in terms.items()}
        means = topology.to_host(global_losses([own], names, topology)).tolist()
        return dict(zip(names, means, strict=True))

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
