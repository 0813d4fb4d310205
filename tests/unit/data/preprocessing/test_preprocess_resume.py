"""A killed run resumes, and ends with the bytes of one that was not killed."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalite.data.preprocessing import input_plan as plan_module
from megalite.data.preprocessing import preprocess as ledger_module
from megalite.data.preprocessing.input_plan import PreprocessJob
from megalite.data.preprocessing.preprocess import Ledger, preprocess
from megalite.data.preprocessing.preprocessing_report import PreprocessingProgress
from megalite.data.preprocessing.shards import ShardWriter
from megalite.utils.errors import UserError

ROOT = Path(__file__).parents[4]
NAMES = [f"text_document.{kind}" for kind in ("bin", "idx", "json")]
KILLED_RUN = """
import sys, time
from megalite.data.preprocessing.input_plan import PreprocessJob
from megalite.data.preprocessing.preprocess import preprocess
from megalite.data.preprocessing import input_plan
if __name__ == "__main__":
    input_plan._MIN_PIECE_BYTES = 2000
    print("started", flush=True)
    begun = []
    def work(progress):
        time.sleep(0.002)
        if not begun:
            print("a piece is done", flush=True)
        begun.append(progress)
        if len(begun) == int(sys.argv[4]):
            time.sleep(1000)  # it is killed, even late
    preprocess(PreprocessJob((sys.argv[1],), sys.argv[2], "byte", append_eod=True, workers=int(sys.argv[3]),
                             resume=True), work)
"""


class Stop(Exception):
    """As a kill, but of this process's choice of moment."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "_MIN_PIECE_BYTES", 2000)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path, source = tmp_path / "in" / "a.jsonl", random.Random(0)
    path.parent.mkdir()
    path.write_text("".join(json.dumps({"text": "x" * source.randrange(300)}) + "\n" for _ in range(2000)))
    return path


def stop_after(count: int) -> Iterator[None]:
    for _ in range(count):
        yield
    raise Stop


def run_until(job: PreprocessJob, count: int) -> None:
    steps = stop_after(count)
    with pytest.raises(Stop):
        preprocess(job, lambda progress: next(steps))


def output(prefix: Path) -> list[bytes]:
    files = [Path(f"{prefix}_{name}") for name in NAMES]
    return [path.read_bytes().replace(str(prefix).encode(), b"PREFIX") for path in files]


@pytest.mark.parametrize(("seed", "num_moments"), [(3, 5), pytest.param(4, 20, marks=pytest.mark.slow)])
def test_a_killed_process_is_gone_on_with(tmp_path: Path, corpus: Path, seed: int, num_moments: int) -> None:
    """kill -9 at random moments of runs in a row, with one and two workers, at the start and amid work."""
    script = tmp_path / "run.py"
    script.write_text(KILLED_RUN)
    preprocess(PreprocessJob((str(corpus),), str(tmp_path / "whole"), "byte", append_eod=True))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    moments = random.Random(seed)
    command = [sys.executable, str(script), str(corpus), str(tmp_path / "killed")]
    for attempt in range(num_moments):
        with subprocess.Popen(
            [*command, str(1 + attempt % 2), "60"], env=environment, stdout=subprocess.PIPE
        ) as run:
            assert run.stdout is not None
            for _ in range(moments.randint(1, 2)):
                run.stdout.readline()
            time.sleep(moments.uniform(0, 0.1))
            run.send_signal(signal.SIGKILL)
            assert run.wait() == -signal.SIGKILL
    subprocess.run([*command, "2", "0"], env=environment, check=True, capture_output=True)
    assert output(tmp_path / "killed") == output(tmp_path / "whole")
    assert not [name for name in os.listdir(tmp_path) if "unfinished" in name]


