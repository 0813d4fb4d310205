"""A run taken up from a checkpoint, whatever layout it was saved from."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from megalite.checkpoint.choice import choose_checkpoint
from megalite.checkpoint.folder import iterations_in
from megalite.checkpoint.intake import Intake, intake_of, takes_state
from megalite.checkpoint.local_saves import LocalSaves
from megalite.checkpoint.manifest import DamagedCheckpoint, Manifest
from megalite.checkpoint.place import Tensors
from megalite.checkpoint.tensor_reader import read_tensors
from megalite.config import CheckpointConfig, Config
from megalite.data.corpus_record import DataRecord
from megalite.errors import UserError
from megalite.log import log
from megalite.topology import Topology


def load_checkpoint(
    folder: Path,
    tensors: Tensors,
    config: Config,
    topology: Topology,
    local: LocalSaves | None = None,
    data: DataRecord | None = None,
) -> Intake | None:
    """Copies the checkpoint of `load_iteration`, else the latest whole one, into this rank's tensors.

    Every rank calls it, and every rank gets the same or raises the same.

    Args:
        tensors: all that this rank holds, by name; what the intake does not name stays as it is.
        local: the run's non-persistent saves: the newest is taken where it is newer, and the run goes on
            from its own folder with all of its state.
        data: what the run reads, to be compared with what the checkpoint's run read.

    Returns:
        What was taken; None where the folder holds no checkpoint.

    Raises:
        UserError: the checkpoint is of another model or run, or none can be read.
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
    """This rank's non-persistent save, where all ranks have one that is newer than what the folder holds."""
    goes_on = takes_state(checkpoint) and checkpoint.load_iteration is None
    if local is None or not goes_on or not checkpoint.loads_own:
        return None
    found = local.newest(tensors)
    if found is None:
        return None
    iteration, manifest = found
    newest = _newest_persistent(folder, topology)
    if newest >= iteration:
        log.info(
            "the non-persistent checkpoint of iteration %d is left out: --save has a newer one", iteration
        )
        return None
    log.info("the non-persistent checkpoint of iteration %d is loaded: --save has none so new", iteration)
    return manifest


def _newest_persistent(folder: Path, topology: Topology) -> int:
    """The newest iteration that rank 0 sees, whole or not; -1 where there is none."""
    newest = [-1]
    if topology.rank == 0:
        with suppress(OSError):  # it is told by who reads the folder next
            newest = [max(iterations_in(folder), default=-1)]
    dist.broadcast_object_list(newest)
    return newest[0]


def _read(
    manifest: Manifest, tensors: Tensors, config: Config, topology: Topology, data: DataRecord | None
) -> Intake:
    try:
        intake = intake_of(manifest, tensors, config, topology, data)
        taken = {name: tensors[name] for name in intake.sources}
        read_tensors(manifest, taken, topology, intake.sources)
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(manifest.folder, [str(error)]) from error
    return intake
