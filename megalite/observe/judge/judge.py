"""Judge a program: run it in each layout from one start, compare each with one rank, and log what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.config import Config
from megalite.config.fields import with_fields
from megalite.data.microbatch import LM_LOSS
from megalite.distributed.axes import MeshOptions
from megalite.distributed.local_ranks import LocalRanks, RankError
from megalite.distributed.topology import Topology
from megalite.observe.judge.compare import (
    GRADIENT,
    WEIGHT,
    Deviations,
    ReferenceCheck,
    first_difference,
    largest,
    lines,
)
from megalite.observe.judge.program import ProgramFault
from megalite.observe.judge.rank_record import FullRecord, FullTensor, Task, join, record_rank
from megalite.observe.verify.layouts import Layout
from megalite.observe.verify.record_run import gather_buffers, gather_stage
from megalite.train.run_context import build_data, resolve_run
from megalite.train.trainer import Trainer
from megalite.utils.errors import UserError, few, first_line
from megalite.utils.log import ProgressLine, log

Tensors = dict[str, Tensor]


class OwnRun(NamedTuple):
    """Megalite's run on one rank.

    Attributes:
        start, weights: parameters and saved buffers, before the first iteration and after the last one.
        gradients: those of the first iteration, by parameter.
        samples: ``[iterations, global batch, sequence + 1]``.
        reports: figures of each iteration, by the names that adapters use.
    """

    start: Tensors
    samples: Tensor
    gradients: Tensors
    weights: Tensors
    reports: list[dict[str, float]]


def record_ours(topology: Topology, config: Config, num_iterations: int) -> OwnRun:
    """Train on this rank."""
    run = resolve_run(config, topology)
    gradients: Tensors = {}
    samples: list[Tensor] = []
    reports: list[dict[str, float]] = []
    with Trainer(run, build_data(run)) as trainer:

        def keep_gradients() -> None:
            if not gradients:
                gradients.update(gather_stage(trainer, trainer.optimizer.gradient))

        start = gather_stage(trainer, trainer.optimizer.weight) | gather_buffers(trainer)
        trainer.train_step.before_update.append(keep_gradients)
        for _ in range(num_iterations):
            samples.append(_samples(trainer))
            result = trainer.step()
            reports.append(
                {
                    "loss": result.losses[LM_LOSS],
                    "gradient norm": result.grad_norm,
                    "learning rate": result.plan.learning_rate,
                    **{name: value for name, value in result.losses.items() if name != LM_LOSS},
                }
            )
        trainer.optimizer.finish_weights()
        weights = gather_stage(trainer, trainer.optimizer.weight) | gather_buffers(trainer)
        return OwnRun(start, torch.stack(samples), gradients, weights, reports)


def _samples(trainer: Trainer) -> Tensor:
    first = trainer.progress.consumed_samples
    batches = [trainer.load_batch.load_for_replica(first, i, 0) for i in range(trainer.num_microbatches)]
    return torch.cat([torch.cat([each.tokens, each.labels[:, -1:]], dim=1) for each in batches])


FLOOR = 1e-11
"""Least tolerance, as a relative difference."""
ROUNDINGS = 10.0
"""Least tolerance in units in the last place of the weights' dtype."""
NUM_PERTURBED = 3
"""Number of runs of one rank from a start that is changed by rounding; they measure the tolerance."""
_BLURRED = 1e-4
"""Tolerance above which a quantity is named before the table."""
_TIMEOUT = 900.0
_NUMBERS = ("loss", "gradient norm")
_ROW = "{:<{width}} {:>5} {:>9} {:>9} {:>9}  {}"


