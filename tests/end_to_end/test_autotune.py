"""Three layouts of two ranks, run for real: one runs out of memory, and a tuning that was ended goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megalite.plan.measure import autotune
from megalite.plan.trial import DONE, OUT_OF_MEMORY
from megalite.utils.errors import UserError

ROOT = Path(__file__).parents[2]
RUN = (
    *("--gpu", "a100-80", "--world-size", "2", "--gpus-per-node", "2", "--preset", "gpt-tiny", "--mock-data"),
    *("--vocab-size", "256", "--seq-length", "32", "--global-batch-size", "4", "--attention-dropout", "0"),
    *("--iterations", "3", "--warmup-iterations", "1", "--top", "3", "--timeout", "200"),
)
# What the search is left to choose of: tp 2, pp 2 or dp 2.
LAYOUT = (
    *(
        "--micro-batch-size",
        "2",
        "--zero-stage",
        "0",
        "--recompute-modules",
        "mlp_act",
        "--pipeline-schedule",
        "1f1b",
    ),
    *("--recompute-granularity", "selective", "--no-sequence-parallel"),
)
FULL = """
import runpy, sys, yaml
config = yaml.safe_load(open(sys.argv[2]))
if config["parallel"]["pipeline_model_parallel_size"] == 2:
    raise MemoryError("out of memory: 3 GiB more")
sys.path.insert(0, {root!r})
sys.argv.insert(1, "train")
runpy.run_module("megalite", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_the_best_of_three(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(FULL.format(root=str(ROOT)))
    words = [*RUN, *LAYOUT, "--folder", str(tmp_path / "tuning")]
    first = autotune(words, "", [str(program)])
    while not (tmp_path / "tuning" / "results.json").exists():
        next(first)
    first.close()  # ended once a trial was done

    lines = list(autotune(words, "", [str(program)]))
    assert sum(": already in " in line for line in lines) == 1
    record = json.loads((tmp_path / "tuning" / "results.json").read_text())
    found = {each["layout"].split(" --micro")[0]: each for each in record["trials"]}
    assert found.keys() == {"--tp 1 --pp 1", "--tp 2 --pp 1", "--tp 1 --pp 2"}
    full = found["--tp 1 --pp 2"]
    assert (full["status"], full["reason"]) == (OUT_OF_MEMORY, "MemoryError: out of memory: 3 GiB more")
    done = {name: each for name, each in found.items() if each["status"] == DONE}
    assert done.keys() == {"--tp 1 --pp 1", "--tp 2 --pp 1"}, record
    assert all(each["tokens_per_second"] > 0 and each["memory_bytes"] > 0 for each in done.values())
    best = min(done, key=lambda name: done[name]["seconds"])
    assert lines[-1].startswith("torchrun --nproc-per-node 2 -m megalite train ") and f" {best} " in lines[-1]
    rows = [line for line in lines if line.startswith((DONE, OUT_OF_MEMORY))]
    assert [row.split("  ")[0] for row in rows] == [DONE, DONE, OUT_OF_MEMORY]
    assert best in rows[0] and "3 GiB more" in rows[2]

    with pytest.raises(UserError, match=r"another tuning \(length changed\)"):
        list(autotune([*words, "--iterations", "4"], "", program))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--iterations", "3", "--warmup-iterations", "3"), "leaves none of --iterations 3 to measure"),
        (("--warmup-iterations", "-1"), "'-1' is not a whole number"),
        (("--timeout", "nan"), "'nan' is not a number above 0"),
        (("--train-iters", "2"), "--train-iters 2 is less than --iterations 3"),
        (("--json",), "--json is an option of megalite plan"),
        (("--dry-run",), "--dry-run computes nothing"),
        (
            ("--calibrate",),
            "--calibrate plans for this machine, and --gpu a100-80 for another: remove one",
        ),
        (("--world-size", "4096"), "--world-size 4096 is too large for the"),
        (("--tp", "64"), "--num-attention-heads 4 is not divisible by --tp 64"),
    ],
)
def test_bad_input(tmp_path: Path, words: tuple[str, ...], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        list(autotune([*RUN, *words, "--folder", str(tmp_path)], ""))
