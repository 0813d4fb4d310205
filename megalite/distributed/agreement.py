"""Check that all ranks of a run were started with the same flags and code, and read the same files.

Every rank describes itself with a record, a mapping from names ("--lr") to values as text ("0.0001"). The
ranks exchange digests of their records over the store, which exists before any process group: each rank
writes one small key, and rank 0 reads all of them at once. If digests differ, one record for each distinct
digest is exchanged.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import megalite
from megalite.utils.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import Store

RankRecord = Mapping[str, str]

REFUSED = "refused"
"""The only name in the record of a rank that refuses its own command line."""

_MAX_KINDS = 8  # number of distinct records that are compared
_MAX_LINES = 20
_MAX_RANGES = 8  # number of ranges of ranks in a message
_ABSENT = "nothing"
_SECONDS_TO_READ = 10.0


def code_record() -> dict[str, str]:
    """Return the versions of megalite and torch, and a digest of all Python files of megalite."""
    folder = Path(megalite.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder).as_posix()}\n".encode())
        digest.update(path.read_bytes())
    return {
        "the version of megalite": f"{megalite.__version__} (digest of its files {digest.hexdigest()[:12]})",
        "the version of torch": torch.__version__,
    }


def check_agreement(store: Store, rank: int, world_size: int, record: RankRecord | None, topic: str) -> None:
    """Raise the same error on every rank if the ranks' records differ.

    Every rank must call it equally often for each topic.

    Args:
        store: store without keys of an earlier start.
        record: record of this rank; None if it has nothing to compare.
        topic: name for the compared records.

    Raises:
        UserError: one line for each name whose value differs, with the ranks and their values.
        RuntimeError: a rank did not call it within the store's timeout.
    """
    # Ranks may run different versions of megalite, so these keys must not change.
    number = store.add(f"megalite/agreement/{topic}/calls/{rank}", 1)
    prefix = f"megalite/agreement/{topic}/{number}"
    text = "" if record is None else json.dumps(record, sort_keys=True)
    # A rank without a record has an empty digest.
    store.set(f"{prefix}/digest/{rank}", text and hashlib.sha256(text.encode()).hexdigest())
    kinds: list[list[int]] = []
    if rank == 0:
        digests = store.multi_get([f"{prefix}/digest/{other}" for other in range(world_size)])
        kinds = _kinds(digests)
        representatives = [ranks[0] for ranks in kinds[:_MAX_KINDS]] if len(kinds) > 1 else []
        store.set(f"{prefix}/requested", json.dumps(representatives))
    requested: list[int] = json.loads(store.get(f"{prefix}/requested"))
    if not requested:
        return
    if rank in requested:
        store.set(f"{prefix}/record/{rank}", text)
    if rank == 0:
        keys = [f"{prefix}/record/{other}" for other in requested]
        records = [json.loads(found) for found in store.multi_get(keys)]
        message = "\n".join(_differences(kinds, records, world_size))
        store.set(f"{prefix}/message", message)
        _wait_for_readers(store, f"{prefix}/readers", world_size - 1)
    else:
        message = store.get(f"{prefix}/message").decode()
        store.add(f"{prefix}/readers", 1)
    raise UserError(message)


def _wait_for_readers(store: Store, key: str, number: int) -> None:
    """Wait until this many ranks have read the message, because the store can end with this process."""
    deadline = time.monotonic() + _SECONDS_TO_READ
    with suppress(RuntimeError):
        while store.add(key, 0) < number and time.monotonic() < deadline:
            time.sleep(0.01)


def _kinds(digests: Sequence[bytes]) -> list[list[int]]:
    """Group the ranks by digest, the largest group first; ranks without a record are in no group."""
    groups = defaultdict[bytes, list[int]](list)
    for rank, digest in enumerate(digests):
        if digest:
            groups[digest].append(rank)
    return sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks[0]))


def _differences(kinds: Sequence[Sequence[int]], records: Sequence[RankRecord], world_size: int) -> list[str]:
    """Return one line for each name whose value is not the same in all records.

    Args:
        kinds: groups of ranks with equal records.
        records: records of the first `_MAX_KINDS` groups.
    """
    lines = []
    for ranks, record in zip(kinds, records, strict=False):
        if REFUSED in record:
            lines.append(f"{_named(ranks)} alone: {record[REFUSED]}")
    compared = [
        (ranks, record) for ranks, record in zip(kinds, records, strict=False) if REFUSED not in record
    ]
    for name in dict.fromkeys(name for _, record in compared for name in record):
        by_value = defaultdict[str, list[int]](list)
        for ranks, record in compared:
            by_value[record.get(name, _ABSENT)] += ranks
        if len(by_value) > 1:
            lines.append(
                f"{name} differs between ranks: {_values(by_value, world_size)}; start every rank with "
                "the same"
            )
    if (more := len(lines) - _MAX_LINES) > 0:
        lines[_MAX_LINES:] = [f"{more} more settings differ between ranks"]
    if more_kinds := kinds[len(records) :]:
        lines.append(f"{_named(rank for ranks in more_kinds for rank in ranks)} differ too, in other ways")
    return lines


def _values(by_value: Mapping[str, Sequence[int]], world_size: int) -> str:
    """Describe which ranks have which value, the most common value last."""
    ordered = sorted(by_value.items(), key=lambda item: (len(item[1]), -min(item[1])))
    parts = [f"{_named(ranks)} {'has' if len(ranks) == 1 else 'have'} {value}" for value, ranks in ordered]
    value, ranks = ordered[-1]
    if len(ranks) > 1 and sum(map(len, by_value.values())) == world_size:
        parts[-1] = f"the others {value}"
    return ", ".join(parts)


def _named(ranks: Iterable[int]) -> str:
    """Format ranks, with ranges of consecutive ranks: "ranks 0 to 3, 8"."""
    numbers = sorted(ranks)
    starts = [n for i, n in enumerate(numbers) if i == 0 or numbers[i - 1] != n - 1]
    ends = [n for i, n in enumerate(numbers) if i == len(numbers) - 1 or numbers[i + 1] != n + 1]
    ranges = [
        str(first) if first == last else f"{first}{', ' if last == first + 1 else ' to '}{last}"
        for first, last in zip(starts, ends, strict=True)
    ]
    if len(ranges) > _MAX_RANGES:
        ranges[_MAX_RANGES:] = [f"… ({len(numbers)} in all)"]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(ranges)}"
