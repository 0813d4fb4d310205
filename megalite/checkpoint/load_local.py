"""Load a run from local saves, in any layout: each part is read on a node, and the ranks send it on."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from megalite.checkpoint.compatibility import loads_optimizer
from megalite.checkpoint.folder import name_of
from megalite.checkpoint.load import LoadPlan, plan_load
from megalite.checkpoint.local_saves import LocalSaves, known_run_id, part_of, parts_in
from megalite.checkpoint.manifest import DamagedCheckpoint, Manifest, TensorRecord, dtype_name, read_manifest
from megalite.checkpoint.parameter_range import ParameterRange, Tensors
from megalite.checkpoint.relayout import HeldPieces, exchange
from megalite.checkpoint.stored_run import StoredRun, newest_at
from megalite.checkpoint.tensor_files import FilePiece, open_tensors
from megalite.config import CheckpointConfig, Config
from megalite.data.corpus_record import DataRecord
from megalite.distributed.regroup import HeldPart
from megalite.utils.errors import UserError, few
from megalite.utils.log import log


def load_local(
    saves: LocalSaves,
    folder: Path | StoredRun,
    tensors: Tensors,
    config: Config,
    data: DataRecord | None = None,
) -> LoadPlan | None:
    """Load the newest save with all its state, if it is newer than what is in --save.

    Every rank must call this. The ranks send each other what they need.

    Args:
        folder: where the persistent checkpoints are.
        data: see `load_checkpoint`.

    Returns:
        What was loaded; None, and nothing has changed, if there is no such save or the run has other
        tensors or another precision.

    Raises:
        UserError: the save belongs to another model; raised on every rank.
    """
    checkpoint, topology = config.checkpoint, saves.topology
    if not (loads_optimizer(checkpoint) and checkpoint.load_iteration is None and checkpoint.loads_own):
        return None
    if (found := saves.newest()) is None:
        return None
    (iteration, parts), newest = found, -1
    if topology.rank == 0:
        with suppress(OSError):  # the next read of the folder reports it
            newest = newest_at(folder)
    if topology.world.object_of_first(newest, "the newest checkpoint") >= iteration:
        log.info(
            "the non-persistent checkpoint of iteration %d is skipped: --save has a newer one", iteration
        )
        return None
    whole = _joined(parts, saves, iteration)
    held: HeldPieces = []
    with topology.agreed():
        try:
            plan = plan_load(whole, tensors, config, topology, data)
        except ValueError as error:
            raise DamagedCheckpoint(whole.folder, [str(error)]) from error
    try:
        with topology.agreed():
            if other := sorted(name for name, source in plan.sources.items() if name != source):
                raise UserError(f"it has another precision, or lacks {few(other)}")
            held = _pieces_in(parts)
        exchange(held, {name: tensors[name] for name in plan.sources}, topology)
    except UserError as error:
        log.warning("the non-persistent checkpoint of iteration %d is skipped: %s", iteration, error)
        return None
    log.info(
        "the non-persistent checkpoint of iteration %d is loaded: it is newer than those in --save", iteration
    )
    return plan


def _joined(parts: Sequence[Manifest], saves: LocalSaves, iteration: int) -> Manifest:
    """Return a manifest of all parts, of which each rank has some, with the texts of the first."""
    every = [part for of_rank in saves.topology.world.gather_objects(parts, "parts") for part in of_rank]
    pieces: dict[str, tuple[TensorRecord, ...]] = {}
    for part in every:
        for name, records in part.tensors.items():
            pieces[name] = (*pieces.get(name, ()), *records)
    first = min(every, key=lambda part: part.folder.parent.name)
    return replace(first, folder=saves.root / name_of(iteration), tensors=pieces)


def _pieces_in(parts: Iterable[Manifest]) -> HeldPieces:
    """Return the pieces of verified parts. Files are mapped into memory, and read when they are used.

    Raises:
        DamagedCheckpoint: a file cannot be opened, or differs from its index.
    """
    held: HeldPieces = []
    for part in parts:
        (file,) = part.files
        try:
            with open_tensors(part, file) as handle:
                for name, (record,) in part.tensors.items():
                    tensor = handle.get_tensor(name)
                    whole = record.range or ParameterRange.whole(tuple(tensor.shape))
                    size, dtype = tensor.numel(), dtype_name(tensor.dtype)
                    if (size, dtype) != (whole.end - whole.start, record.dtype):
                        raise ValueError(f"{name} differs from the index")
                    held.append((name, FilePiece(tensor.flatten(), whole)))
        except ValueError as error:
            raise DamagedCheckpoint(part.folder, [str(error)]) from error
    return held


def held_parts(config: CheckpointConfig) -> list[HeldPart]:
    """Return the parts of the run's local saves that are on this node, without verifying their bytes."""
    found: list[HeldPart] = []
    with suppress(OSError):  # the start reports it
        for iteration, folder in _parts_here(config):
            with suppress(DamagedCheckpoint, OSError, LookupError, TypeError, ValueError):
                found.append(HeldPart(iteration, *part_of(read_manifest(folder))))
    return found


def delete_parts_after(config: CheckpointConfig, reached: int) -> None:
    """Delete the parts of iterations after `reached`, the last one of the run so far.

    An earlier run in the same folder has left them on a node that was a spare since.
    """
    with suppress(OSError):
        for iteration, folder in _parts_here(config):
            if iteration > reached:
                shutil.rmtree(folder, ignore_errors=True)


def _parts_here(config: CheckpointConfig) -> Iterable[tuple[int, Path]]:
    run_id = known_run_id(config.save) if config.save else None
    if run_id is None or config.non_persistent_local_ckpt_dir is None:
        return ()
    return parts_in(Path(config.non_persistent_local_ckpt_dir) / run_id)
