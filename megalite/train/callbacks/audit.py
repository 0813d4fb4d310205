"""Compare replicas at intervals, and end the run if a device has computed wrongly.

They compare what they hold, and the first microbatch of an iteration also runs on another replica: the
results must be equal bit by bit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from megalite.data.microbatch import WithTerms
from megalite.distributed.collectives import largest_of_all
from megalite.model.stage import Stage
from megalite.observe.recorder import Reader, watch_modules
from megalite.optim.flat_buffers import BucketEntry
from megalite.optim.gradient_buckets import GradientBuffer
from megalite.train.loop import Callback, TrainingLoop, is_due
from megalite.train.model_chunks import layer_depth, unchanged_buffers
from megalite.train.replicas import (
    AuditFailed,
    Finding,
    ReplicaComparison,
    checksum,
    checksum_of,
    gather_rows,
)
from megalite.train.train_step import IterationPlan, StepResult
from megalite.train.trainer import LayoutChange, Trainer
from megalite.utils.errors import UserError
from megalite.utils.log import log


class Audit(Callback):
    """Audit every --audit-interval iterations; a difference ends the run before the next save.

    Before the update it compares the first microbatch with the results of another replica, and after the
    update the weights, optimizer state and state of the run. Checkpoints that were saved after the last
    passed audit are renamed, so that a restart does not load them. The newest one up to it is kept, whatever
    --keep-last is.
    """

    def __init__(self) -> None:
        self._last_passed: int | None = None

    def state(self) -> dict[str, Any]:
        return {"last_passed": self._last_passed}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._last_passed = state["last_passed"]

    @contextmanager
    def running(self, loop: TrainingLoop) -> Iterator[None]:
        check_determinism(loop)
        self._first_iteration = loop.iteration
        loop.trainer.saver.confirm(self._good_until)
        with ExitStack() as self._auditing:
            self._auditing.enter_context(self._in_layout(loop))
            yield

    def before_layout_change(self, loop: TrainingLoop) -> None:
        self._compare(loop)  # the new layout is made from some of the replicas, and may have no others
        self._auditing.close()
        del self._replicas, self._microbatch

    def after_layout_change(self, loop: TrainingLoop, change: LayoutChange) -> None:
        self._auditing.enter_context(self._in_layout(loop))

    @contextmanager
    def _in_layout(self, loop: TrainingLoop) -> Iterator[None]:
        """Compare the replicas of the trainer's layout in the block."""
        trainer = loop.trainer
        self._replicas = ReplicaComparison(trainer)
        self._microbatch = MicrobatchComparison(trainer)
        log.info("%s", self._description(loop))

        def before_update() -> None:
            if finding := self._microbatch.find():
                # If the replicas have different weights, that is the cause.
                self._end(self._replicas.find() or finding, loop, loop.next_iteration)

        trainer.train_step.before_update.append(before_update)
        try:
            yield
        finally:
            trainer.train_step.before_update.remove(before_update)
            self._microbatch.close()

    def needs_boundary(self, loop: TrainingLoop, iteration: int) -> bool:
        interval = loop.trainer.config.training.audit_interval
        return is_due(iteration, interval) or is_due(iteration + 1, interval)

    def before_step(self, loop: TrainingLoop) -> None:
        if is_due(loop.next_iteration, loop.trainer.config.training.audit_interval):
            self._microbatch.start()

    def after_iteration(self, loop: TrainingLoop, result: StepResult) -> None:
        if is_due(loop.iteration, loop.trainer.config.training.audit_interval):
            self._compare(loop)

    def _compare(self, loop: TrainingLoop) -> None:
        if finding := self._replicas.find():
            self._end(finding, loop, loop.iteration)
        self._last_passed = loop.iteration
        loop.trainer.saver.confirm(self._good_until)

    @property
    def _good_until(self) -> int:
        """Return the iteration of the last passed audit, or the one at which this run has begun."""
        return self._first_iteration if self._last_passed is None else self._last_passed

    def _end(self, finding: Finding, loop: TrainingLoop, iteration: int) -> NoReturn:
        """End the run; every rank must call it.

        Raises:
            AuditFailed: always.
        """
        trainer, passed = loop.trainer, self._last_passed
        found = finding.text(trainer.topology)
        checkpoints = trainer.saver.withdraw(self._good_until, iteration)
        last = "no audit has passed" if passed is None else f"the last audit passed after iteration {passed}"
        error = AuditFailed(
            f"the audit of iteration {iteration} failed: {found}; {last}, and {checkpoints}: start again "
            "without the device"
        )
        error.finding = finding
        raise error

    def _description(self, loop: TrainingLoop) -> str:
        interval, size = loop.trainer.config.training.audit_interval, loop.trainer.topology.sample_ranks.size
        where = "on the next replica" if size > 1 else "on the same device, for there is no other replica"
        weights, state = (f"{self._replicas.compared_share(kind):.0%}" for kind in ("model", "optimizer"))
        return (
            f"audits every {interval} iterations: a microbatch runs again {where}; compared with other "
            f"ranks: {weights} of rank {loop.trainer.topology.rank}'s weights, {state} of its optimizer state"
        )


