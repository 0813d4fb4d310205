"""Read global batches, average their losses over all ranks, and evaluate a model on a dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from megalite.config import Config
from megalite.data.batch_loader import BatchLoader
from megalite.data.blend import OnePass
from megalite.data.gpt_dataset import Dataset
from megalite.data.microbatch import (
    REAL_TOKEN,
    Microbatch,
    Terms,
    add_terms,
    later_real_token,
    later_token,
)
from megalite.distributed.collectives import all_reduce
from megalite.distributed.topology import Topology
from megalite.model.experts import names_of_terms
from megalite.model.stage import Stage
from megalite.pipeline.executor import Pipeline, divisor_of
from megalite.train.run_context import RunContext


def hidden_shape(config: Config, seq_length: int) -> tuple[int, int, int]:
    """Return the shape of what a stage sends to the next one for a microbatch, on each rank.

    Args:
        seq_length: tokens of a sequence; a sample may be cut into several.
    """
    num_sequences = config.training.micro_batch_size * (config.model.seq_length // seq_length)
    return seq_length // config.parallel.num_hidden_slices, num_sequences, config.model.stage_output_size


class GlobalBatches:
    """Divisors of a global batch's losses, computed before its first microbatch runs.

    Attributes:
        counts_afterwards: tokens with a loss are counted while the batch runs, and `LossMasks.token_ratio`
            then corrects loss and gradients as a whole.
    """

    def __init__(self, run: RunContext) -> None:
        self._topology = run.topology
        self._num_later = run.config.model.mtp_num_layers
        self._has_masks = run.config.data.masks_loss or run.samples.are_masked
        self._reads_all = reads_whole_batches(run)
        self.counts_afterwards = run.config.data.masks_loss and not self._reads_all

    def open(
        self,
        read: Callable[[int], Microbatch],
        num_microbatches: int,
        num_sequences: int,
        seq_length: int,
        *,
        counts_afterwards: bool | None = None,
    ) -> tuple[Callable[[int], Microbatch], dict[str, float | Tensor]]:
        """Return a function that loads a microbatch by its index, and the divisors by `LossTerm.per`.

        Where a term is a mean over something else than the tokens with a loss, masks are counted before, over
        all ranks with a loss: the batch is loaded here, and this is a collective. A stage that reads no
        samples has only the divisors of the terms that it can have.

        Args:
            read: reads a microbatch by its index; called once for each.
            num_sequences: number of sequences of the global batch.
            seq_length: tokens of each.
            counts_afterwards: divide the sum over the tokens with a loss by the number of all tokens; by
                default as the attribute says.
        """
        batch = [read(index) for index in range(num_microbatches)] if self._reads_all else []
        afterwards = self.counts_afterwards if counts_afterwards is None else counts_afterwards
        divisors = self._divisors(batch, num_sequences, seq_length, afterwards)
        if self._num_later:
            divisors |= self._later_token_divisors(batch, num_sequences, seq_length)
        return batch.__getitem__ if batch else read, divisors

    def _divisors(
        self, batch: Sequence[Microbatch], num_sequences: int, seq_length: int, counts_afterwards: bool
    ) -> dict[str, float | Tensor]:
        """Return the numbers of tokens with a loss, of tokens that are not padding, and of sequences."""
        num_tokens = num_sequences * seq_length
        if counts_afterwards and not batch:  # the correction is of the whole gradient
            return {"token": num_tokens}
        divisors: dict[str, float | Tensor] = {
            "token": num_tokens,
            REAL_TOKEN: num_tokens,
            "sample": num_sequences,
        }
        if self._has_masks and not counts_afterwards:
            del divisors["token"]  # a stage without masks has no loss
            divisors |= self._count("token", [each.loss_mask for each in batch])
        return divisors | self._count(REAL_TOKEN, [each.is_real for each in batch])

    def _count(self, name: str, masks: Sequence[Tensor | None]) -> dict[str, float | Tensor]:
        """Return the number of marked tokens by its name; nothing if this stage has no masks."""
        marked = [mask.sum() for mask in masks if mask is not None]
        if not marked:
            return {}
        total = torch.stack(marked).sum().double()
        all_reduce(total, self._topology.loss_ranks, of=f"the number of {name}s")
        return {name: total}

    def _later_token_divisors(
        self, batch: Sequence[Microbatch], num_sequences: int, seq_length: int
    ) -> dict[str, float | Tensor]:
        """Return the numbers of tokens that have a later one, and of those whose later label has a loss.

        Args:
            batch: the rank's microbatches, if they must be counted.
        """
        divisors: dict[str, float | Tensor] = {}
        for ahead in range(1, self._num_later + 1):
            masks = {
                later_real_token(ahead): [each.later_real for each in batch],
                later_token(ahead): [each.later_mask for each in batch],
            }
            for name, marked in masks.items():
                if batch:
                    own = [None if mask is None else mask[:, ahead - 1] for mask in marked]
                    divisors |= self._count(name, own)
                else:
                    divisors[name] = num_sequences * (seq_length - ahead)
        return divisors


def reads_whole_batches(run: RunContext) -> bool:
    """Return whether a global batch is read whole before it runs, because it must be counted."""
    model, data = run.config.model, run.config.data
    counts_later_tokens = model.mtp_num_layers > 0 and (data.masks_loss or data.masks_attention)
    counts_real_tokens = data.masks_loss and bool(names_of_terms(model))
    return run.samples.are_masked or counts_later_tokens or counts_real_tokens


class LossMasks:
    """Numbers of tokens that have a loss in the microbatches of one or several global batches.

    A microbatch's loss is divided by the number of all tokens in its global batch, before any rank knows how
    many of them have a loss. Multiplying its mean over these, and its gradients, by `token_ratio` corrects
    the divisor.
    """

    def __init__(self) -> None:
        self._num_tokens = 0
        self._num_with_loss: list[Tensor] = []

    def counted(self, microbatch: Microbatch) -> Microbatch:
        """Count the microbatch's tokens and return it."""
        if microbatch.loss_mask is not None:
            self._num_tokens += microbatch.loss_mask.numel()
            self._num_with_loss.append(microbatch.loss_mask.sum())
        return microbatch

    def token_ratio(self, topology: Topology) -> Tensor:
        """Return all tokens divided by those with a loss, an fp64 scalar on the device; a collective.

        The ranks of the first stage count, because they load every microbatch in any schedule. If no token
        has a loss, the divisor is one.
        """
        totals = torch.zeros(2, dtype=torch.float64, device=topology.device)
        if topology.pp.is_first and self._num_with_loss:
            totals[0].fill_(self._num_tokens)  # `totals[0] = number` would wait for the device
            totals[1] = torch.stack(self._num_with_loss).sum()
        for axis in (topology.loss_ranks, topology.pp):
            all_reduce(totals, axis, of="the number of tokens")
        return totals[0] / totals[1].clamp_min(1.0)


