"""Load a run from a checkpoint of any layout."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from megalite.checkpoint.compatibility import (
    check_compatibility,
    is_newly_untied,
    loads_optimizer,
    resumed_config,
)
from megalite.checkpoint.folder import iterations_in
from megalite.checkpoint.full_tensors import OF_TRAINING
from megalite.checkpoint.local_saves import LocalSaves
from megalite.checkpoint.manifest import FIRST_WITH_BUFFERS, RUN, DamagedCheckpoint, Manifest
from megalite.checkpoint.parameter_range import Tensors
from megalite.checkpoint.progress import CallbackStates, TrainingProgress, states_of
from megalite.checkpoint.selection import choose_checkpoint
from megalite.checkpoint.tensor_files import read_tensors
from megalite.config import CheckpointConfig, Config
from megalite.data.corpus_record import DataRecord
from megalite.distributed.topology import Topology
from megalite.tensor_parallel.parameter_spec import ParameterShard
from megalite.utils.errors import UserError, few
from megalite.utils.log import log

_MODEL, _STATE, _MAIN, _EMA = "model.", "optimizer.", ".main", "ema."
_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.")
_SCALER = "optimizer.loss_scaler."
_NUM_STEPS = "optimizer.num_steps"
"""A tensor that every checkpoint with optimizer state has."""
_OUTPUT, _WORD = "output.weight", "embedding.word.weight"


@dataclass(frozen=True)
class LoadPlan:
    """Tensors and settings that a run loads from a checkpoint.

    Attributes:
        folder: folder of the checkpoint.
        progress: progress from which the run continues; iteration 0 if it loads only the weights.
        sources: names of the run's tensors to load, each with the name of the checkpoint's tensor.
        config: config of the run, with the checkpoint's learning-rate schedule if the run keeps it.
        notices: messages for the log.
        callbacks: states of the callbacks of the checkpoint's run; None if the run loads only the weights.
    """

    folder: Path
    progress: TrainingProgress
    sources: Mapping[str, str]
    config: Config
    notices: tuple[str, ...] = ()
    callbacks: CallbackStates | None = None


def plan_load(
    manifest: Manifest,
    wanted: Tensors,
    config: Config,
    topology: Topology,
    data: DataRecord | None = None,
) -> LoadPlan:
    """Decide what to load.

    Args:
        wanted: all tensors of this rank, by name.
        data: identity of the run's data.

    Raises:
        UserError: the checkpoint belongs to another model or run, or lacks what the run needs.
        ValueError: run.json is damaged.
    """
    description, checkpoint = manifest.description, config.checkpoint
    progress = TrainingProgress.from_record(description["progress"])
    notices = check_compatibility(description, manifest.folder, config, topology, data)
    rules = _SourceRules(
        manifest.tensors.keys(),
        loads_optimizer(checkpoint),
        is_other_precision=description["model"].get("params_dtype") != config.model.params_dtype,
        is_newly_untied=is_newly_untied(description, config),
    )
    _check_layers(manifest, config.model.num_layers)
    _check_state(manifest, checkpoint)
    missing = _missing_buffers(manifest, wanted, checkpoint)
    sources = dict(rules.sources({name: each for name, each in wanted.items() if name not in missing}))
    _check_plain_tensors(manifest, wanted)
    if missing:
        notices.append(
            f"{few(missing)} start at their initial values: checkpoint {manifest.folder} has no such buffers"
        )
    if loads_optimizer(checkpoint):
        notices += _loss_scale_notices(manifest.tensors.keys(), wanted)
    elif not checkpoint.finetune:
        notices.append(
            f"the optimizer state of {manifest.folder} is not loaded: the optimizer's moments start at zero"
        )
    notices += _average_notices(manifest.tensors.keys(), wanted, loads=loads_optimizer(checkpoint))
    if rules.is_newly_untied:
        notices.append("the output weight starts as the word embedding: the checkpoint's model is tied")
    return LoadPlan(
        manifest.folder,
        TrainingProgress() if checkpoint.finetune else progress,
        sources,
        resumed_config(description, config),
        tuple(notices),
        None if checkpoint.finetune else states_of(description),
    )


@dataclass(frozen=True)
class _SourceRules:
    """Rules that find the checkpoint's tensor for each tensor of a run.

    Attributes:
        saved: names of the checkpoint's tensors.
        loads_optimizer: whether the run loads the optimizer state.
        is_other_precision: whether the model's weights have another precision than in the checkpoint; they
            are then read from its main weights, and rounded once.
        is_newly_untied: whether the output weight and its state are read from the word embedding.
    """

    saved: Collection[str]
    loads_optimizer: bool
    is_other_precision: bool
    is_newly_untied: bool

    def sources(self, wanted: Tensors) -> Iterator[tuple[str, str]]:
        """Yield each name with its name in the checkpoint, or with itself if the checkpoint lacks it."""
        for name in wanted:
            if self._is_loaded(name):
                candidates = self._candidates(name)
                yield name, next((candidate for candidate in candidates if candidate in self.saved), name)

    def _is_loaded(self, name: str) -> bool:
        if name.startswith(_SCALER):  # a new scaler is created if the checkpoint has none
            return self.loads_optimizer and name in self.saved
        # An average that is not loaded starts as the weights.
        is_weight = name.startswith((_MODEL, _EMA)) or name.endswith(_MAIN)
        return is_weight or self.loads_optimizer

    def _candidates(self, name: str) -> Iterator[str]:
        """Yield the checkpoint's tensors that can be loaded as this tensor, the best first."""
        if self.is_newly_untied:
            name = name.replace(_OUTPUT, _WORD)
        is_main, is_weight, is_ema = name.endswith(_MAIN), name.startswith(_MODEL), name.startswith(_EMA)
        parameter = name.removeprefix(_MODEL).removeprefix(_STATE).removeprefix(_EMA).removesuffix(_MAIN)
        if is_ema and self.loads_optimizer:
            yield name
        if is_main or is_ema or (is_weight and self.is_other_precision):
            yield f"{_STATE}{parameter}{_MAIN}"
        yield f"{_MODEL}{parameter}" if is_main or is_ema else name


