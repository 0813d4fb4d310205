"""Test that a full disk does not end a run, and that its outputs are written once there is space."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megalite.config import LoggingConfig
from megalite.distributed.topology import Topology
from megalite.train.callbacks.profiler import profiler
from megalite.train.telemetry import metrics_file
from megalite.train.telemetry.dashboards import SAMPLES
from megalite.train.telemetry.metrics import IterationMetrics, ValidationMetrics
from megalite.train.telemetry.metrics_file import MetricsFile, OutputFile
from megalite.train.telemetry.timers import Timers
from megalite.train.telemetry.writers import Writers


class LimitedDisk:
    """Limits the size of a folder's files: the kernel writes up to the limit, and then refuses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def full(self, file: Path, room: int) -> Iterator[None]:
        """Leave space for `room` more bytes of the file in the block."""
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + room, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class SmallDisk:
    """Fills a file system of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def full(self, file: Path, room: int) -> Iterator[None]:
        """Leave space for the rest of the file's last disk block only."""
        filler = self.folder / "filler"
        with filler.open("wb", buffering=0) as stream, suppress(OSError):
            while True:
                stream.write(b"x" * 4096)
        yield
        filler.unlink()


@pytest.fixture(params=["limit", "tmpfs"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LimitedDisk | SmallDisk]:
    if request.param == "limit":
        yield LimitedDisk(tmp_path)
        return
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a file system needs root")
    try:
        yield SmallDisk(tmp_path)
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


Disk = LimitedDisk | SmallDisk


def _iterations(path: Path) -> list[int]:
    return [json.loads(line)["iteration"] for line in path.read_text().splitlines()]


def _write(writers: Writers, metrics: IterationMetrics, first: int, last: int) -> None:
    for iteration in range(first, last + 1):
        changed = dataclasses.replace(metrics, iteration=iteration)
        for interval in writers.intervals:
            writers.iteration(interval, changed, Timers())


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def test_metrics_and_tensorboard_continue(
    disk: Disk, topology: Topology, metrics: IterationMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    file, board = disk.folder / "m.jsonl", disk.folder / "board"
    config = LoggingConfig(
        log_interval=1, metrics_file=str(file), tensorboard_dir=str(board), tensorboard_queue_size=1
    )
    with Writers(config, topology, "") as writers:
        _write(writers, metrics, 1, 2)
        with disk.full(file, 100):
            _write(writers, metrics, 3, 60)
            writers.validation(ValidationMetrics(60, 480, "valid", 2.5))
            assert not file.read_bytes().endswith(b"\n")  # a line is cut
        assert sorted(text.split()[0] for text in _warnings(caplog)) == [
            "--metrics-file",
            "--tensorboard-dir",
            "--tensorboard-dir",
        ]
        assert all(" cannot be written (" in text for text in _warnings(caplog))
        _write(writers, metrics, 61, 61)
    assert [text.endswith("is written again") for text in _warnings(caplog)[3:]] == 3 * [True]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["iteration"] for line in lines if "validation" not in line] == list(range(1, 62))
    assert len(lines) == 62
    read = EventAccumulator(str(board))
    read.Reload()
    assert [event.step for event in read.Scalars("lm loss")] == list(range(1, 62))
    assert len(read.Scalars("lm loss validation")) == 1
    assert len(EventAccumulator(str(board / SAMPLES)).Reload().Scalars("lm loss vs samples")) == 61


def test_a_run_that_ends_on_a_full_disk_can_resume_in_the_same_file(
    disk: Disk, metrics: IterationMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    path = disk.folder / "m.jsonl"
    writer = MetricsFile(path)
    writer.iteration(dataclasses.replace(metrics, iteration=1), {})
    with disk.full(path, 100):
        for iteration in range(2, 30):
            writer.iteration(dataclasses.replace(metrics, iteration=iteration), {})
        writer.close()
    assert "records are lost" in _warnings(caplog)[-1]
    writer = MetricsFile(path)
    writer.iteration(dataclasses.replace(metrics, iteration=30), {})
    writer.close()
    lines = path.read_text().splitlines()
    whole = [json.loads(line)["iteration"] for line in lines if line.endswith("}")]
    assert len(whole) == len(lines) - 1  # one line was cut, and spoils no other
    assert whole[-1] == 30


def test_a_file_deleted_to_make_space_begins_with_a_whole_record(tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = OutputFile(path, "--flag")
    file.write(b"0123456789\n")
    file.flush()
    with LimitedDisk(tmp_path).full(path, 5):
        file.write(b"abcdefghij\n")
        file.flush()
        assert path.read_bytes() == b"0123456789\nabcde"
    path.unlink()
    file.write(b"more\n")
    file.close()
    assert path.read_bytes() == b"abcdefghij\nmore\n"


def test_more_than_can_be_held_is_lost_by_whole_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics_file, "MAX_HELD_BYTES", 12)
    path = tmp_path / "file"
    file = OutputFile(path, "--flag")
    with LimitedDisk(tmp_path).full(path, 2):
        for word in (b"aaaa\n", b"bbbb\n", b"cccc\n", b"dddd\n"):
            file.write(word)
            file.flush()
    file.flush()
    file.close()
    assert path.read_bytes() == b"aaaa\nbbbb\n"
    assert _warnings(caplog)[-1] == f"--flag {path} is written again; 2 records were lost"


def test_wandb_that_fails_ends_nothing(
    topology: Topology,
    metrics: IterationMetrics,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    logged: list[int] = []
    is_full = False

    def log(_: object, step: int) -> None:
        if is_full:
            raise OSError(28, "No space left on device")
        logged.append(step)

    run = SimpleNamespace(log=log, finish=lambda exit_code: None)
    module = SimpleNamespace(init=lambda **_: run, Histogram=tuple)
    monkeypatch.setitem(sys.modules, "wandb", module)  # type: ignore[arg-type]
    with Writers(LoggingConfig(log_interval=1, wandb_project="gpt"), topology, "a: 1") as writers:
        _write(writers, metrics, 1, 1)
        is_full = True
        _write(writers, metrics, 2, 4)
        is_full = False
        _write(writers, metrics, 5, 5)
    assert logged == [1, 5]
    failing, again = _warnings(caplog)
    assert failing == (
        "--wandb-project gpt cannot be written (OSError: [Errno 28] No space left on device): training "
        "continues without it"
    )
    assert again == "--wandb-project gpt is written again"


def test_an_incomplete_trace_is_logged_and_removed(
    tmp_path: Path, topology: Topology, caplog: pytest.LogCaptureFixture
) -> None:
    config = LoggingConfig(tensorboard_dir=str(tmp_path), profile_execution=True)
    (tmp_path / "empty").touch()
    profiled = profiler(config, topology, range(1, 7))
    with LimitedDisk(tmp_path).full(tmp_path / "empty", 500), profiled as step:
        for _ in range(6):
            step()
    folder = tmp_path / "profile"
    assert _warnings(caplog) == [
        f"--profile-execution: the trace in {folder} cannot be written (the file is incomplete: is the disk "
        "full?): training continues without it"
    ]
    assert not list(folder.iterdir())


@pytest.mark.parametrize("is_buffered", [True, False])
def test_a_log_that_cannot_be_written_changes_no_status(is_buffered: bool) -> None:
    """Test a log on the full disk, where Slurm often puts it."""
    program = (
        "from megalite.utils.log import configure_logging, log\n"
        "configure_logging(0)\n"
        "for iteration in range(3):\n"
        "    log.info('iteration %d', iteration)\n"
    )
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            [sys.executable, *([] if is_buffered else ["-u"]), "-c", program],
            env={key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert run.returncode == 0
    assert run.stderr == (
        "warning: the log cannot be written (No space left on device): the run continues, and messages are "
        "lost until there is space\n"
    )
