"""Saves of a run, one at a time: now, or in the background from a copy while training goes on."""

from __future__ import annotations

import dataclasses
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megalite.checkpoint.exchange import Exchange, SaveError
from megalite.checkpoint.folder import name_of
from megalite.checkpoint.host_copy import HostCopy
from megalite.checkpoint.lease import FolderLease, LeaseLost, hold_folder
from megalite.checkpoint.local_saves import LocalSave, LocalSaves
from megalite.checkpoint.place import Tensors
from megalite.checkpoint.progress import Progress
from megalite.checkpoint.save import Contents, Save
from megalite.checkpoint.shares import all_of, share_of
from megalite.checkpoint.tensor_writer import Piece
from megalite.config import CheckpointConfig, Config
from megalite.log import log
from megalite.topology import Topology


class Job(Protocol):
    """Something that all ranks write together."""

    @property
    def final(self) -> Path: ...

    def run(self, exchange: Exchange) -> None: ...


class StoreLost(SaveError):
    """A run whose ranks can agree on no save any more, now or later."""

    def __init__(self, final: Path, why: object) -> None:
        super().__init__(
            f"checkpoint {final} cannot be written: the store that the ranks agree through is gone "
            f"({str(why).splitlines()[0]}), as when the launcher was killed; start the run again"
        )


class _Running:
    """A save under way.

    Attributes:
        error: what went wrong on this rank or was told to it, once `run` has come back.
        is_done: whether it has.
    """

    def __init__(self, job: Job, exchange: Exchange, copy: HostCopy | None) -> None:
        self.job = job
        self.exchange = exchange
        self.copy = copy
        self.error: SaveError | None = None
        self.is_done = False
        self.start = time.monotonic()
        self.thread: threading.Thread | None = None

    def go_in_background(self) -> None:
        # A daemon: a run whose other ranks are gone must not wait for them at its end.
        self.thread = threading.Thread(target=self.go, name="save-checkpoint", daemon=True)
        self.thread.start()

    def wait(self) -> None:
        """Waits for this rank's end of it."""
        if self.thread is not None:
            self.thread.join()

    def go(self) -> None:
        """Raises nothing."""
        try:
            if self.copy is not None:
                self.copy.fill()
            self.job.run(self.exchange)
        except SaveError as error:
            self.error = error
        except dist.DistError as error:
            self.error = StoreLost(self.job.final, error)
        except Exception:  # a defect is told like any other failure: training must not end without a word
            self.error = SaveError(f"checkpoint {self.job.final} failed:\n{traceback.format_exc()}")
        finally:
            self.is_done = True


