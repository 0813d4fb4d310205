"""Measure the forward pass by module: parameters, operations and time."""

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

from megalite.distributed.observer import DEVICE
from megalite.distributed.topology import Topology
from megalite.log import THIS_RANK, log
from megalite.model.compiled import run_as_written
from megalite.train.loop import Callback, TrainingLoop
from megalite.train.trainer import Trainer

NUM_TIMED = 3
"""Timed forwards of one microbatch, whose median is logged; one before them counts FLOPs and warms up."""
_LAYER = re.compile(r"^layers\.\d+")


@dataclass
class ModuleRow:
    """The costs of all modules of one name, over all layers.

    Attributes:
        name: the module's, with ``layers.*`` for each layer; empty for the rank's whole part of the model.
        flops: of GEMMs and attention in the forward of one microbatch.
        seconds: of each timed forward.
    """

    name: str
    num_modules: int = 0
    num_parameters: int = 0
    flops: int = 0
    seconds: list[float] = field(default_factory=lambda: [0.0] * NUM_TIMED)

    @property
    def latency(self) -> float:
        return statistics.median(self.seconds)


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Count attention by its arguments' shapes: torch has formulas for its own kernels of GPUs only."""
    return sdpa_flop_count(query, key, value)


ATTENTION_FLOPS = dict.fromkeys(
    (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, torch.ops.megalite.flash_attention),
    _attention_flops,
)


class ModuleProfile(Callback):
    """Logs the modules' costs before iteration --profile-modules."""

    def before_step(self, loop: TrainingLoop) -> None:
        if loop.next_iteration == loop.trainer.config.logging.profile_modules:
            log_module_profile(loop.trainer)


def log_module_profile(trainer: Trainer) -> None:
    """Log the costs of one microbatch's forward, on one rank of each pipeline stage; a collective.

    It evaluates a microbatch of the next iteration, without changing the run's state.
    """
    topology, iteration = trainer.topology, trainer.progress.iteration + 1
    rows = profile_modules(trainer)
    if topology.tp.is_first and topology.dp.is_first:
        log.info("%s", "\n".join(_table(rows, iteration, topology.rank)), extra=THIS_RANK)


def profile_modules(trainer: Trainer) -> list[ModuleRow]:
    """Return the rows of this rank's modules, each before those of its submodules; a collective."""
    with run_as_written(trainer.config.training.compile):
        return _profiled(trainer)


def _profiled(trainer: Trainer) -> list[ModuleRow]:
    rows: dict[str, ModuleRow] = {}
    for chunk in trainer.chunks:
        chunk.train()
        for name, module in chunk.named_modules():
            row = rows.setdefault(_grouped(name), ModuleRow(_grouped(name)))
            row.num_modules += 1
            row.num_parameters += sum(parameter.numel() for parameter in module.parameters())
    load = partial(trainer.load_batch, trainer.progress.consumed_samples)
    with FlopCounterMode(display=False, custom_mapping=ATTENTION_FLOPS) as counter:

        def add_flops(row: ModuleRow, before: float, after: float) -> None:
            row.flops += int(after - before)

        with _read_around(trainer.chunks, rows, counter.get_total_flops, add_flops):
            trainer.pipeline.evaluate(1, load)
    for number in range(NUM_TIMED):

        def add_seconds(row: ModuleRow, before: float, after: float, number: int = number) -> None:
            row.seconds[number] += after - before

        with _read_around(trainer.chunks, rows, _clock(trainer.topology), add_seconds):
            trainer.pipeline.evaluate(1, load)
    return list(rows.values())


def _grouped(name: str) -> str:
    return _LAYER.sub("layers.*", name)


def _clock(topology: Topology) -> Callable[[], float]:
    """Return a clock that waits for the device."""
    if topology.device.type != "cuda":
        return time.perf_counter

    def read() -> float:
        with topology.events.during(DEVICE):
            torch.cuda.synchronize(topology.device)
        return time.perf_counter()

    return read


@contextmanager
def _read_around(
    chunks: Sequence[nn.Module],
    rows: dict[str, ModuleRow],
    read: Callable[[], float],
    add: Callable[[ModuleRow, float, float], None],
) -> Iterator[None]:
    """Read a counter before and after each module's forward in this block."""
    begun: list[float] = []

    def begin(*_: Any) -> None:
        begun.append(read())

    def end(row: ModuleRow, *_: Any) -> None:
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


def _table(rows: Sequence[ModuleRow], iteration: int, rank: int) -> Iterator[str]:
    whole = rows[0]
    yield f"modules of rank {rank} before iteration {iteration}, in the forward pass of one microbatch:"
    yield (
        f"  {'module':<36}{'number':>7}{'parameters':>16}{'GFLOP':>12}{'share':>8}{'ms':>11}{'share':>8}"
        f"{'TFLOP/s':>10}"
    )
    called = [row for row in rows if row.latency > 0.0]  # a list of modules has no forward
    for row in called:
        yield _line("  " * _depth(row) + (row.name or "all"), row, whole)
    yield _line("  outside these modules", _rest(called), whole)
    yield (
        "  GFLOP: GEMMs and attention, the full square of causal attention; times: medians of "
        f"{NUM_TIMED} forwards, with a device synchronization before and after each module"
    )


def _depth(row: ModuleRow) -> int:
    """Return the nesting depth of a row's modules; the list of layers does not count."""
    return len(row.name.removeprefix("layers.").split(".")) if row.name else 0


def _rest(rows: Sequence[ModuleRow]) -> ModuleRow:
    """Return the costs of the whole minus those of its parts: the logits and the loss."""
    whole, *others = rows
    parts = [row for row in others if _depth(row) == 1]
    rest = ModuleRow("", 1, 0, whole.flops - sum(row.flops for row in parts))
    rest.seconds = [
        seconds - sum(row.seconds[number] for row in parts) for number, seconds in enumerate(whole.seconds)
    ]
    return rest


def _line(name: str, row: ModuleRow, whole: ModuleRow) -> str:
    return (
        f"  {name:<36}{row.num_modules:>7}{row.num_parameters:>16,}"
        f"{row.flops / 1e9:>12.3f}{_share(row.flops, whole.flops):>8}"
        f"{row.latency * 1e3:>11.3f}{_share(row.latency, whole.latency):>8}"
        f"{row.flops / row.latency / 1e12:>10.3f}"
    )


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"