def _check_layers(manifest: Manifest, num_layers: int) -> None:
    """Raise an error if there are weights of more layers than in run.json: no rank would read them."""
    found = (_LAYER.match(name) for name in manifest.tensors)
    count = 1 + max((int(match[1]) for match in found if match), default=-1)
    if count > num_layers:
        raise ValueError(f"{RUN} has num_layers {num_layers}, but there are weights of {count} layers")


def _check_state(manifest: Manifest, checkpoint: CheckpointConfig) -> None:
    """Raise an error if the checkpoint has no optimizer state and the run needs it."""
    if _NUM_STEPS not in manifest.tensors and loads_optimizer(checkpoint):
        raise UserError(
            f"checkpoint {manifest.folder} has no optimizer state (it was saved with --no-save-optim, or "
            "converted): pass --no-load-optim to continue with the optimizer's moments at zero, or "
            "--finetune to start a new run from its weights"
        )


def _missing_buffers(manifest: Manifest, wanted: Tensors, checkpoint: CheckpointConfig) -> list[str]:
    """Return the names of buffers that the checkpoint lacks, and that keep their initial values.

    A new run begins with them, and so does a run that resumes from a checkpoint of an earlier format. Buffers
    that only training reads also begin so in a run with another balance loss, or without optimizer state.

    Raises:
        UserError: the run resumes from a checkpoint that would have them: its model had no such buffers.
    """
    missing = sorted(
        name
        for name, each in wanted.items()
        if isinstance(each, ParameterShard) and each.is_buffer and each.tensor.numel()
        if name not in manifest.tensors
    )
    can_begin = checkpoint.finetune or manifest.description["format"] < FIRST_WITH_BUFFERS
    has_other_updates = checkpoint.allow_settings_change or not loads_optimizer(checkpoint)
    lacking = [name for name in missing if not (has_other_updates and name.endswith(OF_TRAINING))]
    if lacking and not can_begin:
        raise UserError(
            f"checkpoint {manifest.folder} lacks {few(lacking)}, which this model has: register constants "
            "with persistent=False, or pass --finetune to start a new run from its weights"
        )
    return missing


