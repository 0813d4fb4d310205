"""What the tool says of a checkpoint, of its damage, and of two that differ."""

import dataclasses
import json
import math
import re
import shutil

import pytest
import torch

from megalite.checkpoint.convert.model_settings import parameters_of
from megalite.checkpoint.progress import TrainingProgress
from megalite.cli.checkpoints import inspect as main
from megalite.config import Config
from megalite.config.presets import PRESETS
from megalite.observe.report.checkpoint_inspection import compare, inspect, lines_of, open_view, statistics_of
from megalite.utils.errors import UserError
from megalite.utils.log import LineInterval
from tests.checkpoint_folder import MemorySource, make_pipe, write_checkpoint

MODEL = dataclasses.replace(PRESETS["llama-tiny"], num_layers=2, vocab_size=100)
NORM = "model.layers.1.mlp_norm.weight"


def save(folder, iteration=3, dtype="fp32", changes=None):
    """A run's folder with one checkpoint of weights that are always the same, but for the changes."""
    model = dataclasses.replace(MODEL, params_dtype=dtype)
    specs = parameters_of(model)
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(spec.used_shape, generator=generator) for name, spec in specs.items()}
    for name, value in (changes or {}).items():
        weights[name].view(-1)[: len(value)] = torch.tensor(value)
    progress = TrainingProgress(iteration, 8 * iteration)
    return MemorySource(Config(model=model), weights, progress).save(folder)


def exit_status(*words):
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in words])
    return stopped.value.code


def test_a_whole_checkpoint(tmp_path, capsys):
    save(tmp_path / "run")
    shutil.copytree(tmp_path / "run" / "iter_0000003", tmp_path / "run" / "iter_0000002")
    assert exit_status(tmp_path / "run", "--verify") == 0
    out = capsys.readouterr().out
    assert "iterations   2, 3 (latest: iter_0000003)" in out
    assert "iteration 3, consumed_samples 24" in out
    (line,) = [line for line in out.splitlines() if NORM in line]
    assert line.split() == [NORM, "float32", "[64]", "weights_0002_layer1.safetensors"]
    assert "weights: 15 tensors" in out


def test_norms_and_json(tmp_path, capsys):
    values = [math.nan, math.inf, -9.0]
    save(tmp_path / "run", changes={NORM.removeprefix("model."): values})
    assert exit_status(tmp_path / "run", "--norms", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    (found,) = [tensor for tensor in report["tensors"] if tensor["name"] == NORM]
    assert found["shape"] == [64]
    assert (found["figures"]["num_nan"], found["figures"]["num_infinite"]) == (1, 1)
    assert found["figures"]["minimum"] == -9.0
    assert report["damage"] == []


def test_figures_are_those_of_the_elements():
    tensor = torch.randn(5, 7, dtype=torch.bfloat16)
    statistics = statistics_of(tensor)
    assert statistics.norm == pytest.approx(tensor.double().norm().item(), rel=1e-12)
    assert (statistics.minimum, statistics.maximum) == (tensor.min().item(), tensor.max().item())


def flip(file):
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "flags", "message"),
    [
        (flip, ["--verify"], "damaged: weights_0001_layer0.safetensors has other contents"),
        (lambda file: file.unlink(), [], "damaged: weights_0001_layer0.safetensors is missing"),
        (
            lambda file: file.write_bytes(file.read_bytes()[:99]),
            ["--norms"],
            "damaged: .*weights_0001_layer0",
        ),
    ],
)
def test_damage_is_named(damage, flags, message, tmp_path, capsys):
    save(tmp_path / "run")
    damage(tmp_path / "run" / "iter_0000003" / "weights_0001_layer0.safetensors")
    assert exit_status(tmp_path / "run", *flags) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("damaged")]
    assert lines
    assert all(re.match(message, line) for line in lines)


def test_damage_that_nothing_asks_for_is_not_looked_for(tmp_path):
    save(tmp_path / "run")
    flip(tmp_path / "run" / "iter_0000003" / "weights_0001_layer0.safetensors")
    assert exit_status(tmp_path / "run") == 0


@pytest.mark.parametrize("file", ["run.json", "index.json", "config.yaml", "SHA256SUMS"])
def test_a_damaged_text_is_named(file, tmp_path):
    save(tmp_path / "run")
    flip(tmp_path / "run" / "iter_0000003" / file)
    with pytest.raises(UserError, match=file):
        main([str(tmp_path / "run")])


def test_the_same_twice(tmp_path, capsys):
    for name in "ab":
        save(tmp_path / name, changes={NORM.removeprefix("model."): [math.nan]})
    assert exit_status(tmp_path / "a", "--diff", tmp_path / "b") == 0
    assert capsys.readouterr().out == "equal: 15 tensors the same, 0 not\n"


