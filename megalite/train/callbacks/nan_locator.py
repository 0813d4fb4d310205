"""Locate the layer and the microbatch in which an iteration went wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.data.batch_loader import microbatch_samples
from megalite.data.microbatch import Microbatch, WithTerms, largest_total
from megalite.distributed.collectives import largest_of_all
from megalite.model.compiled import run_as_written
from megalite.model.stage import Stage
from megalite.observe.recorder import Reader, watch_modules
from megalite.train.loop import Callback, TrainingLoop
from megalite.train.model_chunks import layer_depth, unchanged_buffers
from megalite.train.train_step import Anomaly, IterationPlan, StepResult
from megalite.train.trainer import Trainer
from megalite.utils.log import THIS_RANK, log

SPIKE_FACTOR = 10.0
"""A part stands out for a microbatch if its output exceeds the batch's median this many times."""


class NanLocation(Callback):
    """Log of each anomaly with the layer and the microbatch in which it began."""

    def needs_boundary(self, loop: TrainingLoop, iteration: int) -> bool:
        return False  # after an anomaly, the train step computes the next iteration's gradients again

    def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
        if result.anomaly is not None:
            text = anomaly_text(loop.trainer, result.anomaly, result.plan)
            if loop.trainer.topology.is_reporter:
                log.warning("iteration %d: %s", result.plan.iteration, text, extra=THIS_RANK)


def anomaly_text(trainer: Trainer, anomaly: Anomaly, plan: IterationPlan) -> str:
    """Return the log text of an anomaly; a collective. Call it before the next iteration."""
    with unchanged_buffers(trainer.chunks):
        location = NanLocator(trainer).locate(anomaly, plan)
    return f"{anomaly.what}, {location}; the update was skipped"


class NanLocator:
    """Second run of an iteration with hooks on every part of the model, while its weights are unchanged.

    Dropout by counter makes the second run equal to the first. The hooks fill a table of the largest
    magnitudes, by part of the model (rows, in the order of the forward) and by microbatch of the global batch
    (columns). It is reduced over all ranks, so that each rank reaches the same result.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._stages = trainer.chunks
        self._pipeline = trainer.pipeline
        self._train_step = trainer.train_step
        self._load = trainer.load_batch
        self._topology = trainer.topology
        self._micro_batch_size = trainer.config.training.micro_batch_size
        self._is_compiled = trainer.config.training.compile  # layers run uncompiled while they have hooks
        self._rows = {name: row for row, name in enumerate(_parts(trainer.config.model))}

    def locate(self, anomaly: Anomaly, plan: IterationPlan) -> str:
        """Return where the iteration went wrong, as a clause for the log; a collective."""
        first_sample = plan.first_sample
        table = self._magnitudes(plan)
        if anomaly.kind == "spike":
            return self._spike(table, first_sample)
        bad = table.isinf()
        if bad.any():
            column = int(bad.any(0).nonzero()[0])
            row = int(bad[:, column].nonzero()[0])
            others = int(bad.any(0).sum()) - 1
            more = f" and in {others} more microbatches" if others else ""
            return f"first in {self._name(row)} {self._microbatch_text(column, first_sample)}{more}"
        if anomaly.kind == "loss" and self._is_compiled:
            return (
                "but not when it was computed again without --compile: suspect the compiled layers or the "
                "hardware"
            )
        if anomaly.kind == "loss":
            return "but not when it was computed again: suspect the hardware"
        return self._bad_gradient(plan)

    def _magnitudes(self, plan: IterationPlan) -> Tensor:
        """Return the largest magnitude of each part's output, ``[parts, microbatches]``; inf for NaN."""
        num_columns = plan.num_microbatches * self._topology.sample_ranks.size
        table = torch.zeros(len(self._rows), num_columns, dtype=torch.float64, device=self._topology.device)
        watched = [
            (name, module)
            for stage in self._stages
            for name, module in stage.named_modules()
            if not name or name in self._rows
        ]
        reader = _Magnitudes(table, self._rows, plan, self._micro_batch_size)
        with run_as_written(self._is_compiled), watch_modules(reader, watched):
            self._pipeline.evaluate(
                plan.num_microbatches,
                partial(self._load, plan.first_sample),
                self._train_step.hidden_shape(plan.seq_length),
            )
        return self._topology.to_host(largest_of_all(table, self._topology))

    def _spike(self, table: Tensor, first_sample: int) -> str:
        """Name the microbatch of the largest loss, and the first part whose output stands out for it."""
        column = int(table[-1].argmax())
        stands_out = (table[:, column] > SPIKE_FACTOR * table.median(dim=1).values).nonzero()
        largest = f"the largest part of it {self._microbatch_text(column, first_sample)}"
        if len(stands_out) == 0:
            return f"{largest}, where no layer stands out"
        return f"{largest}, where {self._name(int(stands_out[0]))} is the first to stand out"

    def _bad_gradient(self, plan: IterationPlan) -> str:
        """Run the microbatches one by one, and name the first parameter that backward reaches.

        This overwrites the gradients: the update is skipped anyway.
        """
        step, ranks = self._train_step, self._topology.sample_ranks
        divisors = step.divisors(plan)
        for index in range(plan.num_microbatches):
            norm = self._topology.to_host(step.run_microbatch(plan, index, ranks.rank, divisors))
            if not norm.isfinite():
                samples = self._samples(plan.first_sample, index, range(ranks.size))
                name = self._first_bad_parameter()
                return f"first in the gradient of {name} in microbatch {index} {samples}"
        return "but in no microbatch alone: only in their sum, or not when it was computed again"

    def _first_bad_parameter(self) -> str:
        """Return the name of the bad parameter nearest to the loss, over all ranks."""
        bad = set(self._train_step.optimizer.bad_gradients())
        mine = [
            (layer_depth(name), position, name)
            for stage in self._stages
            for position, (name, _) in enumerate(stage.named_parameters())
            if name in bad
        ]
        found = self._topology.world.gather_objects(max(mine, default=None), "bad parameters")
        deepest = max((each for each in found if each is not None), default=None)
        return "all parameters together" if deepest is None else deepest[-1]

    def _name(self, row: int) -> str:
        return list(self._rows)[row]

    def _microbatch_text(self, column: int, first_sample: int) -> str:
        index, dp_rank = divmod(column, self._topology.sample_ranks.size)
        rank = f" of data-parallel rank {dp_rank}" if self._topology.sample_ranks.size > 1 else ""
        samples = self._samples(first_sample, index, range(dp_rank, dp_rank + 1))
        return f"in microbatch {index}{rank} {samples}"

    def _samples(self, first_sample: int, index: int, dp_ranks: range) -> str:
        """Describe the samples of microbatch `index` on these consecutive replicas."""
        first, last = (
            microbatch_samples(
                first_sample, index, self._micro_batch_size, dp_rank, self._topology.sample_ranks.size
            )
            for dp_rank in (dp_ranks[0], dp_ranks[-1])
        )
        return f"(sample {first[0]})" if first[0] == last[-1] else f"(samples {first[0]} to {last[-1]})"


