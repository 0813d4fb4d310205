"""Choose network addresses of a rank: gloo's interface, and the address on which rank 0's store listens."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress

from megalite.utils.log import THIS_RANK, log

VARIABLE = "GLOO_SOCKET_IFNAME"
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
            f"{VARIABLE}={interface}: host {socket.gethostname()} resolves its own name to a loopback address"
        )
    elif many_hosts:
        found = ", ".join(f"{name} has {address}" for address, name in outward.items())
        log.warning(
            f"host {socket.gethostname()} resolves its own name to a loopback address, which ranks on other "
            f"hosts cannot reach: if the run hangs now, set {VARIABLE} to the interface between the hosts "
            f"({found or 'this host has only loopback'})",
            extra=THIS_RANK,
        )


def is_this_machine(host: str) -> bool:
    """Return whether a host name, such as localhost, always refers to the machine that uses it."""
    return host in _THIS_MACHINE or host.startswith("127.")


def loopback_listener(host: str, port: int) -> socket.socket:
    """Return a socket for rank 0's store that listens only on a loopback address.

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
