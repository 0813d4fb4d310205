"""Plans of a program's own model: what they print, and what they refuse."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from megalite.config import Config
from megalite.plan.measure import autotune
from megalite.plan.plan_report import answer
from megalite.plan.plan_request import model_of
from megalite.plan.trial import Length, Trial
from megalite.plan.write_job import write_job
from megalite.utils.errors import UserError

ROOT = Path(__file__).parents[3]
OWN = ROOT / "examples" / "own_model.py"
FLAGS = (
    "--gpu h100 --world-size 16 --num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 128 "
    "--padded-vocab-size 512 --bf16 --global-batch-size 32"
)


def plan(program: Path, flags: str = "") -> dict[str, object]:
    (line,) = answer([*shlex.split(f"{FLAGS} {flags} --json"), "--program", str(program)])
    return json.loads(line)


def parameters_of_own_model(num_layers: int = 8, h: int = 256, vocab: int = 512, positions: int = 128) -> int:
    ffn = 4 * h
    layer = 2 * h + 2 * ffn * h + 4 * ffn + h * ffn
    return num_layers * layer + 2 * vocab * h + positions * h + 2 * h


def test_an_own_model_has_its_own_parameters_and_operations() -> None:
    found = plan(OWN, "--tp 2 --pp 2")
    assert found["parameters"] == parameters_of_own_model()
    assert found["seconds_by_kind"]["attention"] == 0.0
    assert found["seconds_by_kind"]["tp"] > 0.0
    assert list(found["tflops_per_gpu_by_convention"]) == ["causal"]
    flops = found["tflops_per_gpu"] * 1e12 * 16 / found["tokens_per_second"]
    assert flops == 6 * (8 * 3 * 256 * 1024 + 512 * 256)
    rendezvous = "--rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29500"
    start = f"torchrun --nproc-per-node 8 --nnodes 2 {rendezvous} {OWN} --num-layers 8"
    assert found["command"].startswith(start)


def test_a_subclass_of_gpt_is_planned_like_gpt() -> None:
    own = plan(ROOT / "examples" / "own_loss.py")
    (line,) = answer(shlex.split(f"{FLAGS} --json"))
    assert own["parameters"] == json.loads(line)["parameters"]
    assert own["tflops_per_gpu"] == pytest.approx(json.loads(line)["tflops_per_gpu"], rel=0.02)


def test_a_search_tries_no_recomputation_of_parts_that_the_model_lacks() -> None:
    found = plan(OWN, "--search --top 2 --zero-stage 1 --pp 1 --micro-batch-size 1")
    assert found["fitting"] > 2
    assert all("selective" not in each["command"] for each in found["layouts"])


def test_a_job_starts_the_program(tmp_path: Path) -> None:
    script = tmp_path / "job.sbatch"
    flags = FLAGS.replace("--world-size 16", "--nodes 2")
    arguments = [*shlex.split(f"{flags} --time 1:00:00 --train-iters 9 --lr 1e-3 --mock-data")]
    write_job([*arguments, "--program", str(OWN), "--output", str(script)], "")
    assert f'"${{launcher[@]}}" {OWN} "${{flags[@]}}"' in script.read_text()


def test_measured_layouts_run_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def run(config: Config, world_size: int, folder: Path, length: Length, program: Sequence[str]) -> Trial:
        started.append(tuple(program))
        return Trial("done", seconds=1.0, tokens_per_second=1.0, memory_bytes=1.0)

    monkeypatch.setattr("megalite.plan.measure.run_trial", run)
    flags = shlex.split(FLAGS.replace("--world-size 16", "--world-size 1"))
    more = shlex.split("--train-iters 99 --lr 1e-3 --mock-data --top 1 --folder")
    for number, program in enumerate(([], ["--program", str(OWN)])):
        list(autotune([*flags, *more, str(tmp_path / str(number)), *program], ""))
    assert started == [("-m", "megalite", "train"), (str(OWN),)]


MODEL = """
import megalite
from tests.unit.observe import own_models
class Model(own_models.{base}):
    pass
if __name__ == "__main__":
    {call}
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "does not call megalite.pretrain with a model: pass the program that trains it"),
        ("import megalite; megalite.pretrain()", "passes no model to megalite.pretrain: remove --program"),
        ("x = (", "is not a Python program"),
        ("\n\nraise KeyError('a')", "line 3, raises KeyError: 'a'"),
        ("import megalite; megalite.pretrain(3)", "the model provider is a int: pass a subclass"),
        (
            MODEL.format(base="ReadingModel", call="megalite.pretrain(Model)"),
            r"own_models.py, line \d+, in forward, reads a value from the device",
        ),
    ],
    ids=["no call", "no model", "syntax", "error", "not a model", "reads"],
)
def test_mistakes_are_one_line(text: str, message: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        plan(program)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_another_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        model_of(tmp_path / "no.py")
    with pytest.raises(UserError, match="'megatron' is not a Python file"):
        list(answer([*FLAGS.split(), "--program", "megatron"]))


def test_no_layout_fits_names_the_nearest_and_what_each_lacks() -> None:
    flags = "--gpu-set memory_gib=3 --zero-stage 0 --pp 1 --search --hidden-size 2048"
    with pytest.raises(
        UserError, match=r"most of it is \w+, tp\d.* lacks \d+\.\d GB, tp\d.* lacks"
    ) as caught:
        list(answer([*FLAGS.split(), *flags.split()]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("program", "assumes"), [("own_model.py", False), ("own_loss.py", True)])
def test_attention_dropout_is_assumed_only_of_gpt(program: str, assumes: bool) -> None:
    found = plan(ROOT / "examples" / program)
    assert bool(found["assumed"]) is assumes
    assert ("--attention-dropout 0" in found["command"]) is assumes
