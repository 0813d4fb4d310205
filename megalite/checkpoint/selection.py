"""Select the checkpoint of a folder that all ranks load: the latest complete one."""

from __future__ import annotations

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
from megalite.distributed.topology import Topology
from megalite.utils.commands import command_name
from megalite.utils.errors import UserError
from megalite.utils.log import log

_MAX_SHOWN = 3
_FOREIGN = {
    "latest_checkpointed_iteration.txt": "Megatron-LM's",
    "model.safetensors": "Hugging Face's",
    "model.safetensors.index.json": "Hugging Face's",
    ".metadata": "torch.distributed.checkpoint's",
}
"""Files that identify checkpoint folders of other programs."""


class _Finding(NamedTuple):
    """Problems that one rank found in a checkpoint.

    Attributes:
        text_problems: problems of text files, which every rank should find.
        file_problems: problems of the tensor files that this rank checked.
        digest: digest of the index, to detect that ranks see different folders.
    """

    text_problems: tuple[str, ...] = ()
    file_problems: tuple[str, ...] = ()
    digest: str | None = None
    is_other_format: bool = False


def choose_checkpoint(folder: Path, topology: Topology, iteration: int | None = None) -> Manifest | None:
    """Return the checkpoint that `latest` names, or the newest complete one before it; every rank calls this.

    All its bytes have been read and verified; the ranks divide the files among themselves.

    Args:
        iteration: iteration to load; other checkpoints are then not considered.

    Returns:
        The manifest; None if the folder has no checkpoint.

    Raises:
        UserError: no checkpoint is complete, another version wrote it, the folder cannot be read, or ranks
            see different folders. Every rank raises it.
    """
    with topology.agreed():
        listing = _listing(folder, iteration)
    listing = _listing_of_first(folder, listing, topology)
    for notice in listing.notices:
        log.warning("%s", notice)
    damaged: list[str] = []
    for name in listing.names:
        manifest, problems = _verified(folder / name, topology)
        if manifest is not None:
            if damaged:
                log.warning("checkpoint %s is loaded instead", manifest.folder)
            return manifest
        damaged.append(f"{name}: {'; '.join(problems)}")
        if iteration is None and len(listing.names) > 1:
            log.warning("checkpoint %s is damaged and skipped: %s", folder / name, "; ".join(problems))
    if not damaged:
        return None
    advice = "pass another --load-iteration" if iteration is not None else "load another"
    raise UserError(
        f"--load {folder} has no complete checkpoint to load ({' | '.join(damaged)}): {advice}, or remove "
        "--load"
    )


def _listing(folder: Path, iteration: int | None) -> Listing:
    try:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"--load {folder} is not a folder: pass the one that --save wrote")
        if (folder / RUN).exists() and not (folder / LATEST).exists():
            raise UserError(
                f"--load {folder} is one checkpoint: pass the folder above it, {folder.absolute().parent}, "
                "and --load-iteration if it is not the latest"
            )
        found = iterations_in(folder)
        listing = list_checkpoints(folder)
        foreign = [name for name in _FOREIGN if (folder / name).exists()]
        if foreign and not listing.names:
            raise UserError(
                f"--load {folder} holds no checkpoint of megalite: {foreign[0]} is {_FOREIGN[foreign[0]]}; "
                f"try to convert it with {command_name('convert')}"
            )
        if iteration is None:
            return listing
    except OSError as error:
        raise UserError(f"--load {folder} cannot be read: {error.strerror}") from None
    if iteration not in found:
        known = f"iterations {', '.join(map(str, found))}" if found else "none"
        raise UserError(f"--load {folder} has no checkpoint {name_of(iteration)}: it has {known}")
    return Listing((found[iteration],))


def _listing_of_first(folder: Path, listing: Listing, topology: Topology) -> Listing:
    """Return the listing of rank 0, after checking that either all ranks see a checkpoint or none does."""
    listings: list[Listing] = [listing] * topology.world_size
    dist.all_gather_object(listings, listing)
    empty = [rank for rank, each in enumerate(listings) if not each.names]
    if 0 < len(empty) < len(listings):
        raise _different(folder, f"{_ranks(empty)} see no checkpoint")
    return listings[0]


def _verified(checkpoint: Path, topology: Topology) -> tuple[Manifest | None, list[str]]:
    """Return the manifest of a checkpoint that every rank finds complete, or None and its problems."""
    manifest: Manifest | None = None
    finding = _Finding()
    with topology.agreed():  # nothing raises here; wait for the slowest reader
        try:
            manifest = read_manifest(checkpoint)
            mine = manifest.files[topology.rank :: topology.world_size]
            finding = _Finding((), tuple(damage_of(manifest, mine)), manifest.digests[INDEX])
        except DamagedCheckpoint as error:
            finding = _Finding(error.problems, is_other_format=isinstance(error, OtherFormat))
    findings = [finding] * topology.world_size
    dist.all_gather_object(findings, finding)
    problems = _problems(findings)
    if all(each.is_other_format for each in findings):
        raise DamagedCheckpoint(checkpoint, problems)
    if not problems and len({each.digest for each in findings}) > 1:
        raise _different(checkpoint.parent, f"{checkpoint.name} differs from rank to rank")
    return (None if problems else manifest), problems


def _problems(findings: Sequence[_Finding]) -> list[str]:
    """Return each problem of any rank once; problems of text files name the ranks if not all have them."""
    problems = []
    for problem in dict.fromkeys(problem for finding in findings for problem in finding.text_problems):
        ranks = [rank for rank, finding in enumerate(findings) if problem in finding.text_problems]
        problems.append(problem if len(ranks) == len(findings) else f"{problem} on {_ranks(ranks)}")
    problems += sorted({problem for finding in findings for problem in finding.file_problems})
    rest = len(problems) - _MAX_SHOWN
    return problems if rest <= 0 else [*problems[:_MAX_SHOWN], f"and {rest} more"]


def _ranks(ranks: Iterable[int]) -> str:
    return f"ranks {', '.join(map(str, ranks))}"


def _different(folder: Path, what: str) -> UserError:
    return UserError(
        f"--load {folder} is not the same on all ranks ({what}): pass a folder on a file system that all "
        "ranks share"
    )
