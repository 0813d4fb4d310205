"""Whole runs through the program: launchers, resumption, outputs, ends."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from megalite.train import stopping
from tests.end_to_end.conftest import TINY_FLAGS, Run, RunHere, write_corpus
from tests.programs import run_program_on_ranks


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _losses(path: Path) -> dict[int, float]:
    return {line["iteration"]: line["lm_loss"] for line in _lines(path) if "iteration" in line}


@pytest.mark.parametrize(("ranks", "layout"), [(1, []), (2, ["--pp", "2"])])
def test_stop_and_resume_is_bitwise_a_run_at_a_stroke(
    pretrain: Run, tmp_path: Path, ranks: int, layout: list[str]
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = [*layout, "--train-iters", "8", "--lr", "0.01"]

    def run(folder: Path, *more: str) -> None:
        files = ("--save", folder, "--load", folder, "--metrics-file", folder / "metrics.jsonl")
        done = pretrain(*flags, *map(str, files), *more, ranks=ranks)
        assert done.returncode == 0, done.stderr

    run(whole)
    run(parts, "--exit-interval", "4")
    assert (parts / "latest").read_text().strip() == "iter_0000004"
    run(parts)
    assert _losses(parts / "metrics.jsonl") == _losses(whole / "metrics.jsonl")
    files = sorted((whole / "iter_0000008").glob("*.safetensors"))
    assert len(files) == ranks
    for file in files:
        expected, resumed = load_file(file), load_file(parts / "iter_0000008" / file.name)
        assert expected.keys() == resumed.keys()
        assert all(expected[name].equal(resumed[name]) for name in expected)


def test_a_run_counted_in_samples_resumes_in_its_ramp_up(pretrain_here: RunHere, tmp_path: Path) -> None:
    """Batches of 2, 2, 4, 6 and 8 samples; stopped after the third, of which one was passed over."""

    flags = [
        *("--train-samples", "24", "--global-batch-size", "8", "--rampup-batch-size", "2", "2", "12"),
        *("--lr", "0.01", "--lr-warmup-samples", "6", "--iterations-to-skip", "2", "--log-params-norm"),
        *("--log-num-zeros-in-grad", "--log-interval", "1", "--eval-iters", "0"),
    ]

    def run(folder: Path, *more: str) -> list[dict[str, Any]]:
        outputs = ["--save", str(folder), "--load", str(folder), "--metrics-file", str(folder / "m.jsonl")]
        status, errors = pretrain_here(*flags, *outputs, *more, base=TINY_FLAGS[:-8])
        assert (status, errors) == (0, [])
        return [line for line in _lines(folder / "m.jsonl") if "iteration" in line]

    whole = run(tmp_path / "whole")
    assert [line["global_batch_size"] for line in whole] == [2, 2, 4, 6, 8]
    assert [line["consumed_samples"] for line in whole] == [2, 4, 8, 14, 22]
    assert [line["total_skipped"] for line in whole] == [0, 1, 1, 1, 1]
    run(tmp_path / "parts", "--exit-interval", "3")
    parts = run(tmp_path / "parts")
    for name in ("iteration", "lm_loss", "learning_rate", "params_norm", "num_zeros", "total_skipped"):
        assert [line.get(name) for line in parts] == [line.get(name) for line in whole], name
    assert ["num_zeros" in line for line in whole] == [True, False, True, True, True]


def test_the_gradient_of_a_skipped_update_is_not_told_of(pretrain_here: RunHere, tmp_path: Path) -> None:
    """An overflow is looked for by running microbatches again, which leaves the last of their gradients."""
    metrics = tmp_path / "m.jsonl"
    flags = ("--fp16", "--loss-scale", "1e19", "--log-num-zeros-in-grad", "--metrics-file", str(metrics))
    status, _ = pretrain_here(*flags, "--train-iters", "1")
    (line,) = (line for line in _lines(metrics) if "iteration" in line)
    assert (status, line["skipped"]) == (0, True)
    assert "num_zeros" not in line


def test_an_overflow_that_lowers_the_loss_scale_is_no_warning(pretrain: Run, tmp_path: Path) -> None:
    metrics = tmp_path / "m.jsonl"
    done = pretrain("--fp16", "--hysteresis", "1", "--metrics-file", str(metrics), "--train-iters", "2")
    lines = [line for line in _lines(metrics) if "iteration" in line]
    assert (done.returncode, [line["skipped"] for line in lines]) == (0, [True, True])
    assert lines[-1]["loss_scale"] == 2.0**30
    assert "warning: iteration" not in f"{done.stdout}{done.stderr}"


def test_padding_rows_of_the_vocabulary_are_no_zeros_of_the_gradient(
    pretrain_here: RunHere, tmp_path: Path
) -> None:
    def num_zeros(padded_size: str) -> int:
        metrics = tmp_path / f"{padded_size}.jsonl"
        flags = ("--log-num-zeros-in-grad", "--train-iters", "1", "--metrics-file", str(metrics))
        assert pretrain_here(*flags, "--pad-vocab-size-to", padded_size)[0] == 0
        (line,) = (line for line in _lines(metrics) if "iteration" in line)
        return int(line["num_zeros"])

    assert abs(num_zeros("257") - num_zeros("384")) < 64  # the elements of a row


def test_plain_python_with_the_variables_set(corpus: str) -> None:
    """env:// as a scheduler starts it."""
    flags = (*TINY_FLAGS, "--data-path", corpus, "--pp", "2")
    first, last = run_program_on_ranks("pretrain_gpt.py", flags, flags)
    assert (first.returncode, last.returncode) == (0, 0), first.stderr + last.stderr
    assert "using world size: 2, data-parallel-size: 1" in first.stdout
    assert "iteration        4/       4" in last.stdout  # the last rank reports
    assert "iteration        4/       4" not in first.stdout


