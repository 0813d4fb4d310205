"""Verify layouts: run a config in each and on one rank, log the differences, and trace the first one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from megalite.config import Config, ParallelConfig, check_config
from megalite.config.fields import with_fields
from megalite.distributed.local_ranks import RankError
from megalite.model.routing_record import RoutingRecord
from megalite.observe.verify.compare_runs import TOLERANCES, RunComparison, Tolerance, compare
from megalite.observe.verify.first_difference import FirstDifference, first_difference
from megalite.observe.verify.layouts import Layout, common_batch_size
from megalite.observe.verify.record_run import RunRecord, SaveChain, record_run
from megalite.observe.verify.trace_run import RankTrace, trace_run
from megalite.train.own_model import record_verified
from megalite.train.run_context import Providers
from megalite.utils.errors import ConfigError, UserError
from megalite.utils.log import ProgressLine, log

FP16_LOSS_SCALE = 4096.0
"""Replaces a dynamic loss scale, whose first iterations overflow and cannot be compared."""

MAX_TRACED = 3
"""Number of layouts that a verification traces if they differ; most often one mistake is in all."""

_ROW = "{:<{width}} {:>6} {:>10} {:>10} {:>10} {:<42} {}"


def verify_layouts(
    config: Config,
    layouts: Sequence[Layout],
    num_iterations: int = 5,
    num_worst: int = 1,
    providers: Providers | None = None,
    *,
    replays_routing: bool = False,
    is_quick: bool = False,
) -> bool:
    """Run the config in each layout and on one rank, and log their differences.

    Each run evaluates and saves, and the next layout resumes what the one before has saved; one rank resumes
    the last one. If a layout trains another run, both are traced to find the first tensor that differs.

    Args:
        num_worst: number of parameters to show for each layout, those with the largest gradient differences.
        providers: providers of a custom model and datasets; by default the config determines them.
        replays_routing: send tokens to the experts of the run on one rank. Layouts are then not traced.
        is_quick: only train: do not evaluate, save and resume.

    Returns:
        True if every layout trains the same run, up to the order of floating-point sums.

    Raises:
        ConfigError: the config cannot run in some layouts. It is raised before anything runs, and names them
            all.
        UserError: the config cannot run in any layout.
    """
    alone, *configs = _configs_of(config, layouts)
    row = _logged_head(alone, layouts, num_iterations)
    routing = RoutingRecord() if replays_routing else None

    def record(run: Config, world_size: int) -> RunRecord:
        return record_run(run, num_iterations, world_size, providers, routing, is_quick=is_quick)

    with TemporaryDirectory(prefix="megalite-verify-") as folder:
        chain = SaveChain(None if is_quick or num_iterations == 1 else Path(folder), record)
        found = _log_comparisons(chain, alone, list(zip(layouts, configs, strict=True)), row, num_worst)
    if providers is not None and config.model.params_dtype in ("fp64", "fp32"):  # 16 bits prove little
        record_verified(providers.model, found.same)
    if not replays_routing:
        _log_first_differences(found.different, alone, num_iterations, providers)
    return _log_verdict(found.num_other, found.num_refused)


@dataclass
class _Verified:
    """Results of a verification.

    Attributes:
        different: the layouts that train another run.
        num_other: number of layouts in which anything differs.
    """

    same: list[ParallelConfig] = field(default_factory=list)
    different: list[tuple[Layout, Config]] = field(default_factory=list)
    num_other: int = 0
    num_refused: int = 0


def _log_comparisons(
    chain: SaveChain,
    alone: Config,
    layouts: Sequence[tuple[Layout, Config]],
    row: Callable[..., str],
    num_worst: int,
) -> _Verified:
    """Compare each layout with one rank, and log a row for it."""
    found, tolerance = _Verified(), TOLERANCES[alone.model.params_dtype]
    num_runs = 1 + len(layouts)
    with _shown(f"run 1 of {num_runs}: one rank"):
        reference, _ = chain.run("one rank", alone, 1)
    for number, (layout, applied) in enumerate(layouts, 2):
        before = chain.last
        try:
            with _shown(f"run {number} of {num_runs}: {layout}"):
                run, resumed = chain.run(str(layout), applied, layout.world_size)
        except UserError as error:  # for example, an option that a custom model does not support
            log.info(row(str(layout), layout.world_size, "", "", "", "", f"cannot run: {error}"))
            found.num_refused += 1
            if found.num_refused == len(layouts):
                raise
            continue
        comparison = compare(run, reference)
        excesses = comparison.excesses(tolerance) + resumed_excesses(before, resumed, reference, tolerance)
        if comparison.training_excesses(tolerance):
            found.different.append((layout, applied))
        if excesses:
            found.num_other += 1
        else:
            found.same.append(applied.parallel)
        verdict = "; ".join(excesses) or "the same run" + _rerouting(comparison, reference.routing)
        _log_rows(row, layout, comparison, verdict, num_worst)
    before, resumed = chain.last, chain.resume(alone, 1)
    if excesses := resumed_excesses(before, resumed, reference, tolerance):
        found.num_other += 1
        log.info(row("one rank", 1, "", "", "", "", "; ".join(excesses)))
    return found


def resumed_excesses(
    saved_by: str, resumed: RunRecord | str | None, reference: RunRecord, tolerance: Tolerance
) -> list[str]:
    """Describe what differs after a resume, of a save by the layout `saved_by`; see `SaveChain.resume`."""
    if resumed is None:
        return []
    if isinstance(resumed, str):
        return [f"resumed from {saved_by}: {resumed}"]
    found = compare(resumed, reference).excesses(tolerance)
    return [f"resumed from {saved_by}: {', '.join(found)}"] * bool(found)


@contextmanager
def _shown(what: str) -> Iterator[None]:
    """Show on a terminal which run goes on in the block."""
    with ProgressLine(seconds_between=0.0) as show:
        show(what)
        yield


def _rerouting(comparison: RunComparison, routing: RoutingRecord | None) -> str:
    """Describe the tokens that went to the reference's experts instead of their own; empty if none did."""
    if routing is None or not comparison.num_rerouted:
        return ""
    return (
        f", with the experts of one rank for {comparison.num_rerouted} of {routing.num_tokens} tokens, whose "
        f"scores are {comparison.rerouted_gap:.1e} apart"
    )


