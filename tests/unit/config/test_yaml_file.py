"""YAML files: reading, writing, and reading back."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config import Config, DataConfig, OptimizerConfig, check_config, to_yaml
from megalite.config.arguments import Diagnostics
from megalite.config.presets import PRESETS
from megalite.config.yaml_file import read_yaml
from megalite.frontends.command_line import parse
from tests.unit.frontends.megatron.lines import COURSE

TINY = {"tiny.yaml": "gpt-tiny", "bloom-tiny.yaml": "bloom-tiny", "llama-tiny.yaml": "llama-tiny"}
EXAMPLES = [Path(__file__).parents[3] / "scripts" / "examples" / name for name in TINY]


@pytest.fixture
def written(tmp_path: Path):
    """Return a function that writes a YAML file and returns its path."""

    def write(text: str) -> str:
        (tmp_path / "run.yaml").write_text(text)
        return str(tmp_path / "run.yaml")

    return write


def test_nested_and_flat_keys_mean_the_same(written) -> None:
    nested, _ = parse(
        ["--config", written("model:\n  num_layers: 3\nparallel:\n  tp: 2\noptimizer:\n  lr: 1e-4\n")]
    )
    flat, _ = parse(["--config", written("num-layers: 3\ntp: 2\nlr: 1e-4\noptimizer: adam\n")])
    assert nested == flat
    assert (nested.model.num_layers, nested.parallel.tp, nested.optimizer.lr) == (3, 2, 1e-4)


def test_flags_go_over_yaml_over_preset(written) -> None:
    path = written("num_layers: 3\nhidden_size: 32\n")
    config, _ = parse(["--preset", "llama-tiny", "--config", path, "--hidden-size", "16"])
    assert (config.model.num_layers, config.model.hidden_size, config.model.num_query_groups) == (3, 16, 2)


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("lr: 3e-4", "lr", 3e-4),
        ("train_iters: 220_000_000", "train_iters", 220_000_000),
        ("data_path: [0.3, a, 0.7, b]", "data_path", ("0.3", "a", "0.7", "b")),
        ("data_path: corpus", "data_path", ("corpus",)),
        ("data_path: []", "data_path", ()),
        ("data_path:\n- a\n- b", "data_path", ("a", "b")),
        ("pipeline_layers: [3, 5]", "pipeline_layers", (3, 5)),
        ("cp_comm_type: p2p", "cp_comm_type", "p2p"),
        ("cp_comm_type: [p2p, a2a]", "cp_comm_type", ("p2p", "a2a")),
        ("embed_layernorm: yes", "embed_layernorm", True),
        ("add_bias_linear: false", "add_bias_linear", False),
        ("split: 90,5,5", "split", "90,5,5"),
        ("save: ~", "save", None),
        ("model:\noptimizer:\n  # all commented\n", "lr", 3e-4),
        ("", "lr", 3e-4),
    ],
)
def test_values(text: str, name: str, expected: object, written) -> None:
    config, _ = parse(["--config", written(text)])
    (part,) = (part for part in vars(config).values() if hasattr(part, name) and name in vars(part))
    assert getattr(part, name) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp: 1\nhiden_size: 3", "line 2: 'hiden_size' is not a field; nearest is 'hidden_size'"),
        ("model:\n  lr: 3", "line 2: 'lr' is not a field of model, but of optimizer"),
        ("modl:\n  num_layers: 3", "line 1: 'modl' is not a field"),
        ("model: 3", "line 1: expected `key: value` lines under model"),
        ("- a", "line 1: expected `key: value` lines at the top level"),
        ("num_layers: x", "line 1: num_layers takes a whole number, not 'x'"),
        ("num_layers: [1]", "line 1: num_layers takes one plain value"),
        ("num_layers: {a: 1}", "line 1: num_layers takes one plain value"),
        ("data_path: [[a]]", "line 1: data_path takes a list of plain values"),
        ("num_layers: null", "line 1: num_layers cannot be null"),
        ("num_layers: 1\nnum_layers: 2", "line 2: num_layers is already in line 1: remove one"),
        ("num_layers: 1\nnum-layers: 2", "line 1: num_layers 1 and"),
        ("model: {num_layers: 1, num_layers: 2}", "line 1: num_layers is already in line 1: remove one"),
        ("model:\n  num_layers: 1\nmodel:\n  seq_length: 2", "line 3: model is already in line 1: remove"),
        ("num_layers: 1\nmodel:\n  num_layers: 2", "line 3: num_layers 2 set the same option"),
        ("a: [", "is not YAML"),
        ("a: \x07", "is not YAML"),
    ],
)
def test_mistakes_name_file_line_and_key(text: str, message: str, written, problems) -> None:
    path = written(text)
    first = problems(f"--config {path}")[0]
    assert path in first
    assert message in first


def test_a_file_that_is_no_text(tmp_path: Path, problems) -> None:
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\xff")
    assert "cannot be read" in problems(f"--config {tmp_path / 'x.yaml'}")[0]
    assert "cannot be read: Is a directory" in problems(f"--config {tmp_path}")[0]


def test_without_pyyaml_the_error_says_so(written, problems, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    assert "needs PyYAML: pip install pyyaml" in problems(f"--config {written('tp: 1')}")[0]


def read_back(text: str, tmp_path: Path) -> Config:
    (tmp_path / "back.yaml").write_text(text)
    return parse(["--config", str(tmp_path / "back.yaml")])[0]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_written_and_read_back(name: str, tmp_path: Path) -> None:
    config = Config(model=PRESETS[name])
    assert read_back(to_yaml(config), tmp_path) == config


def test_a_printed_config_can_be_fed_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = shlex.split(COURSE)
    with pytest.raises(SystemExit) as caught:
        parse([*argv, "--print-config"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert read_back(printed, tmp_path) == parse(argv)[0]
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        parse(["--print-config"])
    assert capsys.readouterr().out == ""


def test_sections_of_a_group_are_optional(written, problems) -> None:
    """A file without sections, and one with some of them, mean the same."""
    flat = "model: {num_layers: 3, num_experts: 4, moe_router_topk: 1, rotary_base: 5e4}"
    nested = "model: {num_layers: 3, experts: {num_experts: 4, moe_router_topk: 1}}\nrope: {rotary_base: 5e4}"
    first, second = (parse(["--config", written(text)])[0] for text in (flat, nested))
    assert first == second and first.model.moe_router_topk == 1
    wrong, *_ = problems(f"--config {written('model: {rope: {moe_router_topk: 1}}')}")
    assert "'moe_router_topk' is not a field of rope, but of experts" in wrong
    path = written("num_experts: 4\nmodel: {experts: {num_experts: 2}}")
    twice, *_ = problems(f"--config {path}")
    assert "line 1: num_experts 4 and" in twice and "set the same option: remove one" in twice


def test_a_printed_config_says_what_layers_are_made_of(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(shlex.split("--preset gemma4-e2b --vocab-size 99 --print-config"))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("# layers")]
    assert lines[1] == (
        "# layers 4, 9, 14: attention (8 heads of 512, 1 of keys and values, rope of 512 elements, "
        "base 1e+06), MLP of 6144"
    )
    assert "keys and values of layer 13, window 511" in lines[2]


def test_printing_a_config_with_mistakes_is_a_mistake(problems) -> None:
    assert "unknown flag --foo" in problems("--print-config --foo")[0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text(max_size=8).filter(lambda text: not text.startswith("~/"))),
    st.text(max_size=8).filter(lambda text: not text.startswith("~/")),  # it is expanded
    st.floats(0, 1e300),
    st.none() | st.integers(1, 10**15),
)
def test_any_value_comes_back(
    tmp_path_factory, paths: list[str], split: str, lr: float, iters: int | None
) -> None:
    base = Config()
    config = replace(
        base,
        data=DataConfig(data_path=tuple(paths), split=split),
        optimizer=OptimizerConfig(lr=lr),
        training=replace(base.training, train_iters=iters),
    )
    folder = tmp_path_factory.mktemp("yaml")
    assert read_back(to_yaml(config), folder) == config


def test_other_yaml_readers_get_the_same_values() -> None:
    config = Config(data=DataConfig(data_path=("a: b", "😀\x7f")), optimizer=OptimizerConfig(adam_eps=1e-8))
    read = yaml.safe_load(to_yaml(config))
    assert read["optimizer"]["adam_eps"] == 1e-8
    assert read["data"]["data_path"] == ["a: b", "😀\x7f"]
    assert read["model"]["add_bias_linear"] is True
    assert read["parallel"]["pipeline_layers"] is None


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_want_a_corpus_and_nothing_else(path: Path) -> None:
    config, notices = parse(["--config", str(path), "--data-path", "p"])
    assert notices == []
    for tp, pp, dp in ((1, 1, 1), (4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 2)):
        layout = replace(config.parallel, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
        check_config(replace(config, parallel=layout), tp * pp * dp)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_field_of_an_example_has_a_comment(path: Path) -> None:
    for line in path.read_text().splitlines():
        if line.startswith("  "):
            assert "  #" in line, line


def test_examples_are_the_tiny_presets() -> None:
    for path in EXAMPLES:
        assert parse(["--config", str(path)])[0].model == PRESETS[TINY[path.name]]


def test_null_takes_back_what_a_preset_gives(written) -> None:
    config, _ = parse(["--preset", "llama-tiny", "--config", written("num_query_groups: null")])
    assert config.model.num_query_groups is None


def test_a_problem_in_a_file_leaves_its_field_in_doubt(written) -> None:
    diagnostics = Diagnostics()
    read_yaml(written("num_layers: x\nhiden_size: 3\n"), diagnostics)
    assert diagnostics.invalid_fields == {"num_layers", "hidden_size"}
