"""Evaluate a trained model on the tasks of lm-evaluation-harness (Gao et al., zenodo 10256836).

Every rank builds the same requests. Batches of requests are distributed over the replicas, and every rank
gets all answers, so all ranks make the same calls. Import this module only if lm_eval is installed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from megalite.attention.cache import CachedCore
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.distributed.axis import Axis
from megalite.distributed.collectives import all_gather_from
from megalite.distributed.topology import Topology
from megalite.generate.generator import Generator, Prompt, Sampler, Sampling, text_of
from megalite.generate.trained_model import TrainedModel, load_model, stop_token
from megalite.utils.errors import UserError

ROWS = 1024
"""Positions whose logits are in memory at a time."""

Request = TypeVar("Request")
Answer = TypeVar("Answer")


def known_tasks(names: Sequence[str], folder: str | None, flags: tuple[str, str]) -> TaskManager:
    """Return the known tasks, with those of a folder of YAML files.

    Args:
        names: names of tasks, groups or tags, with wildcards.
        flags: flags of the names and of the folder, for messages.

    Raises:
        UserError: a name matches no task.
    """
    manager = TaskManager(include_path=folder)
    for name in names:
        if not manager.match_tasks([name]):
            where = "" if folder is None else f", and {folder} has no such task"
            raise UserError(
                f"{flags[0]} {name}: lm-evaluation-harness does not know it{where}: "
                f"`lm-eval ls tasks` lists all, and {flags[1]} adds a folder of YAML files"
            )
    return manager


@contextmanager
def data_loaded() -> Iterator[None]:
    """Turn errors in loading the data of tasks into a UserError."""
    try:
        yield
    except (OSError, ConnectionError) as error:
        raise UserError(f"the data of a task cannot be loaded: {error}") from error


def evaluate_tasks(
    trained: TrainedModel,
    tokenizer: Tokenizer,
    topology: Topology,
    names: Sequence[str],
    *,
    folder: Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int,
) -> Mapping[str, Any] | None:
    """Return the harness's results on the first rank of each node, and None on the others.

    Every rank must call it.

    Args:
        names, folder: see `known_tasks`.
        num_fewshot: examples before each question; None for the task's own number.
        limit: largest number of questions per task; None for all.
        batch_size: requests per batch of a replica.

    Raises:
        UserError: a task is unknown, or its data cannot be loaded. Every rank raises it.
    """
    trained.check_is_gpt("--tasks evaluates")
    with topology.agreed():
        manager = known_tasks(names, None if folder is None else str(folder), ("--tasks", "--task-folder"))
    model = HarnessModel(trained, tokenizer, batch_size, topology)
    with data_loaded():
        return simple_evaluate(
            model,
            tasks=manager.match_tasks([*names]),
            num_fewshot=num_fewshot,
            limit=limit,
            task_manager=manager,
            log_samples=False,
        )


def token_scores(part: Tensor, targets: Tensor, vocab_size: int, tp: Axis) -> tuple[Tensor, Tensor]:
    """Return the log-likelihood of each target, and whether it is the likeliest token; a collective of tp.

    Args:
        part: this rank's logits, ``[n, v/tp]``.
        targets: int64 ``[n]``.
    """
    logits = all_gather_from(part, tp)[:, :vocab_size]
    logs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return logs.gather(-1, targets[:, None])[:, 0].double(), logits.argmax(-1) == targets


TokenWindow = tuple[list[int], list[int]]
"""Tokens of a context, which may be empty, and tokens of a continuation to score."""


class TaskModel(TemplateLM):
    """Answers the harness's requests for log-likelihoods; a subclass scores the tokens.

    Attributes:
        max_length: tokens that the model reads.
    """

    def __init__(self, tokenizer: Tokenizer, max_length: int) -> None:
        super().__init__()
        self.tokens = tokenizer
        self.max_length = max_length

    @abstractmethod
    def scores(self, windows: Sequence[TokenWindow]) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood, and whether it has the likeliest tokens, on all ranks.

        Args:
            windows: the start of a context that is too long is not read.
        """

    @property
    def eot_token_id(self) -> int:
        """Return the end-of-document token, which begins each text."""
        return self.tokens.eod

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Encode a text, without special tokens."""
        return self.tokens.encode(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether it has the likeliest tokens.

        Args:
            requests: text, tokens of the context and tokens of the continuation. The start of a context
                that is too long is not read.

        Raises:
            UserError: a continuation alone is longer than the sequence length.
        """
        windows = [(context, continuation) for _, context, continuation in requests]
        longest = max((len(continuation) for _, continuation in windows), default=0)
        if longest > self.max_length:
            raise UserError(
                f"a task has an answer of {longest} tokens, and the model reads {self.max_length}: remove it"
            )
        return self.scores(windows)

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, in windows of the sequence length without overlap."""
        windows = [
            (number, *make_disjoint_window(window))
            for number, request in enumerate(requests)
            for window in get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
            )
        ]
        sums = [0.0] * len(requests)
        for (number, *_), (value, _) in zip(windows, self._loglikelihood_tokens(windows), strict=True):
            sums[number] += value
        return sums


def union(mine: dict[int, Answer], axis: Axis) -> dict[int, Answer]:
    """Return the answers of all ranks of an axis, by the numbers of their requests."""
    parts = axis.gather_objects(mine, "answers of tasks")
    return {number: answer for part in parts for number, answer in part.items()}


class HarnessModel(TaskModel):
    """Answers the harness's requests with a trained model.

    Args:
        batch_size: requests per batch of a replica.
    """

    def __init__(
        self, trained: TrainedModel, tokenizer: Tokenizer, batch_size: int, topology: Topology
    ) -> None:
        super().__init__(tokenizer, trained.config.model.seq_length)
        self.stage = load_model(trained, topology, CachedCore)
        self.vocab_size = trained.vocab_size
        self.batch_size = batch_size
        self.topology = topology

    def scores(self, windows: Sequence[TokenWindow]) -> list[tuple[float, bool]]:
        """Return the scores of the windows; their batches are distributed over the replicas."""
        return self._answered(windows, self._score, lambda window: len(window[0]) + len(window[1]))

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the text after each context, up to the first of its stop strings."""
        answers = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        for numbers in groups.values():
            options = normalize_gen_kwargs(requests[numbers[0]].args[1])
            contexts = [(number, self.tok_encode(requests[number].args[0])) for number in numbers]
            answer = partial(self._continue, options=options)
            texts = self._answered(contexts, answer, lambda context: len(context[1]))
            for number, text in zip(numbers, texts, strict=True):
                answers[number] = text
        return answers

    def _answered(
        self,
        requests: Sequence[Request],
        answer: Callable[[Sequence[Request]], list[Answer]],
        length: Callable[[Request], int],
    ) -> list[Answer]:
        """Answer requests in batches of similar length, the longest first; all ranks return all answers."""
        ranks = self.topology.sample_ranks
        order = sorted(range(len(requests)), key=lambda i: -length(requests[i]))
        batches = [order[first : first + self.batch_size] for first in range(0, len(order), self.batch_size)]
        mine: dict[int, Answer] = {}
        for batch in batches[ranks.rank :: ranks.size]:
            # Stages before the last have no scores.
            mine.update(zip(batch, answer([requests[i] for i in batch]), strict=False))
        answers = union(union(mine, ranks), self.topology.pp)
        return [answers[i] for i in range(len(requests))]

    @torch.inference_mode()
    def _score(self, windows: Sequence[TokenWindow]) -> list[tuple[float, bool]]:
        """Return the scores of a batch on the last stage, and nothing on the others."""
        rows = [(context + continuation)[-self.max_length - 1 :] for context, continuation in windows]
        counts = [len(continuation) for _, continuation in windows]
        generator = Generator(self.stage, self._sampler(0.0), None)
        hidden = generator.read([row[:-1] for row in rows], 0)  # [s, b, h], padded on the left
        if not self.stage.is_last:
            return []
        places = torch.tensor(
            [(len(hidden) - count + i, row) for row, count in enumerate(counts) for i in range(count)],
            device=hidden.device,
        )
        targets = torch.tensor(
            [token for row, count in zip(rows, counts, strict=True) for token in row[len(row) - count :]],
            device=hidden.device,
        )
        hidden = hidden[places[:, 0], places[:, 1]]  # [n, h]
        of_tokens = [
            token_scores(self.stage.logits(part[:, None])[:, 0], tokens, self.vocab_size, self.topology.tp)
            for part, tokens in zip(hidden.split(ROWS), targets.split(ROWS), strict=True)
        ]
        values, are_best = (torch.cat(each).split(counts) for each in zip(*of_tokens, strict=True))
        scores = zip(values, are_best, strict=True)
        return [(float(value.sum()), bool(is_best.all())) for value, is_best in scores]

    @torch.inference_mode()
    def _continue(self, contexts: Sequence[tuple[int, list[int]]], options: Mapping[str, Any]) -> list[str]:
        """Return the texts after contexts, which are numbers and tokens."""
        count = options["max_gen_toks"]
        room = self.max_length - count
        if room < 1:
            raise UserError(
                f"a task generates up to {count} tokens, and the model reads {self.max_length}: no token of "
                "the question would be left"
            )
        prompts = [Prompt(number, (ids or [self.eot_token_id])[-room:], count) for number, ids in contexts]
        stop = handle_stop_sequences(options["until"], None)

        def is_complete(prompt: Prompt, ids: list[int]) -> bool:
            text = text_of(self.tokens, prompt.ids, ids)
            return any(each and each in text for each in stop)

        generator = Generator(self.stage, self._sampler(options["temperature"]), stop_token(self.tokens))
        texts = []
        for prompt, ids in zip(prompts, generator.complete(prompts, is_complete=is_complete), strict=True):
            kept = ids[:-1] if ids[-1:] == [generator.eod] else ids
            text = text_of(self.tokens, prompt.ids, kept)
            texts.append(str(postprocess_generated_text(text, stop, None)))
        return texts

    def _sampler(self, temperature: float) -> Sampler:
        return Sampler(Sampling(temperature), self.vocab_size, self.topology.tp)
