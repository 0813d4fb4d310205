"""Storage of optimizer states outside of the device: in host memory, or in a file on a local disk.

An update streams the file through a ring of buffers.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megalite.optim import NUM_SLOTS, RANGE_SIZE
from megalite.utils.errors import UserError
from megalite.utils.files import file_system_of
from megalite.utils.hardware.host_memory import allocate_bytes
from megalite.utils.log import log

FLAG = "--optimizer-nvme-offload"
BLOCK = 4096
"""Direct reads and writes start and end at multiples of this number of bytes, in the file and in memory."""
NUM_THREADS = 8
"""Number of threads that read, write and compute checksums: disks are fastest with several requests."""
_CACHED_BLOCKS = 64
"""Number of blocks that fit into a core's cache."""
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
_NETWORK_FILE_SYSTEMS = (
    *("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "beegfs", "gpfs", "9p", "afs", "glusterfs"),
    *("fuse.sshfs", "fuse.blobfuse", "fuse.s3fs", "fuse.gcsfuse"),
)


class StateSize(NamedTuple):
    """Tensors of one of AdamW's states.

    Attributes:
        numel: number of elements of each tensor.
        kinds: names of the tensors, such as main and exp_avg.
    """

    numel: int
    dtype: torch.dtype
    kinds: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return len(self.kinds) * self.numel * self.dtype.itemsize


class StateRange(NamedTuple):
    """Elements ``[start, stop)`` of the state at this position."""

    state: int
    start: int
    stop: int


def num_offloaded(sizes: Sequence[StateSize], fraction: float) -> int:
    """Return how many states, from the first on, hold at least this share of all elements."""
    needed = fraction * sum(size.numel for size in sizes)
    total = count = 0
    while total < needed:
        total += sizes[count].numel
        count += 1
    return count


def ranges_of(
    sizes: Sequence[StateSize], range_size: int, order: Sequence[int] | None = None
) -> list[StateRange]:
    """Return the ranges of all states, in `order` or in the order of the states.

    Each starts at a multiple of `range_size`, so a vector instruction of the update never spans two ranges.
    """
    return [
        StateRange(number, start, min(start + range_size, sizes[number].numel))
        for number in (range(len(sizes)) if order is None else order)
        for start in range(0, sizes[number].numel, range_size)
    ]


class StateStorage:
    """Tensors of states, initially zero, whose ranges pass to an update one by one.

    An update calls `start`, possibly long before it begins, then `take` and `put` for each range in order,
    then `finish`. Between updates `tensors` may be read and written; call `seal` after writing. For tensors
    in memory, the methods without a body have nothing to do.

    Args:
        order: order of the states in an update; None for the order of `sizes`.

    Attributes:
        ranges: ranges in the order of an update.
    """

    _tensors: Sequence[dict[str, Tensor]]

    def __init__(
        self,
        sizes: Sequence[StateSize],
        range_size: int = RANGE_SIZE,
        order: Sequence[int] | None = None,
    ) -> None:
        self.sizes = sizes
        self.ranges = ranges_of(sizes, range_size, order)

    def tensors(self, state: int) -> dict[str, Tensor]:
        """Return a state's complete tensors by kind, ``[numel]``, in host memory or mapped into it."""
        return self._tensors[state]

    def take(self, number: int) -> dict[str, Tensor]:
        """Return the tensors of a range by kind, for the update to change in place."""
        state, start, stop = self.ranges[number]
        return {kind: tensor[start:stop] for kind, tensor in self._tensors[state].items()}

    def start(self) -> None:
        """Prepare for an update, unless this has already been done."""

    def put(self, number: int) -> None:
        """Store a range that was taken and updated."""

    def finish(self) -> None:
        """Wait until all ranges are stored."""

    def seal(self, kinds: Collection[str] | None = None) -> None:
        """Accept new values of `tensors`, only of `kinds` if passed."""

    def check(self) -> None:
        """Check that `tensors` are unchanged since the last update or `seal`."""


class HostStorage(StateStorage):
    """Tensors in host memory. It is not pinned: only the host reads and writes it.

    Args:
        device: meta for tensors without memory in a dry run.
    """

    def __init__(
        self,
        sizes: Sequence[StateSize],
        device: str = "cpu",
        range_size: int = RANGE_SIZE,
        order: Sequence[int] | None = None,
    ) -> None:
        super().__init__(sizes, range_size, order)
        self._tensors = [_zeros(size, device) for size in sizes]


def _zeros(size: StateSize, device: str) -> dict[str, Tensor]:
    if device == "meta":
        return {kind: torch.zeros(size.numel, dtype=size.dtype, device=device) for kind in size.kinds}
    flat = allocate_bytes(size.num_bytes).view(size.dtype)
    return dict(zip(size.kinds, flat.split(size.numel), strict=True))


class StateFileError(UserError):
    """Raised in training if a rank's file cannot be read or written, or its contents have changed."""

    on_one_rank = True


class _Part(NamedTuple):
    """One kind's tensor of a range: its bytes in the file and in its slot's memory."""

    kind: str
    dtype: torch.dtype
    numel: int
    start: int
    num_bytes: int  # a whole number of blocks
    memory: Tensor


class FileStorage(StateStorage):
    """Tensors in an unnamed file, which the system deletes when this process ends.

    Reads and writes bypass the page cache (`O_DIRECT`) if the file system supports it. Threads read ranges
    before the update and write them after it, through `NUM_SLOTS` buffers. A checksum of each range is kept
    in memory and compared whenever the range is read. `tensors` are mapped, so a checkpoint reads and writes
    them without holding all of them in memory.

    Args:
        folder: existing folder on a local disk.
        sizes: sizes of the states, with equal dtypes and kinds.

    Raises:
        UserError: the folder does not exist, cannot be written to, or has too little space.
    """

    def __init__(
        self,
        folder: Path,
        sizes: Sequence[StateSize],
        range_size: int = RANGE_SIZE,
        order: Sequence[int] | None = None,
    ) -> None:
        super().__init__(sizes, range_size, order)
        assert len(self.ranges) == len(sizes) or range_size * sizes[0].dtype.itemsize % BLOCK == 0
        self.folder = folder
        starts, self.num_bytes = _layout(sizes)
        self._file = _new_file(folder, self.num_bytes)
        self._descriptor = self._file.fileno()
        self._map = mmap.mmap(self._descriptor, self.num_bytes)
        content = torch.frombuffer(self._map, dtype=torch.uint8)
        self._tensors = [
            {
                kind: content[start : start + size.numel * size.dtype.itemsize].view(size.dtype)
                for kind, start in zip(size.kinds, kind_starts, strict=True)
            }
            for size, kind_starts in zip(sizes, starts, strict=True)
        ]
        self.ring_bytes = ring_bytes(sizes, range_size)
        slots = allocate_bytes(self.ring_bytes).split(self.ring_bytes // NUM_SLOTS)
        self._parts = [list(self._parts_of(number, starts, slots)) for number in range(len(self.ranges))]
        zeros = {part.num_bytes for parts in self._parts for part in parts}
        checksum_of_zeros = {size: _checksum(bytes(size)) for size in zeros}
        self._checksums = [[checksum_of_zeros[part.num_bytes] for part in parts] for parts in self._parts]
        self._is_direct = _set_direct(self._descriptor, slots[0])
        self._pool = ThreadPoolExecutor(NUM_THREADS, "optimizer-file")
        self._running: dict[int, list[Future[None]]] = {}  # by the range that they read
        self._is_new = True  # main weights and their averages are written first
        self._is_started = False

    def _parts_of(
        self, number: int, starts: Sequence[Sequence[int]], slots: Sequence[Tensor]
    ) -> Iterator[_Part]:
        state, first, last = self.ranges[number]
        size, memory = self.sizes[state], slots[number % NUM_SLOTS]
        item = size.dtype.itemsize
        num_bytes = _in_blocks((last - first) * item)
        memories = memory.split(len(memory) // len(size.kinds))
        for kind, start, own in zip(size.kinds, starts[state], memories, strict=True):
            yield _Part(kind, size.dtype, last - first, start + first * item, num_bytes, own[:num_bytes])

    def start(self) -> None:
        if self._is_started:
            return
        if self._is_new:
            self.seal(("main", "ema"))
        self._is_started = True
        self._drop_pages()
        for number in range(min(NUM_SLOTS, len(self.ranges))):
            self._submit(number, self._read)

    def take(self, number: int) -> dict[str, Tensor]:
        for future in self._running.pop(number):
            future.result()
        return {part.kind: part.memory.view(part.dtype)[: part.numel] for part in self._parts[number]}

    def put(self, number: int) -> None:
        """Write the range, and then read the next range that uses its slot."""
        later = number + NUM_SLOTS

        def write_and_read(_: int, index: int) -> None:
            self._write(number, index)
            if later < len(self.ranges):
                self._read(later, index)

        self._submit(later, write_and_read)

    def finish(self) -> None:
        self._is_started = False
        running, self._running = self._running, {}
        for futures in running.values():
            for future in futures:
                future.result()

    def seal(self, kinds: Collection[str] | None = None) -> None:
        self._is_new = False
        self.finish()  # ranges that were read ahead are outdated
        self._compare_map(self._accept, kinds)
        self._map.flush()
        self._drop_pages()

    def check(self) -> None:
        if self._is_new:
            self.seal(("main", "ema"))
        self._compare_map(self._expect)

    def _submit(self, number: int, work: Callable[[int, int], None]) -> None:
        """Run the work on each part of a range in the threads."""
        self._running[number] = [
            self._pool.submit(work, number, index) for index in range(len(self.sizes[0].kinds))
        ]

    def _compare_map(
        self, use: Callable[[int, int, int], None], kinds: Collection[str] | None = None
    ) -> None:
        """Pass the checksum of each part of the mapped file to `use`."""
        content = memoryview(self._map)

        def visit(number: int) -> None:
            for index, part in enumerate(self._parts[number]):
                if kinds is None or part.kind in kinds:
                    use(number, index, _checksum(content[part.start : part.start + part.num_bytes]))

        for _ in self._pool.map(visit, range(len(self.ranges))):
            pass

    def _accept(self, number: int, index: int, found: int) -> None:
        self._checksums[number][index] = found

    def _expect(self, number: int, index: int, found: int) -> None:
        if found != self._checksums[number][index]:
            part, (_, start, stop) = self._parts[number][index], self.ranges[number]
            raise StateFileError(
                f"{FLAG} {self.folder}: bytes {part.start} to {part.start + part.num_bytes} of this "
                f"process' file ({part.kind}, elements {start} to {stop} of a bucket) differ from the bytes "
                "written: check the disk, and resume from the last checkpoint"
            )

    def _read(self, number: int, index: int) -> None:
        part = self._parts[number][index]
        content = part.memory.numpy().data
        self._transfer(os.preadv, content, part.start, "read")
        self._expect(number, index, _checksum(content))

    def _write(self, number: int, index: int) -> None:
        part = self._parts[number][index]
        content = part.memory.numpy().data
        self._checksums[number][index] = _checksum(content)
        self._transfer(os.pwritev, content, part.start, "written")

    def _transfer(
        self, call: Callable[[int, list[memoryview], int], int], content: memoryview, start: int, verb: str
    ) -> None:
        """Read or write all bytes, at a position of the file."""
        done = 0
        try:
            while done < len(content):
                count = call(self._descriptor, [content[done:]], start + done)
                if count == 0:
                    raise OSError(errno.EIO, "the file ends early")
                done += count
        except OSError as error:
            raise StateFileError(
                f"{FLAG} {self.folder}: bytes {start + done} to {start + len(content)} of this process' file "
                f"cannot be {verb} ({error.strerror}): check the disk, and resume from the last checkpoint"
            ) from None

    def _drop_pages(self) -> None:
        """Release the memory of mapped pages that a checkpoint has read or written; the file holds them."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
        if self._is_direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def ring_bytes(sizes: Sequence[StateSize], range_size: int = RANGE_SIZE) -> int:
    """Return the host memory of the buffers for streaming these states."""
    return NUM_SLOTS * max(
        len(size.kinds) * _in_blocks(min(size.numel, range_size) * size.dtype.itemsize) for size in sizes
    )


def file_bytes(sizes: Sequence[StateSize]) -> int:
    """Return the size of the file for these states."""
    return _layout(sizes)[1]


def _checksum(content: memoryview | bytes) -> int:
    """Return a checksum of whole blocks: the CRC-32 of sums of their 64-bit words.

    The sums are over each block, and over all blocks for each position in a block. If up to three words
    differ, some sums differ. It takes a third of the time of a CRC-32 over all bytes.
    """
    blocks = np.frombuffer(content, np.uint64).reshape(-1, BLOCK // 8)
    block_sums, place_sums = np.empty(len(blocks), np.uint64), np.zeros(BLOCK // 8, np.uint64)
    for start in range(0, len(blocks), _CACHED_BLOCKS):  # read from memory once
        cached = blocks[start : start + _CACHED_BLOCKS]
        cached.sum(axis=1, out=block_sums[start : start + _CACHED_BLOCKS])
        place_sums += cached.sum(axis=0)
    return zlib.crc32(place_sums.data, zlib.crc32(block_sums.data))


def _layout(sizes: Sequence[StateSize]) -> tuple[list[list[int]], int]:
    """Return the start of each kind of each state in the file, and the size of the file."""
    starts: list[list[int]] = []
    end = 0
    for size in sizes:
        step = _in_blocks(size.numel * size.dtype.itemsize)
        starts.append([end + index * step for index in range(len(size.kinds))])
        end += len(size.kinds) * step
    return starts, end


def _in_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK) * BLOCK


def _new_file(folder: Path, num_bytes: int) -> tempfile._TemporaryFileWrapper[bytes]:
    """Create an unnamed file, with space on the disk for all its bytes.

    Raises:
        UserError: the file cannot be created.
    """
    if not folder.is_dir():
        raise UserError(f"{FLAG} {folder} is not a folder: create it on a local disk, or pass another folder")
    try:
        file = tempfile.TemporaryFile(dir=folder, buffering=0)
        try:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        except BaseException:
            file.close()
            raise
    except OSError as error:
        free = shutil.disk_usage(folder).free
        raise UserError(
            f"{FLAG} {folder}: a rank's optimizer state of {num_bytes / 1e9:.2f} GB cannot be stored "
            f"({error.strerror}; {free / 1e9:.2f} GB are free): free space, or pass a folder on another disk"
        ) from None
    kind = file_system_of(file.fileno())
    if kind in _MEMORY_FILE_SYSTEMS:
        log.warning("%s %s is in memory (%s), not on a disk: it saves no memory", FLAG, folder, kind)
    elif kind in _NETWORK_FILE_SYSTEMS:
        log.warning("%s %s is on a network file system (%s): pass a local disk", FLAG, folder, kind)
    return file  # type: ignore[return-value]


def _set_direct(descriptor: int, memory: Tensor) -> bool:
    """Enable direct reads and writes if a block can be read directly; return whether it can."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | getattr(os, "O_DIRECT", 0))
        os.preadv(descriptor, [memory.numpy().data[:BLOCK]], 0)
    except OSError:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        return False
    return hasattr(os, "O_DIRECT")
