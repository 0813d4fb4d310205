"""Find the other ranks of a start: the launcher's environment, the store, and settings that must agree."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore, rendezvous

from megalite.distributed.agreement import (
    REFUSED,
    RankRecord,
    check_agreement,
    name_of_start,
    wait_for_listener,
)
from megalite.utils.errors import UserError
from megalite.utils.log import THIS_RANK, log

_OF_OTHER_LAUNCHERS = {
    "SLURM_STEP_NUM_TASKS": "srun",  # not SLURM_NTASKS, which salloc and sbatch also set for one process
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpirun",
}
"""Variables with the number of processes that a launcher has started, and the launcher."""
_SECONDS_TO_REFUSE = 10.0
"""Seconds for which a rank that refuses its settings tries to report this to the others."""


@dataclass(frozen=True)
class Launch:
    """Position of this process among the launched processes: from torchrun, or the same variables.

    Attributes:
        restarts: number of torchrun's restarts of the ranks, plus Slurm's restarts of the job.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    restarts: int = 0

    @staticmethod
    def from_environment() -> Launch:
        """Read RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and the counts of restarts.

        The restart counts are TORCHELASTIC_RESTART_COUNT and SLURM_RESTART_COUNT. If neither RANK nor
        WORLD_SIZE is set, there is one rank.

        Raises:
            UserError: only some of the variables that ``env://`` needs are set, or one is not valid; srun or
                mpirun has started several processes without RANK.
        """
        needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        present = [name for name in needed if name in os.environ]
        restarts = restart_count()
        if not {"RANK", "WORLD_SIZE"} & set(present):
            _refuse_other_launcher()
            return Launch(0, 1, 0, 1, restarts)
        if missing := [name for name in needed if name not in os.environ]:
            raise UserError(
                f"{', '.join(present)} set but not {', '.join(missing)}: set all four, or use torchrun"
            )
        if len(hosts := os.environ["MASTER_ADDR"].replace(",", " ").split()) != 1:
            raise UserError(
                f"MASTER_ADDR={os.environ['MASTER_ADDR']!r} is not one host: set it to rank 0's host"
                + (f", {hosts[0]}" if hosts else "")
            )
        rank, world_size, _ = map(_environment_int, ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        local_world_size = _environment_int("LOCAL_WORLD_SIZE", world_size)
        if rank >= world_size or local_world_size == 0:
            mistake = UserError(
                f"RANK={rank}, WORLD_SIZE={world_size}, LOCAL_WORLD_SIZE={local_world_size} are not valid: "
                "RANK must be below WORLD_SIZE, and LOCAL_WORLD_SIZE at least 1"
            )
            mistake.on_one_rank = rank >= world_size
            raise mistake
        local_rank = _environment_int("LOCAL_RANK", rank % local_world_size)
        return Launch(rank, world_size, local_rank, local_world_size, restarts)


def restart_count() -> int:
    """Return the number of torchrun's restarts of the ranks, plus Slurm's restarts of the job.

    Raises:
        UserError: a variable of the environment is not a number.
    """
    return sum(map(_environment_int, ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")))


def several_by_other_launcher() -> tuple[str, str] | None:
    """Return srun or mpirun, and a clause on its processes, if it started several without RANK; else None."""
    for name, launcher in _OF_OTHER_LAUNCHERS.items():
        text = os.environ.get(name, "")
        if "RANK" not in os.environ and text.isdecimal() and int(text) > 1:
            return launcher, f"{launcher} has started {text} processes ({name})"
    return None


def _refuse_other_launcher() -> None:
    """Refuse processes that do not know of each other: each would train the whole run.

    Raises:
        UserError: srun or mpirun has started several processes, but RANK is not set.
    """
    if several := several_by_other_launcher():
        launcher, started = several
        per_node = "--ntasks-per-node=1" if launcher == "srun" else "--map-by ppr:1:node"
        raise UserError(
            f"{started}, but RANK is not set, so that each would be a run of one rank: start one torchrun on "
            f"each node ({launcher} {per_node} torchrun --nnodes N --nproc-per-node GPUS ...), or set RANK, "
            "WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each process"
        )


def _environment_int(name: str, default: int = 0) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        mistake = UserError(f"environment variable {name}={text!r} is not a number: set it to an integer")
        mistake.on_one_rank = name in ("RANK", "LOCAL_RANK")
        raise mistake
    return int(text)


@contextmanager
def refusal_reported() -> Iterator[None]:
    """Report a UserError of this rank in this block to the other ranks, which also raise it.

    The block must run before any rank waits for another. If all ranks raise the error, rank 0 opens no store
    and nothing is reported: rank 0 prints it.
    """
    try:
        yield
    except UserError as error:
        with suppress(UserError, dist.DistError, TimeoutError):
            _report_refusal(Launch.from_environment(), error)
        raise


def _report_refusal(launch: Launch, error: UserError) -> None:
    if launch.rank > 0:
        wait_for_listener(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), _SECONDS_TO_REFUSE)
        store = _store_of_start(launch, timedelta(seconds=_SECONDS_TO_REFUSE))
        check_agreement(store, launch.rank, launch.world_size, {REFUSED: str(error)}, "start")


def open_store(launch: Launch, timeout: timedelta) -> Store:
    """Return the store that all ranks of this start share, without the keys of an earlier start.

    Raises:
        UserError: there is no rendezvous with the other ranks.
    """
    with rendezvous_explained(launch):
        if launch.world_size > 1:
            choose_interface(
                os.environ["MASTER_ADDR"], many_hosts=launch.local_world_size < launch.world_size
            )
        return _store_of_start(launch, timeout)


def check_start(
    launch: Launch, store: Store, must_agree: RankRecord, device_type: str, shard_degree: str = ""
) -> None:
    """Check that all ranks were started alike; every rank must call it equally often.

    Args:
        shard_degree: number of replicas of a node that ZeRO shards over, if it does.

    Raises:
        UserError: settings, devices or shard degrees differ; raised on every rank.
    """
    record = {
        **must_agree,
        "the device": device_type,
        "the size of the groups that ZeRO shards within": shard_degree,
    }
    with rendezvous_explained(launch):
        check_agreement(store, launch.rank, launch.world_size, record, "start")


@contextmanager
def rendezvous_explained(launch: Launch) -> Iterator[None]:
    """Turn errors of the network or the store into a UserError that names the address of rank 0."""
    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError, OSError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        mistake = UserError(
            f"rank {launch.rank}: no rendezvous at MASTER_ADDR:MASTER_PORT {address} "
            f"({str(error).splitlines()[0]}): every rank must name rank 0's host and a free port of it, and "
            "rank 0 must be running"
        )
        mistake.on_one_rank = True  # rank 0 may be gone, or may never have started
        raise mistake from None


def _store_of_start(launch: Launch, timeout: timedelta) -> Store:
    """Return the store for the rendezvous, without the keys of an earlier start."""
    if launch.world_size == 1:
        return HashStore()
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    master = os.environ["MASTER_ADDR"]
    if launch.rank == 0 and not is_torchruns and is_this_machine(master):
        listener = listener_at(master, int(os.environ["MASTER_PORT"]))
        address, port = listener.getsockname()[:2]
        store: Store = TCPStore(
            address,
            port,
            launch.world_size,
            is_master=True,
            timeout=timeout,
            master_listen_fd=listener.detach(),
            use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
        )
    else:
        if launch.rank > 0:
            wait_for_listener(master, int(os.environ["MASTER_PORT"]), timeout.total_seconds())
        store, _, _ = next(rendezvous("env://", launch.rank, launch.world_size, timeout=timeout))
    store.set_timeout(timeout)
    if is_torchruns:  # torchrun's store and its keys outlive the ranks
        name = name_of_start(store, launch.rank, launch.world_size, timeout.total_seconds())
        return PrefixStore(name, store)
    return store


GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = "127.0.0.1"
_THIS_MACHINE = ("localhost", _LOOPBACK, "::1")
"""Values of MASTER_ADDR that other hosts cannot resolve to rank 0's host, so all ranks are on one host."""
_SIOCGIFADDR = 0x8915  # Linux, netdevice(7): an interface's IPv4 address
_ANY_PORT = 9  # no packet is sent to it


def choose_interface(master: str, *, many_hosts: bool) -> None:
    """Set GLOO_SOCKET_IFNAME if gloo would publish an address that other ranks cannot reach.

    gloo publishes the address to which this host's name resolves, or 127.0.0.1 if that is not an address of
    this host. If hosts resolve their own names to a loopback address, a run on several hosts would hang.
    This function then chooses the interface towards rank 0, and on rank 0's own host the only interface that
    is not loopback. It changes nothing if the user has set the variable, or if the name resolves to a network
    address. If all ranks are on this machine, they listen on its loopback interface, to which no other
    machine can connect.

    Args:
        master: MASTER_ADDR, the host of rank 0.
        many_hosts: whether there are ranks on other hosts.
    """
    if GLOO_INTERFACE in os.environ:
        return
    is_gloo_on_loopback = _is_loopback(_address_of_gloo())
    if is_this_machine(master):
        if not is_gloo_on_loopback and (loopback := _interfaces().get(_LOOPBACK)):
            os.environ[GLOO_INTERFACE] = loopback
        return
    if not is_gloo_on_loopback:
        return
    outward = {address: name for address, name in _interfaces().items() if not _is_loopback(address)}
    interface = outward.get(_address_towards(master))
    if interface is None and many_hosts and len(outward) == 1:
        (interface,) = outward.values()
    if interface is not None:
        os.environ[GLOO_INTERFACE] = interface
        log.info(
            f"{GLOO_INTERFACE}={interface}: host {socket.gethostname()} resolves its own name to a loopback "
            "address"
        )
    elif many_hosts:
        found = ", ".join(f"{name} has {address}" for address, name in outward.items())
        log.warning(
            f"host {socket.gethostname()} resolves its own name to a loopback address, which ranks on other "
            f"hosts cannot reach: if the run hangs now, set {GLOO_INTERFACE} to the interface between the "
            f"hosts ({found or 'this host has only loopback'})",
            extra=THIS_RANK,
        )


def is_this_machine(host: str) -> bool:
    """Return whether a host name, such as localhost, always refers to the machine that uses it."""
    return host in _THIS_MACHINE or host.startswith("127.")


def listener_at(host: str, port: int) -> socket.socket:
    """Return a socket for a store that listens at one address of this machine; 0 chooses a free port.

    torch's own socket would listen on all addresses of the machine, for any MASTER_ADDR.

    Raises:
        OSError: the port is taken.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)
    except BaseException:
        listener.close()
        raise
    return listener


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _address_of_gloo() -> str:
    """Return the address that gloo publishes if GLOO_SOCKET_IFNAME is not set."""
    with suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        for family, kind, _, _, address in found:
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return str(address[0])
    return _LOOPBACK


def own_address(master: str | None = None) -> str:
    """Return the address at which other ranks reach this host, as gloo chooses it (`choose_interface`).

    Args:
        master: host of another rank; by default MASTER_ADDR.
    """
    interface = os.environ.get(GLOO_INTERFACE, "").split(",")[0]
    for address, name in _interfaces().items():
        if name == interface:
            return address
    master = master or os.environ.get("MASTER_ADDR", _LOOPBACK)
    if is_this_machine(master):
        return _LOOPBACK
    address = _address_of_gloo()
    return _address_towards(master) if _is_loopback(address) else address


def _address_towards(host: str) -> str:
    """Return the address of this host on the route to another host, without sending a packet."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _ANY_PORT))
        return str(probe.getsockname()[0])
    return _LOOPBACK


def _interfaces() -> dict[str, str]:
    """Return interfaces by their IPv4 address, including loopback; empty on systems other than Linux."""
    try:
        from fcntl import ioctl
    except ImportError:
        return {}
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # the interface has no IPv4 address
                answer = ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                found[socket.inet_ntoa(answer[20:24])] = name
    return found
