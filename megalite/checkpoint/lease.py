"""Hold a lease on a run's folder of checkpoints: one run at a time writes there.

    SAVE/lease.3    {"host": "n7", "pid": 4711, "job": "812", …}

Rank 0 creates the file with O_EXCL, which is atomic on local disks, NFS and Lustre, or as an object that must
not exist (If-None-Match). A thread touches the file, or writes the object again if it is still there
(If-Match), every few seconds; this is the heartbeat. Another run that finds the file watches it. It takes
over the folder if the holder cannot be alive, or has shown no heartbeat for `ABANDONED_SECONDS` by the
watcher's own clock; clocks of different hosts are never compared. A takeover creates the file with the next
number, with the same condition, so only one of two competing runs gets the folder. Then it deletes the old
file, and the files that the old holder has not finished.

A holder that was paused or cut off finds its file gone when it continues. Rank 0 checks before each rename of
a save; other ranks only write between the beginning and the end of a save, which rank 0 announces.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megalite.checkpoint.folder import SaveError, remove_leftovers
from megalite.checkpoint.lease_files import MISSING, NAME, LeaseFiles, files_at
from megalite.distributed.agreement import wait_for_all
from megalite.distributed.regroup import GENERATION
from megalite.distributed.topology import Topology
from megalite.utils.errors import UserError, one_line
from megalite.utils.files import parse_json
from megalite.utils.log import log
from megalite.utils.object_store import is_object_url

BEAT_SECONDS = 5.0
ABANDONED_SECONDS = 60.0
"""Must be longer than an NFS client caches the times of a file (`acregmax`)."""
_CHECK_SECONDS = 1.0
"""`is_lost` reads the file at most once per this time."""
_POLL_SECONDS = 0.2


class LeaseLost(SaveError):
    """Raised when another run has taken over the folder, so this run must not write anything more."""

    def __init__(self, save: str | Path, holder: object = None) -> None:
        by = f" ({holder})" if holder else ""
        super().__init__(
            f"--save {save} was taken over by another run{by}: this run stops and writes nothing more"
        )


@dataclass(frozen=True)
class LeaseHolder:
    """Process that holds a lease.

    Attributes:
        machine: identifies the booted system and its pid namespace; empty if unknown.
        pid_start: start time of the process, in ticks since boot, to detect a reused pid.
        job: Slurm's job id; empty outside Slurm.
        job_starts: how often Slurm has started the job before.
        processes, generation: name of the run's processes, and number of their group; see `regroup`. Empty
            and 0 if a loss ends the run.
        addresses: host:port of some of them, separated by spaces.
        since: date and time by the holder's clock, for people to read.
        token: random text, so that no two leases have the same content.
    """

    host: str
    machine: str
    pid: int
    pid_start: int
    job: str
    job_starts: int
    processes: str
    generation: int
    addresses: str
    since: str
    token: str

    @staticmethod
    def here() -> LeaseHolder:
        """Return this process as a holder."""
        starts = os.environ.get("SLURM_RESTART_COUNT", "")
        processes, generation, *addresses = os.environ.get(GENERATION, " 0").split(" ")
        return LeaseHolder(
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            pid_start=_start_of(os.getpid()) or 0,
            job=os.environ.get("SLURM_JOB_ID", ""),
            job_starts=int(starts) if starts.isdecimal() else 0,
            processes=processes,
            generation=int(generation),
            addresses=" ".join(addresses),
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
        content: content of its file while this run holds the lease.
    """

    def __init__(
        self, save: str | Path, number: int, content: bytes, files: LeaseFiles | None = None
    ) -> None:
        self.save = save
        self.number = number
        self.content = content
        self.files = files or files_at(save)
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
            is_own = self.files.read(self.number)[0] == self.content
        except OSError as error:
            if error.errno not in MISSING or not self.files.is_as_before():
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
            newest = _newest(self.files)
        return LeaseLost(self.save, newest and LeaseHolder.parse(newest[1]))

    def is_lost(self) -> bool:
        """Return whether the lease was lost, as of about a second ago. An unreadable folder is not a loss.

        A thread reads the file, with a time limit: a hanging file system must not stop training.
        """
        is_due = time.monotonic() - self._checked_at >= _CHECK_SECONDS
        if not self._is_lost and is_due and not self._check_thread.is_alive():
            self._check_thread = threading.Thread(target=self._try_check, name="lease-check", daemon=True)
            self._check_thread.start()
            self._check_thread.join(self.files.patience)
        return self._is_lost

    def _try_check(self) -> None:
        with suppress(LeaseLost, OSError):
            self.check()


