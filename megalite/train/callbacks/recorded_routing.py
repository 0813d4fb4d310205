"""Record the experts of each token of a run in files, and send another run's tokens to them in any layout.

A folder has a folder for each recorded iteration, with a safetensors file of each rank that routed tokens:

    iteration_0000005_samples_32_to_39/rank_0_of_4.safetensors

A file holds the numbers of its samples in the run, ``samples [n]``, the positions of its tokens in each,
``positions [n, s]``, and the experts of the tokens by name of the router, ``layers.1.mlp.router [n, s, k]``.

Shapes: s tokens of a rank's samples, b microbatch, n samples of a rank in an iteration, e experts, k experts
of a token.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from torch import Tensor

from megalite.checkpoint.tensor_files import FilePiece, write_file
from megalite.config import ModelConfig
from megalite.data.batch_loader import microbatch_samples
from megalite.distributed.collectives import all_reduce
from megalite.model.experts import Router
from megalite.model.routing_record import ChoiceObserver, ChoiceRecorder, ChoiceReplayer
from megalite.optim.post_step_hooks import sum_over_tokens
from megalite.train.loop import Callback, TrainingLoop, is_due
from megalite.train.train_step import IterationPlan, StepResult
from megalite.train.trainer import Trainer
from megalite.utils.errors import UserError
from megalite.utils.files import make_writable
from megalite.utils.log import log


class RoutingRecording(Callback):
    """Record of the experts of each token in the folder of --record-routing."""

    def on_start(self, loop: TrainingLoop) -> None:
        trainer = loop.trainer
        assert trainer.config.logging.record_routing is not None
        self._folder = Path(trainer.config.logging.record_routing)
        with trainer.topology.agreed():
            make_writable(self._folder, "--record-routing")
        check_routers(trainer, "--record-routing")

    def needs_boundary(self, loop: TrainingLoop, iteration: int) -> bool:
        return any(map(loop.trainer.config.logging.records_routing, (iteration, iteration + 1)))

    def before_step(self, loop: TrainingLoop) -> None:
        self._recorders: dict[str, ChoiceRecorder] = {}
        if loop.trainer.config.logging.records_routing(loop.next_iteration):
            self._recorders = {name: ChoiceRecorder() for name in routers_of(loop.trainer)}
            observe_choices(loop.trainer, self._recorders)

    def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
        observe_choices(loop.trainer, {})

    def after_iteration(self, loop: TrainingLoop, result: StepResult) -> None:
        plan = result.plan
        if loop.trainer.config.logging.records_routing(plan.iteration) and not plan.is_excluded:
            samples = range(plan.first_sample, plan.first_sample + plan.num_samples)
            folder = IterationFolder.of(self._folder, plan.iteration, samples)
            write_routing(folder, self._recorders, loop.trainer)


def write_routing(folder: IterationFolder, recorders: Mapping[str, ChoiceRecorder], trainer: Trainer) -> None:
    """Write the experts of an iteration; a collective.

    Raises:
        UserError: a file cannot be written; raised on every rank.
    """
    topology = trainer.topology
    # Without sequence parallelism, the ranks along tp route the same tokens.
    num_copies = 1 if trainer.config.parallel.sequence_parallel else topology.tp.size
    with topology.agreed(), _written(folder):
        if topology.rank == 0:
            folder.clear()
    with topology.agreed(), _written(folder):
        if num_copies == 1 or topology.tp.rank == 0:
            folder.write(topology.rank, topology.world_size // num_copies, _tensors(recorders))


@contextmanager
def _written(folder: IterationFolder) -> Iterator[None]:
    """Raise a UserError if the block cannot write to the folder."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--record-routing {folder.path}: {error.strerror}") from None


def _tensors(recorders: Mapping[str, ChoiceRecorder]) -> dict[str, Tensor]:
    """Return the tensors of this rank's file; an empty one if its stage has no router."""
    found = {name: recorder.by_sample() for name, recorder in recorders.items()}
    experts = {name: of_layer for name, (_, _, of_layer) in found.items()}
    for samples, positions, _ in found.values():  # all of them route the same tokens
        return tensors_of_file(samples, positions, experts)
    return tensors_of_file(torch.empty(0, dtype=torch.int64), torch.empty(0, 0, dtype=torch.int64), experts)


