"""Save a run, one checkpoint at a time: immediately, or from a copy while training continues."""

from __future__ import annotations

import ctypes
import dataclasses
import secrets
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.checkpoint.folder import LocalRun, Retention, RunFolder, SaveError
from megalite.checkpoint.lease import FolderLease, LeaseLost
from megalite.checkpoint.local_saves import LocalSave, LocalSaves
from megalite.checkpoint.parameter_range import Tensors
from megalite.checkpoint.save import Contents, Save, SaveAgreement, plan_save
from megalite.checkpoint.stored_run import StoredRun, upload_staged
from megalite.checkpoint.tensor_files import FilePiece
from megalite.config import CheckpointConfig
from megalite.distributed.axis import CHECKPOINT
from megalite.distributed.collectives import all_reduce
from megalite.distributed.topology import Topology
from megalite.tensor_parallel.parameter_spec import ParameterShard
from megalite.utils.errors import UserError, few, first_line
from megalite.utils.hardware.host_memory import allocate_bytes, pin
from megalite.utils.log import log

_ALIGNMENT = 64


class HostCopy:
    """Copy of a rank's pieces in host memory, which is reused for each save.

    The copy runs while training computes the next gradients, which does not change the tensors. Training
    calls `protect` before it writes to them, and waits there for the rest of the copy. The first copy
    allocates the memory; later copies allocate only if they need more.

    Args:
        device: device of the tensors; some of them can be in host memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._done: torch.cuda.Event | None = None
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._filled = threading.Event()

    def take(self, pieces: Mapping[str, FilePiece]) -> dict[str, FilePiece]:
        """Start a copy of the pieces; it is complete once `fill` returns, and valid until the next call."""
        starts, size = dict[str, int](), 0  # in bytes
        for name, piece in pieces.items():
            starts[name] = size
            size += -(-piece.num_bytes // _ALIGNMENT) * _ALIGNMENT
        if size > self._memory.numel():
            self._pairs = []  # free the old memory first
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = allocate_bytes(size)
            if self._stream is not None:
                pin(self._memory)
        copies = {name: self._at(starts[name], piece.tensor) for name, piece in pieces.items()}
        pairs = [(copies[name], piece.tensor.detach().contiguous()) for name, piece in pieces.items()]
        self._pairs = [pair for pair in pairs if pair[1].device.type == "cpu"]
        self._filled.clear()
        if self._stream is not None:
            self._copy_on(self._stream, [pair for pair in pairs if pair[1].device.type != "cpu"])
        return {name: FilePiece(copies[name], piece.range) for name, piece in pieces.items()}

    def fill(self) -> None:
        """Copy the pieces, or wait until the GPU has copied them; any thread can call this."""
        try:
            for copy, tensor in self._pairs:
                # Copy in one thread: torch would use as many threads as training, and compete for its cores.
                ctypes.memmove(copy.data_ptr(), tensor.data_ptr(), copy.numel() * copy.element_size())
            self._pairs = []
        finally:
            self._filled.set()
        if self._done is not None:
            # The default device of a new thread is GPU 0, on which a context would occupy memory.
            torch.cuda.set_device(self._device)
            self._done.synchronize()

    def protect(self) -> None:
        """Keep later work from writing to tensors before they have been copied.

        The host waits only for the copy of tensors in host memory. On a GPU, later kernels wait for the
        copies.
        """
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
        self._filled.wait()

    def _at(self, start: int, like: Tensor) -> Tensor:
        content = self._memory[start : start + like.numel() * like.element_size()]
        return content.view(like.dtype).view(like.shape)

    @torch.no_grad()
    def _copy_on(self, stream: torch.cuda.Stream, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for copy, tensor in pairs:
                copy.copy_(tensor, non_blocking=True)
                tensor.record_stream(stream)  # a temporary's memory is not reused before the copy has run
            self._done = stream.record_event()


class StoreLost(SaveError):
    """Raised if the ranks can no longer agree on any save, because the store is gone."""

    def __init__(self, final: Path | str, reason: str) -> None:
        super().__init__(
            f"checkpoint {final} cannot be written: the store through which the ranks agree is gone "
            f"({reason}), as when the launcher was killed; start the run again"
        )


@dataclasses.dataclass(eq=False)
class _RunningSave:
    """Save in progress, in the calling thread or in a new thread.

    Attributes:
        error: error on this rank or on rank 0, once `run` has returned.
        is_done: whether `run` has returned.
    """

    job: Save | LocalSave
    pieces: Mapping[str, FilePiece]
    agreement: SaveAgreement
    copy: HostCopy | None
    error: SaveError | None = None
    is_done: bool = False
    started_at: float = dataclasses.field(default_factory=time.monotonic)
    thread: threading.Thread | None = None

    def start(self) -> None:
        # A daemon, because a run must not wait for ranks that are gone when it ends.
        self.thread = threading.Thread(target=self.run, name="save-checkpoint", daemon=True)
        self.thread.start()

    def wait(self) -> None:
        if self.thread is not None:
            self.thread.join()

    def run(self) -> None:
        """Write the checkpoint, and store an error instead of raising it."""
        try:
            if self.copy is not None:
                self.copy.fill()
            self.job.run(self.agreement, self.pieces)
        except SaveError as error:
            self.error = error
        except dist.DistError as error:
            self.error = StoreLost(self.job.final, first_line(error))
        except Exception:  # report a bug like any other failure: training must not end silently
            self.error = SaveError(f"checkpoint {self.job.final} failed:\n{traceback.format_exc()}")
        finally:
            self.is_done = True
            if isinstance(self.job, Save):
                self.job.is_written.set()
                self.job.is_staged.set()


class Saver:
    """Writer of the checkpoints of a run.

    Every rank must call every method at the same iteration, and all ranks decide in the same way. With
    `async_save` a thread copies the tensors while training computes the next gradients, and then writes the
    copy. This needs memory for one copy, and never runs two saves at once. If the next save is due while one
    is running, it is skipped with a warning. The last save of a run waits for the running one, and is then
    written immediately.

    To object storage, a thread uploads the files also without `async_save`; the next save then waits for it.
    At the end of a run, the config can limit how long. The next start uploads what is left.

    A failed save is logged, and training continues to the next one, unless the config requests an exit. It is
    an error if the last save fails, or if the lease on the folder is lost, because the run can then save
    nothing more.

    Args:
        lease: lease on the folder of `config.save`; None if no other run can write there.

    Attributes:
        local: non-persistent saves of the run; None if it makes none.
        has_left: whether the end of the run has not waited for the upload of a checkpoint.
    """

    def __init__(
        self, config: CheckpointConfig, topology: Topology, lease: FolderLease | None = None
    ) -> None:
        self._config = config
        self._topology = topology
        self._lease = lease
        self._folder: RunFolder | None = None
        if config.save is not None:
            self._folder = StoredRun.at(config.save, config.save_stage) or LocalRun(Path(config.save))
        self.local = LocalSaves.of(config, topology) if config.saves_locally else None
        self._copy = HostCopy(topology.device)
        self._running: _RunningSave | None = None
        self._failure: SaveError | None = None  # error of the newest persistent save
        self._confirmed: int | None = None
        self._name: str | None = None
        self._num_saves = 0
        self._cleans_up = True
        self._deadline: float | None = None  # by `time.monotonic`, of uploads at the end of the run
        self.has_left = False

    def upload_staged(self) -> None:
        """Upload the checkpoint that an earlier start has left on the nodes, if any; call it before loading.

        Raises:
            UserError: the store or a file cannot be read or written; on every rank.
        """
        if isinstance(self._folder, StoredRun):
            with self._topology.events.during(CHECKPOINT):
                check = self._lease.check if self._lease is not None else lambda: None
                upload_staged(self._folder, self._topology, check)

    def training_from(self, iteration: int) -> Saver:
        """Delete non-persistent saves of other iterations when training begins; return self to enter it."""
        if self.local is not None:
            with self._topology.events.during(CHECKPOINT):
                self.local.begin(iteration)
        return self

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        """Wait for a running save. After an error, the ranks no longer agree on saves.

        Raises:
            SaveError: the last persistent save of the run failed, at any interval.
        """
        if error is None:
            self._begin_deadline()
            if self._running is not None:
                with self._topology.events.during(CHECKPOINT):
                    self._end(is_last=True)
            if self._failure is not None:
                raise self._failure
        elif self._running is not None and isinstance(error, Exception):
            with self._topology.events.during(CHECKPOINT):
                self._running.wait()
            self._running = None

    def save(self, contents: Contents, tensors: Tensors, *, is_last: bool = False) -> None:
        """Save, or start to save in the background.

        Args:
            tensors: tensors of this rank, by name. Call `before_update` before writing to them, except to
                buffers.
            is_last: whether training ends after this save; the checkpoint is then complete on return.

        Raises:
            UserError: the config has no folder.
            SaveError: this save or an earlier one failed, and the run must end. Every rank raises it.
        """
        if self._folder is None:
            raise UserError("a checkpoint is to be saved, and there is no folder for it: pass --save FOLDER")
        is_local = self._running is not None and isinstance(self._running.job, LocalSave)
        waits = is_last or is_local or not self._config.async_save
        if is_last:
            self._begin_deadline()
        if self._must_skip(contents.iteration, "--save-interval", waits=waits):
            return
        retention = Retention(self._config.keep_last, self._config.keep_every, self._confirmed)
        name = _file_name(self._topology)
        job = Save(self._folder, contents, name, retention, self._lease, self._cleans_up)
        with self._topology.events.during(CHECKPOINT):
            self._begin(job, plan_save(self._unchanging(tensors), self._topology), is_last)

    def save_local(self, contents: Contents, tensors: Tensors) -> None:
        """Make or start a non-persistent save; it is skipped while another save is running.

        Raises:
            SaveError: this save or an earlier one failed, and the run must end. Every rank raises it.
        """
        flag = "--non-persistent-save-interval"
        if self.local is None or self._must_skip(contents.iteration, flag, waits=False):
            return
        with self._topology.events.during(CHECKPOINT):
            pieces = plan_save(self._unchanging(tensors), self._topology)
            self._begin(LocalSave(self.local, contents, self._lease), pieces)

    def _unchanging(self, tensors: Tensors) -> Tensors:
        """Return the tensors of a save; in the background, with copies of buffers, which forward changes."""
        if not self._config.async_save:
            return tensors
        return {
            name: dataclasses.replace(each, tensor=each.tensor.clone())
            if isinstance(each, ParameterShard) and each.is_buffer
            else each
            for name, each in tensors.items()
        }

    def before_update(self) -> None:
        """Wait until training can write to tensors that a save must copy; call it before each update."""
        if self._running is not None and self._running.copy is not None:
            with self._topology.events.during(CHECKPOINT):
                self._running.copy.protect()

    def poll(self) -> None:
        """Finish a background save that has ended on every rank; call it in each iteration.

        Raises:
            SaveError: the save failed, and the run must end. Every rank raises it.
        """
        if self._running is not None and self._largest(not self._running.is_done) == 0:
            with self._topology.events.during(CHECKPOINT):
                self._end()

    def finish(self) -> None:
        """Wait for a running save.

        Raises:
            SaveError: the save failed, and the run must end. Every rank raises it.
        """
        if self._running is not None:
            with self._topology.events.during(CHECKPOINT):
                self._end()

    def confirm(self, iteration: int) -> None:
        """Let later saves keep the newest checkpoint up to an iteration up to which the run is good."""
        self._confirmed = iteration

    def withdraw(self, after: int, until: int) -> str:
        """Make the checkpoints of the iterations (after, until] unavailable for a resume; a collective.

        They are renamed, and `latest` then names the newest one before them. Non-persistent saves are
        deleted.

        Returns:
            The newest checkpoint that remains, and what has become of the others, as clauses for a message.
        """
        with suppress(SaveError):
            self.finish()
        if self.local is not None:
            self.local.keep_only(after)
        if isinstance(self._folder, StoredRun):
            self._folder.remove_staged()
        text = ""
        if self._topology.rank == 0 and (folder := self._folder) is not None:
            try:
                if self._lease is not None:
                    self._lease.check()
                withdrawn, good = folder.withdraw(after, until)
                best = f"the last good checkpoint is {folder}/{good}" if good else "no checkpoint is good"
                text = f"{best} (withdrawn: {few(withdrawn)})" if withdrawn else best
            except (OSError, LeaseLost) as error:
                text = f"do not load checkpoints of {folder} after iteration {after}: {first_line(error)}"
        text = self._topology.world.object_of_first(text, "checkpoints")
        return text or "there is no --save folder"

    def _must_skip(self, iteration: int, interval_flag: str, *, waits: bool) -> bool:
        self.finish() if waits else self.poll()
        if self._running is None:
            return False
        log.warning(
            "iteration %d is not saved: %s is still being written after %.0f s; pass a larger %s",
            iteration,
            self._running.job.final,
            time.monotonic() - self._running.started_at,
            interval_flag,
        )
        return True

    def _begin(self, job: Save | LocalSave, pieces: Mapping[str, FilePiece], is_last: bool = False) -> None:
        """Start a job on pieces that nothing else writes to; without a thread, also finish it.

        Uploads always have a thread: training waits only until its tensors are in files.
        """
        in_background = self._config.async_save and not is_last
        moved = {  # host memory, which offloaded state is in, is written directly
            name: piece
            for name, piece in pieces.items()
            if in_background or piece.tensor.device.type != "cpu"
        }
        copy = self._copy if moved else None
        held = {**pieces, **(copy.take(moved) if copy else {})}
        self._running = running = _RunningSave(job, held, self._next_agreement(), copy)
        if in_background:
            log.info("saving checkpoint %s in the background", job.final)
            running.start()
        elif isinstance(job, Save) and job.folder.uploads and (not is_last or self._deadline is not None):
            running.start()
            job.is_written.wait()
            if not is_last:
                log.info("uploading checkpoint %s in the background", job.final)
        else:
            running.run()
        if running.thread is None or is_last:
            self._end(is_last)

    def _next_agreement(self) -> SaveAgreement:
        topology = self._topology
        if self._name is None:  # agree on a name that is unique in the store
            self._name = topology.world.object_of_first(secrets.token_hex(8), "a save's name")
        self._num_saves += 1
        name = f"save/{self._name}/{self._num_saves}"
        return SaveAgreement(topology.store, topology.rank, topology.world_size, name)

    def _end(self, is_last: bool = False) -> None:
        """Wait for the running save, log its outcome, and raise an error that must end the run."""
        running = self._running
        assert running is not None
        if self._is_late(running, is_last):
            self._running, self._failure, self.has_left = None, None, True
            return
        running.wait()
        error = self._agreed_error(running)
        running.agreement.forget()
        self._running = None
        if isinstance(running.job, Save):
            self._failure, self.has_left = error, False
        if error is None:
            log.info("saved checkpoint %s", running.job.final)
            self._cleans_up &= isinstance(running.job, LocalSave)
            if self.local is not None and isinstance(running.job, Save):
                if is_last:
                    self.local.remove_all()
                else:
                    self.local.remove_up_to(running.job.contents.iteration)
        elif is_last or self._config.exit_on_save_failure or isinstance(error, StoreLost | LeaseLost):
            raise error
        else:
            self._cleans_up = True
            log.warning("%s; training continues, and the next save tries again", error)

    def _begin_deadline(self) -> None:
        """Limit the waiting for uploads from now on: the run ends."""
        limit = self._config.exit_upload_seconds
        if limit is not None and self._deadline is None:
            self._deadline = time.monotonic() + limit

    def _is_late(self, running: _RunningSave, is_last: bool) -> bool:
        """Wait for a save until the deadline; return whether its upload is left to the next start then."""
        job = running.job
        if self._deadline is None or not (isinstance(job, Save) and job.folder.uploads):
            return False
        job.is_staged.wait()
        assert running.thread is not None
        running.thread.join(max(0.0, self._deadline - time.monotonic()))
        # Rank 0 completes a checkpoint, or learns of an error; the other ranks learn it within a second.
        is_late = not running.is_done and job.leave() if self._topology.rank == 0 else False
        is_late = self._topology.world.object_of_first(is_late, "the end of an upload")
        if is_late:
            stage = self._config.run_folder
            stays = f"it stays in {stage} on each node, and the next start of the run uploads it"
            log.warning(
                "checkpoint %s is not uploaded within --exit-upload-seconds %g: %s",
                *(job.final, self._config.exit_upload_seconds),
                stays if is_last else "the last save takes its place",
            )
        return is_late

    def _agreed_error(self, running: _RunningSave) -> SaveError | None:
        """Return the most severe error of any rank; None only if no rank has one."""
        error = running.error
        if error is not None and self._lease is not None:
            try:
                self._lease.check()
            except LeaseLost as lost:
                error = lost
            except OSError:
                pass
        severity = {None: 0, SaveError: 1, StoreLost: 2, LeaseLost: 3}
        mine = severity[type(error) if error else None]
        worst = self._largest(mine)
        if worst == 0 or worst == mine:
            return error
        if worst == 1:
            return SaveError(f"checkpoint {running.job.final} failed on another rank")
        if worst == 2:
            return StoreLost(running.job.final, "as another rank reports")
        assert self._lease is not None
        return self._lease.loss()

    def _largest(self, here: int) -> int:
        """Return the largest number on any rank, through the host, without waiting for earlier GPU work."""
        number = all_reduce(torch.tensor(here), self._topology.world, dist.ReduceOp.MAX, of="a save's result")
        return int(number.item())


def _file_name(topology: Topology) -> str:
    """Return a unique name for this rank's file; readers do not interpret it."""
    parts = [
        f"{entry.name}_{topology.axes[entry.name].rank:0{entry.file_digits}d}"
        for entry in topology.model.mesh_spec.weights_first
        if entry.always_named or topology.axes[entry.name].size > 1
    ]
    return f"{'_'.join(parts)}.safetensors"