def test_a_rank_that_ends_is_told_by_the_others(tmp_path: Path) -> None:
    """A damaged sample that one replica meets in the middle of training."""
    prefix = str(tmp_path / "damaged")
    write_corpus(prefix, [bytes(range(65, 75)) * 200])
    tokens = np.fromfile(f"{prefix}.bin", dtype=np.uint16)
    tokens[-40:-33] = 300  # in one sample alone
    tokens.tofile(f"{prefix}.bin")
    flags = (*TINY_FLAGS, "--data-path", prefix, "--split", "1,0,0", "--train-iters", "15")
    ranks = run_program_on_ranks("pretrain_gpt.py", flags, flags)
    assert [rank.returncode for rank in ranks] == [1, 1]
    text = "".join(rank.stderr for rank in ranks)
    errors = sorted(line for line in text.splitlines() if line.startswith("error: "))
    assert len(errors) == 2, errors
    assert "has token id 300" in errors[0]
    assert "lost the connection to another rank" in errors[1]
    assert "Traceback" not in text


def test_outputs_hold_every_iteration_and_evaluation(pretrain_here: RunHere, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    status, errors = pretrain_here(
        *("--metrics-file", str(metrics), "--tensorboard-dir", str(tmp_path / "tensorboard")),
        *(
            "--eval-interval",
            "2",
            "--log-throughput",
            "--profile-execution",
            "True",
            "--profile-name",
            "TRACE",
        ),
    )
    assert (status, errors) == (0, [])
    assert list(_losses(metrics)) == [1, 2, 3, 4]
    evaluations = [line["validation"] for line in _lines(metrics) if "validation" in line]
    assert [(each["iteration"], each["split"]) for each in evaluations] == [
        (2, "valid"),
        (4, "valid"),
        (4, "test"),
    ]
    assert list((tmp_path / "tensorboard").glob("events*"))
    assert list((tmp_path / "tensorboard" / "TRACE").iterdir())


def test_tensorboard_has_each_step_once_after_a_resume_from_an_earlier_iteration(
    pretrain_here: RunHere, tmp_path: Path
) -> None:
    """The first reader is TensorBoard's public one, the second its server's."""
    board = tmp_path / "board"
    package = "tensorboard.backend.event_processing"
    names = ("event_accumulator", "plugin_event_accumulator")
    readers = [pytest.importorskip(f"{package}.{name}").EventAccumulator for name in names]

    def run(*flags: str, save: str = "run") -> None:
        files = ("--save", str(tmp_path / save), "--save-interval", "2", "--tensorboard-dir", str(board))
        logged = ("--eval-interval", "1", "--log-layer-grad-norms-interval", "1")
        assert pretrain_here(*flags, *files, *logged, "--lr-decay-style", "constant") == (0, [])

    def steps(read: type, folder: Path) -> dict[str, list[int]]:
        """Return the steps of each tag; the second reader has all of them as tensors, and the config too."""
        kinds = {"scalars": "Scalars", "histograms": "Histograms"}
        if read is readers[1]:
            kinds = {"tensors": "Tensors"}
        events = read(str(folder), size_guidance=dict.fromkeys(kinds, 0)).Reload()
        return {
            tag: [event.step for event in getattr(events, get)(tag)]
            for kind, get in kinds.items()
            for tag in events.Tags()[kind]
        }

    def check(iterations: list[int], configs: list[int]) -> None:
        """Check the steps, where a batch has four samples."""
        for read in readers:
            found = steps(read, board)
            assert found.pop("config/text_summary", configs) == configs
            assert found.pop("lm loss test")[-1] == iterations[-1]
            following = [*iterations[1:], 0]  # a smaller one begins another run
            saved = [n for n, after in zip(iterations, following, strict=True) if n % 2 == 0 or after < n]
            assert found.pop("goodput") == saved
            assert len(found) > 10 and {"lm loss", "lm loss validation", "grad-norm by layer"} <= found.keys()
            assert all(numbers == iterations for numbers in found.values()), found
            by_samples = steps(read, board / "samples")
            assert len(by_samples) == 4
            assert all(numbers == [4 * number for number in iterations] for numbers in by_samples.values())

    resume = ("--load", str(tmp_path / "run"), "--ckpt-step", "2")
    run("--train-iters", "4")
    check([1, 2, 3, 4], [1])
    run("--train-iters", "3", *resume)
    check([1, 2, 3], [1, 3])
    run("--train-iters", "5", *resume)
    check([1, 2, 3, 4, 5], [1, 3])
    run("--train-iters", "2", *resume, "--finetune", save="tuned")
    check([1, 2, 3, 4, 5, 1, 2], [1, 3, 1])


def test_a_loss_that_is_not_finite_is_shown_and_named(pretrain: Run, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    flags = [
        "--lr",
        "1e30",
        "--clip-grad",
        "0",
        "--lr-decay-style",
        "constant",
        "--metrics-file",
        str(metrics),
    ]
    run = pretrain(*flags)
    assert run.returncode == 0, run.stderr
    assert "lm loss: NAN" in run.stdout or "lm loss: INF" in run.stdout
    assert "warning: iteration 2: the " in run.stdout
    assert set(_losses(metrics).values()) & {"NaN", "Infinity"}


def test_exit_duration(pretrain_here: RunHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that goes forward by a minute at each look: at the start, then before each check."""
    monkeypatch.setattr(stopping, "time", SimpleNamespace(monotonic=count(step=60.0).__next__))
    metrics = tmp_path / "metrics.jsonl"
    flags = ["--train-iters", "1000", "--exit-duration-in-mins", "2.5", "--save", str(tmp_path)]
    status, _ = pretrain_here(*flags, "--metrics-file", str(metrics))
    assert status == 0
    assert list(_losses(metrics)) == [1, 2]
    assert (tmp_path / "latest").exists()


def test_deterministic_kernels(pretrain_here: RunHere) -> None:
    status, errors = pretrain_here("--deterministic")
    assert (status, errors) == (0, [])