class Saver:
    """Writes a run's checkpoints.

    Every rank calls every method at the same iteration; what is decided is decided by all alike. With
    `async_save` a thread copies the tensors while training computes its next gradients, and then writes the
    copy: memory for one copy, never two saves at once. An interval's save that comes while one is under way
    is left out with a warning; the last one of a run waits for it, and is then written at once.

    A save that fails is told, and training goes on to the next, unless the config says to exit; where it was
    the last it is an error. So it is where the folder's lease is lost: no further save is this run's to make.

    Args:
        lease: on the folder of `config.save`; None where no other run can write there.

    Attributes:
        local: the run's non-persistent saves; None where it makes none.
    """

    def __init__(
        self, config: CheckpointConfig, topology: Topology, lease: FolderLease | None = None
    ) -> None:
        self._config = config
        self._topology = topology
        self._lease = lease
        self.local = LocalSaves.of(config, topology)
        self._copy = HostCopy(topology.device)
        self._running: _Running | None = None
        self._failure: SaveError | None = None  # of the newest persistent save
        self._name: str | None = None
        self._num_saves = 0

    def training_from(self, iteration: int) -> Saver:
        """To be entered where training begins: non-persistent saves of another past are deleted."""
        if self.local is not None:
            self.local.keep_only(iteration)
        return self

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for a save that is under way; after an error nothing is agreed on or told any more.

        Raises:
            SaveError: the run's last persistent save failed, at whichever interval it was.
        """
        if error is None:
            if self._running is not None:
                self._end(is_last=True)
            if self._failure is not None:
                raise self._failure
        elif self._running is not None and isinstance(error, Exception):
            self._running.wait()
            self._running = None

    def save(self, contents: Contents, tensors: Tensors, *, is_last: bool = False) -> None:
        """Saves, or begins to.

        Args:
            tensors: what this rank holds, by name. Call `before_update` before they are written to.
            is_last: nothing is trained afterwards: on return the checkpoint is whole.

        Raises:
            SaveError: this save, or one before it, failed and the run must end; on every rank.
        """
        is_local = self._running is not None and isinstance(self._running.job, LocalSave)
        if self._is_busy(contents.iteration, "--save-interval", waits=is_last or is_local):
            return
        folder = self._config.save
        assert folder is not None

        def job(pieces: Mapping[str, Piece]) -> Save:
            keep = self._config.keep_last, self._config.keep_every
            return Save(Path(folder), contents, pieces, _file_name(self._topology), *keep, self._lease)

        self._begin(job, share_of(tensors, self._topology), is_last)

    def save_local(self, contents: Contents, tensors: Tensors) -> None:
        """Makes a non-persistent save, or begins to; it is left out while another save is under way.

        Raises:
            SaveError: this save, or one before it, failed and the run must end; on every rank.
        """
        if self.local is None or self._is_busy(
            contents.iteration, "--non-persistent-save-interval", waits=False
        ):
            return
        pieces = {name: all_of(tensor, self._topology) for name, tensor in tensors.items()}
        self._begin(partial(LocalSave, self.local, contents, lease=self._lease), pieces)

    def before_update(self) -> None:
        """To be called before training writes to what a save may still have to copy."""
        if self._running is not None and self._running.copy is not None:
            self._running.copy.protect()

    def poll(self) -> None:
        """Tells of a save in the background that every rank has come to the end of; call it each iteration.

        Raises:
            SaveError: it failed and the run must end; on every rank.
        """
        if self._running is not None and not self._is_running_somewhere():
            self._end()

    def finish(self) -> None:
        """Waits for what is under way.

        Raises:
            SaveError: it failed and the run must end; on every rank.
        """
        if self._running is not None:
            self._end()

    def _is_busy(self, iteration: int, interval_flag: str, *, waits: bool) -> bool:
        """Whether a save must be left out for another that is still under way."""
        self.finish() if waits else self.poll()
        if self._running is None:
            return False
        seconds = time.monotonic() - self._running.start
        log.warning(
            "iteration %d is not saved: %s is still being written after %.0f s; a larger %s gives it the "
            "time",
            iteration,
            self._running.job.final,
            seconds,
            interval_flag,
        )
        return True

    def _begin(
        self, job: Callable[[Mapping[str, Piece]], Job], pieces: Mapping[str, Piece], is_last: bool = False
    ) -> None:
        """Starts a job with pieces that nothing writes to meanwhile; what needs no thread also ends it."""
        in_background = self._config.async_save and not is_last
        copy = self._copy if in_background or self._topology.device.type != "cpu" else None
        running = _Running(job(copy.take(pieces) if copy else pieces), self._exchange(), copy)
        self._running = running
        if in_background:
            log.info("saving checkpoint %s in the background", running.job.final)
            running.go_in_background()
        else:
            running.go()
            self._end(is_last)

    def _exchange(self) -> Exchange:
        """The ranks' messages about the next save."""
        topology = self._topology
        if self._name is None:
            self._name = _agreed_name()
        self._num_saves += 1
        name = f"save/{self._name}/{self._num_saves}"
        return Exchange(_get_default_store(), topology.rank, topology.world_size, name)

    def _end(self, is_last: bool = False) -> None:
        """Waits for the save under way, tells how it went, and raises what must end the run."""
        running = self._running
        assert running is not None
        running.wait()
        error = self._agreed_error(running)
        running.exchange.forget()
        self._running = None
        if isinstance(running.job, Save):
            self._failure = error
        if error is None:
            self._saved(running.job, is_last)
        elif is_last or self._config.exit_on_save_failure or isinstance(error, StoreLost | LeaseLost):
            raise error
        else:
            log.warning("%s; training goes on, and the next save tries again", error)

    def _saved(self, job: Job, is_last: bool) -> None:
        """Tells of a checkpoint that is whole, and deletes what it supersedes."""
        log.info("saved checkpoint %s", job.final)
        if self.local is not None and isinstance(job, Save):
            if is_last:
                self.local.remove_all()
            else:
                self.local.remove_up_to(job.contents.iteration)

    def _is_running_somewhere(self) -> bool:
        assert self._running is not None
        return self._largest(not self._running.is_done) > 0

    def _agreed_error(self, running: _Running) -> SaveError | None:
        """What went wrong, the gravest of any rank's; none only where no rank has one."""
        error = running.error and (self._lost_lease() or running.error)
        gravity = {None: 0, SaveError: 1, StoreLost: 2, LeaseLost: 3}
        mine = gravity[type(error) if error else None]
        worst = self._largest(mine)
        if worst == 0 or worst == mine:
            return error
        if worst == 1:
            return SaveError(f"checkpoint {running.job.final} failed on another rank")
        if worst == 2:
            return StoreLost(running.job.final, "as another rank tells")
        assert self._lease is not None
        return self._lease.loss()

    def _lost_lease(self) -> LeaseLost | None:
        """Return the error of a lost lease where this rank finds that it is."""
        try:
            if self._lease is not None:
                self._lease.check()
        except LeaseLost as error:
            return error
        except OSError:
            pass
        return None

    def _largest(self, here: int) -> int:
        """The largest number of any rank: on the host, which does not wait for the GPU's work before it."""
        number = torch.tensor(here)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return int(number.item())


def save_checkpoint(
    folder: Path, progress: Progress, tensors: Tensors, config: Config, topology: Topology
) -> Path:
    """Makes one checkpoint, outside of a run's other saves; every rank calls it.

    Returns:
        The checkpoint's folder, which is whole.

    Raises:
        UserError: some rank could not write, or another run holds the folder; raised on every rank, and
            nothing half-written is left.
    """
    with hold_folder(str(folder), topology) as lease:
        saver = Saver(dataclasses.replace(config.checkpoint, save=str(folder)), topology, lease)
        saver.save(Contents.of(progress, config, topology), tensors, is_last=True)
    return folder / name_of(progress.iteration)


def _agreed_name() -> str:
    """A name that nothing else in the store has, the same on every rank."""
    names = [secrets.token_hex(8)]
    dist.broadcast_object_list(names)
    return names[0]


def _file_name(topology: Topology) -> str:
    """A name of this rank's own; readers make nothing of it."""
    name = f"pp_{topology.pp.rank:02d}_tp_{topology.tp.rank:02d}"
    return f"{name}_dp_{topology.dp.rank:03d}.safetensors" if topology.dp.size > 1 else f"{name}.safetensors"