def _check_plain_tensors(manifest: Manifest, wanted: Tensors) -> None:
    """Raise an error if the checkpoint has a plain tensor that this version does not have."""
    plain = {
        name for name, pieces in manifest.tensors.items() if any(piece.range is None for piece in pieces)
    }
    known = {name for name, tensor in wanted.items() if isinstance(tensor, Tensor)} | {_NUM_STEPS}
    if unknown := sorted(name for name in plain - known if not name.startswith(_SCALER)):
        raise UserError(
            f"checkpoint {manifest.folder} has tensors that this run does not have: {few(unknown)}; load "
            "another checkpoint, or remove --load"
        )


def _loss_scale_notices(saved: Collection[str], wanted: Tensors) -> list[str]:
    """Return notices of a loss scale that is new or no longer needed, because of fp16 or --loss-scale."""
    has = any(name.startswith(_SCALER) for name in saved)
    needs = any(name.startswith(_SCALER) for name in wanted)
    if needs and not has:
        return ["the checkpoint has no dynamic loss scale: it starts at --initial-loss-scale"]
    if has and not needs:
        return ["the checkpoint's dynamic loss scale is not used: this run has none"]
    return []


def _average_notices(saved: Collection[str], wanted: Tensors, *, loads: bool) -> list[str]:
    """Return notices of averages of the weights that begin anew or are no longer needed."""
    has = any(name.startswith(_EMA) for name in saved)
    needs = any(name.startswith(_EMA) for name in wanted)
    if needs and not (has and loads):
        return ["the average of --ema-decay starts at the loaded weights"]
    if has and loads and not needs:
        return ["the checkpoint's average of the weights is not used: this run has no --ema-decay"]
    return []


def load_checkpoint(
    folder: Path,
    tensors: Tensors,
    config: Config,
    topology: Topology,
    local: LocalSaves | None = None,
    data: DataRecord | None = None,
) -> LoadPlan | None:
    """Copy the checkpoint of `load_iteration`, or the latest complete one, into this rank's tensors.

    Every rank must call this. All ranks return the same value or raise the same error.

    Args:
        tensors: all tensors of this rank, by name; tensors that the plan does not name do not change.
        local: non-persistent saves of the run. If the newest of them is newer, it is loaded instead, from
            each rank's own folder and with all its state.
        data: identity of the run's data, to compare with the data of the checkpoint's run.

    Returns:
        The plan that was loaded; None if the folder has no checkpoint.

    Raises:
        UserError: the checkpoint belongs to another model or run, or none can be read.
    """
    manifest = _newest_local(folder, tensors, config.checkpoint, topology, local)
    manifest = manifest or choose_checkpoint(folder, topology, config.checkpoint.load_iteration)
    if manifest is None:
        return None
    with topology.agreed():
        return _read(manifest, tensors, config, topology, data)


def _newest_local(
    folder: Path,
    tensors: Tensors,
    checkpoint: CheckpointConfig,
    topology: Topology,
    local: LocalSaves | None,
) -> Manifest | None:
    """Return this rank's non-persistent save, if all ranks have one that is newer than those in --save."""
    continues = loads_optimizer(checkpoint) and checkpoint.load_iteration is None
    if local is None or not continues or not checkpoint.loads_own:
        return None
    found = local.newest(tensors)
    if found is None:
        return None
    iteration, manifest = found
    newest = _newest_persistent(folder, topology)
    if newest >= iteration:
        log.info(
            "the non-persistent checkpoint of iteration %d is skipped: --save has a newer one", iteration
        )
        return None
    log.info(
        "the non-persistent checkpoint of iteration %d is loaded: it is newer than those in --save", iteration
    )
    return manifest


def _newest_persistent(folder: Path, topology: Topology) -> int:
    """Return the newest iteration that rank 0 sees, complete or not; -1 if there is none."""
    newest = [-1]
    if topology.rank == 0:
        with suppress(OSError):  # the next read of the folder reports it
            newest = [max(iterations_in(folder), default=-1)]
    dist.broadcast_object_list(newest)
    return newest[0]


def _read(
    manifest: Manifest, tensors: Tensors, config: Config, topology: Topology, data: DataRecord | None
) -> LoadPlan:
    try:
        plan = plan_load(manifest, tensors, config, topology, data)
        loaded = {name: tensors[name] for name in plan.sources}
        read_tensors(manifest, loaded, topology, plan.sources)
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(manifest.folder, [str(error)]) from error
    return plan