@dataclass
class Verdict:
    """Results of a judgement, by layout; a resume is ``LAYOUT of the save -> LAYOUT``.

    Attributes:
        different: findings about the layouts that train another run.
        refused: why the others cannot run.
    """

    same: list[str] = field(default_factory=list)
    different: dict[str, list[str]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


class ProgramJudge:
    """Judge of a program, which runs it on ranks of this machine.

    Args:
        module: the adapter or the script.
        task: the program, its model and its options; `samples` and `start` are replaced if the adapter starts
            from megalite's model.
        folder: folder for checkpoints; None to judge none.
    """

    def __init__(self, module: ModuleType, task: Task, ranks: LocalRanks, folder: Path | None) -> None:
        self._module = module
        self._task = task
        self._ranks = ranks
        self._folder = folder
        self._num_iterations = len(task.samples)
        self._starts_from_ours = hasattr(module, "from_megalite")
        self._last_save: tuple[str, Path] | None = None
        self._verdict = Verdict()

    def run(self, layouts: Sequence[Layout]) -> Verdict:
        """Judge the layouts, and log a table.

        Raises:
            UserError: the program cannot run on one rank, or is not deterministic there.
        """
        width = max(14, *(len(str(layout)) for layout in layouts))
        self._row = partial(_ROW.format, width=width)
        try:
            ours = self._run_ours() if self._starts_from_ours else None
        except RankError as error:
            log.info("%s", error)
            raise UserError(f"megalite's own run of the model fails: {_last_line(error)}") from None
        try:
            self._run_reference()
            self._measure_tolerance()
        except RankError as error:
            log.info("%s", error)
            raise UserError(f"the program fails on one rank: {_last_line(error)}") from None
        log.info(self._row("layout", "ranks", "loss", "gradient", "weight", "verdict"))
        if ours is not None:
            self._log_row("megalite", 1, self._check.deviations(ours, {}, is_same_program=False))
        for layout in layouts:
            self._judge(layout)
        if self._last_save is not None:
            self._judge_resume(Layout(), *self._last_save)
        return self._verdict

    # ---- The reference.

    def _run_ours(self) -> FullRecord | None:
        """Run megalite's own model for its weights, its samples and a second opinion, if they fit."""
        config = with_fields(self._task.config, params_dtype="fp64" if self._task.is_wide else "fp32")
        run = self._ranks.run(record_ours, config.mesh, 1, config, self._num_iterations)[0]

        def theirs(tensors: Mapping[str, Tensor]) -> dict[str, FullTensor]:
            named = self._module.from_megalite(config, tensors)
            return {name: FullTensor(full.double()) for name, full in named.items()}

        try:
            start = theirs(run.start)
        except UserError as error:
            log.info("no row of megalite's own run, and the program's own start: %s", first_line(error))
            return None
        own = self._run(Layout(), samples=run.samples[:0]).own_start
        shapes = [{name: full.value.shape for name, full in each.items()} for each in (own, start)]
        if other := sorted({name for name, _ in shapes[0].items() ^ shapes[1].items()}):
            log.info(
                "no row of megalite's run, and the program's own start: parameters do not match, such as %s",
                few(other),
            )
            return None
        self._task = self._task._replace(
            samples=run.samples, start={name: full.value for name, full in start.items()}
        )
        optimizer = config.optimizer
        if optimizer.lr_decay_style != "constant" or optimizer.lr_warmup_iters:
            log.info("no row of megalite's own run: programs count the updates of a schedule otherwise")
            return None
        reports = [{name: [value] for name, value in each.items()} for each in run.reports]
        return FullRecord(start, start, reports, theirs(run.gradients), theirs(run.weights))

    def _run_reference(self) -> None:
        """Run the program on one rank, and again to see that it does the same."""
        reference = self._run(Layout(), saves=True)
        own = {name: full.value for name, full in reference.own_start.items()}
        if self._task.start is None:
            self._task = self._task._replace(start=own)
        self._check = ReferenceCheck(reference, max(FLOOR, ROUNDINGS * reference.eps))
        again = self._check.deviations(self._run(Layout()), {})
        if found := [kind for kind, each in again.items() if each.size != 0.0]:
            kind, name = found[0]
            raise UserError(
                f"two runs of one rank differ in the {kind} of {name}: make the program deterministic, such "
                "as with a fixed seed and no dropout"
            )

    def _measure_tolerance(self) -> None:
        """Measure what one rounding of each weight changes in every result."""
        assert self._task.start is not None
        eps = self._check.reference.eps
        for seed in range(NUM_PERTURBED):
            generator = torch.Generator().manual_seed(seed)
            start = {
                name: full * (1.0 + eps * (torch.randint(0, 2, full.shape, generator=generator) * 2 - 1))
                for name, full in self._task.start.items()
            }
            self._check.measure(self._run(Layout(), start=start))
        if self._check.floor > FLOOR:
            log.info("tolerance: %.1e at least, %g roundings of the weights", self._check.floor, ROUNDINGS)
        if blurred := [name for (_, name), size in self._check.tolerance.items() if size > _BLURRED]:
            log.info(
                "a rounding of the weights already changes %s, where errors may hide: try another --seed",
                few(blurred),
            )

    # ---- Layouts.

    def _run(self, layout: Layout, *, saves: bool = False, **changes: object) -> FullRecord:
        """Run the program in a layout; the changes are of the task."""
        task = self._task._replace(layout=layout, **changes)  # type: ignore[arg-type]
        if layout.mbs is not None:
            task = task._replace(config=with_fields(task.config, micro_batch_size=layout.mbs))
        if saves and self._folder is not None and self._num_iterations > 1:
            folder = self._folder / str(layout).replace(" ", "-")
            folder.mkdir(exist_ok=True)
            task = task._replace(save=(folder, self._middle))
        with ProgressLine(seconds_between=0.0) as show:
            show(f"{layout}: {'resumes' if task.load else 'runs'}")
            mesh = MeshOptions(num_threads=1)
            record = join(self._ranks.run(record_rank, mesh, layout.world_size, task, timeout=_TIMEOUT))
        if task.save is not None:
            self._last_save = None if record.save_error else (str(layout), task.save[0])
            if record.save_error:
                log.info("no checkpoint of %s is judged: %s", layout, record.save_error)
        return record

    @property
    def _middle(self) -> int:
        return (self._num_iterations + 1) // 2

    def _judge(self, layout: Layout) -> None:
        """Compare a layout with the reference. Trace a first iteration that differs; else resume a save."""
        name, saved, self._last_save = str(layout), self._last_save, None
        try:
            record = self._run(layout, saves=True)
        except (ProgramFault, RankError) as error:
            text = f"the run ends with {_last_line(error)}"
            self._verdict.different[name] = [text]
            log.info(self._row(name, layout.world_size, "", "", "", text))
            if isinstance(error, RankError):
                log.info("%s", error)
            self._last_save = saved
            return
        except UserError as error:
            self._verdict.refused[name] = first_line(error)
            log.info(self._row(name, layout.world_size, "", "", "", f"cannot run: {first_line(error)}"))
            self._last_save = saved
            return
        findings = self._log_row(name, layout.world_size, self._compared(layout, record))
        self._log_own_start(record)
        if findings:
            self._last_save = saved
            if any(each.phase == 1 for each in findings.values()):
                try:
                    self._locate(layout)
                except (RankError, UserError) as error:
                    log.info("  could not be traced: %s", _last_line(error))
        elif saved is not None and not self._judge_resume(layout, *saved) and self._last_save is not None:
            self._judge_resume(layout, *self._last_save)

    def _compared(self, layout: Layout, record: FullRecord, since: int = 0) -> Deviations:
        return self._check.deviations(record, self._sizes(layout), since)

    def _log_row(self, name: str, num_ranks: int, deviations: Deviations) -> Deviations:
        """Log the row of a run and what it finds, and return the findings."""
        findings = self._check.findings(deviations)
        sizes = (largest(deviations, kinds) for kinds in (_NUMBERS, (GRADIENT,), (WEIGHT,)))
        cells = [f"{size:.1e}" for size in sizes]
        log.info(self._row(name, num_ranks, *cells, "ANOTHER RUN" if findings else "the same run"))
        for line in lines(findings):
            log.info("  %s", line)
        if findings:
            self._verdict.different[name] = lines(findings)
        else:
            self._verdict.same.append(name)
        return findings

    def _log_own_start(self, record: FullRecord) -> None:
        """Log which weights the program draws otherwise than on one rank, where users begin from these."""
        reference = self._check.reference.own_start
        drawn = [
            name
            for name, full in record.own_start.items()
            if name in reference and not torch.equal(full.value, reference[name].value)
        ]
        if drawn:
            log.info("  its own start would be another one, in %d tensors: %s", len(drawn), few(drawn))

    def _judge_resume(self, layout: Layout, saved_by: str, folder: Path) -> bool:
        """Resume a save in a layout, and compare the rest of its run; return whether the program can."""
        name = f"{saved_by} -> {layout}"
        try:
            record = self._run(layout, load=folder, samples=self._task.samples[self._middle :])
        except UserError as error:
            self._verdict.refused[name] = first_line(error)
            log.info("  resumes no save of %s: %s", saved_by, first_line(error))
            return False
        except RankError as error:
            found = [f"the resume ends with {_last_line(error)}"]
        else:
            found = lines(self._check.findings(self._compared(layout, record, self._middle)))
        for line in found:
            log.info("  resumed from a save of %s: %s", saved_by, line)
        if found:
            self._verdict.different[name] = found
        else:
            self._verdict.same.append(name)
        return True

    def _locate(self, layout: Layout) -> None:
        """Trace a layout and one rank, and log the first tensor that differs."""
        one = self._task.samples[:1]
        reference = self._run(Layout(), samples=one, is_traced=True).traces[0]
        if not reference:
            return
        traces = self._run(layout, samples=one, is_traced=True).traces
        for is_gradient in (False, True):
            line = first_difference(traces, reference, self._sizes(layout), is_gradient=is_gradient)
            if line:
                break
        line = line or "no module's output and no gradient of one differs: see the reduction of gradients"
        log.info("  %s", line)
        self._verdict.different[str(layout)].append(line)

    def _sizes(self, layout: Layout) -> dict[str, int]:
        """Return the numbers of a layout that a factor can come from."""
        samples = len(self._task.samples[0]) // layout.size("dp")
        size = layout.mbs or self._task.config.training.micro_batch_size
        _, batch_size, length = self._task.samples.shape
        others = {"global batch": batch_size, "sequence length": length - 1}
        return {**layout.sizes, "microbatches": max(1, samples // size), **others}


def _last_line(error: RankError | UserError) -> str:
    return str(error).strip().splitlines()[-1]