def check_determinism(loop: TrainingLoop) -> None:
    """Check that equal inputs give equal bits.

    Raises:
        UserError: GPU kernels may not be deterministic.
    """
    trainer = loop.trainer
    if trainer.topology.device.type == "cuda" and not trainer.config.training.deterministic:
        raise UserError(
            f"--audit-interval {trainer.config.training.audit_interval} compares bits, and without "
            "--deterministic-mode GPU kernels may add in another order: pass it, or remove --audit-interval"
        )


class _Result(NamedTuple):
    """Checksum of a module's output or of a parameter's gradient, in the order of the computation.

    Attributes:
        is_gradient: gradients are computed after all outputs.
        depth: number of the layer; negative for a gradient, because backward begins at the last layer.
        position: position among the results of this rank.
    """

    is_gradient: bool
    depth: float
    position: int
    checksum: Tensor

    @property
    def order(self) -> tuple[bool, float, int]:
        return self[:3]


Results = dict[str, _Result]
"""The first microbatch's results on this rank, by their names for the message."""

_RUNS = 2
"""How often each replica runs a microbatch again after a difference, to see whether it repeats its result."""


class MicrobatchComparison:
    """Comparison of the results of an iteration's first microbatch with those of another replica for it.

    Each replica runs the first microbatch of the replica after it before the iteration, with the same
    weights. Dropout is keyed by samples, so all outputs, losses and gradients must have the same bits.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._replicas = trainer.topology.sample_ranks
        self._plan: IterationPlan | None = None
        self._next_results: Results = {}
        self._own_results: Results = {}
        self._recording = ExitStack()

    def start(self) -> None:
        """Run the next replica's microbatch, and begin to record this rank's own; a collective."""
        plan = self._trainer.train_step.plan_iteration(self._trainer.progress)
        if plan.is_excluded:
            return
        self._plan = plan
        self._next_results = self._run(plan, (self._replicas.rank + 1) % self._replicas.size)
        self._own_results = self._recording.enter_context(_recorded(self._trainer))

    def find(self) -> Finding | None:
        """Return the first difference, the same on every rank; a collective, before the update.

        It returns None if `start` has not been called for this iteration.
        """
        plan, self._plan = self._plan, None
        if plan is None:
            return None
        self.close()
        device, size = self._trainer.topology.device, self._replicas.size
        mine = torch.stack(
            [
                checksum_of((results[name].checksum for name in sorted(results)), device)
                for results in (self._next_results, self._own_results)
            ]
        )
        rows = torch.cat(gather_rows(mine.unsqueeze(0), self._replicas))
        differs = rows[:, 0] != rows[:, 1].roll(-1)
        # Pipeline and tensor-parallel ranks may see no difference, or another one: they agree on the owner.
        next_ranks = torch.arange(1, size + 1, device=device)
        owners = torch.where(differs, next_ranks, torch.zeros_like(next_ranks)).amax()
        owner = int(self._trainer.topology.to_host(largest_of_all(owners, self._trainer.topology)).item())
        return self._locate(plan, owner % size) if owner else None

    def close(self) -> None:
        """Stop recording."""
        self._recording.close()

    def _run(self, plan: IterationPlan, replica: int) -> Results:
        trainer = self._trainer
        devices = [trainer.topology.device] if trainer.topology.device.type == "cuda" else []
        for chunk in trainer.chunks:
            chunk.train()
        with (
            torch.random.fork_rng(devices),
            unchanged_buffers(trainer.chunks),
            _recorded(trainer) as results,
        ):
            divisors = trainer.train_step.divisors(plan)
            trainer.train_step.run_microbatch(plan, 0, replica, divisors)
        return results

    def _locate(self, plan: IterationPlan, owner: int) -> Finding:
        """Run the owner's microbatch on all replicas, and let the results vote on the first difference."""
        runs = [self._run(plan, owner) for _ in range(_RUNS)]
        is_owner, is_runner = (
            self._replicas.rank == owner,
            (self._replicas.rank + 1) % self._replicas.size == owner,
        )
        first = ([self._own_results] if is_owner else []) + ([self._next_results] if is_runner else [])
        mine = [{name: int(each.checksum.item()) for name, each in run.items()} for run in (*runs, *first)]
        gathered = self._replicas.gather_objects(mine, "audit")
        order = {name: each.order for name, each in runs[0].items()}
        here = _first_difference(gathered, self._replicas.ranks, order)
        everywhere = self._trainer.topology.world.gather_objects(here, "audit")
        return _finding([each for each in everywhere if each is not None], owner)


