"""Hold a lease on a run's folder of checkpoints: one run at a time writes there.

    SAVE/lease.3    {"host": "n7", "pid": 4711, "job": "812", …}

Rank 0 creates the file with O_EXCL, which is atomic on local disks, NFS and Lustre. A thread touches the file
every few seconds; this is the heartbeat. Another run that finds the file watches it. It takes over the folder
if the holder cannot be alive, or has shown no heartbeat for `ABANDONED_SECONDS` by the watcher's own clock;
clocks of different hosts are never compared. A takeover creates the file with the next number, again with
O_EXCL, so only one of two competing runs gets the folder. Then it deletes the old file, and the files that
the old holder has not finished.

A holder that was paused or cut off finds its file gone when it continues. Rank 0 checks before each rename of
a save; other ranks only write between the beginning and the end of a save, which rank 0 announces.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megalite.checkpoint.folder import remove_leftovers
from megalite.checkpoint.save_agreement import SaveError
from megalite.distributed.store_barrier import wait_for_all
from megalite.distributed.topology import Topology
from megalite.utils.errors import UserError, one_line
from megalite.utils.files import make_writable, open_regular, parse_json, read_regular
from megalite.utils.log import log

BEAT_SECONDS = 5.0
ABANDONED_SECONDS = 60.0
"""Must be longer than an NFS client caches the times of a file (`acregmax`)."""
_CHECK_SECONDS = 1.0
"""`is_lost` reads the file at most once per this time."""
_PATIENCE_SECONDS = 2.0
"""`is_lost` waits this long for a file system that does not answer."""
_POLL_SECONDS = 0.2
_MAX_BYTES = 1 << 16
_NAME = re.compile(r"lease\.([1-9][0-9]{0,99})")
"""A file of any number may have been put there by hand: the name with the next number must be valid too."""
_MISSING = (errno.ENOENT, errno.ESTALE)


class LeaseLost(SaveError):
    """Raised when another run has taken over the folder, so this run must not write anything more."""

    def __init__(self, folder: Path, holder: object = None) -> None:
        by = f" ({holder})" if holder else ""
        super().__init__(
            f"--save {folder} was taken over by another run{by}: this run stops and writes nothing more"
        )


@dataclass(frozen=True)
class LeaseHolder:
    """Process that holds a lease.

    Attributes:
        machine: identifies the booted system and its pid namespace; empty if unknown.
        pid_start: start time of the process, in ticks since boot, to detect a reused pid.
        job: Slurm's job id; empty outside Slurm.
        job_starts: how often Slurm has started the job before.
        since: date and time by the holder's clock, for people to read.
        token: random text, so that no two leases have the same content.
    """

    host: str
    machine: str
    pid: int
    pid_start: int
    job: str
    job_starts: int
    since: str
    token: str

    @staticmethod
    def here() -> LeaseHolder:
        """Return this process as a holder."""
        starts = os.environ.get("SLURM_RESTART_COUNT", "")
        return LeaseHolder(
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            pid_start=_start_of(os.getpid()) or 0,
            job=os.environ.get("SLURM_JOB_ID", ""),
            job_starts=int(starts) if starts.isdecimal() else 0,
            since=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            token=secrets.token_hex(8),
        )

    @staticmethod
    def parse(content: bytes) -> LeaseHolder | None:
        """Return the holder that a lease names; None if the file is not complete (yet)."""
        try:
            record = parse_json(content)
            holder = LeaseHolder(**record)
        except (ValueError, TypeError):
            return None
        kinds = {name: type(value) for name, value in asdict(LeaseHolder.here()).items()}
        return holder if {name: type(value) for name, value in record.items()} == kinds else None

    def content(self) -> bytes:
        """Return the content of the lease's file."""
        return json.dumps(asdict(self)).encode() + b"\n"

    def is_gone(self) -> bool:
        """Return whether the process is known to have ended. Only its own machine can know."""
        if not self.machine or self.machine != _machine() or self.host != socket.gethostname():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):
            return False
        start = _start_of(self.pid)
        return start is not None and start != self.pid_start

    def __str__(self) -> str:
        job = f", Slurm job {self.job} start {self.job_starts}" if self.job else ""
        return one_line(f"process {self.pid} on {self.host}{job}, since {self.since}")


