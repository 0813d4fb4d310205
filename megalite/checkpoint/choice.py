"""Which of a folder's checkpoints every rank loads: the latest one that is whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from megalite.checkpoint.folder import LATEST, Listing, iterations_in, list_checkpoints, name_of
from megalite.checkpoint.manifest import (
    INDEX,
    RUN,
    DamagedCheckpoint,
    Manifest,
    OtherFormat,
    damage_of,
    read_manifest,
)
from megalite.errors import UserError
from megalite.log import log
from megalite.topology import Topology

_MAX_TOLD = 3
_FOREIGN = {
    "latest_checkpointed_iteration.txt": "Megatron-LM's",
    "model.safetensors": "Hugging Face's",
    "model.safetensors.index.json": "Hugging Face's",
    ".metadata": "torch.distributed.checkpoint's",
}
"""Files by which other programs' folders are known."""


class _Finding(NamedTuple):
    """What one rank found of a checkpoint.

    Attributes:
        of_texts: problems that every rank should find.
        of_files: problems of the tensor files of which this rank read each byte.
        digest: of the index, so that ranks that see different folders are told.
    """

    of_texts: tuple[str, ...] = ()
    of_files: tuple[str, ...] = ()
    digest: str | None = None
    is_other_format: bool = False


def choose_checkpoint(folder: Path, topology: Topology, iteration: int | None = None) -> Manifest | None:
    """The checkpoint that `latest` names, or the newest whole one before it; every rank calls it.

    Every byte of it has been read and found as it was saved; the ranks share the reading.

    Args:
        iteration: the one to load; no other is taken then.

    Returns:
        None where the folder holds no checkpoint.

    Raises:
        UserError: none is whole; another version wrote it; the folder cannot be read, or ranks see different
            folders. Raised on every rank.
    """
    with topology.agreed():
        listing = _listing(folder, iteration)
    listing = _shared(folder, listing, topology)
    for notice in listing.notices:
        log.warning("%s", notice)
    told: list[str] = []
    for name in listing.names:
        manifest, problems = _verified(folder / name, topology)
        if manifest is not None:
            if told:
                log.warning("checkpoint %s is taken instead", manifest.folder)
            return manifest
        told.append(f"{name}: {'; '.join(problems)}")
        if iteration is None and len(listing.names) > 1:
            log.warning("checkpoint %s is not whole and is left out: %s", folder / name, "; ".join(problems))
    if not told:
        return None
    advice = "give another --load-iteration" if iteration is not None else "load another"
    raise UserError(
        f"--load {folder} has no whole checkpoint to load ({' | '.join(told)}): {advice}, or leave out --load"
    )


def _listing(folder: Path, iteration: int | None) -> Listing:
    try:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"--load {folder} is no folder: give the one that --save wrote")
        if (folder / RUN).exists() and not (folder / LATEST).exists():
            raise UserError(
                f"--load {folder} is one checkpoint: give the folder above it, {folder.absolute().parent}, "
                "and --load-iteration where it is not the latest"
            )
        found = iterations_in(folder)
        listing = list_checkpoints(folder)
        if not listing.names:
            _refuse_foreign(folder)
        if iteration is None:
            return listing
    except OSError as error:
        raise UserError(f"--load {folder} cannot be read: {error.strerror}") from None
    if iteration not in found:
        known = f"those of iterations {', '.join(map(str, found))}" if found else "none"
        raise UserError(f"--load {folder} has no checkpoint {name_of(iteration)}: it has {known}")
    return Listing((found[iteration],))


def _refuse_foreign(folder: Path) -> None:
    for name, whose in _FOREIGN.items():
        if (folder / name).exists():
            raise UserError(
                f"--load {folder} holds no checkpoint of megalite: {name} is {whose}; see what "
                "tools/convert_checkpoint.py makes of it"
            )


def _shared(folder: Path, listing: Listing, topology: Topology) -> Listing:
    """The first rank's, once it is known that every rank sees some checkpoint, or none does."""
    seen: list[Listing] = [listing] * topology.world_size
    dist.all_gather_object(seen, listing)
    blind = [rank for rank, each in enumerate(seen) if not each.names]
    if 0 < len(blind) < len(seen):
        raise _different(folder, f"no checkpoint is seen by {_ranks(blind)}")
    return seen[0]


def _verified(checkpoint: Path, topology: Topology) -> tuple[Manifest | None, list[str]]:
    """The manifest of a checkpoint that every rank finds whole; or None and what is wrong."""
    manifest: Manifest | None = None
    finding = _Finding()
    with topology.agreed():  # nothing is raised: it waits for those who read longest
        try:
            manifest = read_manifest(checkpoint)
            mine = manifest.files[topology.rank :: topology.world_size]
            finding = _Finding((), tuple(damage_of(manifest, mine)), manifest.digests[INDEX])
        except DamagedCheckpoint as error:
            finding = _Finding(error.problems, is_other_format=isinstance(error, OtherFormat))
    findings = [finding] * topology.world_size
    dist.all_gather_object(findings, finding)
    problems = _told(findings)
    if all(each.is_other_format for each in findings):
        raise DamagedCheckpoint(checkpoint, problems)
    if not problems and len({each.digest for each in findings}) > 1:
        raise _different(checkpoint.parent, f"{checkpoint.name} differs from rank to rank")
    return (None if problems else manifest), problems


def _told(findings: Sequence[_Finding]) -> list[str]:
    """All ranks' problems, each once, and with its ranks where only some should not have it."""
    counted = Counter(problem for finding in findings for problem in finding.of_texts)
    problems = [
        problem
        if count == len(findings)
        else f"{problem} on {_ranks(rank for rank, each in enumerate(findings) if problem in each.of_texts)}"
        for problem, count in counted.items()
    ]
    problems += sorted({problem for finding in findings for problem in finding.of_files})
    rest = len(problems) - _MAX_TOLD
    return problems if rest <= 0 else [*problems[:_MAX_TOLD], f"and {rest} more"]


def _ranks(ranks: Iterable[int]) -> str:
    return f"ranks {', '.join(map(str, ranks))}"


def _different(folder: Path, what: str) -> UserError:
    return UserError(
        f"--load {folder} is not the same on all ranks ({what}): give a folder on a file system that all of "
        "them share"
    )
