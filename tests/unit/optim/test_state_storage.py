"""Optimizer states in a file: its contents, its checksums, and what it leaves behind."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
import torch

from megalite.optim import NUM_SLOTS, state_storage
from megalite.optim.state_storage import (
    FileStorage,
    HostStorage,
    StateFileError,
    StateRange,
    StateSize,
    file_bytes,
    num_offloaded,
    ranges_of,
    ring_bytes,
)
from megalite.utils.errors import UserError

KINDS = ("main", "exp_avg", "exp_avg_sq")
SIZES = [StateSize(numel, torch.float32, KINDS) for numel in (5000, 64, 12288, 3000)]
RANGE_SIZE = 1024


def _filled(storage) -> None:
    generator = torch.Generator().manual_seed(1)
    for number, size in enumerate(storage.sizes):
        for tensor in storage.tensors(number).values():
            tensor.copy_(torch.rand(size.numel, generator=generator))
    storage.seal()


def _updated(storage, factor: float) -> None:
    storage.start()
    for number in range(len(storage.ranges)):
        for index, tensor in enumerate(storage.take(number).values()):
            tensor.mul_(factor).add_(number + index)
        storage.put(number)
    storage.finish()


def _contents(storage) -> list[torch.Tensor]:
    return [tensor.clone() for number in range(len(SIZES)) for tensor in storage.tensors(number).values()]


def test_the_file_has_what_memory_has(tmp_path: Path) -> None:
    storages = [HostStorage(SIZES, range_size=RANGE_SIZE), FileStorage(tmp_path, SIZES, RANGE_SIZE)]
    assert len(storages[1].ranges) > 2 * NUM_SLOTS
    for storage in storages:
        _filled(storage)
        for factor in (2.0, 0.5, 3.0):
            _updated(storage, factor)
    for expected, found in zip(*map(_contents, storages), strict=True):
        assert torch.equal(found, expected)
    storages[1].check()


def test_what_is_written_between_updates_is_updated_next(tmp_path: Path) -> None:
    """As a checkpoint does, through mapped pages, after updates that went past them."""
    storages = [HostStorage(SIZES, range_size=RANGE_SIZE), FileStorage(tmp_path, SIZES, RANGE_SIZE)]
    for storage in storages:
        for factor in (2.0, 0.5):
            _updated(storage, factor)
            _contents(storage)  # the pages are mapped now
            for number in range(len(SIZES)):
                storage.tensors(number)["exp_avg"].mul_(7.0)
            storage.seal()
        _updated(storage, 3.0)
    for expected, found in zip(*map(_contents, storages), strict=True):
        assert torch.equal(found, expected)


def test_new_states_are_zero_and_main_weights_what_was_written_first(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path, SIZES, RANGE_SIZE)
    storage.tensors(0)["main"].fill_(5.0)
    _updated(storage, 1.0)
    first = storage.tensors(0)
    assert first["main"][:RANGE_SIZE].eq(5.0).all()
    assert first["exp_avg"][:RANGE_SIZE].eq(1.0).all()


@pytest.mark.parametrize("reads_directly", [True, False])
def test_another_byte_is_found_and_its_place_named(
    tmp_path: Path, reads_directly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not reads_directly:
        monkeypatch.setattr(os, "O_DIRECT", 0)
    storage = FileStorage(tmp_path, SIZES, RANGE_SIZE)
    _filled(storage)
    _updated(storage, 2.0)
    part = storage._parts[3][1]  # elements 3072 to 4096 of the first state
    os.pwrite(os.open(f"/proc/self/fd/{storage._descriptor}", os.O_RDWR), b"\xff\xee", part.start + 4)
    place = re.escape(f"bytes {part.start} to {part.start + part.num_bytes}")
    message = f"--optimizer-nvme-offload {tmp_path}: {place} .*exp_avg, elements 3072 to 4096 .* differ"
    with pytest.raises(StateFileError, match=message):
        storage.check()
    with pytest.raises(StateFileError, match=message):
        _updated(storage, 2.0)


def _exchange(words: torch.Tensor, first: int, second: int) -> None:
    words[[first, second]] = words[[second, first]]


def _move(words: torch.Tensor, first: int, second: int) -> None:
    """Add to one word what is taken from another: the sum of all stays."""
    words[first] += 1 << 40
    words[second] -= 1 << 40


DAMAGES = {
    "a bit": lambda words: words[70_000].bitwise_xor_(1),
    "words of a block are exchanged": lambda words: _exchange(words, 512, 1000),
    "words of a block, by the same number": lambda words: _move(words, 512, 1000),
    "words of two blocks, by the same number": lambda words: _move(words, 5, 512 + 5),
    "blocks are exchanged": lambda words: _exchange(words.view(-1, 512), 3, 80),
    "a block of zeros": lambda words: words[512:1024].zero_(),
    "a block of another": lambda words: words[512:1024].copy_(words[4096:4608]),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_checksum_finds(tmp_path: Path, damage) -> None:
    """Also damage that leaves the sum of all words, of a block, or of a place in all blocks."""
    storage = FileStorage(tmp_path, [StateSize(300 * 1024, torch.float32, KINDS)], 150 * 1024)
    _filled(storage)
    storage.check()
    damage(storage.tensors(0)["exp_avg"].view(torch.int64))
    with pytest.raises(StateFileError, match="differ"):
        storage.check()


def test_a_read_error_names_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = FileStorage(tmp_path, SIZES, RANGE_SIZE)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(StateFileError, match=r"bytes 0 to 4096 .*cannot be read \(Input/output error\)"):
        _updated(storage, 2.0)


def test_the_file_has_no_name(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path, SIZES, RANGE_SIZE)
    assert not list(tmp_path.iterdir())
    assert os.fstat(storage._descriptor).st_size == storage.num_bytes == file_bytes(SIZES)
    assert os.fstat(storage._descriptor).st_blocks * 512 >= storage.num_bytes  # its space is reserved


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"--optimizer-nvme-offload .*gone is not a folder: create it"):
        FileStorage(tmp_path / "gone", SIZES)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"of 0.00 GB cannot be stored \(No space left .* GB are free\)"):
        FileStorage(tmp_path, SIZES)
    monkeypatch.setattr(state_storage.tempfile, "TemporaryFile", full)
    with pytest.raises(UserError, match="cannot be stored"):
        FileStorage(tmp_path, SIZES)


@pytest.mark.parametrize(("kind", "warning"), [("tmpfs", "is in memory"), ("nfs4", "network"), ("xfs", "")])
def test_memory_and_network_are_warned_about(
    tmp_path: Path, kind: str, warning: str, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    monkeypatch.setattr(state_storage, "file_system_of", lambda _: kind)
    FileStorage(tmp_path, SIZES)
    assert (warning in caplog.text) if warning else not caplog.text


def test_buffers_have_the_size_that_is_planned(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path, SIZES, RANGE_SIZE)
    assert storage.ring_bytes == ring_bytes(SIZES, RANGE_SIZE) == NUM_SLOTS * len(KINDS) * 4 * RANGE_SIZE


@pytest.mark.parametrize(
    ("fraction", "count"), [(1.0, 4), (0.001, 1), (0.245, 1), (0.248, 2), (0.5, 3), (0.853, 4)]
)
def test_a_share_is_whole_states(fraction: float, count: int) -> None:
    assert num_offloaded(SIZES, fraction) == count


def test_ranges_start_at_multiples_of_their_size() -> None:
    assert ranges_of(SIZES[:2], 4096) == [
        StateRange(0, 0, 4096),
        StateRange(0, 4096, 5000),
        StateRange(1, 0, 64),
    ]
    assert ranges_of([], 64) == []


def test_a_kind_has_its_own_buffer_in_a_slot(tmp_path: Path) -> None:
    """A shorter range's is read while another kind of the longer range before it is still written."""
    storage = FileStorage(tmp_path, SIZES, 2 * RANGE_SIZE)
    for slot in range(NUM_SLOTS):
        of_slot = storage._parts[slot::NUM_SLOTS]
        starts = [{parts[index].memory.data_ptr() for parts in of_slot} for index in range(len(KINDS))]
        assert [len(each) for each in starts] == [1, 1, 1]
        assert len(set.union(*starts)) == 3
