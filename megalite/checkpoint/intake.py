"""What a run takes from a checkpoint: which of its tensors stand for which of the run's, and the rest."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from megalite.checkpoint.identity import check_identity, is_newly_untied, resumed_config
from megalite.checkpoint.manifest import RUN, Manifest
from megalite.checkpoint.place import Tensors
from megalite.checkpoint.progress import Progress
from megalite.config import Config
from megalite.config.checkpoint import CheckpointConfig
from megalite.data.corpus_record import DataRecord
from megalite.errors import UserError
from megalite.topology import Topology

_MODEL, _STATE, _MAIN = "model.", "optimizer.", ".main"
_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.")
_SCALER = "optimizer.loss_scaler."
_NUM_STEPS = "optimizer.num_steps"
"""In every checkpoint that has the optimizer's state."""
_OUTPUT, _WORD = "output.weight", "embedding.word.weight"


@dataclass(frozen=True)
class Intake:
    """What a run takes from one checkpoint.

    Attributes:
        progress: what the run goes on from; the beginning where it takes the weights alone.
        sources: names of the run's tensors that are read, each with the checkpoint's that it is read from.
        config: the run's, with the checkpoint's schedule where it goes on with that.
        notices: what the user is to be told.
    """

    progress: Progress
    sources: Mapping[str, str]
    config: Config
    notices: tuple[str, ...] = ()


def intake_of(
    manifest: Manifest,
    wanted: Tensors,
    config: Config,
    topology: Topology,
    data: DataRecord | None = None,
) -> Intake:
    """Decides what is taken.

    Args:
        wanted: all that this rank holds, by name.
        data: what the run reads.

    Raises:
        UserError: the checkpoint is of another model or run, or has not what is asked of it.
        ValueError: run.json is damaged.
    """
    description, checkpoint = manifest.description, config.checkpoint
    progress = Progress.from_record(description["progress"])
    notices = check_identity(description, manifest.folder, config, topology, data)
    choice = _Choice(
        manifest.tensors.keys(),
        checkpoint,
        is_rounded_anew=description["model"].get("params_dtype") != config.model.params_dtype,
        is_newly_untied=is_newly_untied(description, config),
    )
    _check_layers(manifest, config.model.num_layers)
    _check_state(manifest, checkpoint)
    sources = dict(choice.sources(wanted))
    _check_plain(manifest, wanted, checkpoint)
    if checkpoint.finetune:
        notices.append(f"only the weights are taken from {manifest.folder}: the run starts at iteration 0")
    elif not checkpoint.load_optim:
        notices.append(
            f"the optimizer's state of {manifest.folder} is left out: Adam's moments start at zero"
        )
    else:
        notices += _of_scaler(manifest.tensors.keys(), wanted)
    if choice.is_newly_untied:
        notices.append("the output weight starts as the word table, which the checkpoint's model shares")
    return Intake(
        Progress() if checkpoint.finetune else progress,
        sources,
        resumed_config(description, config),
        tuple(notices),
    )


def takes_state(checkpoint: CheckpointConfig) -> bool:
    """Whether a run takes up the optimizer's state too."""
    return checkpoint.load_optim and not checkpoint.finetune


@dataclass(frozen=True)
class _Choice:
    """Where each of a run's tensors comes from.

    Attributes:
        saved: names of the checkpoint's tensors.
        is_rounded_anew: the model's weights are in another precision than the checkpoint's, so that they are
            taken from its main weights, and rounded once.
        is_newly_untied: the output weight and its state come from the word table's.
    """

    saved: Collection[str]
    checkpoint: CheckpointConfig
    is_rounded_anew: bool
    is_newly_untied: bool

    def sources(self, wanted: Tensors) -> Iterator[tuple[str, str]]:
        """Pairs of a name here and one in the checkpoint; a name that it lacks is paired with itself."""
        for name in wanted:
            if not self._is_taken(name):
                continue
            candidates = list(self._candidates(name))
            yield name, next((candidate for candidate in candidates if candidate in self.saved), name)

    def _is_taken(self, name: str) -> bool:
        if name.startswith(_SCALER):  # it is made anew where the checkpoint has none
            return takes_state(self.checkpoint) and name in self.saved
        is_weight = name.startswith(_MODEL) or name.endswith(_MAIN)
        return is_weight or takes_state(self.checkpoint)

    def _candidates(self, name: str) -> Iterator[str]:
        """The checkpoint's tensors that may stand for one of the run's, the best first."""
        if self.is_newly_untied:
            name = name.replace(_OUTPUT, _WORD)
        is_main, is_rounded = name.endswith(_MAIN), name.startswith(_MODEL)
        parameter = name.removeprefix(_MODEL).removeprefix(_STATE).removesuffix(_MAIN)
        if is_main or (is_rounded and self.is_rounded_anew):
            yield f"{_STATE}{parameter}{_MAIN}"
        yield f"{_MODEL}{parameter}" if is_main else name


def _check_layers(manifest: Manifest, num_layers: int) -> None:
    """Refuses weights of more layers than run.json says: each rank reads its own layers alone."""
    found = (_LAYER.match(name) for name in manifest.tensors)
    count = 1 + max((int(match[1]) for match in found if match), default=-1)
    if count > num_layers:
        raise ValueError(f"{RUN} says num_layers {num_layers}, and there are weights of {count} layers")


def _check_state(manifest: Manifest, checkpoint: CheckpointConfig) -> None:
    """Refuses a checkpoint without the optimizer's state to a run that needs it."""
    if _NUM_STEPS not in manifest.tensors and takes_state(checkpoint):
        raise UserError(
            f"checkpoint {manifest.folder} has no optimizer state (it was saved with --no-save-optim, or "
            "converted): give --no-load-optim to go on with Adam's moments at zero, or --finetune to start "
            "a run from its weights"
        )


def _check_plain(manifest: Manifest, wanted: Tensors, checkpoint: CheckpointConfig) -> None:
    """Refuses a checkpoint that has a tensor for which this version has no place."""
    plain = {
        name for name, pieces in manifest.tensors.items() if any(piece.place is None for piece in pieces)
    }
    known = {name for name, tensor in wanted.items() if isinstance(tensor, Tensor)} | {_NUM_STEPS}
    if unknown := sorted(name for name in plain - known if not name.startswith(_SCALER)):
        raise UserError(
            f"checkpoint {manifest.folder} holds other tensors than this run: {', '.join(unknown[:3])} and "
            f"{len(unknown[3:])} more are in it alone; load another, or leave out --load"
        )


def _of_scaler(saved: Collection[str], wanted: Tensors) -> list[str]:
    """What is told of a loss scale that comes or goes with fp16, or with --loss-scale."""
    has = any(name.startswith(_SCALER) for name in saved)
    needs = any(name.startswith(_SCALER) for name in wanted)
    if needs and not has:
        return ["the checkpoint has no dynamic loss scale: it starts at --initial-loss-scale"]
    if has and not needs:
        return ["the checkpoint's dynamic loss scale is left out: this run has none"]
    return []
