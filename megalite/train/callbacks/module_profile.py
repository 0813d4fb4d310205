"""Report the costs of modules in tables: operations and times, memory, and memory of each layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from megalite.config import LoggingConfig
from megalite.distributed.topology import Topology
from megalite.train.loop import Callback, TrainingLoop
from megalite.train.module_costs import NUM_TIMED, ModuleCosts, Phase, module_costs
from megalite.train.trainer import Trainer
from megalite.utils.errors import UserError
from megalite.utils.files import make_writable, replace_file
from megalite.utils.log import THIS_RANK, log

_LAYER = re.compile(r"^layers\.\d+")
_REST = "outside submodules"
_STATE = ("weights", "gradients", "optimizer")


class ModuleProfile(Callback):
    """Log of the modules' costs before iteration --profile-modules."""

    def on_start(self, loop: TrainingLoop) -> None:
        config, topology = loop.trainer.config.logging, loop.trainer.topology
        if config.profile_modules_file is not None:
            with topology.agreed():
                check_file(file_of_rank(config.profile_modules_file, topology))

    def needs_boundary(self, loop: TrainingLoop, iteration: int) -> bool:
        return iteration + 1 == loop.trainer.config.logging.profile_modules

    def before_step(self, loop: TrainingLoop) -> None:
        if loop.next_iteration == loop.trainer.config.logging.profile_modules:
            log_module_profile(loop.trainer)


def file_of_rank(path: str, topology: Topology) -> Path:
    """Return the --profile-modules-file of a pipeline rank: ranks after the first add their number."""
    file = Path(path)
    return file if topology.pp.is_first else file.with_stem(f"{file.stem}_rank{topology.rank}")


def check_file(file: Path) -> None:
    """Check that a file can be written.

    Raises:
        UserError: it cannot.
    """
    make_writable(file.parent, "--profile-modules-file in")
    if file.is_dir():
        raise UserError(f"--profile-modules-file {file} is a folder: pass the name of a file")


def log_module_profile(trainer: Trainer) -> None:
    """Log the costs of one microbatch on one rank of each pipeline stage, and write its file; a collective.

    It runs a microbatch of the next iteration, without changing the run's state.
    """
    costs, topology = module_costs(trainer), trainer.topology
    if not topology.is_first_outside(topology.pp):
        return
    config = trainer.config.logging
    text = "\n".join(profile_tables(costs, title(trainer), config))
    log.info("%s", text, extra=THIS_RANK)
    if config.profile_modules_file is not None:
        file = file_of_rank(config.profile_modules_file, topology)
        try:
            with replace_file(file) as stream:
                stream.write(f"{text}\n".encode())
        except OSError as error:
            text = "--profile-modules-file %s cannot be written (%s): training continues without it"
            log.warning(text, file, error.strerror, extra=THIS_RANK)


def title(trainer: Trainer) -> str:
    """Return the line above the tables."""
    rank, iteration = trainer.topology.rank, trainer.progress.iteration + 1
    plan = trainer.train_step.plan_iteration(trainer.progress)
    size, length = trainer.config.training.micro_batch_size * plan.sequences_per_sample, plan.seq_length
    return (
        f"modules of rank {rank} before iteration {iteration}, in one microbatch of {size} x {length} tokens:"
    )


def profile_tables(costs: Mapping[str, ModuleCosts], first_line: str, config: LoggingConfig) -> Iterator[str]:
    """Yield the lines of all tables.

    Args:
        costs: costs of each module; see `module_costs`.
        config: how deep the tables go, and how many submodules of a module they show.
    """
    rows = _grouped(costs)
    yield first_line
    yield from _computation(rows, config)
    yield ""
    yield from _memory(rows, config)
    yield ""
    yield from _memory_by_layer(costs, rows)


def _grouped(costs: Mapping[str, ModuleCosts]) -> list[ModuleCosts]:
    """Sum the costs of modules with the same name in all layers: `layers.*.mlp` has all their MLPs."""
    rows: dict[str, ModuleCosts] = {}
    for name, each in costs.items():
        if name != "layers":  # a list without a forward; `layers.*` has the same costs
            group = _LAYER.sub("layers.*", name)
            rows.setdefault(group, ModuleCosts(group, num_modules=0)).add(each)
    return list(rows.values())


def _depth(row: ModuleCosts) -> int:
    """Return the nesting depth of a row's modules; the list of layers does not count."""
    return len(row.name.removeprefix("layers.").split(".")) if row.name else 0


def _parent(row: ModuleCosts) -> str:
    return row.name.rpartition(".")[0].removesuffix("layers")


