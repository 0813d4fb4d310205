"""Where in the model and in the batch an iteration went bad: asked only once it has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.data.batch import Microbatch
from megalite.data.sampler import microbatch_samples
from megalite.model.compiled import run_as_written
from megalite.model.stage import GPTStage
from megalite.parallel.collectives import largest_of_all
from megalite.pipeline.executor import Pipeline
from megalite.topology import Topology
from megalite.train.guard import Fault
from megalite.train.optimizer import RunOptimizer

STANDS_OUT = 10.0
"""What a part gives for a spiky microbatch stands out above this many times the batch's median."""


class FaultFinder:
    """Runs a bad iteration again with every part of the model watched, before its weights are changed.

    Dropout by counter makes the second run the same as the first. A table of the largest magnitudes, by part
    of the model (rows, in the order of the forward pass) and by microbatch of the global batch (columns), is
    put together over all ranks, so that each comes to the same words.
    """

    def __init__(
        self,
        stages: Sequence[GPTStage],
        pipeline: Pipeline[Microbatch],
        optimizer: RunOptimizer,
        load: Callable[[int, int], Microbatch],
        micro_batch_size: int,
        topology: Topology,
        is_compiled: bool = False,
    ) -> None:
        """Keeps what a second run takes.

        Args:
            stages: this rank's chunks of the model.
            pipeline: that runs them.
            optimizer: that holds their gradients.
            load: gives a microbatch by the batch's first sample and its number within the batch.
            micro_batch_size: samples of a microbatch.
            topology: of the run.
            is_compiled: the layers are compiled; while their modules are watched they run as written.
        """
        self._stages = stages
        self._pipeline = pipeline
        self._optimizer = optimizer
        self._load = load
        self._micro_batch_size = micro_batch_size
        self._topology = topology
        self._is_compiled = is_compiled
        self._rows = {name: row for row, name in enumerate(_parts(stages[0].config.num_layers))}

    def where(self, fault: Fault, consumed_samples: int, num_microbatches: int) -> str:
        """Says where the batch from sample `consumed_samples` on went bad; every rank must call it."""
        table = self._magnitudes(consumed_samples, num_microbatches)
        if fault.kind == "spike":
            return self._spike(table, consumed_samples)
        bad = table.isinf()
        if bad.any():
            column = int(bad.any(0).nonzero()[0])
            row = int(bad[:, column].nonzero()[0])
            others = int(bad.any(0).sum()) - 1
            more = f" and in {others} more microbatches" if others else ""
            return f"first in {self._name(row)} {self._place(column, consumed_samples)}{more}"
        if fault.kind == "loss" and self._is_compiled:
            return (
                "but not when it was computed again without --compile: suspect the compiled layers or the "
                "hardware"
            )
        if fault.kind == "loss":
            return "but not when it was computed again: suspect the hardware"
        return self._bad_gradient(consumed_samples, num_microbatches)

    def _magnitudes(self, consumed_samples: int, num_microbatches: int) -> Tensor:
        """The largest magnitude of each part's output, ``[parts, microbatches]``; NaN counts as infinite."""
        num_columns = num_microbatches * self._topology.dp.size
        table = torch.zeros(len(self._rows), num_columns, dtype=torch.float64, device=self._topology.device)
        with run_as_written(self._is_compiled), self._watched(table, consumed_samples):
            self._pipeline.evaluate(num_microbatches, partial(self._load, consumed_samples))
        return largest_of_all(table, self._topology).cpu()

    @contextmanager
    def _watched(self, table: Tensor, consumed_samples: int) -> Iterator[None]:
        """Notes what each part gives into the column of the microbatch that its stage is in."""
        column = 0

        def enter(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            nonlocal column
            first_sample = int(arguments[_SAMPLE_NUMBERS][0])
            column = (first_sample - consumed_samples) // self._micro_batch_size

        def note(row: int, _: nn.Module, __: object, output: Tensor | tuple[Tensor, ...]) -> None:
            first = output if isinstance(output, Tensor) else output[0]  # a norm gives the residual too
            largest = first.detach().abs().amax().double()
            table[row, column] = largest.nan_to_num(nan=math.inf, posinf=math.inf)

        handles = []
        for stage in self._stages:
            handles.append(stage.register_forward_pre_hook(enter))
            for name, module in stage.named_modules():
                if name in self._rows:
                    handles.append(module.register_forward_hook(partial(note, self._rows[name])))
            if stage.is_last:
                handles.append(stage.register_forward_hook(partial(note, self._rows["loss"])))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _spike(self, table: Tensor, consumed_samples: int) -> str:
        """The microbatch of the largest loss, and the first part that gives far more for it than others."""
        column = int(table[-1].argmax())
        stands_out = (table[:, column] > STANDS_OUT * table.median(dim=1).values).nonzero()
        place = f"the largest part of it {self._place(column, consumed_samples)}"
        if len(stands_out) == 0:
            return f"{place}, where no layer stands out"
        return f"{place}, where {self._name(int(stands_out[0]))} is the first to stand out"

    def _bad_gradient(self, consumed_samples: int, num_microbatches: int) -> str:
        """Runs the microbatches one by one, and names the first parameter that backward comes to.

        The gradients are spent: the update is left out.
        """
        for index in range(num_microbatches):
            if not math.isfinite(self._grad_norm(consumed_samples, index)):
                samples = self._samples(consumed_samples, index, range(self._topology.dp.size))
                name = self._first_bad_parameter()
                return f"first in the gradient of {name} in microbatch {index} {samples}"
        return "but in no microbatch alone: only in their sum, or not when it was computed again"

    def _grad_norm(self, consumed_samples: int, index: int) -> float:
        """Of microbatch `index` alone, on all replicas."""

        def load(_: int) -> Microbatch:
            return self._load(consumed_samples, index)

        self._optimizer.begin(1)
        self._pipeline.train_step(1, load)
        return self._optimizer.finish_gradients().item()

    def _first_bad_parameter(self) -> str:
        """The bad parameter nearest to the loss, over all ranks, in words."""
        bad = set(self._optimizer.bad_gradients())
        mine = [
            (_depth(name), place, name)
            for stage in self._stages
            for place, (name, _) in enumerate(stage.named_parameters())
            if name in bad
        ]
        found: list[tuple[tuple[int, int], int, str] | None] = [None] * self._topology.world_size
        dist.all_gather_object(found, max(mine, default=None))
        deepest = max((each for each in found if each is not None), default=None)
        return "all parameters together" if deepest is None else deepest[-1]

    def _name(self, row: int) -> str:
        return list(self._rows)[row]

    def _place(self, column: int, consumed_samples: int) -> str:
        """A microbatch in words, by its column."""
        index, dp_rank = divmod(column, self._topology.dp.size)
        rank = f" of data-parallel rank {dp_rank}" if self._topology.dp.size > 1 else ""
        samples = self._samples(consumed_samples, index, range(dp_rank, dp_rank + 1))
        return f"in microbatch {index}{rank} {samples}"

    def _samples(self, consumed_samples: int, index: int, dp_ranks: range) -> str:
        """The numbers of the samples of microbatch `index` on these replicas, which follow one another."""
        first, last = (
            microbatch_samples(
                consumed_samples, index, self._micro_batch_size, dp_rank, self._topology.dp.size
            )
            for dp_rank in (dp_ranks[0], dp_ranks[-1])
        )
        return f"(sample {first[0]})" if first[0] == last[-1] else f"(samples {first[0]} to {last[-1]})"


_SAMPLE_NUMBERS = 2
"""Place of the samples' numbers among a stage's arguments."""


def _parts(num_layers: int) -> list[str]:
    """Modules whose outputs are watched, by their names in the whole model, and the loss."""
    blocks = ("attention_norm", "attention", "mlp_norm", "mlp")
    layers = [f"layers.{layer}.{block}" for layer in range(num_layers) for block in blocks]
    return ["embedding", *layers, "final_norm", "loss"]


def _depth(name: str) -> tuple[int, int]:
    """A parameter's way from the input: what backward comes to first is deepest."""
    words = name.split(".")
    if words[0] == "layers":
        return 1, int(words[1])
    return (0, 0) if words[0] == "embedding" else (2, 0)