def test_what_differs(tmp_path, capsys):
    save(tmp_path / "a", changes={NORM.removeprefix("model."): [0.0] * 64})
    save(tmp_path / "b", iteration=4, changes={NORM.removeprefix("model."): [0.0] * 63 + [0.5]})
    assert exit_status(tmp_path / "a", "--diff", tmp_path / "b") == 1
    out = capsys.readouterr().out.splitlines()
    assert out == [
        "progress.iteration: 3 | 4",
        "progress.consumed_samples: 24 | 32",
        f"{NORM}: max |a - b| 5.000e-01, relative norm inf",
        "different: 14 tensors the same, 1 not",
    ]


def test_another_precision_is_reported_with_its_distance(tmp_path):
    views = [open_view(save(tmp_path / dtype, dtype=dtype)) for dtype in ("fp32", "bf16")]
    comparison = compare(*views)
    assert not comparison.is_equal
    assert len(comparison.tensors) == 15
    assert all("float32 | bfloat16" in str(tensor) for tensor in comparison.tensors)
    assert all(0 < tensor.relative < 4e-3 for tensor in comparison.tensors)


def test_layout_and_versions_make_no_difference(tmp_path):
    views = [open_view(save(tmp_path / name)) for name in "ab"]
    views[1].description = {**views[1].description, "torch": "9", "layout": {"pp": 2, "dp": 1, "tp": 4}}
    comparison = compare(*views)
    assert comparison.is_equal
    assert [field.name for field in comparison.fields] == ["torch", "layout.pp", "layout.cp", "layout.tp"]


def test_one_tensor_is_held_at_a_time(tmp_path):
    view = open_view(save(tmp_path / "run"))
    held = []
    read = view.tensor

    def tensor(name):
        held.append(name)
        return read(name)

    view.tensor = tensor
    report = inspect(view, norms=True)
    assert held == [line.name for line in report.tensors]
    assert any("norm" in line for line in lines_of(report))


def test_values_of_the_run_are_broken_into_lines(tmp_path):
    view = open_view(save(tmp_path / "run"))
    view.description = {
        **view.description,
        "written": {"start_time": 0.0, "end_time": 60.0},
        "run": {f"field_{number}": number for number in range(40)},
    }
    lines = list(lines_of(inspect(view)))
    assert "  written      start 1970-01-01 00:00:00, end 1970-01-01 00:01:00" in lines
    assert any(line.startswith(" " * 15 + "field_") for line in lines)
    assert max(len(line) for line in lines if "field_" in line) <= 100


def test_the_text_counts_fields_that_have_their_defaults(tmp_path):
    view = open_view(save(tmp_path / "run"))
    run = {"seed": 7, "global_batch_size": None, "lr": 1e-3, "clip_grad": 1.0, "data_path": ["a"], "other": 1}
    view.description = {**view.description, "run": run, "corpora": {"splits": [{"name": "", "parts": [2]}]}}
    report = inspect(view)
    lines = list(lines_of(report))
    assert "  run          seed 7, lr 0.001, data_path a, other 1; 2 at their defaults (--json)" in lines
    assert "  corpora      splits parts 2" in lines
    assert report.record()["description"]["run"] == run


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--verify", "verified 2 of "),
        ("--norms", "read 2 of 15 tensors"),
        ("--diff", "compared 2 of 15 tensors"),
    ],
)
def test_progress_is_on_standard_error(flag, line, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(LineInterval, "is_over", lambda self: True)
    folder = save(tmp_path / "run")
    exit_status(folder, flag, *([folder] if flag == "--diff" else []))
    printed = capsys.readouterr()
    assert [text for text in printed.err.splitlines() if text.startswith(line)]
    assert " 2 of " not in printed.out


def test_times_of_writing_are_no_difference(tmp_path):
    views = [open_view(save(tmp_path / name)) for name in "ab"]
    for number, view in enumerate(views):
        view.description = {**view.description, "written": {"start_time": number}}
    assert compare(*views).fields == ()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_text(""), "is not a folder"),
        (lambda path: path.mkdir(), "is not a checkpoint of megalite"),
        (lambda path: (path / "mp_rank_00").mkdir(parents=True), "is not a checkpoint"),
    ],
)
def test_what_is_no_checkpoint(make, message, tmp_path):
    make(tmp_path / "given")
    with pytest.raises(UserError, match=message):
        main([str(tmp_path / "given")])


@pytest.mark.parametrize("words", [[], ["--verify"], ["--norms"]])
def test_a_pipe_as_a_tensor_file_is_not_waited_for(words, tmp_path, capsys):
    """Nor where the file tells the shape of a tensor that is whole."""
    checkpoint = write_checkpoint(tmp_path / "run")
    make_pipe(checkpoint / "part_0.safetensors")
    assert exit_status(tmp_path / "run", *words) == 1
    assert "damaged: part_0.safetensors cannot be read: it is not a regular file" in capsys.readouterr().out