class RoutingReplay(Callback):
    """Replay that sends tokens to the experts in the folder of --replay-routing-from."""

    def on_start(self, loop: TrainingLoop) -> None:
        trainer = loop.trainer
        assert trainer.config.training.replay_routing_from is not None
        with trainer.topology.agreed():
            self._recorded = recorded_iterations(Path(trainer.config.training.replay_routing_from))
        check_routers(trainer, "--replay-routing-from")
        first, last = self._recorded[0].samples[0], self._recorded[-1].samples[-1]
        num = len(self._recorded)
        log.info("replaying the experts of %d recorded iterations, samples %d to %d", num, first, last)

    def before_step(self, loop: TrainingLoop) -> None:
        trainer = loop.trainer
        plan = trainer.train_step.plan_iteration(trainer.progress)
        self._replayers: dict[str, ChoiceReplayer] = {}  # none if the iteration is not recorded
        samples = range(plan.first_sample, plan.first_sample + plan.num_samples)
        with trainer.topology.agreed():
            recorded = self._read(samples, trainer.config.model)
        if recorded is not None:
            self._replayers = {name: ChoiceReplayer(name, recorded) for name in routers_of(trainer)}
            observe_choices(trainer, self._replayers)

    def after_iteration(self, loop: TrainingLoop, result: StepResult) -> None:
        observe_choices(loop.trainer, {})  # until now, a NaN may be located by running the iteration again
        interval = loop.trainer.config.logging.log_interval
        has_choices = self._replayers and not result.plan.is_excluded
        if has_choices and (loop.is_ending or is_due(loop.iteration, interval)):
            num_others, num_tokens = count_others(self._replayers, result.plan, loop.trainer)
            log.info(
                "iteration %d: recorded experts replace others for %d of %d tokens, counted in each layer",
                *(loop.iteration, num_others, num_tokens),
            )

    def _read(self, samples: range, model: ModelConfig) -> RecordedExperts | None:
        """Return the experts of an iteration's samples; None if none are recorded.

        Raises:
            UserError: only some of them are recorded, or files are missing or damaged.
        """
        found = [each for each in self._recorded if each.has_some_of(samples)]
        if not found:
            return None
        recorded = RecordedExperts(found, model.seq_length, model.num_experts or 0)
        if missing := recorded.missing(samples):
            raise UserError(
                f"--replay-routing-from has {len(samples) - len(missing)} of the samples {samples[0]} to "
                f"{samples[-1]} of an iteration, not sample {missing[0]}: pass the --global-batch-size and "
                "the iterations of the run that recorded them"
            )
        return recorded


def count_others(
    replayers: Mapping[str, ChoiceReplayer], plan: IterationPlan, trainer: Trainer
) -> tuple[int, int]:
    """Return how many tokens got other experts than routers select, and of how many; a collective."""
    topology, size = trainer.topology, trainer.config.training.micro_batch_size
    ranks = topology.sample_ranks
    counts = torch.zeros(2, dtype=torch.int64, device=topology.device)
    for index in range(plan.num_microbatches):  # an audit also runs samples of other ranks
        samples = microbatch_samples(plan.first_sample, index, size, ranks.rank, ranks.size).tolist()
        for each in replayers.values():
            is_other = torch.stack([each.gaps[sample] for sample in samples]) != -math.inf
            counts += torch.stack((is_other.sum(), torch.ones_like(is_other).sum()))
    for router in list(routers_of(trainer).values())[:1]:
        sum_over_tokens(counts, router.weight, topology)
    all_reduce(counts, topology.pp, of="replayed tokens")
    num_others, num_tokens = topology.to_host(counts).tolist()
    return num_others, num_tokens


def routers_of(trainer: Trainer) -> dict[str, Router]:
    """Return the routers of this rank by their names in the model."""
    return {
        name: module
        for chunk in trainer.chunks
        for name, module in chunk.named_modules()
        if isinstance(module, Router)
    }


def observe_choices(trainer: Trainer, observers: Mapping[str, ChoiceObserver]) -> None:
    """Let routers ask their observer by name, and those without one select by themselves."""
    for name, router in routers_of(trainer).items():
        router.choice_observer = observers.get(name)


def check_routers(trainer: Trainer, flag: str) -> None:
    """Check that the model has a router that can be observed; a collective.

    Raises:
        UserError: it has none.
    """
    topology = trainer.topology
    count = torch.tensor([len(routers_of(trainer))], device=topology.device)
    all_reduce(count, topology.pp, of="number of routers")
    if not topology.to_host(count).item():
        raise UserError(
            f"{flag}: the model has no megalite.model.experts.Router: pass --num-experts, or remove {flag}"
        )


_SAMPLES, _POSITIONS = "samples", "positions"
_FOLDER = re.compile(r"iteration_\d+_samples_(\d+)_to_(\d+)")


