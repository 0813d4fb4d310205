"""A whole run whose checkpoints are in object storage: killed during an upload, resumed, and inspected."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest

from tests.object_server import object_server, settings_for
from tests.programs import StartedProgram
from tests.soak.kill_loop import RUN

pytest.importorskip("obstore")


def test_a_run_that_does_not_end_its_uploads_loses_nothing(tmp_path: Path) -> None:
    """Killed during one, then ended with too little time, it has the bits of a run that nobody disturbed."""
    flags = [*RUN, "--layout", "manual", "--train-iters", "6", "--save-interval", "2"]
    url, disk = "s3://bucket/run", tmp_path / "disk"
    with object_server() as server, ExitStack() as stack:
        environment = {**settings_for(server.url), "TMPDIR": str(tmp_path)}
        outputs = map(tmp_path.joinpath, map("output_{}".format, count()))

        def start(*words: str) -> StartedProgram:
            return stack.enter_context(StartedProgram(words, environment, [next(outputs)] * 2))

        def finished(*words: str) -> str:
            return ended(start(*words), 0)

        def ended(program: StartedProgram, status: int) -> str:
            done = program.ended()
            assert done.returncode == status, done.stdout
            return done.stdout

        def stop_uploads_after(iteration: int, program: StartedProgram) -> None:
            deadline = time.monotonic() + 120.0
            while f"iter_{iteration:07d}".encode() not in server.objects.get("bucket/run/latest", b""):
                assert program.process.is_alive() and time.monotonic() < deadline
                time.sleep(0.01)
            server.write_delay = 1000.0

        stored = ["pretrain_gpt.py", *flags, "--save", url, "--load", url]
        killed = start(*stored)
        stop_uploads_after(2, killed)
        deadline = time.monotonic() + 120.0
        while not any("iter_0000004" in name for _, name in server.writes):
            assert killed.process.is_alive() and time.monotonic() < deadline
            time.sleep(0.01)
        killed.process.kill()
        killed.process.join()
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

        finished("pretrain_gpt.py", *flags, "--save", str(disk))
        compared = ["tools/inspect_checkpoint.py", url, "--diff", str(disk)]
        assert "equal" in finished(*compared, "--load-iteration", "6")
