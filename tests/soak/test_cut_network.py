"""A run on two hosts, which are network namespaces, when the network between them is cut."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.soak.folder import iterations_of
from tests.soak.lost_nodes import flags_of
from tests.soak.lost_ranks import ROOT


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two namespaces with a link between them: 10.213.0.1 and 10.213.0.2."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = tuple(f"megalite{os.getpid()}{letter}" for letter in "ab")
    links = tuple(f"mg{os.getpid()}{letter}" for letter in "ab")
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
            _ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespace: {error.stderr.decode().strip()}")
        for number, (name, link) in enumerate(zip(names, links, strict=True), 1):
            _ip("link", "set", link, "netns", name)
            _ip("-n", name, "link", "set", link, "name", "link0")
            _ip("-n", name, "addr", "add", f"10.213.0.{number}/24", "dev", "link0")
            for each in ("lo", "link0"):
                _ip("-n", name, "link", "set", each, "up")
        yield names[0], names[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.slow
def test_the_host_with_most_ranks_goes_on_and_the_other_ends(hosts: tuple[str, str], tmp_path: Path) -> None:
    """Two ranks on one host, and one on the other, which could train alone; the disk is shared."""
    log = tmp_path / "log"
    flags = [*flags_of(tmp_path / "run", 1000), "--global-batch-size", "12", "--zero-stage", "1"]
    flags += ["--inprocess-restart", "--non-persistent-save-interval", "2", "--peer-copies", "1"]

    def start(rank: int, host: int, local_rank: int, num_local: int) -> subprocess.Popen[bytes]:
        place = ["--non-persistent-local-ckpt-dir", str(tmp_path / f"node{host}")]
        environment = {"RANK": rank, "WORLD_SIZE": 3, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": num_local}
        words = {name: str(value) for name, value in environment.items()}
        words |= {"MASTER_ADDR": "10.213.0.1", "MASTER_PORT": "29500", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags, *place]
        with log.open("ab") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", hosts[host], *command],
                env={**os.environ, **words, "OMP_NUM_THREADS": "1"},
                stdout=file,
                stderr=file,
            )

    ranks = [start(0, 0, 0, 2), start(1, 0, 1, 2), start(2, 1, 0, 1)]
    try:
        _until(lambda: max(iterations_of(tmp_path / "run"), default=0) > 4, 120)
        _ip("-n", hosts[1], "link", "set", "link0", "down")
        _until(lambda: ranks[2].poll() is not None, 240)
        said = log.read_text()
        assert "1 rank of 3 lost" in said
        assert ": 2 ranks went on from iteration" in said
        assert "2 of 3 ranks do not answer: waiting 60 s" in said
        assert "go on without this one, which they cannot reach" in said
        assert ranks[2].returncode == 1
        assert ranks[0].poll() is ranks[1].poll() is None
    finally:
        for each in ranks:
            each.kill()
            each.wait()