class _Difference(NamedTuple):
    """First result that differs among the replicas of one position in the model.

    Attributes:
        order: its place in the order of the computation.
        suspects: global ranks with a result that the majority does not have; all if there is no majority.
        repeated: suspects whose further runs are wrong too, all with the same result.
        unstable: suspects whose further runs differ from each other.
    """

    order: tuple[bool, float, int]
    name: str
    is_voted: bool
    suspects: tuple[int, ...]
    repeated: tuple[int, ...]
    unstable: tuple[int, ...]


def _first_difference(
    gathered: Sequence[Sequence[Mapping[str, int]]],
    ranks: Sequence[int],
    order: Mapping[str, tuple[bool, float, int]],
) -> _Difference | None:
    """Return the first result on which the runs of the replicas differ.

    Args:
        gathered: checksums for each replica: of its further runs, and then of its runs that are in question.
        ranks: global ranks of the replicas.
        order: order of the computation, by the names of the results.
    """
    for name in sorted(order, key=order.__getitem__):
        values = {rank: [run.get(name) for run in runs] for rank, runs in zip(ranks, gathered, strict=True)}
        if len({value for each in values.values() for value in each}) == 1:
            continue
        further = [value for each in values.values() for value in each[:_RUNS]]
        value, count = Counter(further).most_common(1)[0]
        is_voted = 2 * count > len(further)
        suspects = [rank for rank, each in values.items() if not is_voted or any(v != value for v in each)]
        unstable = [rank for rank in suspects if len(set(values[rank][:_RUNS])) > 1]
        repeated = [rank for rank in suspects if rank not in unstable and values[rank][0] != value]
        return _Difference(order[name], name, is_voted, tuple(suspects), tuple(repeated), tuple(unstable))
    return None


def _finding(differences: Sequence[_Difference], owner: int) -> Finding:
    """Return the finding from the first difference at each position in the model; several ranks have it."""
    first = min(each.order for each in differences)
    earliest = [each for each in differences if each.order == first]
    suspects = {rank for each in earliest for rank in each.suspects}
    unstable = {rank for each in earliest for rank in each.unstable}
    is_voted = all(each.is_voted for each in earliest)
    what = f"in the first microbatch of replica {owner} differs between replicas that compute the same"
    if unstable:
        suspects, is_voted = unstable, True
        what += ", and a replica that computes it again does not repeat its own result"
    elif not is_voted:
        what += ", and each replica that computes it again repeats its own result"
    elif any(each.repeated for each in earliest):
        what += ", and the wrong result repeats"
    else:
        what += ", and the wrong result does not repeat"
    return Finding((earliest[0].name,), what, tuple(sorted(suspects)), is_voted)


@contextmanager
def _recorded(trainer: Trainer) -> Iterator[Results]:
    """Record the results of the first microbatch that runs in the block.

    Schedules run the microbatches of a chunk in order, so the first result of each name belongs to the first
    microbatch; recomputation comes later.
    """
    reader = _FirstResults(trainer.topology.device)
    modules = (each for chunk in trainer.chunks for each in chunk.named_modules())
    if trainer.config.training.compile:  # a hook would change compiled layers
        modules = (("", chunk) for chunk in trainer.chunks)
    reducer = trainer.optimizer.reducer
    with watch_modules(reader, modules):
        reducer.on_gradient = reader.note_gradient
        try:
            yield reader.results
        finally:
            reducer.on_gradient = None


class _FirstResults(Reader):
    """Checksums of the first result of each name: outputs of modules and gradients of parameters."""

    def __init__(self, device: torch.device) -> None:
        self.results: Results = {}
        self._device = device

    def leaves(self, name: str, module: nn.Module | None, args: tuple[Any, ...], output: Any) -> None:
        text, depth = f"the output of {name}", layer_depth(name)
        if isinstance(module, Stage):
            text = "the loss" if module.is_last else f"the output of the stage with {_layers(module)}"
            depth = math.inf if module.is_last else max(map(int, module.layers), default=-1) + 0.5
        if text not in self.results and (values := [*_tensors(output)]):
            total = checksum_of(map(checksum, values), self._device)
            self.results[text] = _Result(False, depth, len(self.results), total)

    def note_gradient(self, buffer: GradientBuffer, entry: BucketEntry) -> None:
        if (name := f"the gradient of {entry.name}") not in self.results:
            # Small gradients of 16 bits are held, and a bucket's last one is in its buffer, in fp32, already.
            # Which one is last depends on the other microbatches in flight.
            gradient = checksum(buffer.accumulated(entry).to(buffer.dtype))
            self.results[name] = _Result(True, -layer_depth(entry.name), len(self.results), gradient)


def _layers(chunk: Stage) -> str:
    numbers = list(chunk.layers)
    return f"layers {numbers[0]} to {numbers[-1]}" if numbers else "no layer"


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, WithTerms):
        yield from output.tensors()
    elif isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for each in output:
            yield from _tensors(each)
