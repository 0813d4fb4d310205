"""Evaluate a model on tasks of lm-evaluation-harness while it trains, on the ranks that train it.

The pipeline of the training run computes the scores, with its layout, ZeRO stage and kernels. Sequences of
similar length run together, padded on the right: a causal model does not see the padding. Context-parallel
ranks score the tokens of their slices.

Shapes: s sequence, b microbatch, v padded vocabulary, tp = tp.size.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from io import StringIO
from typing import Any, NamedTuple

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from torch import Tensor

from megalite.config import TrainingConfig
from megalite.data.batch_loader import own_tokens_of
from megalite.data.microbatch import Microbatch
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.distributed.collectives import all_reduce
from megalite.generate.benchmark_tasks import (
    ROWS,
    TaskModel,
    TokenWindow,
    data_loaded,
    known_tasks,
    token_scores,
    union,
)
from megalite.model.stage import Stage
from megalite.pipeline.executor import Pipeline
from megalite.train.global_batch import hidden_shape
from megalite.train.loop import Callback, TrainingLoop, is_due
from megalite.train.run_context import RunContext
from megalite.train.stopping import Stopped
from megalite.train.telemetry.metrics import TaskScores
from megalite.train.telemetry.writers import Writers
from megalite.train.train_step import StepResult
from megalite.train.trainer import Trainer, build_pipeline
from megalite.utils.errors import UserError
from megalite.utils.log import log

FLAG = "--eval-tasks"
_LENGTH_STEP = 64
"""Sequences are padded to a multiple of this number of tokens per rank of tp and per slice of a sequence, so
that few shapes occur."""
_MAX_MICROBATCHES = 8
"""Largest number of microbatches of a replica that the pipeline runs together."""


class LoadedTasks(NamedTuple):
    """Tasks and groups of them with their data, and the harness's index, which is slow to build."""

    manager: TaskManager
    tasks: list[Any]


class TaskEvaluation(Callback):
    """Evaluates the tasks of --eval-tasks at intervals, and once the run is finished."""

    def __init__(self, tasks: LoadedTasks, tokenizer: Tokenizer, writers: Writers) -> None:
        self.tasks = tasks
        self.tokenizer = tokenizer
        self.writers = writers

    def needs_boundary(self, loop: TrainingLoop, iteration: int) -> bool:
        return is_due(iteration, _interval(loop))

    def after_iteration(self, loop: TrainingLoop, result: StepResult) -> None:
        is_urgent = loop.stop is not None and loop.stop.is_urgent
        if is_due(loop.iteration, _interval(loop)) and not is_urgent:
            self._log_scores(loop)

    def on_end(self, loop: TrainingLoop) -> None:
        if loop.stop is None and not is_due(loop.iteration, _interval(loop)):
            self._log_scores(loop)

    def _log_scores(self, loop: TrainingLoop) -> None:
        trainer = loop.trainer
        model = TrainingModel(trainer, self.tokenizer, loop.stop_conditions.raise_if_urgent)
        try:
            with trainer.timers("eval-time"), _random_state_kept(trainer.topology.device):
                results = _evaluate(model, self.tasks, trainer.config.training)
        except Stopped as stopped:
            log.warning("the tasks at iteration %d were interrupted: they have no scores", loop.iteration)
            loop.stop = stopped.stop
            return
        # The harness returns results on the first rank of each node only.
        own = {} if results is None else scores_of(results["results"])
        found = trainer.topology.world.object_of_first(own, "scores of tasks")
        scores = TaskScores(loop.iteration, trainer.progress.consumed_samples, found)
        self.writers.task_scores(scores)


def _interval(loop: TrainingLoop) -> int:
    training = loop.trainer.config.training
    return training.eval_tasks_interval or training.eval_interval


