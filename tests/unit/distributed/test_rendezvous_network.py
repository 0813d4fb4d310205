"""Which interface gloo is told of, on hosts of every kind."""

from __future__ import annotations

import logging
import os

import pytest

from megalite.distributed import rendezvous
from megalite.distributed.rendezvous import GLOO_INTERFACE, choose_interface, own_address


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A host of one cable that takes its own name for a loopback address."""
    monkeypatch.delenv(GLOO_INTERFACE, raising=False)
    monkeypatch.setattr(rendezvous, "_address_of_gloo", lambda: "127.0.1.1")
    monkeypatch.setattr(rendezvous, "_interfaces", lambda: {"127.0.0.1": "lo", "10.0.0.2": "eth0"})
    monkeypatch.setattr(rendezvous, "_address_towards", lambda master: "10.0.0.2")
    yield monkeypatch
    os.environ.pop(GLOO_INTERFACE, None)


def test_the_way_to_rank_0(host: pytest.MonkeyPatch) -> None:
    choose_interface("n0", many_hosts=True)
    assert os.environ[GLOO_INTERFACE] == "eth0"


def test_the_only_way_out_of_rank_0_s_host(host: pytest.MonkeyPatch) -> None:
    host.setattr(rendezvous, "_address_towards", lambda master: "127.0.1.1")
    choose_interface("n0", many_hosts=True)
    assert os.environ[GLOO_INTERFACE] == "eth0"


def test_a_choice_that_nobody_can_make(host: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    both = {"127.0.0.1": "lo", "10.0.0.2": "eth0", "192.168.0.2": "ib0"}
    host.setattr(rendezvous, "_interfaces", lambda: both)
    host.setattr(rendezvous, "_address_towards", lambda master: "127.0.1.1")
    with caplog.at_level(logging.WARNING, logger="megalite"):
        choose_interface("n0", many_hosts=True)
    assert GLOO_INTERFACE not in os.environ
    assert (
        f"set {GLOO_INTERFACE}" in caplog.text and "(eth0 has 10.0.0.2, ib0 has 192.168.0.2)" in caplog.text
    )


def test_two_launchers_on_one_machine_stay_on_loopback(host: pytest.MonkeyPatch) -> None:
    choose_interface("localhost", many_hosts=True)
    assert GLOO_INTERFACE not in os.environ


@pytest.mark.parametrize("master", ["localhost", "127.0.0.1", "::1", "127.0.1.1"])
def test_ranks_of_one_machine_listen_on_its_loopback(host: pytest.MonkeyPatch, master: str) -> None:
    host.setattr(rendezvous, "_address_of_gloo", lambda: "192.168.0.2")
    choose_interface(master, many_hosts=False)
    assert os.environ[GLOO_INTERFACE] == "lo"


def test_what_the_user_says_stays(host: pytest.MonkeyPatch) -> None:
    host.setenv(GLOO_INTERFACE, "ib0")
    choose_interface("n0", many_hosts=True)
    assert os.environ[GLOO_INTERFACE] == "ib0"


def test_a_host_whose_name_others_can_use(host: pytest.MonkeyPatch) -> None:
    host.setattr(rendezvous, "_address_of_gloo", lambda: "192.168.0.2")
    choose_interface("n0", many_hosts=True)
    assert GLOO_INTERFACE not in os.environ


def test_one_host_needs_nothing(host: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    host.setattr(rendezvous, "_address_towards", lambda master: "127.0.0.1")
    with caplog.at_level(logging.INFO, logger="megalite"):
        choose_interface("127.0.0.1", many_hosts=False)
    assert GLOO_INTERFACE not in os.environ and not caplog.text


@pytest.mark.parametrize(
    ("interface", "master", "address"),
    [
        ("", "n0", "10.0.0.3"),
        ("eth0", "n0", "10.0.0.2"),
        ("", "n1", "10.0.0.4"),
        ("eth0,ib0", "localhost", "10.0.0.2"),
        ("ib0", "n0", "10.0.0.3"),
        ("", "localhost", "127.0.0.1"),
        ("", None, "127.0.0.1"),
    ],
)
def test_the_address_for_other_ranks(
    host: pytest.MonkeyPatch, interface: str, master: str | None, address: str
) -> None:
    host.setattr(rendezvous, "_address_towards", lambda master: "10.0.0.3")
    host.setenv(GLOO_INTERFACE, interface)
    if master == "n1":
        host.setattr(rendezvous, "_address_of_gloo", lambda: "10.0.0.4")
    host.delenv("MASTER_ADDR", raising=False)
    if master is not None:
        host.setenv("MASTER_ADDR", master)
    assert own_address() == address


def test_this_machine_s_own_interfaces() -> None:
    assert rendezvous._interfaces().get("127.0.0.1", "lo") == "lo"
    assert rendezvous._address_towards("127.0.0.1") == "127.0.0.1"
    assert rendezvous._address_towards("no.such.host.invalid") == "127.0.0.1"