class FolderLease:
    """Check, on any rank, that this run may still write to its folder of checkpoints.

    Attributes:
        name: name of the lease's file.
        content: content of the file while this run holds the lease.
    """

    def __init__(self, folder: Path, name: str, content: bytes) -> None:
        self.folder = folder
        self.name = name
        self.content = content
        self._inode = folder.stat().st_ino if folder.exists() else 0
        self._has_seen = False  # a rank that never saw the file may see another folder, where it is not lost
        self._checked_at = time.monotonic()
        self._check_thread = threading.Thread()
        self._is_lost = False

    def check(self) -> None:
        """Read the lease's file.

        Raises:
            LeaseLost: the file is gone, or another run's.
            OSError: the folder cannot be read.
        """
        began_at = time.monotonic()  # a process that is stopped after it has read must read again
        try:
            is_own = read_regular(self.folder / self.name, _MAX_BYTES) == self.content
        except OSError as error:
            if error.errno not in _MISSING:
                raise
            # A lost file system does not mean a lost lease: then this folder is missing or another one.
            if self.folder.stat().st_ino != self._inode:
                raise
            is_own = False
        self._has_seen |= is_own
        if self._is_lost or (self._has_seen and not is_own):
            self._is_lost = True
            raise self.loss()
        self._checked_at = began_at

    def loss(self) -> LeaseLost:
        """Return the error for a lost lease. It names the new holder if this rank can see it."""
        newest = None
        with suppress(OSError):
            newest = _newest(self.folder)
        return LeaseLost(self.folder, newest and LeaseHolder.parse(newest[1]))

    def is_lost(self) -> bool:
        """Return whether the lease was lost, as of about a second ago. An unreadable folder is not a loss.

        A thread reads the file, with a time limit: a hanging file system must not stop training.
        """
        is_due = time.monotonic() - self._checked_at >= _CHECK_SECONDS
        if not self._is_lost and is_due and not self._check_thread.is_alive():
            self._check_thread = threading.Thread(target=self._try_check, name="lease-check", daemon=True)
            self._check_thread.start()
            self._check_thread.join(_PATIENCE_SECONDS)
        return self._is_lost

    def _try_check(self) -> None:
        with suppress(LeaseLost, OSError):
            self.check()


class HeldLease(FolderLease):
    """Lease and its heartbeat, on rank 0.

    Args:
        descriptor: file descriptor of the lease's file, open for writing.
    """

    def __init__(self, folder: Path, name: str, content: bytes, descriptor: int) -> None:
        super().__init__(folder, name, content)
        self._has_seen = True
        self._descriptor = descriptor
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease-heartbeat", daemon=True)
        self._thread.start()

    @staticmethod
    def take(folder: Path) -> HeldLease:
        """Acquire the lease, if necessary from a holder that is gone.

        Raises:
            UserError: another live run holds it, or the folder cannot be written.
        """
        make_writable(folder, "--save")
        try:
            while True:
                number, reason = _wait_until_free(folder)
                if not _NAME.fullmatch(f"lease.{number + 1}"):
                    raise UserError(
                        f"--save {folder} holds lease.{number}, and no lease has a larger number: delete "
                        "that file if no run writes to the folder"
                    )
                lease = _create(folder, number + 1)
                if lease is not None:
                    break
                time.sleep(_POLL_SECONDS)  # another run was faster, or the folder's listing was outdated
            if reason:
                log.warning("--save %s is taken over: %s", folder, reason)
                with suppress(OSError):  # leftovers only take up space
                    remove_leftovers(folder)
        except OSError as error:
            raise UserError(
                f"--save {folder} cannot be written ({error.strerror}: {error.filename}): pass another folder"
            ) from None
        return lease

    def release(self) -> None:
        """End the heartbeat, and delete the file if it is still this lease's."""
        self._is_over.set()
        self._thread.join(BEAT_SECONDS)  # do not wait longer: the file system may hang
        with suppress(LeaseLost, OSError):
            self.check()
            (self.folder / self.name).unlink()
        with suppress(OSError):
            os.close(self._descriptor)

    def _beat(self) -> None:
        # Use the open file, so that a lost lease does not touch its successor's file.
        while not self._is_over.wait(BEAT_SECONDS):
            with suppress(OSError):
                os.utime(self._descriptor)


