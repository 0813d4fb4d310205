"""Ranks that share a GPU in the checks of a GPU machine: NCCL, MPS, and the order of the rows."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_check import mps, several_ranks
from benchmarks.gpu_check.commands import Finished
from benchmarks.gpu_check.layout_rows import FIRST, Row, all_rows
from benchmarks.gpu_check.mps import LOG, PROGRAM, Mps
from benchmarks.gpu_check.runner import CheckContext
from benchmarks.gpu_check.several_ranks import rank_host
from megalite.utils.hardware import process_settings
from megalite.utils.hardware.process_settings import MPS_FOLDER
from tests.covering import by_new_pairs
from tests.parity.test_layout_table import CORE, ROWS

DAEMON = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], 'w')
time.sleep(60)
"""


@pytest.fixture
def daemons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in place of MPS's; it starts a process with its name, which ignores requests to end."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program, daemon = folder / PROGRAM, folder / "nvidia-cuda-mps-fake"
    daemon.symlink_to(os.path.realpath(sys.executable))
    program.write_text(f"""#!/bin/bash
[ -z "$LD_PRELOAD" ] || exit 9
echo "$CUDA_MPS_PIPE_DIRECTORY" >>{tmp_path}/starts
PYTHONHOME={sys.base_prefix} setsid {daemon} -c "{DAEMON}" {tmp_path}/ready &
until [ -e {tmp_path}/ready ]; do sleep 0.01; done
rm {tmp_path}/ready
""")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(process_settings, "DEFAULT_MPS_FOLDER", tmp_path / "nvidia-mps")
    monkeypatch.setattr(mps.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(mps, "SECONDS_TO_END", 0.2)
    for name in (MPS_FOLDER, LOG):
        monkeypatch.delenv(name, raising=False)
    return program


def test_the_check_starts_restarts_and_ends_its_own_daemon(daemons: Path, tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], env={MPS_FOLDER: "/tmp/other"}
    )
    try:
        with Mps() as service:
            assert (service.problem, service.is_own) == ("", True)
            assert os.environ[MPS_FOLDER].startswith(str(tmp_path)) and Path(os.environ[MPS_FOLDER]).is_dir()
            (first,) = service._processes()
            service.restart()
            (second,) = service._processes()
            assert first != second
        assert not list(service._processes())  # although it does not end by itself
        assert MPS_FOLDER not in os.environ
        assert (tmp_path / "starts").read_text().count("\n") == 2
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_daemon_of_the_machine_is_left_alone(daemons: Path, tmp_path: Path) -> None:
    (tmp_path / "nvidia-mps").mkdir()
    (tmp_path / "nvidia-mps" / "control").touch()
    with Mps() as service:
        service.restart()
        assert (service.problem, service.is_own) == ("", False)
    assert not (tmp_path / "starts").exists()


def test_ranks_take_turns_where_mps_cannot_start(daemons: Path) -> None:
    daemons.write_text("#!/bin/bash\nexit 3\n")
    with Mps() as service:
        assert service.problem.startswith(f"{PROGRAM} -d cannot start: status 3")
        assert MPS_FOLDER not in os.environ
    daemons.unlink()
    with Mps() as service:
        assert service.problem == f"{PROGRAM} is not installed"


@pytest.mark.parametrize(
    ("answer", "description"),
    [
        ("(2, 28, 9)|too old: type pip install", "one GPU: too old: type pip install, or pass --nccl FILE"),
        ("(2, 30, 7)|", "8 ranks share one GPU under MPS, NCCL 2.30.7"),
    ],
)
def test_ranks_of_a_machine_with_one_gpu(
    answer: str, description: str, daemons: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(several_ranks, "run_python", lambda *_: Finished(0, f"a line\n{answer}\n"))
    monkeypatch.setenv("LD_PRELOAD", "")  # so that it is taken back
    with rank_host(CheckContext("cuda", False, tmp_path, nccl=tmp_path / "libnccl.so.2")) as host:
        assert os.environ["LD_PRELOAD"] == str(tmp_path / "libnccl.so.2")
        if isinstance(host, str):
            assert host == description
            return
        assert (host.description, host.flags) == (description, ("--ranks-share-gpus",))
        assert host.fits("tp2pp2dp2") and not host.fits("tp4pp4")
        assert host.row_seconds == 60.0
        assert host.mps is not None
        host.mps.problem = "not installed"
        assert host.row_seconds == 180.0


def test_each_of_several_gpus_has_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with rank_host(CheckContext("cuda", False, tmp_path)) as host:
        assert not isinstance(host, str)
        assert (host.num_ranks, host.flags, host.mps) == (2, (), None)


def test_rows_are_those_of_the_table_by_their_new_pairs() -> None:
    rows = all_rows()
    assert rows[: len(FIRST)] == FIRST and len(rows) == len(set(rows))
    assert {Row(*row) for row in (*CORE, *ROWS)} <= set(rows)
    small, middle, large, other = (
        Row(*each.split()) for each in ("a fp64 tp2", "a fp64 tp2pp2", "a fp64 tp2pp2+sp", "b fp32 dp2")
    )
    by_value = by_new_pairs([small, middle, large, other], lambda row: row.parts)
    assert [row for row, _ in by_value] == [large, other, small, middle]
    gains: list[int] = []
    known: set[object] = set()
    for row, gain in by_new_pairs([Row(*each) for each in CORE], lambda row: row.parts):
        new = set(itertools.combinations(sorted(row.parts.items()), 2)) - known
        assert gain == len(new)
        gains.append(gain)
        known |= new
    assert gains == sorted(gains, reverse=True)