def bisect_layouts(
    config: Config, layouts: Sequence[Layout], num_iterations: int = 5, providers: Providers | None = None
) -> bool:
    """Trace the config in each layout and on one rank, and log in which tensor they first differ.

    Arguments, result and errors are as in `verify_layouts`.
    """
    alone, *configs = _configs_of(config, layouts)
    is_same = True
    for layout, applied in zip(layouts, configs, strict=True):
        location = locate_difference(applied, alone, layout.world_size, num_iterations, providers)
        _log_location(layout, location)
        is_same &= location.is_same
    return is_same


def _log_first_differences(
    different: Sequence[tuple[Layout, Config]],
    alone: Config,
    num_iterations: int,
    providers: Providers | None,
) -> None:
    for layout, applied in different[:MAX_TRACED]:
        _log_location(layout, locate_difference(applied, alone, layout.world_size, num_iterations, providers))
    if different[MAX_TRACED:]:
        names = ",".join(str(layout) for layout, _ in different[MAX_TRACED:])
        log.info("not traced: %s; verify these alone to trace them", names)


def _log_location(layout: Layout, location: Location) -> None:
    for number, line in enumerate(location.text.splitlines()):
        log.info("%s%s", f"{layout}: " if number == 0 else "", line)


def _log_verdict(num_other: int, num_refused: int) -> bool:
    """Log the verdict on all layouts; return whether all that can run train the same run."""
    if num_other > 0:
        log.info("NOT the same run: see the rows above")
    elif num_refused:
        log.info("every layout that can run trains the same run; %d cannot", num_refused)
    else:
        log.info("every layout trains the same run")
    return num_other == 0


def _configs_of(config: Config, layouts: Sequence[Layout]) -> list[Config]:
    """Return the config of the run on one rank, and in each layout; see `verify_layouts`."""
    if config.parallel.layout == "auto":
        raise UserError("--layout auto chooses no layout here, where layouts are compared: remove it")
    global_batch_size = common_batch_size(config, layouts)
    return _applied(with_constant_loss_scale(config), (Layout(), *layouts), global_batch_size)


