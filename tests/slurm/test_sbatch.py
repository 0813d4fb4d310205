"""The batch scripts on a real Slurm: two nodes, a warning before the time limit, a requeue and a resume."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megalite.data.indexed_dataset import IndexedWriter
from megalite.plan.measure import measure_scaling
from megalite.plan.write_job import write_job
from tests.slurm.cluster import GPUS_PER_NODE, Slurm, needs_slurm

pytestmark = [pytest.mark.slow, needs_slurm]

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 256
TINY = (
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64"),
    *("--max-position-embeddings", "64", "--micro-batch-size", "1", "--global-batch-size", "4"),
    *("--log-interval", "1", "--eval-iters", "0", "--save-interval", "1000", "--distributed-backend", "gloo"),
)
END_SECONDS = 600.0


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus, a GPT-2 tokenizer of single bytes, and the environment that the scripts read."""
    with IndexedWriter(str(tmp_path / "corpus"), np.uint16) as writer:
        for number in range(40):
            writer.add_document([list(f"document {number}: ".encode() * 20)])
    letters = [chr(number) for number in range(NUM_TOKENS, 2 * NUM_TOKENS)]
    tokens = {letter: number for number, letter in enumerate([*letters, "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(tokens))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    given = {
        "DATA_PATH": tmp_path / "corpus",
        "VOCAB": tmp_path / "vocab.json",
        "MERGES": tmp_path / "merges.txt",
        "SAVE": tmp_path / "save",
        "PYTHON": sys.executable,
        "PYTHONPATH": ROOT,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": 1,
    }
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    return tmp_path


def iterations(file: Path) -> list[int]:
    """The iterations that a run's metrics tell, as far as they are written."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [record["iteration"] for line in lines if "lm_loss" in (record := json.loads(line))]


def wait_for_iteration(file: Path, iteration: int, log: Path) -> None:
    end = time.monotonic() + END_SECONDS
    while iteration not in iterations(file):
        assert time.monotonic() < end, log.read_text() if log.exists() else "the job has not begun"
        time.sleep(0.2)


def test_a_warned_job_saves_is_requeued_and_ends(slurm: Slurm, inputs: Path) -> None:
    """Preempted by a signal in the middle, the job goes through every iteration once."""
    metrics, log = inputs / "metrics.jsonl", inputs / "log"
    job = slurm.submit(
        ROOT / "scripts" / "pretrain_gpt_multi_node.sbatch",
        *(f"--gpus-per-node={GPUS_PER_NODE}", "--cpus-per-task=2", f"--output={log}"),
        arguments=(*TINY, "--train-iters", "60", "--metrics-file", str(metrics)),
        folder=ROOT,
    )
    wait_for_iteration(metrics, 3, log)
    slurm.signal(job, "USR1")
    slurm.wait(job, {"PENDING"}, END_SECONDS)
    slurm.start_now(job)
    state = slurm.wait(job, {"COMPLETED", "FAILED"}, END_SECONDS)
    told = log.read_text()
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), f"{state}\n{told}"
    assert "received SIGUSR1: stopping after this iteration" in told
    assert "requeued: " in told
    assert iterations(metrics) == list(range(1, 61))


def test_a_script_that_make_sbatch_wrote_is_requeued_and_ends(slurm: Slurm, inputs: Path) -> None:
    """With all of its flags in the file, and both nodes in the job."""
    metrics, log, script = inputs / "metrics.jsonl", inputs / "log", inputs / "made.sbatch"
    said = write_job(
        [
            *("--nodes", "2", "--gpu", "a100-80", "--gpus-per-node", str(GPUS_PER_NODE), "--time", "20"),
            *("--cpus-per-task", "2", "--sbatch", f"output={log}", "--output", str(script), *TINY),
            *("--vocab-size", "300", "--tokenizer-type", "byte", "--data-path", str(inputs / "corpus")),
            *("--tp", "2", "--pp", "2", "--train-iters", "60", "--metrics-file", str(metrics)),
        ],
        "",
    )
    assert any("fits, " in line for line in said)
    job = slurm.submit(script, arguments=(), folder=ROOT)
    wait_for_iteration(metrics, 3, log)
    slurm.signal(job, "USR1")
    slurm.wait(job, {"PENDING"}, END_SECONDS)
    slurm.start_now(job)
    state = slurm.wait(job, {"COMPLETED", "FAILED"}, END_SECONDS)
    told = log.read_text()
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), told
    assert told.count(f"on n[1-2]: 2 x {GPUS_PER_NODE} ranks") == 2
    assert iterations(metrics) == list(range(1, 61))


def test_a_rank_a_process_without_torchrun(
    slurm: Slurm, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BLOOM's script starts ranks itself; on a tokenizer's folder of transformers."""
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")).save(str(inputs / "tokenizer.json"))
    monkeypatch.setenv("TOKENIZER", str(inputs / "tokenizer.json"))
    metrics, log = inputs / "metrics.jsonl", inputs / "log"
    job = slurm.submit(
        ROOT / "scripts" / "pretrain_bloom.sbatch",
        *(f"--gpus-per-node={GPUS_PER_NODE}", f"--ntasks-per-node={GPUS_PER_NODE}"),
        *("--cpus-per-task=2", f"--output={log}"),
        arguments=(
            *(
                *TINY,
                "--tensor-model-parallel-size",
                "2",
                "--vocab-size",
                "300",
                "--pad-vocab-size-to",
                "512",
            ),
            *("--train-iters", "3", "--data-path", str(inputs / "corpus"), "--metrics-file", str(metrics)),
        ),
        folder=ROOT,
    )
    state = slurm.wait(job, {"COMPLETED", "FAILED"}, END_SECONDS)
    assert state["JobState"] == "COMPLETED", log.read_text()
    assert iterations(metrics) == [1, 2, 3]


def test_a_scaling_table_of_jobs(slurm: Slurm, inputs: Path) -> None:
    """Each number of nodes is a job; once they are done, the same command prints the table."""
    folder = inputs / "scaling"
    words = [
        *("--scaling", "1,2", "--gpu", "a100-80", "--gpus-per-node", str(GPUS_PER_NODE), "--time", "20"),
        *("--cpus-per-task", "2", "--sbatch", f"output={inputs / 'log-%j'}", "--folder", str(folder)),
        *("--preset", "gpt-tiny", "--vocab-size", "256", "--mock-data", "--seq-length", "32"),
        *("--global-batch-size", "8", "--micro-batch-size", "1", "--distributed-backend", "gloo"),
        *("--iterations", "3", "--warmup-iterations", "1"),
    ]
    commands = list(measure_scaling(words, ""))[1:]
    assert len(commands) == 3
    for command in commands:
        job = slurm.submit(Path(command.removeprefix("sbatch ")), arguments=(), folder=ROOT)
        state = slurm.wait(job, {"COMPLETED", "FAILED"}, END_SECONDS)
        assert state["JobState"] == "COMPLETED", "\n".join(log.read_text() for log in inputs.glob("log-*"))
    rows = [line.split() for line in measure_scaling(words, "") if line.count("%") == 4]
    assert [row[:2] for row in rows] == [["1", str(GPUS_PER_NODE)], ["2", str(2 * GPUS_PER_NODE)]]
    assert rows[0][5] == rows[0][9] == "100.0%"
