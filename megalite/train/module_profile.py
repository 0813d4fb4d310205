"""The forward pass taken apart: what each kind of module costs, in parameters, operations and time."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from megalite.log import THIS_RANK, log
from megalite.model.compiled import run_as_written
from megalite.train.trainer import Trainer

PASSES = 3
"""Timed passes over one microbatch, of which the median is told; one before them counts and warms up."""
_LAYER = re.compile(r"^layers\.\d+")


@dataclass
class Row:
    """All modules of one name, layers taken together.

    Attributes:
        name: as parameters have it, with ``layers.*`` for each layer; empty for all of the rank.
        flops: of the forward of one microbatch, of matrix products and attention.
        seconds: of each timed pass.
    """

    name: str
    num_modules: int = 0
    num_parameters: int = 0
    flops: int = 0
    seconds: list[float] = field(default_factory=lambda: [0.0] * PASSES)

    @property
    def latency(self) -> float:
        return statistics.median(self.seconds)


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Of the product of a CPU, by its arguments' shapes: torch has a formula for those of a GPU alone."""
    return sdpa_flop_count(query, key, value)


_CPU_ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}


def log_module_profile(trainer: Trainer) -> None:
    """Tells of the forward of one microbatch, one rank for each pipeline stage; every rank calls it.

    It is an evaluation of what the next iteration trains on, which changes nothing.
    """
    topology, iteration = trainer.topology, trainer.progress.iteration + 1
    rows = profile_modules(trainer)
    if topology.tp.is_first and topology.dp.is_first:
        log.info("%s", "\n".join(_table(rows, iteration, topology.rank)), extra=THIS_RANK)


def profile_modules(trainer: Trainer) -> list[Row]:
    """The rows of this rank's modules, each one's before those that it is made of; every rank calls it."""
    with run_as_written(trainer.config.training.compile):
        return _profiled(trainer)


def _profiled(trainer: Trainer) -> list[Row]:
    rows: dict[str, Row] = {}
    for chunk in trainer.chunks:
        chunk.train()
        for name, module in chunk.named_modules():
            row = rows.setdefault(_grouped(name), Row(_grouped(name)))
            row.num_modules += 1
            row.num_parameters += sum(parameter.numel() for parameter in module.parameters())
    load = partial(trainer.train_step.load, trainer.progress.consumed_samples)
    with FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION) as counter:

        def add_flops(row: Row, before: float, after: float) -> None:
            row.flops += int(after - before)

        with _read_around(trainer.chunks, rows, counter.get_total_flops, add_flops):
            trainer.pipeline.evaluate(1, load)
    for number in range(PASSES):

        def add_seconds(row: Row, before: float, after: float, number: int = number) -> None:
            row.seconds[number] += after - before

        with _read_around(trainer.chunks, rows, _clock(trainer.topology.device), add_seconds):
            trainer.pipeline.evaluate(1, load)
    return list(rows.values())


def _grouped(name: str) -> str:
    return _LAYER.sub("layers.*", name)


def _clock(device: torch.device) -> Callable[[], float]:
    """Seconds, once the device has done what it was told."""
    if device.type != "cuda":
        return time.perf_counter

    def read() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return read


@contextmanager
def _read_around(
    chunks: Sequence[nn.Module],
    rows: dict[str, Row],
    read: Callable[[], float],
    add: Callable[[Row, float, float], None],
) -> Iterator[None]:
    """Reads a figure before and after each module's forward in this block."""
    begun: list[float] = []

    def begin(*_: Any) -> None:
        begun.append(read())

    def end(row: Row, *_: Any) -> None:
        add(row, begun.pop(), read())

    handles = []
    for chunk in chunks:
        for name, module in chunk.named_modules():
            handles.append(module.register_forward_pre_hook(begin))
            handles.append(module.register_forward_hook(partial(end, rows[_grouped(name)])))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _table(rows: Sequence[Row], iteration: int, rank: int) -> Iterator[str]:
    whole = rows[0]
    yield f"modules of rank {rank} before iteration {iteration}, in the forward pass of one microbatch:"
    yield (
        f"  {'module':<36}{'number':>7}{'parameters':>16}{'GFLOP':>12}{'share':>8}{'ms':>11}{'share':>8}"
        f"{'TFLOP/s':>10}"
    )
    called = [row for row in rows if row.latency > 0.0]  # a list of modules has no forward
    for row in called:
        yield _line("  " * _depth(row) + (row.name or "all"), row, whole)
    yield _line("  in none of these", _rest(called), whole)
    yield (
        "  GFLOP are of matrix products and attention, causal attention counted whole; times are medians of "
        f"{PASSES} passes, with a wait for the device around each module"
    )


def _depth(row: Row) -> int:
    """How many modules a row's lie in; the list of layers is none."""
    return len(row.name.removeprefix("layers.").split(".")) if row.name else 0


def _rest(rows: Sequence[Row]) -> Row:
    """What the whole does outside of its parts: the logits and the loss."""
    whole, *others = rows
    parts = [row for row in others if _depth(row) == 1]
    rest = Row("", 1, 0, whole.flops - sum(row.flops for row in parts))
    rest.seconds = [
        seconds - sum(row.seconds[number] for row in parts) for number, seconds in enumerate(whole.seconds)
    ]
    return rest


def _line(name: str, row: Row, whole: Row) -> str:
    return (
        f"  {name:<36}{row.num_modules:>7}{row.num_parameters:>16,}"
        f"{row.flops / 1e9:>12.3f}{_share(row.flops, whole.flops):>8}"
        f"{row.latency * 1e3:>11.3f}{_share(row.latency, whole.latency):>8}"
        f"{row.flops / row.latency / 1e12:>10.3f}"
    )


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"