@contextmanager
def _random_state_kept(device: torch.device) -> Iterator[None]:
    """Restore the states of the random number generators, which the harness seeds."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    random.setstate(python)
    np.random.set_state(numpy)


def _evaluate(model: TaskModel, tasks: LoadedTasks, training: TrainingConfig) -> Mapping[str, Any] | None:
    """Return the harness's results on the first rank of each node, and None on the others."""
    with redirect_stderr(StringIO()):  # its progress bars
        found: Mapping[str, Any] | None = simple_evaluate(
            model,
            tasks=tasks.tasks,
            task_manager=tasks.manager,
            num_fewshot=training.eval_tasks_num_fewshot,
            limit=training.eval_tasks_limit,
            bootstrap_iters=0,
            log_samples=False,
        )
    return found


class _Rehearsal(TaskModel):
    """Answers without a model, to find mistakes in tasks before the run starts."""

    def scores(self, windows: Sequence[TokenWindow]) -> list[tuple[float, bool]]:
        return [(0.0, False)] * len(windows)

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        raise UserError(
            f"{FLAG}: {requests[0].task_name} generates text, for which training keeps no keys and values: "
            "evaluate checkpoints with tools/evaluate.py --tasks"
        )


def load_tasks(run: RunContext) -> LoadedTasks:
    """Load the tasks of a run and their data; every rank must call it.

    Raises:
        UserError: a task is unknown, generates text or has an answer that is too long, or its data cannot be
            loaded. Every rank raises it.
    """
    training, tokenizer = run.config.training, run.tokenizer
    assert training.eval_tasks is not None and tokenizer is not None
    names = [name.strip() for name in training.eval_tasks.split(",")]
    with run.topology.agreed(), data_loaded():
        manager = known_tasks(names, training.eval_tasks_folder, (FLAG, "--eval-tasks-folder"))
        loaded = manager.load(manager.match_tasks(names))
        tasks = LoadedTasks(manager, [*loaded["groups"].values(), *loaded["tasks"].values()])
        with _random_state_kept(run.topology.device):
            _evaluate(_Rehearsal(tokenizer, run.config.model.seq_length), tasks, training)
    return tasks