def _shown(
    rows: Sequence[ModuleCosts], cost: Callable[[ModuleCosts], float], config: LoggingConfig
) -> Iterator[ModuleCosts]:
    """Yield the rows within the depth, and of each shown module the submodules that cost most."""
    whole, *others = rows
    kept, depth, top = {""}, config.profile_modules_depth, config.profile_modules_top
    yield whole
    for row in others:
        siblings = sorted((each for each in others if _parent(each) == _parent(row)), key=cost, reverse=True)
        is_expensive = row.name in [each.name for each in siblings[:top]]
        is_deep = depth is not None and _depth(row) > depth
        if _parent(row) in kept and is_expensive and not is_deep:
            kept.add(row.name)
            yield row


def _outside(rows: Sequence[ModuleCosts]) -> ModuleCosts:
    """Return the costs of the whole minus the costs of its parts: the logits and the loss."""
    rest = ModuleCosts(_REST)
    rest.add(rows[0])
    for row in rows:
        if _depth(row) == 1:
            rest.add(row, -1)
    return rest


def _computation(rows: Sequence[ModuleCosts], config: LoggingConfig) -> Iterator[str]:
    whole = rows[0]
    yield f"  {'':<59}{'GMAC':>27}{'ms':>33}"
    phases = "".join(f"{phase.value:>11}" for phase in Phase)
    yield f"  {'module':<36}{'number':>7}{'parameters':>16}{phases}{phases}{'share':>8}{'TFLOP/s':>9}"
    called = [row for row in rows if row.latency() > 0.0]  # some modules have no forward of their own
    for row in (*_shown(called, ModuleCosts.latency, config), _outside(called)):
        seconds = row.latency()
        macs = "".join(f"{_number(row.flops[phase] / 2e9):>11}" for phase in Phase)
        times = "".join(f"{_number(row.latency(phase) * 1e3):>11}" for phase in Phase)
        rate = _number(sum(row.flops.values()) / seconds / 1e12 if seconds > 0.0 else 0.0)
        number = "" if row.name == _REST else f"{row.num_modules:>7}{row.num_parameters:>16,}"
        yield f"  {_label(row):<36}{number:<23}{macs}{times}{seconds / whole.latency():>8.1%}{rate:>9}"
    yield (
        "  GMAC: 10^9 multiply-adds (two FLOPs each) of GEMMs and attention; backward: without what it "
        "recomputes;"
    )
    yield (
        f"  times: medians of {NUM_TIMED} microbatches, with a device synchronization before and after each "
        "operation"
    )


def _memory(rows: Sequence[ModuleCosts], config: LoggingConfig) -> Iterator[str]:
    yield _memory_header("module")
    for row in (*_shown(rows, _num_bytes, config), _outside(rows)):
        if _num_bytes(row):
            yield _memory_line(_label(row), row)
    yield (
        "  activations: what forward of one microbatch leaves in memory for backward, where it was made; the "
        "rest: this rank's, without padding"
    )


def _memory_by_layer(costs: Mapping[str, ModuleCosts], rows: Sequence[ModuleCosts]) -> Iterator[str]:
    """Yield the memory of each layer, with one line for consecutive equal layers, and of the rest."""
    yield _memory_header("layer")
    layers = [each for name, each in costs.items() if _LAYER.fullmatch(name)]
    parts = [row for row in rows if _depth(row) == 1 and row.name != "layers.*"]
    first = [row for row in parts if row.name == "embedding"]
    for each in first:
        yield _memory_line(each.name, each)
    for _, group in groupby(layers, key=lambda each: (each.state_bytes, each.activation_bytes)):
        equal = list(group)
        others = f" to {equal[-1].name}, each" if len(equal) > 1 else ""
        yield _memory_line(f"{equal[0].name}{others}", equal[0])
    for each in (*(part for part in parts if part not in first), _outside(rows)):
        if _num_bytes(each):
            yield _memory_line(each.name, each)


def _num_bytes(row: ModuleCosts) -> float:
    return sum(row.state_bytes.values()) + row.activation_bytes


def _memory_header(what: str) -> str:
    columns = "".join(f"{name:>13}" for name in (*_STATE, "activations"))
    return f"  {what + ' (MB)':<36}{columns}"


def _memory_line(label: str, row: ModuleCosts) -> str:
    sizes = (*(row.state_bytes[name] for name in _STATE), row.activation_bytes)
    return f"  {label:<36}" + "".join(f"{_number(size / 1e6):>13}" for size in sizes)


def _label(row: ModuleCosts) -> str:
    if row.name == _REST:
        return f"  {_REST}"
    return "  " * _depth(row) + (row.name or "all")


def _number(number: float) -> str:
    """Return three decimals, or three digits of a number below 1."""
    return f"{number:.3f}" if abs(number) >= 1.0 else f"{number:.3g}"
