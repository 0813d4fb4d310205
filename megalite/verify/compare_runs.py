"""Run a config in different layouts, compare the runs, and report the differences."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor

from megalite.config import Config, ParallelConfig
from megalite.model.routing_record import RoutingRecord, largest_gap
from megalite.train.own_model import record_verified
from megalite.train.run_context import Providers
from megalite.utils.errors import ConfigError, UserError
from megalite.utils.log import ProgressLine, log
from megalite.verify.bisect import Location, locate_difference
from megalite.verify.compare_traces import magnitude
from megalite.verify.first_difference import SMALLEST, is_only_rounding
from megalite.verify.layouts import Layout, common_batch_size
from megalite.verify.record_run import RunRecord, SaveChain, record_run


@dataclass(frozen=True)
class Tolerance:
    """Largest relative differences that the order of floating-point sums can explain."""

    loss: float
    grad_norm: float
    gradient: float
    weight: float


TOLERANCES = {
    "fp64": Tolerance(loss=1e-11, grad_norm=1e-9, gradient=1e-9, weight=1e-9),
    "fp32": Tolerance(loss=1e-5, grad_norm=1e-4, gradient=1e-3, weight=math.inf),
    "fp16": Tolerance(loss=1e-3, grad_norm=math.inf, gradient=0.05, weight=math.inf),
    "bf16": Tolerance(loss=2e-3, grad_norm=math.inf, gradient=0.1, weight=math.inf),
}
"""Tolerances by params_dtype.