class _Magnitudes(Reader):
    """Largest outputs of modules, each in the column of the microbatch that its stage runs."""

    def __init__(
        self, table: Tensor, rows: Mapping[str, int], plan: IterationPlan, micro_batch_size: int
    ) -> None:
        self._table, self._rows, self._plan = table, rows, plan
        self._micro_batch_size = micro_batch_size
        self._column = 0

    def enters(self, name: str, module: nn.Module | None, args: tuple[Any, ...], *_: Any) -> None:
        if not name:  # a stage
            microbatch: Microbatch = args[0]
            sample = int(microbatch.sample_numbers[0]) // self._plan.sequences_per_sample
            self._column = (sample - self._plan.first_sample) // self._micro_batch_size

    def leaves(self, name: str, module: nn.Module | None, args: tuple[Any, ...], output: Any) -> None:
        if output is None or (isinstance(module, Stage) and not module.is_last):
            return
        first = output if isinstance(output, Tensor) else output[0]  # a norm returns the residual too
        if isinstance(output, WithTerms) and output.hidden is None:
            first = largest_total(output.terms)
        largest = first.detach().abs().amax().double()
        row = self._rows[name or "loss"]
        self._table[row, self._column] = largest.nan_to_num(nan=math.inf, posinf=math.inf)


def _parts(model: ModelConfig) -> list[str]:
    """Return the modules whose outputs are measured, by their names in the whole model, and the loss."""
    layers = []
    for number, spec in enumerate(model.layer_specs):
        mixer = () if spec.mixer is None else ("attention_norm", spec.mixer.name, "attention_output_norm")
        blocks = (*mixer, "mlp_norm", "mlp", "experts", "mlp_output_norm")
        layers += [f"layers.{number}.{block}" for block in blocks]
    return ["embedding", *layers, "final_norm", "loss"]
