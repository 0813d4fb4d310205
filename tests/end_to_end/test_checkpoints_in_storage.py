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


def test_a_run_that_is_killed_during_an_upload_loses_nothing(tmp_path: Path) -> None:
    """It ends with the bits of a run on a disk that nobody disturbed."""
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
            process = start(*words)
            output = process.communicate()[0]
            assert process.returncode == 0, output
            return output

        stored = ["train", *flags, "--save", url, "--load", url]
        killed = start(*stored)
        deadline = time.monotonic() + 120.0
        while "bucket/run/latest" not in server.objects:
            assert killed.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        server.write_delay = 1000.0  # the next upload does not end
        while not any("iter_0000004" in name for _, name in server.writes):
            assert killed.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        server.write_delay = 0.0
        # The holder's process has ended, which its own machine knows: nothing is waited for.
        output = finished(*stored)
        assert f"resumed from {url} at iteration 2" in output
        assert re.search(r"--save s3://bucket/run is taken over: its holder has ended", output)
        assert not list(tmp_path.glob("megalite-stage-*/*/.*"))

        finished("train", *flags, "--save", str(disk))
        assert "equal" in finished("inspect", url, "--diff", str(disk), "--load-iteration", "6")