In fp32 and below there is no bound for the weights. If a gradient is as small as its rounding error, Adam
divides it by an equally small value, and the weight moves by the learning rate in a random direction. fp64 is
the proof. In 16 bits, runs diverge over time, so only the first gradient and the loss are compared.
"""


@dataclass(frozen=True)
class RunComparison:
    """Largest relative differences between the run of a layout and the reference.

    Attributes:
        terms: differences of each iteration, by term of the loss.
        gradients: differences by parameter, relative to the largest magnitude of the reference tensor, but at
            least to `SMALLEST` times the largest gradient.
        weights: differences by name, relative to the largest magnitude of the reference tensor, or of all
            weights if the weight's gradient is only rounding (`is_only_rounding`).
        evaluation: differences of the means of an evaluation, by term.
        expert_use: differences of the routers' figures in the last iteration.
        num_before: iterations before the first compared one.
        num_rerouted: number of tokens that went to the reference's experts instead of their own.
        rerouted_gap: largest difference of the scores of these experts.
    """

    terms: Mapping[str, Sequence[float]]
    grad_norm: float
    gradients: Mapping[str, float]
    weights: Mapping[str, float]
    num_rerouted: int = 0
    rerouted_gap: float = 0.0
    evaluation: Mapping[str, float] = field(default_factory=dict)
    expert_use: Mapping[str, float] = field(default_factory=dict)
    num_before: int = 0

    @property
    def loss(self) -> float:
        """Return the largest difference of a term in an iteration."""
        return max((value for values in self.terms.values() for value in values), key=_nan_first)

    def worst(self, tensors: Mapping[str, float], count: int = 1) -> list[tuple[str, float]]:
        """Return the `count` parameters that differ most, with their differences."""
        return sorted(tensors.items(), key=lambda pair: _nan_first(pair[1]), reverse=True)[:count]

    def excesses(self, tolerance: Tolerance) -> list[str]:
        """Describe each difference above its tolerance; empty if the runs are the same."""
        checks = [
            *(
                (f"{name} of the evaluation", value, tolerance.loss)
                for name, value in self.evaluation.items()
            ),
            *((name, value, tolerance.weight) for name, value in self.worst(self.expert_use)),
        ]
        return self.training_excesses(tolerance) + _excesses(checks)

    def training_excesses(self, tolerance: Tolerance) -> list[str]:
        """Describe the differences of losses, gradients and weights, which a trace can locate."""
        gradients, weights = self.worst(self.gradients), self.worst(self.weights)
        checks = [
            *(self._first_excess(name, tolerance.loss) for name in self.terms),
            ("gradient norm", self.grad_norm, tolerance.grad_norm),
            *((f"gradient of {name}", value, tolerance.gradient) for name, value in gradients),
            *((f"weight {name}", value, tolerance.weight) for name, value in weights),
            (
                f"a score at which {self.num_rerouted} tokens change experts",
                self.rerouted_gap,
                tolerance.gradient,
            ),
        ]
        return _excesses(checks)

    def _first_excess(self, name: str, limit: float) -> tuple[str, float, float]:
        """Return the check of a term in the first iteration that exceeds the limit, or in the last one."""
        values = self.terms[name]
        found = next((i for i, value in enumerate(values) if not value <= limit), len(values) - 1)
        return f"{name} of iteration {self.num_before + found + 1}", values[found], limit


def _excesses(checks: Sequence[tuple[str, float, float]]) -> list[str]:
    """Describe the differences above their limits, of checks that are a name, a difference and a limit."""
    return [
        f"{name} differs by {value:.1e}, over {limit:.0e}"
        for name, value, limit in checks
        if not value <= limit
    ]


def compare(run: RunRecord, reference: RunRecord) -> RunComparison:
    """Compare a run with the reference. Both must have the same parameters, as full tensors.

    Of a run that was resumed, the iterations since then are compared, and no first gradients.
    """
    since = run.num_before
    assert run.weights.keys() == reference.weights.keys()
    magnitudes = {name: magnitude(full) for name, full in reference.gradients.items()}
    largest = max(magnitudes.values(), default=0.0)
    rounded = {name for name, each in magnitudes.items() if is_only_rounding(each, largest)}
    largest_weight = max(map(magnitude, reference.weights.values()), default=0.0)
    return RunComparison(
        terms=_term_differences(run.terms, reference.terms[since:]),
        grad_norm=max(_relative(run.grad_norms, reference.grad_norms[since:]), key=_nan_first),
        gradients={
            name: _difference(run.gradients[name], full, SMALLEST * largest)
            for name, full in reference.gradients.items()
            if since == 0
        },
        weights={
            name: _difference(
                run.weights[name], full, largest_weight if name.removeprefix("ema.") in rounded else 0.0
            )
            for name, full in reference.weights.items()
        },
        num_rerouted=len(run.rerouted),
        rerouted_gap=largest_gap(run.rerouted),
        evaluation=_figure_differences(run.evaluation, reference.evaluation),
        expert_use=_figure_differences(run.expert_use, reference.expert_use),
        num_before=since,
    )


def _term_differences(
    terms: Sequence[Mapping[str, float]], reference: Sequence[Mapping[str, float]]
) -> dict[str, list[float]]:
    """Return the differences by term; NaN for a term that one of the runs does not have.

    An iteration that --iterations-to-skip excludes has no terms, and does not differ.
    """
    names = dict.fromkeys(name for each in (*reference, *terms) for name in each)
    values = {
        name: [[each.get(name, math.nan if each else 0.0) for each in run] for run in (terms, reference)]
        for name in names
    }
    return {name: _relative(*both) for name, both in values.items()}


def _figure_differences(figures: Mapping[str, float], reference: Mapping[str, float]) -> dict[str, float]:
    """Return the differences by name; NaN for a figure that one of the runs does not have."""
    return {name: value for name, (value,) in _term_differences([figures], [reference]).items()}


def _relative(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    return [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(values, reference, strict=True)]


def _difference(tensor: Tensor, reference: Tensor, smallest: float = 0.0) -> float:
    scale = reference.abs().max().clamp_min(max(smallest, 1e-30))
    return ((tensor - reference).abs().max() / scale).item()


def _nan_first(value: float) -> float:
    """Return a key that sorts NaN above all numbers: a run with NaN is not the same run."""
    return math.inf if math.isnan(value) else value


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
        num_iterations: number of iterations of each run.
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
    optimizer = dataclasses.replace(config.optimizer, loss_scale=FP16_LOSS_SCALE)
    return dataclasses.replace(config, optimizer=optimizer)


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
