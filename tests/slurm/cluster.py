"""A real Slurm of two nodes on this one machine, for as long as a test needs it.

Everything listens on loopback and lives in one folder; nothing authenticates. The "GPUs" of the nodes are
device files of terminals, which Slurm counts and hands out and nobody opens.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
GPUS_PER_NODE = 2
_START_SECONDS = 300.0


def missing_programs() -> list[str]:
    """What of Slurm this machine lacks."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


needs_slurm = pytest.mark.skipif(
    bool(missing_programs()) or os.geteuid() != 0,
    reason=f"needs root and Slurm's {', '.join(missing_programs()) or 'programs'}",
)


@dataclass(frozen=True)
class Slurm:
    """A running cluster.

    Attributes:
        conf: its slurm.conf, by which Slurm's commands find it.
    """

    conf: str

    def submit(self, script: Path, *options: str, arguments: Sequence[str], folder: Path) -> str:
        """Submits a batch script from `folder` in this process's environment; returns the job's number."""
        return self._run("sbatch", "--parsable", *options, str(script), *arguments, folder=folder).strip()

    def state(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says, by name."""
        words = self._run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str, states: set[str], seconds: float) -> dict[str, str]:
        """Waits until the job is in one of the states; returns what Slurm says of it then.

        Raises:
            TimeoutError: it is in none of them after so long.
        """
        end = time.monotonic() + seconds
        while (state := self.state(job))["JobState"] not in states:
            if time.monotonic() > end:
                raise TimeoutError(f"job {job} is {state['JobState']} after {seconds:g} s")
            time.sleep(0.2)
        return state

    def wait_for_all(self, seconds: float = 60.0) -> None:
        """Waits until no job waits or runs."""
        end = time.monotonic() + seconds
        while jobs := self._run("squeue", "--noheader", "--format=%i").split():
            if time.monotonic() > end:
                raise TimeoutError(f"jobs {jobs} do not end")
            time.sleep(0.5)

    def signal(self, job: str, name: str) -> None:
        """Sends a signal to the batch script alone, as Slurm does before a job's time is over."""
        self._run("scancel", "--batch", f"--signal={name}", job)

    def start_now(self, job: str) -> None:
        """Spares a requeued job most of the two minutes that Slurm lets it wait.

        Not all of them: a node that was told to end the job starts it again only by a credential of a later
        second, and else the job fails.
        """
        self._run("scontrol", "update", f"JobId={job}", "StartTime=now+10")

    def end_all(self) -> None:
        """Ends every job, with the processes that a failed test may have left."""
        end = time.monotonic() + _START_SECONDS
        while jobs := self._run("squeue", "--noheader", "--format=%i").split():
            self._run("scancel", *jobs)
            if time.monotonic() > end:
                raise TimeoutError(f"jobs {jobs} do not end")
            time.sleep(0.5)

    def _run(self, *command: str, folder: Path | None = None) -> str:
        done = subprocess.run(
            command,
            env=os.environ | {"SLURM_CONF": self.conf},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Slurm]:
    """Starts the controller and two nodes, and ends them."""
    conf = str(_configure(folder))
    environment = os.environ | {"SLURM_CONF": conf}
    daemons = [
        subprocess.Popen(
            [*command, "-D"],
            env=environment,
            stdout=(folder / f"{command[-1]}.out").open("w"),
            stderr=subprocess.STDOUT,
        )
        for command in (["slurmctld", "-c"], ["slurmd", "-N", "n1"], ["slurmd", "-N", "n2"])
    ]
    try:
        _wait_for_nodes(environment)
        slurm = Slurm(conf)
        yield slurm
        slurm.end_all()
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()


def _wait_for_nodes(environment: dict[str, str]) -> None:
    end = time.monotonic() + _START_SECONDS
    while True:
        done = subprocess.run(
            ("sinfo", "-h", "-o", "%t %D"), env=environment, capture_output=True, text=True, check=False
        )
        if done.stdout.split() == ["idle", "2"]:
            return
        if time.monotonic() > end:
            raise TimeoutError(f"Slurm's nodes are not idle: {done.stdout or done.stderr}")
        time.sleep(0.2)


def _configure(folder: Path) -> Path:
    """Writes slurm.conf and gres.conf; returns the first."""
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    host = socket.gethostname()
    controller, *nodes = _free_ports(3)
    lines = [
        "ClusterName=test",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={controller}",
        "AuthType=auth/none",
        "CredType=cred/none",
        "SlurmUser=root",
        "SlurmdUser=root",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/none",
        "SlurmdParameters=config_overrides",
        "ReturnToService=2",
        "MpiDefault=none",
        "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny",
        "GresTypes=gpu",
        "MinJobAge=600",
        "KillWait=5",
        "SchedulerParameters=batch_sched_delay=1,sched_interval=2",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool/%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd-%n.pid",
        f"SlurmctldLogFile={folder}/slurmctld.log",
        f"SlurmdLogFile={folder}/slurmd-%n.log",
        *(
            f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
            f"CPUs=4 RealMemory=8000 Gres=gpu:{GPUS_PER_NODE}"
            for number, port in enumerate(nodes, 1)
        ),
        "PartitionName=debug Nodes=ALL Default=YES State=UP",
    ]
    (folder / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File=/dev/tty[0-{GPUS_PER_NODE - 1}]\n")
    conf = folder / "slurm.conf"
    conf.write_text("\n".join(lines) + "\n")
    return conf


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