def global_losses(
    losses: Sequence[Mapping[str, Tensor]],
    names: Sequence[str],
    topology: Topology,
    token_ratio: Tensor | None = None,
) -> Tensor:
    """Sum the terms of the microbatches' losses over all stages and replicas; return them on every rank.

    Args:
        losses: this rank's terms by name, already divided by the number of units of the global batch.
        names: names of all terms, on any stage.
        token_ratio: factor on the sum, a scalar; see `LossMasks`.

    Returns:
        fp64 ``[names]`` on the device, not yet synchronized with the host.
    """
    total = torch.zeros(len(names), dtype=torch.float64, device=topology.device)
    totals = dict(zip(names, total, strict=True))  # views of the elements
    for terms in losses:
        for name, loss in terms.items():
            totals[name] += loss
    for axis in (topology.loss_ranks, topology.pp):  # a stage without a term adds zero
        all_reduce(total, axis, of="the loss")
    if token_ratio is not None:
        total *= token_ratio
    return total


class Evaluator:
    """Evaluates a rank's part of the model, together with the other ranks.

    Args:
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
        self,
        dataset: Dataset,
        first_sample: int,
        before_batch: Callable[[], None] = lambda: None,
        *,
        num_samples: int | None = None,
    ) -> dict[str, float]:
        """Return the mean of each term of the loss over some samples, without dropout.

        A term's mean is over all of its units in these samples, such as all tokens that have a loss. An error
        that `before_batch` raises ends the evaluation.

        Args:
            num_samples: number of samples from the first one on; by default those of `num_batches`.
        """
        config, topology = self.run.config, self.run.topology
        names = self.chunks[0].loss_names
        for chunk in self.chunks:
            chunk.eval()
        masks = LossMasks()
        terms: Terms = {}  # of this rank, in all batches
        counts: Mapping[str, float | Tensor] = {}
        end = first_sample + (num_samples or self.num_batches * self.global_batch_size)
        with BatchLoader(
            dataset if num_samples is None else OnePass(dataset, len(dataset)),
            config.training.micro_batch_size,
            topology,
            self.run.samples,
            num_later=config.model.mtp_num_layers,
        ) as loader:
            for consumed in range(first_sample, end, self.global_batch_size):
                before_batch()
                num_used = min(end - consumed, self.global_batch_size)

                def read(index: int, consumed: int = consumed, num_used: int = num_used) -> Microbatch:
                    microbatch = loader(consumed, index)
                    is_partial = num_used < self.global_batch_size
                    return masks.counted(microbatch.padded_from(end) if is_partial else microbatch)

                load, numbers = self.batches.open(
                    read,
                    self.num_microbatches,
                    self.global_batch_size if config.data.masks_loss else num_used,  # as `masks` counts
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
        if self.run.samples.are_whole_documents or self.run.config.training.full_validation:
            return 0
        interval = self.run.config.training.eval_interval
        num_before = (iteration - 1) // interval if split == "valid" else 0
        return num_before * self.num_batches * self.global_batch_size

    def num_samples(self, split: str, dataset: Dataset) -> int | None:
        """Return the samples of an evaluation on a dataset with --full-validation; None for `num_batches`."""
        return len(dataset) if split == "valid" and self.run.config.training.full_validation else None