class HeldLease(FolderLease):
    """Lease and its heartbeat, on rank 0."""

    def __init__(self, save: str | Path, number: int, content: bytes, files: LeaseFiles) -> None:
        super().__init__(save, number, content, files)
        self._has_seen = True
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease-heartbeat", daemon=True)
        self._thread.start()

    @staticmethod
    def take(save: str | Path) -> HeldLease:
        """Acquire the lease, if necessary from a holder that is gone.

        Raises:
            UserError: another live run holds it, or the folder cannot be written.
        """
        files = files_at(save)
        files.prepare()
        try:
            while True:
                number, reason = _wait_until_free(save, files)
                if not NAME.fullmatch(f"lease.{number + 1}"):
                    raise UserError(
                        f"--save {save} holds lease.{number}, and no lease has a larger number: delete "
                        "that file if no run writes to the folder"
                    )
                content = LeaseHolder.here().content()
                if _create(files, number + 1, content):
                    break
                time.sleep(_POLL_SECONDS)  # another run was faster, or the folder's listing was outdated
            if reason:
                log.warning("--save %s is taken over: %s", save, reason)
                if not is_object_url(str(save)):  # there, the first save does it
                    with suppress(OSError):  # leftovers only take up space
                        remove_leftovers(Path(save))
        except OSError as error:
            raise UserError(
                f"--save {save} cannot be written ({error.strerror}: {error.filename}): pass another folder"
            ) from None
        return HeldLease(save, number + 1, content, files)

    def release(self) -> None:
        """End the heartbeat, and delete the file if it is still this lease's."""
        self._is_over.set()
        self._thread.join(BEAT_SECONDS)  # do not wait longer: the file system may hang
        with suppress(LeaseLost, OSError):
            self.check()
            self.files.delete(self.number)
        with suppress(OSError):
            self.files.close()

    def _beat(self) -> None:
        while not self._is_over.wait(BEAT_SECONDS):
            with suppress(OSError):
                self.files.touch()


@contextmanager
def hold_folder(save: str | None, topology: Topology) -> Iterator[FolderLease | None]:
    """Hold the lease on --save during the block. Every rank calls this; it yields None without --save.

    Raises:
        UserError: another run holds it, or the folder cannot be written; on every rank.
    """
    if save is None:
        yield None
        return
    lease: HeldLease | None = None
    try:
        with topology.agreed():
            files = files_at(save)
            if topology.rank == 0:
                lease = HeldLease.take(save)
        own = (lease.number, lease.content) if lease else None
        shared = topology.world.object_of_first(own, "the lease on --save")
        assert shared is not None
        yield lease or FolderLease(save, *shared, files)
        # Another rank may still be writing the last metrics, and reads the lease for that.
        wait_for_all(topology.store, topology.world_size)
    finally:
        if lease is not None:
            lease.release()


def newest_holder(save: str) -> LeaseHolder | None:
    """Return the holder of the newest lease on --save, alive or not; None if none can be read."""
    with suppress(OSError):
        if (found := _newest(files_at(save))) is not None:
            return LeaseHolder.parse(found[1])
    return None


def _wait_until_free(save: str | Path, files: LeaseFiles) -> tuple[int, str]:
    """Wait until a new lease may be created. Return the previous lease's number, and why it is void.

    Returns:
        0 and no reason if there is no lease.

    Raises:
        UserError: the holder is alive.
        OSError: the folder cannot be read.
    """
    me, first, deadline = LeaseHolder.here(), None, 0.0
    while found := _newest(files):
        number, content, beat = found
        holder = LeaseHolder.parse(content)
        who = holder or f"the writer of {save}/lease.{number}"
        if holder is not None and holder.is_gone():
            return number, f"its holder has ended ({who})"
        if holder is not None and me.job and holder.job == me.job and holder.job_starts < me.job_starts:
            return number, f"its holder is an earlier start of this Slurm job ({who})"
        if holder is not None and me.processes == holder.processes and holder.generation < me.generation:
            return number, f"its holder's group has lost a rank ({who})"
        if first is None:
            first, deadline = (content, beat), time.monotonic() + ABANDONED_SECONDS
            log.info("--save %s is in use (%s): waiting to see whether that run is alive", save, who)
        elif (content, beat) != first:
            if holder is not None and me.processes == holder.processes != "":
                raise UserError(
                    f"--save {save}: other processes of this run ({who}) go on without this one, which they "
                    "cannot reach: repair its network, and start it again with --join-run"
                )
            raise UserError(
                f"--save {save} is in use by another run ({who}): end that run, or pass another folder; "
                f"a dead run is detected after {ABANDONED_SECONDS:g} s"
            )
        elif time.monotonic() > deadline:
            return number, f"its holder has shown no heartbeat for {ABANDONED_SECONDS:g} s ({who})"
        time.sleep(_POLL_SECONDS)
    return 0, ""


def _create(files: LeaseFiles, number: int, content: bytes) -> bool:
    """Create the lease with this number and delete earlier ones; return False if another run created it."""
    is_taken = False
    if not files.create(number, content):
        return False
    try:
        numbers = files.numbers()
        is_taken = max(numbers, default=number) == number  # otherwise an earlier listing was outdated
    finally:
        if not is_taken:
            files.close()
            files.delete(number)
    if is_taken:
        for old in numbers:
            if old < number:
                files.delete(old)
    return is_taken


def _newest(files: LeaseFiles) -> tuple[int, bytes, object] | None:
    """Return the number and content of the newest lease, and its heartbeat; None without a lease."""
    for number in sorted(files.numbers(), reverse=True):
        try:
            return number, *files.read(number)
        except OSError as error:
            if error.errno not in MISSING:
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
