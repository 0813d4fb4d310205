"""Each mistake is one line with cause and fix, and exit status 1: no traceback, nothing half-written."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megalite.train import rank_training
from megalite.train.train_step import StepResult
from megalite.train.trainer import Trainer
from tests.end_to_end.conftest import ROOT, TINY_FLAGS, RunHere, write_corpus
from tests.programs import run_program

CONFIG_MISTAKES = {
    "indivisible heads": (["--num-attention-heads", "5"], "--hidden-size 64 is not divisible"),
    "too few layers": (["--pp", "1", "--pipeline-layers", "3"], "--pipeline-layers"),
    "indivisible batch": (["--micro-batch-size", "3"], "--global-batch-size 4 is not divisible"),
    "vocabulary too small": (
        ["--vocab-size", "100"],
        "smaller than the tokenizer's 257: pass --vocab-size 257",
    ),
    "padding too small": (
        ["--pad-vocab-size-to", "200"],
        "--vocab-size 257 is above --pad-vocab-size-to 200",
    ),
    "world size": (["--tp", "2"], "world size 1 is not"),
    "unknown flag": (["--num-layer", "3"], "unknown flag --num-layer; nearest is --num-layers"),
    "not there yet": (["--checkpoint-in-cpu"], "--checkpoint-in-cpu"),
    "unreadable tokenizer": (
        ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "/nowhere/tokenizer.json"],
        "/nowhere/tokenizer.json",
    ),
    "no data": (["--data-path", "/nowhere/corpus"], "/nowhere/corpus"),
}


@pytest.mark.parametrize(("flags", "said"), CONFIG_MISTAKES.values(), ids=CONFIG_MISTAKES.keys())
def test_mistake_is_one_line(pretrain_here: RunHere, flags: list[str], said: str) -> None:
    status, lines = pretrain_here(*flags)
    assert status == 1
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    assert said in lines[0]


def test_every_mistake_is_told_at_once(pretrain_here: RunHere) -> None:
    status, lines = pretrain_here("--num-layer", "3", "--num-attention-heads", "5", "--micro-batch-size", "3")
    assert status == 1
    assert len(lines) == 3, lines


def test_yaml_key_that_is_no_field(pretrain_here: RunHere, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model:\n  num_layer: 3\n")
    status, lines = pretrain_here("--config", str(path))
    assert status == 1
    assert len(lines) == 1
    assert "num_layer" in lines[0]
    assert "num_layers" in lines[0]
    assert str(path) in lines[0]


def _truncate(prefix: str, ending: str, num_bytes: int) -> None:
    path = Path(f"{prefix}{ending}")
    path.write_bytes(path.read_bytes()[:num_bytes])


def _foreign(prefix: str) -> None:
    Path(f"{prefix}.idx").write_bytes(b"a file of another kind" * 10)


def _token_beyond_vocabulary(prefix: str) -> None:
    tokens = np.fromfile(f"{prefix}.bin", dtype=np.uint16)
    tokens[:] = 300
    tokens.tofile(f"{prefix}.bin")


def _huge_count(prefix: str) -> None:
    data = bytearray(Path(f"{prefix}.idx").read_bytes())
    data[18:26] = struct.pack("<Q", 2**60)
    Path(f"{prefix}.idx").write_bytes(data)


DAMAGES = {
    "truncated .bin": (lambda prefix: _truncate(prefix, ".bin", 100), r"\.bin"),
    "truncated .idx": (lambda prefix: _truncate(prefix, ".idx", 60), r"\.idx"),
    "no .bin": (lambda prefix: Path(f"{prefix}.bin").unlink(), r"\.bin"),
    "foreign .idx": (_foreign, r"\.idx"),
    "huge count": (_huge_count, r"\.idx"),
    "token beyond the vocabulary": (_token_beyond_vocabulary, r"300.*257.*document|document.*300.*257"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_corpus_is_one_line(pretrain_here: RunHere, tmp_path: Path, name: str) -> None:
    damage, said = DAMAGES[name]
    prefix = str(tmp_path / "damaged")
    write_corpus(prefix, [b"some text" * 30] * 40)
    damage(prefix)
    status, lines = pretrain_here("--data-path", prefix)
    assert status == 1
    assert len(lines) == 1, lines
    assert re.search(said, lines[0]), lines[0]
    assert prefix in lines[0]


def test_a_corpus_cut_while_training_is_one_line_and_the_run_resumes(
    pretrain_here: RunHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading what a mapped file no longer has would end the process by SIGBUS, without a word."""
    prefix, folder = str(tmp_path / "corpus"), tmp_path / "run"
    write_corpus(prefix, [b"some text" * 30] * 400)
    file, step = Path(f"{prefix}.bin"), Trainer.step
    whole = file.read_bytes()

    def step_and_cut(trainer: Trainer, **options: bool) -> StepResult:
        result = step(trainer, **options)
        if trainer.progress.iteration == 3:
            os.truncate(file, 100)
        return result

    def saved() -> int:
        return int((folder / "latest").read_text().strip().removeprefix("iter_"))

    flags = ("--data-path", prefix, "--train-iters", "12", "--eval-iters", "0")
    saving = ("--save", str(folder), "--load", str(folder), "--save-interval", "2")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", step_and_cut)
        status, lines = pretrain_here(*flags, *saving)
    assert (status, len(lines)) == (1, 1), lines
    assert f"{file} became shorter or unreadable while it was in use" in lines[0]
    assert 2 <= saved() < 12  # some batches were read before the cut
    file.write_bytes(whole)
    assert pretrain_here(*flags, *saving)[0] == 0
    assert saved() == 12


