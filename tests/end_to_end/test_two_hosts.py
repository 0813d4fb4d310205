"""Two hosts train together over torchrun's rendezvous, as one host does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from megalite.observe.report.run_history import read_history
from megalite.train.telemetry.time_terms import compare
from tests.end_to_end.conftest import ROOT, TINY_FLAGS
from tests.end_to_end.two_hosts import INTERFACE, Host, two_hosts, why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
LAYOUT = ("--num-layers", "4", "--tp", "2", "--pp", "2", "--params-dtype", "fp32")
END_SECONDS = 600.0


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    try:
        with two_hosts() as both:
            yield both
    except subprocess.CalledProcessError as error:
        pytest.skip(f"not permitted here: {' '.join(error.cmd)}: {error.stderr.decode().strip()}")


def train(
    corpus: str,
    metrics: Path,
    hosts: tuple[Host, ...] | None,
    layout: Sequence[str] = LAYOUT,
    num_ranks: int = 4,
    **environment: str,
) -> list[str]:
    """Trains by one torchrun a host; gives what each host printed."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(len(hosts or (1,))), "--nproc-per-node", str(num_ranks // len(hosts or (1,)))),
    ]
    flags = ("pretrain_gpt.py", *TINY_FLAGS, *layout, "--data-path", corpus, "--metrics-file", str(metrics))
    if hosts is None:
        done = subprocess.run(
            [*command, "--standalone", *flags], cwd=ROOT, capture_output=True, text=True, timeout=END_SECONDS
        )
        assert done.returncode == 0, done.stderr
        return [done.stdout]
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0].name}:29400", "--rdzv-id", "1")
    started = [
        host.start([*command, *rendezvous, *flags], ROOT, OMP_NUM_THREADS="1", **environment)
        for host in hosts
    ]
    try:
        told = [process.communicate(timeout=END_SECONDS)[0] for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                process.terminate()  # torchrun ends its ranks
                process.communicate(timeout=END_SECONDS)
    assert [process.returncode for process in started] == [0, 0], "\n".join(told)
    return told


def losses(metrics: Path) -> list[float]:
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [record["lm_loss"] for record in records if "lm_loss" in record]


def test_two_hosts_train_the_run_of_one(hosts: tuple[Host, Host], corpus: str, tmp_path: Path) -> None:
    """2 x 2 ranks, stages on different hosts; once with the interface named, once with nobody saying it."""
    train(corpus, tmp_path / "one.jsonl", None)
    expected = losses(tmp_path / "one.jsonl")
    assert len(expected) == 4
    train(corpus, tmp_path / "named.jsonl", hosts, GLOO_SOCKET_IFNAME=INTERFACE)
    assert losses(tmp_path / "named.jsonl") == expected
    told = train(corpus, tmp_path / "found.jsonl", hosts)
    assert losses(tmp_path / "found.jsonl") == expected
    assert f"GLOO_SOCKET_IFNAME={INTERFACE}" in told[0] + told[1]


def test_a_slow_link_is_what_makes_a_run_slow(hosts: tuple[Host, Host], corpus: str, tmp_path: Path) -> None:
    """The ranks' replicas exchange gradients of about 1 MB over a cable of 1 MB/s."""
    for host in hosts:
        limit = f"tc qdisc add dev {INTERFACE} root tbf rate 8mbit burst 32kb latency 400ms"
        limited = subprocess.run(
            ["ip", "netns", "exec", host.name, *limit.split()], capture_output=True, text=True, check=False
        )
        if limited.returncode:
            pytest.skip(f"this kernel cannot limit a link: {limited.stderr.strip()}")
    flags = ("--dp", "2", "--log-interval", "1", "--log-time-breakdown", "--eval-iters", "0")
    told = train(corpus, tmp_path / "metrics.jsonl", hosts, flags, 2, GLOO_SOCKET_IFNAME=INTERFACE)
    comparison = compare(read_history(tmp_path / "metrics.jsonl").samples)
    first, *others = comparison.slow_terms()
    assert first.name == "dp wait"
    assert all(other.lost < first.lost / 3 for other in others), others
    assert "time breakdown: dp wait cost" in "".join(told)
