"""Move a run's tensors to another layout, through the memory of the ranks.

Before the old layout ends, each rank copies its share of them to host memory, as for a checkpoint. Once the
tensors of the new layout exist, each rank takes what it needs from the ranks that hold it. A restarted run
takes its tensors from local saves in the same way (`load_local`).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.checkpoint.compatibility import loads_optimizer
from megalite.checkpoint.folder import name_of
from megalite.checkpoint.load import LoadPlan, plan_load
from megalite.checkpoint.local_saves import LocalSaves, known_run_id, part_of, parts_in
from megalite.checkpoint.manifest import DamagedCheckpoint, Manifest, TensorRecord, dtype_name, read_manifest
from megalite.checkpoint.parameter_range import ParameterRange, Tensors, elements_of
from megalite.checkpoint.save import plan_save
from megalite.checkpoint.stored_run import StoredRun, newest_at
from megalite.checkpoint.tensor_files import FilePiece, ReadTarget, open_tensors
from megalite.config import CheckpointConfig, Config
from megalite.data.corpus_record import DataRecord
from megalite.distributed.collectives import all_reduce
from megalite.distributed.regroup import HeldPart
from megalite.distributed.topology import Topology
from megalite.utils.errors import UserError, few
from megalite.utils.log import log

MESSAGE_BYTES = 64 << 20
"""Size of a message between two ranks. A rank has one to send and one to receive at a time."""


def bytes_to_hold(tensors: Tensors, topology: Topology) -> int:
    """Return the host memory that `hold` and `exchange` need on a rank, besides the new layout's tensors."""
    return sum(piece.num_bytes for piece in plan_save(tensors, topology).values()) + 2 * MESSAGE_BYTES


HeldPieces = list[tuple[str, FilePiece]]
"""Pieces of tensors in host memory, each with the name of its tensor and with a range."""


def hold(tensors: Tensors, topology: Topology) -> HeldPieces:
    """Copy to host memory what this rank would write to a checkpoint, with the ranges in the old layout.

    Ranks that have the same elements each hold a share of them.
    """
    return [
        (
            name,
            FilePiece(
                piece.tensor.to("cpu", copy=True).flatten(),
                piece.range or ParameterRange.of(tensors[name], topology),
            ),
        )
        for name, piece in plan_save(tensors, topology).items()
    ]


@torch.no_grad()
def exchange(held: HeldPieces, tensors: Tensors, topology: Topology) -> int:
    """Fill the tensors of the new layout in place; every rank must call this.

    Padding that no rank holds does not change.

    Args:
        held: what `hold` returned in the old layout. It is emptied: each piece is freed once no rank needs it
            any more.
        topology: the ranks in the new layout.

    Returns:
        The bytes that all ranks have sent to each other.

    Raises:
        UserError: elements are held by no rank, or by several that do not hold copies; a dtype or a shape has
            changed, or a tensor is held that no rank needs. Raised on every rank, before anything is copied.
    """
    rank, size = topology.rank, topology.world_size
    targets = {
        name: ReadTarget(name, elements_of(tensor), ParameterRange.of(tensor, topology))
        for name, tensor in tensors.items()
    }
    offered, requests = _agreed_plan(held, targets, topology)

    pieces = dict(enumerate(held))
    held.clear()

    def outgoing(to: int) -> Iterator[Tensor]:
        """Yield what another rank has requested of this rank's pieces."""
        for number in requests[to].of(rank):
            name, piece = pieces[number]
            yield from _common_views(piece.tensor, _range(piece), requests[to].ranges[name])

    def incoming(source: int) -> Iterator[Tensor]:
        """Yield where to put what another rank sends, in the order in which it sends it."""
        for number in requests[rank].of(source):
            name, record = offered[source][number]
            yield from _common_views(targets[name].elements, targets[name].range, _range(record))

    last_needed = {
        number: shift for shift in range(size) for number in requests[(rank + shift) % size].of(rank)
    }
    num_sent = 0
    for shift in range(size):
        for number in [number for number in pieces if last_needed.get(number, -1) < shift]:
            del pieces[number]
        to, source = (rank + shift) % size, (rank - shift) % size
        if shift == 0:
            for own, view in zip(outgoing(to), incoming(source), strict=True):
                view.copy_(own)
        else:
            num_sent += _send_and_receive(outgoing(to), to, incoming(source), source, topology)
    return int(all_reduce(torch.tensor(num_sent), topology.world, of="bytes of the new layout"))


@dataclass(frozen=True)
class _Requests:
    """Tensors of a rank in the new layout, and where it takes them from.

    Attributes:
        ranges: ranges of its tensors, by name.
        pieces: numbers of the pieces that it takes, by the rank that holds them.
    """

    ranges: Mapping[str, ParameterRange]
    pieces: Mapping[int, Sequence[int]]

    def of(self, holder: int) -> Sequence[int]:
        return self.pieces.get(holder, ())


