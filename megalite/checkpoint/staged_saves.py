"""Finish the upload of a save that is whole on the disks of the nodes when a run starts.

An earlier start has ended before its upload was over: it was killed, the store refused the files, or
`--exit-upload-seconds` were over. It has left:

    STAGE/bucket%2Frun/.iter_0000020.5f3a….partial/
        dp_3.5f3a….safetensors   on the node of the rank that wrote it
        SHA256SUMS               on rank 0's node, the last of the texts
        latest                   on rank 0's node: the store's, when the save began

Ranks may be on other nodes, and their number may have changed. A file that is in the store already, where its
name is new in each save, is needed on no node.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from megalite.checkpoint.folder import LATEST
from megalite.checkpoint.manifest import SUMS, DamagedCheckpoint, parse_sums, read_manifest, sha256_of
from megalite.checkpoint.stored_run import StoredRun
from megalite.distributed.topology import Topology
from megalite.utils.errors import UserError
from megalite.utils.log import log


class _Rest(NamedTuple):
    """Rest of the upload of a save.

    Attributes:
        digests: SHA-256 of the files to upload, by name.
        problem: why the save cannot be finished; empty if it can.
        is_done: whether it is complete in the store.
    """

    digests: Mapping[str, str] = {}
    problem: str = ""
    is_done: bool = False


def upload_staged(run: StoredRun, topology: Topology, check: Callable[[], None]) -> None:
    """Upload what is whole, newest first, and delete the rest; every rank calls this before it loads.

    Args:
        check: raises an error if another run has taken over the store's folder.

    Raises:
        UserError: the store or the stage cannot be read or written; nothing is deleted then. Every rank
            raises it.
    """
    mine: dict[str, list[str]] = {}
    with topology.agreed():
        for partial in run.staged():
            with _named_errors(run, partial):
                mine[partial.name] = [file.name for file in partial.iterdir()]
    found = topology.world.gather_objects(mine, "saves in the stage")
    names = {name for of_rank in found for name in of_rank}
    for name in sorted(names, key=lambda name: (len(name), name), reverse=True):
        partial = run.stage / name
        rest = _upload(run, partial, [of_rank.get(name, ()) for of_rank in found], topology, check)
        if rest.problem:
            log.warning("checkpoint %s in %s is removed: %s", _name_of(partial), run.stage, rest.problem)
        shutil.rmtree(partial, ignore_errors=True)


def _upload(
    run: StoredRun,
    partial: Path,
    files: Sequence[Collection[str]],
    topology: Topology,
    check: Callable[[], None],
) -> _Rest:
    """Upload a save if it can be finished.

    Args:
        files: names of the files that each rank sees in its stage.
    """
    name, rank, rest = _name_of(partial), topology.rank, _Rest()
    # The rank that publishes needs the texts.
    first = next((number for number, names in enumerate(files) if SUMS in names), None)
    if first is None:
        return _Rest(problem=f"no node has its {SUMS}, so it was not written to the end")
    with topology.agreed(), _named_errors(run, partial):
        if rank == first:
            rest = _rest_of(run, partial)
    rest = topology.world.gather_objects(rest, "the rest of an upload")[first]
    if rest.problem or rest.is_done:
        return rest
    mine, loads = list[str](), Counter[int]()
    for file in sorted(rest.digests):
        ranks = [number for number, names in enumerate(files) if file in names]
        if not ranks:
            return _Rest(problem=f"no node has its {file}, and it was not uploaded")
        sender = min(ranks, key=lambda number: loads[number])
        loads[sender] += 1
        mine += [file] if sender == rank else []
    log.info("uploading checkpoint %s/%s, which an earlier start has left in %s", run, name, run.stage)
    bad = list[str]()
    with topology.agreed(), _named_errors(run, partial):
        bad = [file for file in mine if sha256_of(partial / file) != rest.digests[file]]
    if damaged := [file for each in topology.world.gather_objects(bad, "damaged files") for file in each]:
        return _Rest(problem=f"{damaged[0]} has other contents than {SUMS} says")
    with topology.agreed(), _named_errors(run, partial):
        run.send(partial, name, mine)
    with topology.agreed(), _named_errors(run, partial):
        if rank == first:
            run.publish(partial, name, check)
    log.info("saved checkpoint %s/%s", run, name)
    return rest


def _rest_of(run: StoredRun, partial: Path) -> _Rest:
    """Return what is left to do, from the texts on this node and what is in the store."""
    name = _name_of(partial)
    try:
        manifest = read_manifest(partial)
    except DamagedCheckpoint as error:
        return _Rest(problem="; ".join(error.problems))
    found = run.objects.list_all(name)
    before = (partial / LATEST).read_bytes() if (partial / LATEST).exists() else b""
    if (latest := run.latest()) != before:
        sums = run.objects.read(f"{name}/{SUMS}") if f"{name}/{SUMS}" in found else b""
        if parse_sums(sums.decode()).keys() >= manifest.digests.keys():
            return _Rest(is_done=True)
        since = latest.decode().strip() or "no checkpoint"
        return _Rest(problem=f"the latest in {run} is {since}, which has changed since it was written")
    return _Rest({file: manifest.digests[file] for file in manifest.files if f"{name}/{file}" not in found})


def _name_of(partial: Path) -> str:
    return partial.name.split(".")[1]


@contextmanager
def _named_errors(run: StoredRun, partial: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"checkpoint {run}/{_name_of(partial)}, which an earlier start has left, cannot be uploaded "
            f"({error.strerror}: {error.filename}): start again, or delete {partial} to go on without it"
        ) from None
