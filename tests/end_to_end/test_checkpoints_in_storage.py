"""A whole run whose checkpoints are in object storage: killed during an upload, resumed, and inspected."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.object_server import object_server, settings_for
from tests.soak.kill_loop import RUN

pytest.importorskip("obstore")


def test_a_run_that_does_not_end_its_uploads_loses_nothing(tmp_path: Path) -> None:
    """Killed during one, then ended with too little time, it has the bits of a run that nobody disturbed."""
    flags = [*RUN, "--layout", "manual", "--train-iters", "6", "--save-interval", "2"]
    url, disk = "s3://bucket/run", tmp_path / "disk"
    with object_server() as server:
        environment = {**os.environ, **settings_for(server.url), "TMPDIR": str(tmp_path)}

        def start(*words: str) -> subprocess.Popen[str]:
            return subprocess.Popen(
                [sys.executable, "-m", "megalite", *words],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )

        def finished(*words: str) -> str:
            return ended(start(*words), 0)

        def ended(process: subprocess.Popen[str], status: int) -> str:
            output = process.communicate()[0]
            assert process.returncode == status, output
            return output

        def stop_uploads_after(iteration: int, process: subprocess.Popen[str]) -> None:
            deadline = time.monotonic() + 120.0
            while f"iter_{iteration:07d}".encode() not in server.objects.get("bucket/run/latest", b""):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.01)
            server.write_delay = 1000.0

        stored = ["train", *flags, "--save", url, "--load", url]
        killed = start(*stored)
        stop_uploads_after(2, killed)
        deadline = time.monotonic() + 120.0
        while not any("iter_0000004" in name for _, name in server.writes):
            assert killed.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        server.write_delay = 0.0
        # The holder's process has ended, which its own machine knows: nothing is waited for.
        left = start(*stored, "--exit-upload-seconds", "0.1")
        stop_uploads_after(4, left)
        output = ended(left, 75)
        assert re.search(r"--save s3://bucket/run is taken over: its holder has ended", output)
        assert f"resumed from {url} at iteration 4" in output
        assert f"{url}/iter_0000006 is not uploaded within --exit-upload-seconds 0.1: it stays in" in output
        assert "to resume, run the same command again" in output
        (note,) = tmp_path.glob("megalite-stage-*/*/requeue")
        assert "an upload is left to the next start" in note.read_text()
        server.write_delay = 0.0
        assert f"resumed from {url} at iteration 6" in finished(*stored)
        assert not list(tmp_path.glob("megalite-stage-*/*/.*"))

        finished("train", *flags, "--save", str(disk))
        assert "equal" in finished("inspect", url, "--diff", str(disk), "--load-iteration", "6")