_Offer = Sequence[tuple[str, TensorRecord]]
"""The pieces of a rank; `file` is the number of the rank and that of the piece."""


def _agreed_plan(
    held: HeldPieces, targets: Mapping[str, ReadTarget], topology: Topology
) -> tuple[Sequence[_Offer], Sequence[_Requests]]:
    """Return what each rank holds, and what each requests from which ranks; a collective."""
    records = [
        (name, TensorRecord(f"{topology.rank} {number}", dtype_name(piece.tensor.dtype), piece.range))
        for number, (name, piece) in enumerate(held)
    ]
    offered = topology.world.gather_objects(records, "tensors of the old layout")
    chosen: dict[int, list[int]] = {}
    with topology.agreed():
        try:
            chosen = _choose_holders(offered, targets, topology.rank)
        except ValueError as error:
            raise UserError(f"tensors cannot move: {error}") from error
    own = _Requests({name: target.range for name, target in targets.items()}, chosen)
    requests = topology.world.gather_objects(own, "tensors of the new layout")
    known = {name for each in requests for name in each.ranges}
    if lost := sorted({name for each in offered for name, _ in each} - known):
        raise UserError(f"tensors cannot move: no rank needs {few(lost)} of the old one")
    return offered, requests


def _common_views(elements: Tensor, own: ParameterRange, other: ParameterRange) -> Iterator[Tensor]:
    """Yield views of what two ranges have in common, in the elements of `own`.

    Boxes of a range are in the order of the full tensor, and no two of them interleave. So the views in the
    elements of `other` have the same shapes, in the same order.
    """
    for box, values in own.views(elements):
        for theirs, _ in other.boxes():
            if (common := box.common(theirs)).numel:
                yield common.within(box).of(values)


def _range(piece: FilePiece | TensorRecord) -> ParameterRange:
    assert piece.range is not None
    return piece.range


def _choose_holders(
    offered: Sequence[_Offer], targets: Mapping[str, ReadTarget], rank: int
) -> dict[int, list[int]]:
    """Return the numbers of the pieces that this rank takes, by the rank that it takes them from.

    Raises:
        ValueError: elements are in no piece, or in several that are no copies; a dtype or a shape differs.
    """
    nearest_first: dict[str, list[TensorRecord]] = {}
    for shift in range(len(offered)):
        for name, record in offered[(rank + shift) % len(offered)]:
            nearest_first.setdefault(name, []).append(record)
    chosen: dict[int, list[int]] = {}
    for name, target in targets.items():
        records = nearest_first.get(name, [])
        if others := {record.dtype for record in records} - {dtype_name(target.elements.dtype)}:
            raise ValueError(f"{name} is {others.pop()}, here {dtype_name(target.elements.dtype)}")
        for record in target.pieces(records):
            holder, number = map(int, record.file.split())
            chosen.setdefault(holder, []).append(number)
    return chosen


def _send_and_receive(
    outgoing: Iterable[Tensor], to: int, incoming: Iterable[Tensor], source: int, topology: Topology
) -> int:
    """Send parts to one rank and receive parts from another, a message at a time; return the bytes sent.

    All ranks do this at the same time, each with the rank at the same distance. A rank waits for its messages
    of one number before it begins the next, so no ranks can wait for each other in a circle.
    """
    num_sent, group = 0, topology.world.group
    for sent, received in zip_longest(_messages(outgoing), _messages(incoming), fillvalue=()):
        operations = []
        if sent:
            parts = [part.reshape(-1).view(torch.uint8) for part in sent]
            message = torch.cat(parts).to(topology.device)
            num_sent += message.numel()
            operations.append(dist.P2POp(dist.isend, message, to, group))
        if received:
            sizes = [part.nbytes for part in received]
            buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=topology.device)
            operations.append(dist.P2POp(dist.irecv, buffer, source, group))
        with topology.world.wait("send and receive", "tensors of the new layout"):
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        if received:
            for part, content in zip(received, buffer.split(sizes), strict=True):
                # A clone is aligned; parts of other dtypes come before it in the buffer.
                part.copy_(content.clone().view(part.dtype).view(part.shape))
    return num_sent


def _messages(parts: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Divide parts into messages, in order. Parts of the same shapes and dtypes are divided alike."""
    message: list[Tensor] = []
    num_bytes = 0
    for part in parts:
        for piece in _small(part):
            if message and num_bytes + piece.nbytes > MESSAGE_BYTES:
                yield message
                message, num_bytes = [], 0
            message.append(piece)
            num_bytes += piece.nbytes
    if message:
        yield message


def _small(part: Tensor) -> Iterator[Tensor]:
    """Yield views that together are the part, in order, none of them larger than a message."""
    if part.nbytes <= MESSAGE_BYTES:
        yield part
    elif len(part) == 1:
        yield from _small(part[0])
    else:
        for half in part.tensor_split(2):
            yield from _small(half)


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