@contextmanager
def hold_folder(folder: str | None, topology: Topology) -> Iterator[FolderLease | None]:
    """Hold the lease on --save during the block. Every rank calls this; it yields None without a folder.

    Raises:
        UserError: another run holds it, or the folder cannot be written; on every rank.
    """
    if folder is None:
        yield None
        return
    lease: HeldLease | None = None
    try:
        with topology.agreed():
            if topology.rank == 0:
                lease = HeldLease.take(Path(folder))
        own = (lease.name, lease.content) if lease else None
        shared = topology.world.object_of_first(own, "the lease on --save")
        assert shared is not None
        yield lease or FolderLease(Path(folder), *shared)
        # Another rank may still be writing the last metrics, and reads the lease for that.
        wait_for_all(topology.store, topology.world_size)
    finally:
        if lease is not None:
            lease.release()


def _wait_until_free(folder: Path) -> tuple[int, str]:
    """Wait until a new lease may be created. Return the previous lease's number, and why it is void.

    Returns:
        0 and no reason if there is no lease.

    Raises:
        UserError: the holder is alive.
        OSError: the folder cannot be read.
    """
    me, first, deadline = LeaseHolder.here(), None, 0.0
    while found := _newest(folder):
        number, content, touched = found
        holder = LeaseHolder.parse(content)
        who = holder or f"the writer of {folder / f'lease.{number}'}"
        if holder is not None and holder.is_gone():
            return number, f"its holder has ended ({who})"
        if holder is not None and me.job and holder.job == me.job and holder.job_starts < me.job_starts:
            return number, f"its holder is an earlier start of this Slurm job ({who})"
        if first is None:
            first, deadline = (content, touched), time.monotonic() + ABANDONED_SECONDS
            log.info("--save %s is in use (%s): waiting to see whether that run is alive", folder, who)
        elif (content, touched) != first:
            raise UserError(
                f"--save {folder} is in use by another run ({who}): end that run, or pass another folder; "
                f"a dead run is detected after {ABANDONED_SECONDS:g} s"
            )
        elif time.monotonic() > deadline:
            return number, f"its holder has shown no heartbeat for {ABANDONED_SECONDS:g} s ({who})"
        time.sleep(_POLL_SECONDS)
    return 0, ""


def _create(folder: Path, number: int) -> HeldLease | None:
    """Create the lease with this number and delete earlier ones; return None if another run created it."""
    name, content = f"lease.{number}", LeaseHolder.here().content()
    file = folder / name
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return None
    is_taken = False
    try:
        os.write(descriptor, content)
        os.fsync(descriptor)
        numbers = _numbers(folder)
        is_taken = max(numbers, default=number) == number  # otherwise an earlier listing was outdated
    finally:
        if not is_taken:
            os.close(descriptor)
            file.unlink()
    if not is_taken:
        return None
    for old in numbers:
        if old < number:
            (folder / f"lease.{old}").unlink(missing_ok=True)
    return HeldLease(folder, name, content, descriptor)


def _numbers(folder: Path) -> list[int]:
    return [int(match[1]) for name in os.listdir(folder) if (match := _NAME.fullmatch(name))]


def _newest(folder: Path) -> tuple[int, bytes, int] | None:
    """Return the number, content and modification time (ns) of the newest lease; None without a lease."""
    for number in sorted(_numbers(folder), reverse=True):
        try:
            with open_regular(folder / f"lease.{number}") as stream:
                return number, stream.read(_MAX_BYTES), os.fstat(stream.fileno()).st_mtime_ns
        except OSError as error:
            if error.errno not in _MISSING:
                raise
    return None


def _machine() -> str:
    """Return an id of this boot and of this pid namespace; each container has its own namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_of(pid: int) -> int | None:
    """Return a process's start time in ticks since boot; -1 if it has ended, None if unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the process name before it may contain anything
    state, start = fields[0], int(fields[19])
    return -1 if state in "ZX" else start
