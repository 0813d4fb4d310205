"""Two hosts on this one machine: network namespaces with names of their own, joined by a cable.

As Debian sets hosts up, each takes its own name for 127.0.1.1, and the other's for its address.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "veth0"
_ETC = Path("/etc/netns")
"""What lies in a folder of a namespace's name there, `ip netns exec` shows in place of /etc's."""


@dataclass(frozen=True)
class Host:
    """A network namespace with a hostname.

    Attributes:
        address: what the other host reaches it by.
    """

    name: str
    address: str

    def start(self, command: Sequence[str], folder: Path, **environment: str) -> subprocess.Popen[str]:
        """Starts a command on the host; its output and errors come through one pipe."""
        inside = ("ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c")
        script = f'hostname {self.name} && exec "$@"'
        kept = {key: value for key, value in os.environ.items() if key != "GLOO_SOCKET_IFNAME"}
        return subprocess.Popen(
            [*inside, script, "sh", *command],
            cwd=folder,
            env={**kept, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def why_not() -> str | None:
    """What keeps this machine from making hosts; None if nothing does."""
    if missing := [program for program in ("ip", "unshare", "hostname") if shutil.which(program) is None]:
        return f"needs {', '.join(missing)} (iproute2, util-linux, hostname)"
    if os.geteuid() != 0:
        return "needs root, who may make network namespaces"
    return None


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Makes two hosts and removes them at the end.

    Raises:
        subprocess.CalledProcessError: this machine does not permit it.
    """
    hosts = tuple(Host(f"megalite{os.getpid()}n{n}", f"10.232.0.{n + 1}") for n in range(2))
    with ExitStack() as undo:
        for host, other in (hosts, hosts[::-1]):
            _run(f"ip netns add {host.name}")
            undo.callback(_run, f"ip netns delete {host.name}")
            (_ETC / host.name).mkdir(parents=True)
            undo.callback(shutil.rmtree, _ETC / host.name)
            names = f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n{other.address} {other.name}\n"
            (_ETC / host.name / "hosts").write_text(names)
        first, second = (host.name for host in hosts)
        _run(f"ip link add {INTERFACE} netns {first} type veth peer name {INTERFACE} netns {second}")
        for host in hosts:
            inside = f"ip -n {host.name}"
            _run(f"{inside} address add {host.address}/24 dev {INTERFACE}")
            for device in (INTERFACE, "lo"):
                _run(f"{inside} link set {device} up")
        yield hosts[0], hosts[1]


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)