def scores_of(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the scores in the harness's results, by task and metric: ``arc_easy/acc``.

    The name of a filter follows the metric, if the task has several.
    """
    return {
        f"{task}/{metric.removesuffix(',none').replace(',', ' ')}": float(score)
        for task, metrics in results.items()
        for metric, score in metrics.items()
        if "," in metric and "_stderr" not in metric and isinstance(score, int | float)
    }


class TrainingModel(TaskModel):
    """Scores tokens with the chunks of a training run. Every rank must make the same calls.

    Args:
        before_batch: called before each run of the pipeline; an error that it raises ends the evaluation.
    """

    def __init__(
        self, trainer: Trainer, tokenizer: Tokenizer, before_batch: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(tokenizer, trainer.config.model.seq_length)
        self.trainer = trainer
        self.before_batch = before_batch
        self.last = next((_ScoringStage(chunk) for chunk in trainer.chunks if chunk.is_last), None)
        chunks = [self.last if chunk.is_last else chunk for chunk in trainer.chunks]
        self.pipeline: Pipeline[Microbatch] = build_pipeline(chunks, trainer.config, trainer.topology)  # type: ignore[arg-type]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        raise NotImplementedError  # `load_tasks` refuses tasks that generate text

    def scores(self, windows: Sequence[TokenWindow]) -> list[tuple[float, bool]]:
        """Return the scores of the windows. They are distributed over the replicas, the longest first."""
        for chunk in self.trainer.chunks:
            chunk.eval()
        ranks, size = self.trainer.topology.sample_ranks, self.trainer.config.training.micro_batch_size
        order = sorted(range(len(windows)), key=lambda i: -sum(map(len, windows[i])))
        found: dict[int, tuple[float, bool]] = {}
        step = size * ranks.size * min(_MAX_MICROBATCHES, self.trainer.num_microbatches)
        for first in range(0, len(order), step):
            self.before_batch()
            group = order[first : first + step]
            batches = [group[start : start + size] for start in range(0, len(group), size)]
            mine = batches[ranks.rank :: ranks.size]
            # ZeRO 3 gathers weights over the replicas: all run as many microbatches.
            num_microbatches = -(-len(batches) // ranks.size)
            rows = [[windows[i] for i in batch] for batch in mine]
            rows += [[]] * (num_microbatches - len(rows))
            longest = max(sum(map(len, windows[i])) - 1 for i in group)
            scores = self._run(rows, self._padded(longest))
            numbers = (number for batch in mine for number in batch)
            found.update(zip(numbers, scores, strict=False))
        merged = union(union(found, ranks), self.trainer.topology.pp)
        return [merged[i] for i in range(len(windows))]

    def _padded(self, length: int) -> int:
        topology = self.trainer.topology
        step = _LENGTH_STEP * topology.tp.size * topology.positions.count
        return min(-(-max(1, length) // step) * step, self.max_length)

    def _run(self, batches: Sequence[Sequence[TokenWindow]], length: int) -> list[tuple[float, bool]]:
        """Return the scores of this replica's windows on the last stage; nothing on the others."""
        config, topology = self.trainer.config, self.trainer.topology

        def load(index: int) -> Microbatch:
            whole = self._microbatch(batches[index], length)
            return own_tokens_of(whole, topology.positions).to(topology.device)

        config = replace(config, model=replace(config.model, seq_length=length))
        self.pipeline.evaluate(len(batches), load, hidden_shape(config, length))
        if self.last is None:
            return []
        results, self.last.results = self.last.results, []
        return [
            score
            for batch, (values, are_best) in zip(batches, results, strict=True)
            for score in list(zip(values.tolist(), are_best.tolist(), strict=True))[: len(batch)]
        ]

    def _microbatch(self, windows: Sequence[TokenWindow], length: int) -> Microbatch:
        """Return a microbatch whose `loss_mask` selects the continuations; missing windows are zeros."""
        size = self.trainer.config.training.micro_batch_size
        text = torch.zeros(size, length + 1, dtype=torch.int64)
        is_scored = torch.zeros(size, length, dtype=torch.bool)
        for row, (context, continuation) in enumerate(windows):
            tokens = torch.tensor((context + continuation)[-length - 1 :])
            text[row, : len(tokens)] = tokens
            end = len(tokens) - 1
            is_scored[row, end - len(continuation) : end] = True
        numbers = torch.zeros(size, dtype=torch.int64)  # keys of dropout, which is off
        return replace(Microbatch.of(text, numbers), loss_mask=is_scored)


class _ScoringStage:
    """Last stage of a model that scores the tokens that `loss_mask` selects instead of their loss.

    Attributes:
        results: log-likelihood of each row, fp64 ``[b]``, and whether all its tokens are the likeliest,
            bool ``[b]``, for each microbatch so far.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.results: list[tuple[Tensor, Tensor]] = []

    def __call__(self, microbatch: Microbatch, hidden: Tensor | None) -> Tensor:
        """Add the results of a microbatch; return a loss of zero."""
        stage, mask = self.stage, microbatch.loss_mask
        assert mask is not None
        output = stage.last_module(stage.hidden_states(microbatch, hidden))
        logits = stage.logits_of(output)  # [s, b, v/tp]
        row, position = mask.nonzero(as_tuple=True)
        values = torch.zeros(mask.shape, dtype=torch.float64, device=logits.device)
        are_best = torch.ones_like(mask)
        for rows, positions in zip(row.split(ROWS), position.split(ROWS), strict=True):
            part, targets = logits[positions, rows], microbatch.labels[rows, positions]  # [n, v/tp], [n]
            value, is_best = token_scores(part, targets, stage.vocab_size, stage.context.tp)
            values[rows, positions], are_best[rows, positions] = value, is_best
        sums = torch.stack((values.sum(1), are_best.logical_not().sum(1).double()))
        value, num_others = all_reduce(sums, stage.context.topology.position_ranks, of="scores of tasks")
        self.results.append((value, num_others == 0))
        return torch.zeros((), dtype=torch.float32, device=logits.device)
