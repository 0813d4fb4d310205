"""Compare replicas at intervals, and end the run if a device has computed wrongly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from megalite.train.audit.first_microbatch import MicrobatchComparison
from megalite.train.audit.replicas import AuditFailed, Finding, ReplicaComparison
from megalite.train.loop import Callback, TrainingLoop, is_due
from megalite.train.train_step import StepResult
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
        trainer = loop.trainer
        check_determinism(loop)
        self._first_iteration = loop.iteration
        self._replicas = ReplicaComparison(trainer)
        self._microbatch = MicrobatchComparison(trainer)
        trainer.saver.confirm(self._good_until)
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

    def before_step(self, loop: TrainingLoop) -> None:
        if is_due(loop.next_iteration, loop.trainer.config.training.audit_interval):
            self._microbatch.start()

    def after_iteration(self, loop: TrainingLoop, result: StepResult) -> None:
        if is_due(loop.iteration, loop.trainer.config.training.audit_interval):
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
        """Describe what is compared, for the log."""
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