@pytest.mark.parametrize("count", [0, 1, 50])
def test_only_what_is_left_is_done(tmp_path: Path, corpus: Path, count: int) -> None:
    job = PreprocessJob((str(corpus),), str(tmp_path / "o"), "byte", append_eod=True)
    run_until(job, count)
    with pytest.raises(
        UserError,
        match=r"belongs to an interrupted run: continue it with --resume, or start again with --overwrite",
    ):
        preprocess(job)
    with open(f"{job.stem}.unfinished/done", "ab") as lines:
        lines.write(b'{"columns": [')  # a line that a kill has cut off
    seen: list[PreprocessingProgress] = []
    going_on = dataclasses.replace(job, resume=True)
    summary = preprocess(going_on, lambda progress: seen.append(dataclasses.replace(progress)))
    num_pieces = -(-corpus.stat().st_size // 2000)
    assert len(seen) == num_pieces - count - 1
    assert summary.progress.num_resumed_bytes < summary.progress.num_bytes == corpus.stat().st_size
    preprocess(dataclasses.replace(job, output_prefix=str(tmp_path / "whole")))
    assert output(tmp_path / "o") == output(tmp_path / "whole")
    os.mkdir(f"{job.stem}.unfinished")  # as of a run that is killed while it cleans up
    assert preprocess(going_on).was_complete
    assert not os.path.exists(f"{job.stem}.unfinished")
    with pytest.raises(UserError, match="exists: pass another --output-prefix"):
        preprocess(job)


def test_another_job_does_not_resume(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = PreprocessJob((str(corpus),), str(tmp_path / "o"), "byte")
    run_until(job, 3)
    other = dataclasses.replace(job, resume=True, append_eod=True)
    with pytest.raises(UserError, match="had another --append-eod: False, and now True"):
        preprocess(other)
    with monkeypatch.context() as patch:
        patch.setattr("megalite.data.preprocessing.preprocess.PIECES_VERSION", 0)
        with pytest.raises(
            UserError, match="is of another version of megalite: start again with --overwrite"
        ):
            preprocess(dataclasses.replace(job, resume=True))
    corpus.write_text(corpus.read_text() + '{"text": "more"}\n')
    with pytest.raises(UserError, match="had another --input;"):
        preprocess(dataclasses.replace(job, resume=True))
    assert preprocess(dataclasses.replace(job, overwrite=True)).progress.num_resumed_bytes == 0


def spoil(path: Path, at: int) -> None:
    """Changes a brace of a file, or changes it back, which its size and time do not tell."""
    state = path.stat()
    with path.open("r+b") as stream:
        stream.seek(at)
        was = stream.read(1)
        stream.seek(at)
        stream.write(b"!" if was == b"{" else b"{")
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_resumption_that_fails_keeps_what_is_done(tmp_path: Path, corpus: Path, workers: int) -> None:
    """A bad line after the interruption; once it is corrected, the run resumes the earlier one."""
    job = PreprocessJob((str(corpus),), str(tmp_path / "o"), "byte", append_eod=True)
    preprocess(dataclasses.replace(job, output_prefix=str(tmp_path / "whole")))
    last_line = corpus.read_bytes().rindex(b"{")
    run_until(job, 3)
    resumed = dataclasses.replace(job, resume=True, workers=workers)
    spoil(corpus, last_line)
    with pytest.raises(UserError, match="line 2000: not valid JSON"):
        preprocess(resumed)
    spoil(corpus, last_line)
    summary = preprocess(resumed)
    assert summary.progress.num_resumed_bytes > 0
    assert output(tmp_path / "o") == output(tmp_path / "whole")


def test_a_full_disk_keeps_what_an_earlier_run_has_done(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = PreprocessJob((str(corpus),), str(tmp_path / "o"), "byte")
    run_until(job, 3)
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "flush", lambda shard: raise_it(full))
        with pytest.raises(
            UserError, match="No space left on device; finished pieces are kept: continue with --resume"
        ):
            preprocess(dataclasses.replace(job, resume=True))
    assert preprocess(dataclasses.replace(job, resume=True)).progress.num_resumed_bytes > 0


def test_a_disk_that_is_full_at_the_start_keeps_nothing(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = PreprocessJob((str(corpus),), str(tmp_path / "o"), "byte")
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(ledger_module, "open_new", lambda *arguments: raise_it(full))
    with pytest.raises(UserError, match=r"o.unfinished: No space left .*; the unfinished output is removed"):
        preprocess(job)
    assert not Path(Ledger(job.stem).folder).exists()


def test_a_folder_that_keeps_its_files_is_reported(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = PreprocessJob((str(corpus),), str(tmp_path / "o"), "byte")
    run_until(job, 3)
    monkeypatch.setattr(
        Path, "unlink", lambda path: raise_it(PermissionError(errno.EACCES, "Permission denied"))
    )
    with pytest.raises(UserError, match=r"cannot write .*o.unfinished: Permission denied"):
        preprocess(dataclasses.replace(job, overwrite=True))


def raise_it(error: Exception) -> None:
    raise error


def test_two_runs_do_not_write_the_same_output(tmp_path: Path, corpus: Path) -> None:
    job = PreprocessJob((str(corpus),), str(tmp_path / "o"), "byte")
    with Ledger(job.stem), pytest.raises(UserError, match="another process is writing"):
        preprocess(job)
    assert preprocess(job).progress.num_documents > 0


def _children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_a_dead_worker_leaves_what_is_done(tmp_path: Path, corpus: Path) -> None:
    job = PreprocessJob((str(corpus),), str(tmp_path / "o"), "byte", workers=2)

    killed: list[int] = []
    others = _children()  # of other tests

    def kill_a_worker(progress: PreprocessingProgress) -> None:
        if killed:
            return
        children = _children() - others
        command = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
        killed.append(next(int(child) for child in children if b"spawn_main" in command[child]))
        os.kill(killed[0], signal.SIGKILL)

    with pytest.raises(UserError, match=r"a worker died \(exit status -9\).* --resume"):
        preprocess(job, kill_a_worker)
    resumed = preprocess(dataclasses.replace(job, resume=True, workers=1))
    assert resumed.progress.num_resumed_bytes > 0


REFUSED_LINKS = {
    "": r"o\.unfinished is a symbolic link: remove it",
    "lock": r"cannot write .*o\.unfinished: Too many levels of symbolic links",
    "run": r"o\.unfinished/run is damaged \(Expecting value.*: remove .*o\.unfinished",
}


@pytest.mark.parametrize("name", ["", "lock", "done", "run", "run.tmp", "0.bin", "0.idx", "0.report"])
def test_nothing_is_written_or_removed_through_a_link(tmp_path: Path, corpus: Path, name: str) -> None:
    """Whoever may write beside the output can guess where unfinished work goes."""
    job = PreprocessJob((str(corpus),), str(tmp_path / "o"), "byte", overwrite=True)
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_text("precious")
    if name:
        os.mkdir(f"{job.stem}.unfinished")
        os.symlink(victim / "precious", f"{job.stem}.unfinished/{name}")
    else:
        os.symlink(victim, f"{job.stem}.unfinished")
    if name in REFUSED_LINKS:
        with pytest.raises(UserError, match=REFUSED_LINKS[name]):
            preprocess(job)
    else:
        preprocess(job)
    assert [(path.name, path.read_text()) for path in victim.iterdir()] == [("precious", "precious")]


@pytest.mark.parametrize(
    ("number", "to_group", "status", "said"),
    [(signal.SIGTERM, False, 143, "SIGTERM"), (signal.SIGINT, True, 130, "interrupted")],
)
def test_a_signal_ends_the_tool_and_its_workers_in_one_line(
    tmp_path: Path, number: signal.Signals, to_group: bool, status: int, said: str
) -> None:
    """As the workers start: Ctrl-C reaches them too, while they still import their modules."""
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "abc"}\n' * 4_000_000)
    command = [sys.executable, "tools/preprocess_data.py", "--input", str(source), "--workers", "3"]
    command += ["--output-prefix", str(tmp_path / "out"), "--tokenizer-type", "byte"]
    run = subprocess.Popen(
        command,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell starts what it runs in the background with Ctrl-C ignored, and the tool leaves it so.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
    while run.poll() is None and len(children.read_text().split()) < 3:  # one is multiprocessing's own
        time.sleep(0.001)
    (os.killpg if to_group else os.kill)(run.pid, number)
    output, errors = run.communicate(timeout=600)  # until the workers have closed their ends too
    assert (run.returncode, output) == (status, "")
    assert errors == f"{said}: run the same command with --resume to continue\n"


def test_a_worker_ends_with_the_first_process_amid_a_piece(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import multiprocessing, os, threading, time\n"
        "from megalite.data.preprocessing.pool import _end_with_parent\n"
        "def busy():\n"
        "    threading.Thread(target=_end_with_parent, daemon=True).start()\n"
        "    time.sleep(3000)\n"
        "if __name__ == '__main__':\n"
        "    multiprocessing.get_context('spawn').Process(target=busy).start()\n"
        "    os._exit(0)\n"  # as by kill -9
    )
    # Returns once the worker has closed its end of the pipe.
    subprocess.run([sys.executable, program], stdout=subprocess.PIPE, check=True, timeout=600)