def _applied(config: Config, layouts: Sequence[Layout], global_batch_size: int) -> list[Config]:
    """Return the config of each layout, or raise one error with the problems of all layouts."""
    configs, problems = [], []
    for layout in layouts:
        try:
            configs.append(layout.apply(config, global_batch_size))
        except ConfigError as error:
            problems += [f"layout {layout}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return configs


def with_constant_loss_scale(config: Config) -> Config:
    """Replace a dynamic loss scale with a constant that keeps gradients finite from the first iteration."""
    if config.model.params_dtype != "fp16" or config.optimizer.loss_scale is not None:
        return config
    log.info("all runs use the loss scale %g, because a dynamic one begins with overflows", FP16_LOSS_SCALE)
    return with_fields(config, loss_scale=FP16_LOSS_SCALE)


def _logged_head(alone: Config, layouts: Sequence[Layout], num_iterations: int) -> Callable[..., str]:
    """Log the head of the table, and return the function that formats its rows."""
    log.info(
        "%d iterations of %d samples in %s against one rank, which runs first; differences are relative",
        num_iterations,
        alone.training.global_batch_size,
        alone.model.params_dtype,
    )
    row = partial(_ROW.format, width=max(14, *(len(str(layout)) for layout in layouts)))
    log.info(row("layout", "ranks", "loss", "grad norm", "gradient", "of parameter", "verdict"))
    return row


def _log_rows(
    row: Callable[..., str], layout: Layout, comparison: RunComparison, verdict: str, num_worst: int
) -> None:
    worst = comparison.worst(comparison.gradients, num_worst)
    loss, norm = f"{comparison.loss:.1e}", f"{comparison.grad_norm:.1e}"
    for i, (name, gradient) in enumerate(worst):
        cells = (str(layout), layout.world_size, loss, norm) if i == 0 else ("", "", "", "")
        log.info(row(*cells, f"{gradient:.1e}", name, verdict if i == 0 else "").rstrip())


Trace = Callable[[Config, int, int, int, Providers | None], list[RankTrace]]
"""Traces an iteration of a config on some ranks, like `trace_run`."""


class Location(NamedTuple):
    """Result of a bisection.

    Attributes:
        difference: the first difference; None if there is none, or if it does not come from the layout.
        text: its report, or the reason why there is none.
        is_same: whether all traced iterations agree.
    """

    difference: FirstDifference | None
    text: str
    is_same: bool = False


def locate_difference(
    config: Config,
    reference: Config,
    world_size: int,
    num_iterations: int,
    providers: Providers | None = None,
    trace: Trace = trace_run,
) -> Location:
    """Trace a layout and one rank until an iteration differs, in fp64 if the model can run in it.

    Args:
        reference: config of the same run on one rank.
        world_size: number of ranks of the layout.

    Raises:
        UserError: the configs cannot run.
    """
    own_dtype = config.model.params_dtype
    note = ""
    if own_dtype != "fp64":
        try:
            wide, alone = (with_fields(each, params_dtype="fp64") for each in (config, reference))
            for each, num_ranks in ((wide, world_size), (alone, 1)):
                check_config(each, num_ranks)
            found = _trace_until_different(wide, alone, world_size, num_iterations, providers, trace)
            if not found.is_same:
                return found._replace(text=f"{found.text}\n  this is in fp64")
            note = f"{found.text}; this is in {own_dtype}"
        except (UserError, RankError) as error:
            reason = str(error).strip().splitlines()[-1]
            note = f"this is in {own_dtype}, because the run is not possible in fp64: {reason}"
    found = _trace_until_different(config, reference, world_size, num_iterations, providers, trace)
    return found._replace(text=f"{found.text}\n  {note}") if note else found


def _trace_until_different(
    config: Config,
    reference: Config,
    world_size: int,
    num_iterations: int,
    providers: Providers | None,
    trace: Trace,
) -> Location:
    # A graph does not call the hooks of its modules.
    config, reference = (with_fields(each, compile=False) for each in (config, reference))
    dtype = config.model.params_dtype
    num_unplaced = 0
    for iteration in range(1, num_iterations + 1):
        (alone,) = trace(reference, 1, iteration, 0, providers)
        run = trace(config, world_size, iteration, 0, providers)
        found, num_unplaced = first_difference(run, alone, iteration, TOLERANCES[dtype])
        if found is None:
            continue
        again = trace(reference, 1, iteration, 1, providers)
        random, _ = first_difference(again, alone, iteration, TOLERANCES[dtype])
        if random is not None:
            return Location(
                None,
                f"no first difference: two runs of one rank differ in the {random.what}. The model draws "
                "random numbers of its own: use megalite.Dropout",
            )
        return Location(found, str(found))
    more = f"; {num_unplaced} tensors have no place in the model of one rank" if num_unplaced else ""
    return Location(None, f"no difference in {num_iterations} iterations in {dtype}{more}", is_same=True)