@pytest.mark.parametrize("saves", [True, False])
def test_nothing_is_saved_of_a_corpus_rewritten_while_training(
    pretrain_here: RunHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: bool
) -> None:
    """Neither size nor tokens say so: without a look at the file the run would end with status 0."""
    prefix, folder = str(tmp_path / "corpus"), tmp_path / "run"
    write_corpus(prefix, [b"some text" * 30] * 400)
    file, step = Path(f"{prefix}.bin"), Trainer.step
    os.utime(file, (1e9, 1e9))

    def step_and_rewrite(trainer: Trainer, **options: bool) -> StepResult:
        result = step(trainer, **options)
        if trainer.progress.iteration == 3:
            file.write_bytes(file.read_bytes().replace(b"s", b"t"))
        return result

    monkeypatch.setattr(Trainer, "step", step_and_rewrite)
    saving = ("--save", str(folder), "--save-interval", "2") if saves else ()
    flags = ("--data-path", prefix, "--train-iters", "4", "--eval-iters", "0")
    status, lines = pretrain_here(*flags, *saving)
    assert (status, len(lines)) == (1, 1), lines
    assert f"{file} was written to or touched while it was in use" in lines[0]
    if saves:
        assert (folder / "latest").read_text().strip() == "iter_0000002"


@pytest.mark.parametrize(
    ("documents", "split", "said"),
    [
        ([], "1,0,0", "train"),
        ([b"ab" * 100], "0,1,0", "train"),
        ([b"ab"], "1,0,0", "fewer than the 33"),
        ([b"ab" * 50], "1,0,0", "fewer than one batch of 4"),
    ],
    ids=["no document", "none to train on", "less than a sample", "less than a batch"],
)
def test_too_little_text(
    pretrain_here: RunHere, tmp_path: Path, documents: list[bytes], split: str, said: str
) -> None:
    prefix = str(tmp_path / "short")
    write_corpus(prefix, documents)
    status, lines = pretrain_here("--data-path", prefix, "--split", split)
    assert status == 1
    assert len(lines) == 1, lines
    assert said in lines[0]


def test_a_folder_to_load_that_is_not_there_is_no_new_run(
    pretrain_here: RunHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_training, "build_data", None)  # the error comes before it
    missing = tmp_path / "typo"
    status, lines = pretrain_here("--load", str(missing), "--finetune", "--save", str(tmp_path / "new"))
    assert status == 1
    assert lines[-1].startswith(f"error: --load {missing} does not exist: pass the folder that --save wrote")


def test_a_foreign_folder_is_no_checkpoint(pretrain_here: RunHere, tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    status, lines = pretrain_here("--load", str(tmp_path))
    assert (status, len(lines)) == (1, 1)
    assert f"--load {tmp_path} holds no checkpoint of megalite" in lines[0]


def test_another_seed_does_not_resume(pretrain_here: RunHere, tmp_path: Path) -> None:
    assert pretrain_here("--save", str(tmp_path))[0] == 0
    status, lines = pretrain_here("--load", str(tmp_path), "--seed", "99")
    assert (status, len(lines)) == (1, 1)
    assert "belongs to another run: seed 1234 (now 99)" in lines[0]


@pytest.mark.parametrize("flag", ["--save", "--tensorboard-dir", "--metrics-file"])
def test_output_that_cannot_be_written_is_told_before_the_first_step(
    pretrain_here: RunHere, tmp_path: Path, flag: str
) -> None:
    (tmp_path / "file").write_text("not a folder")
    status, lines = pretrain_here(flag, str(tmp_path / "file" / "below"), "--train-iters", "1000000")
    assert status == 1
    assert len(lines) == 1
    assert flag in lines[0]


def test_a_world_of_another_size_ends_on_every_rank(corpus: str) -> None:
    run = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "pretrain_gpt.py"),
            *(*TINY_FLAGS, "--data-path", corpus, "--tp", "4"),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    errors = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert run.returncode == 1
    assert len(errors) == 1
    assert "world size 2" in errors[0]
    *_, last, border = run.stderr.splitlines()
    assert (last, border.strip("=")) == (f"  traceback : {errors[0]}", "")
    assert 'pretrain_gpt.py", line' not in run.stderr  # torchrun prints a traceback of its own


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "MASTER_ADDR"),
        ({"MASTER_ADDR": "localhost", "MASTER_PORT": "abc"}, "MASTER_PORT='abc'"),
        ({"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "RANK": "7"}, "RANK=7"),
        ({"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "RANK": "one"}, "RANK='one'"),
    ],
)
def test_a_broken_environment_is_a_mistake(corpus: str, environment: dict[str, str], said: str) -> None:
    line = ("pretrain_gpt.py", *TINY_FLAGS, "--data-path", corpus)
    run = run_program(*line, environment={"RANK": "0", "WORLD_SIZE": "2", **environment})
    assert run.returncode == 1
    assert said in run.stderr
    assert "Traceback" not in run.stderr
