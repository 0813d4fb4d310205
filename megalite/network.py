"""Where ranks listen for each other: gloo's network interface, and the address of rank 0's store."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress

from megalite.log import THIS_RANK, log

VARIABLE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = "127.0.0.1"
_THIS_MACHINE = ("localhost", _LOOPBACK, "::1")
"""Names of rank 0's host by which no other host finds it: all ranks are on one."""
_SIOCGIFADDR = 0x8915  # Linux, netdevice(7): an interface's IPv4 address
_ANY_PORT = 9  # no packet is sent to it


def choose_interface(master: str, *, many_hosts: bool) -> None:
    """Sets GLOO_SOCKET_IFNAME where gloo by itself would tell the other ranks an address that leads nowhere.

    gloo tells them what this host's name resolves to, or 127.0.0.1 where that is nobody's address. On hosts
    that take their own name for a loopback address, a run of several waits for ever. Chosen is the interface
    towards rank 0, and on rank 0's own host the only one that there is. What the user has set stays, and so
    does everything where the name resolves to an address of the network. Ranks of this machine alone listen
    on its loopback interface, where no other machine can connect to them.

    Args:
        master: MASTER_ADDR, rank 0's host.
        many_hosts: whether there are ranks on other hosts.
    """
    if VARIABLE in os.environ:
        return
    is_gloo_on_loopback = _is_loopback(_address_of_gloo())
    if is_this_machine(master):
        if not is_gloo_on_loopback and (loopback := _interfaces().get(_LOOPBACK)):
            os.environ[VARIABLE] = loopback
        return
    if not is_gloo_on_loopback:
        return
    outward = {address: name for address, name in _interfaces().items() if not _is_loopback(address)}
    interface = outward.get(_address_towards(master))
    if interface is None and many_hosts and len(outward) == 1:
        (interface,) = outward.values()
    if interface is not None:
        os.environ[VARIABLE] = interface
        log.info(
            f"{VARIABLE}={interface}: host {socket.gethostname()} takes its own name for a loopback address"
        )
    elif many_hosts:
        found = ", ".join(f"{name} has {address}" for address, name in outward.items())
        log.warning(
            f"host {socket.gethostname()} takes its own name for a loopback address, where ranks of others "
            f"do not find it: if the run stands still now, set {VARIABLE} to the interface between the hosts "
            f"({found or 'this host has none but loopback'})",
            extra=THIS_RANK,
        )


def is_this_machine(host: str) -> bool:
    """Return whether the name of rank 0's host means this machine wherever it is used."""
    return host in _THIS_MACHINE or host.startswith("127.")


def loopback_listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens on a loopback address alone, for rank 0's store.

    torch's store by itself listens on all addresses of the machine, whatever MASTER_ADDR says.

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
    """The address that gloo tells other ranks where it is not told an interface."""
    with suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        for family, kind, _, _, address in found:
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return str(address[0])
    return _LOOPBACK


def _address_towards(host: str) -> str:
    """This host's own address on the way to another; no packet is sent."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _ANY_PORT))
        return str(probe.getsockname()[0])
    return _LOOPBACK


def _interfaces() -> dict[str, str]:
    """Interfaces by their IPv4 address, loopback too; none where the system is not Linux."""
    try:
        from fcntl import ioctl
    except ImportError:
        return {}
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no such address
                answer = ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                found[socket.inet_ntoa(answer[20:24])] = name
    return found