@dataclass(frozen=True)
class IterationFolder:
    """Folder of an iteration.

    Attributes:
        samples: numbers of its samples in the run.
    """

    path: Path
    samples: range

    @staticmethod
    def of(folder: Path, iteration: int, samples: range) -> IterationFolder:
        """Return the folder of an iteration in the folder of a run."""
        return IterationFolder(
            folder / f"iteration_{iteration:07}_samples_{samples[0]}_to_{samples[-1]}", samples
        )

    def has_some_of(self, samples: range) -> bool:
        """Return whether the iteration has any of these samples."""
        return self.samples.start < samples.stop and samples.start < self.samples.stop

    def clear(self) -> None:
        """Make an empty folder: an earlier run may have recorded the iteration in another layout."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)

    def write(self, index: int, num_files: int, tensors: Mapping[str, Tensor]) -> None:
        """Write one of the iteration's files, under its name once it is complete.

        Raises:
            OSError: it cannot be written.
        """
        file = self.path / f"rank_{index}_of_{num_files}.safetensors"
        partial = file.with_suffix(".partial")
        write_file(partial, {name: FilePiece(each) for name, each in tensors.items()})
        partial.rename(file)


def recorded_iterations(folder: Path) -> list[IterationFolder]:
    """Return the iterations that a folder has, in the order of their samples.

    Raises:
        UserError: it has none.
    """
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := _FOLDER.fullmatch(path.name):
            found.append(IterationFolder(path, range(int(match[1]), int(match[2]) + 1)))
    if not found:
        raise UserError(
            f"--replay-routing-from {folder} has no recorded iteration: pass a folder that a run has written "
            "with --record-routing"
        )
    return sorted(found, key=lambda each: each.samples.start)


def tensors_of_file(samples: Tensor, positions: Tensor, experts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a rank's file."""
    return {_SAMPLES: samples, _POSITIONS: positions, **experts}


class _Piece(NamedTuple):
    """Some tokens of a sample: a row of a file, and their positions."""

    file: Any
    row: int
    positions: Tensor


class RecordedExperts:
    """Experts of tokens of some iterations; files are mapped into memory and read on access.

    Args:
        seq_length: number of tokens of a sample.

    Raises:
        UserError: files are missing, or cannot be read.
    """

    def __init__(self, folders: Sequence[IterationFolder], seq_length: int, num_experts: int) -> None:
        self.seq_length, self.num_experts = seq_length, num_experts
        self._folders = ", ".join(each.path.name for each in folders)
        self._pieces: dict[int, list[_Piece]] = {}
        for folder in folders:
            for path in _complete_files(folder.path):
                file, samples, positions = _opened(path)
                for row, sample in enumerate(samples.tolist()):
                    self._pieces.setdefault(sample, []).append(_Piece(file, row, positions[row]))

    def missing(self, samples: range) -> list[int]:
        """Return the samples that no file has."""
        return [each for each in samples if each not in self._pieces]

    def sample_experts(self, layer: str, sample: int, topk: int) -> Tensor:
        """Return the experts of a whole sample, int64 ``[S, k]``.

        Args:
            layer: name of the router in the model.

        Raises:
            UserError: the files lack the layer or some tokens, or are of another model.
        """
        experts = torch.full((self.seq_length, topk), -1)
        for file, row, positions in self._pieces.get(sample, ()):
            if layer not in file.keys():  # noqa: SIM118  a file of another pipeline stage; it is no dict
                continue
            piece_experts = file.get_slice(layer)[row]  # [s, k]
            is_alike = piece_experts.shape[-1] == topk and int(positions.max()) < self.seq_length
            if not is_alike or int(piece_experts.max()) >= self.num_experts:
                raise UserError(
                    f"{self._folders} is of another model: {layer} has {topk} of {self.num_experts} experts "
                    f"for each of {self.seq_length} tokens here"
                )
            experts[positions] = piece_experts.long()
        if int(experts.min()) < 0:
            raise UserError(f"{self._folders} lacks experts of {layer} for tokens of sample {sample}")
        return experts


def _opened(path: Path) -> tuple[Any, Tensor, Tensor]:
    """Open a file, and read its samples and positions.

    Raises:
        UserError: it cannot be read.
    """
    try:
        file = safetensors.safe_open(path, framework="pt", device="cpu")
        samples = file.get_tensor(_SAMPLES)
        # In older files all samples have the same positions, [s].
        return file, samples, file.get_tensor(_POSITIONS).expand(len(samples), -1)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}): record the iteration again") from None


def _complete_files(folder: Path) -> list[Path]:
    """Return the files of an iteration.

    Raises:
        UserError: some of them are missing.
    """
    files = sorted(folder.glob("rank_*.safetensors"))
    expected = {int(file.stem.rsplit("_", 1)[1]) for file in files}
    if expected != {len(files)}:
        raise UserError(f"{folder} is incomplete, with {len(files)} files: record the iteration again")
    return files
