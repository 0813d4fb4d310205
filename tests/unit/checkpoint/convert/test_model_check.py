"""A conversion runs both models, and names the first part that computes something else."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from megalite.checkpoint.convert import convert as convert_module
from megalite.checkpoint.convert import formats, hf_folder
from megalite.checkpoint.convert.convert import Conversion
from megalite.checkpoint.convert.model_check import check_same, filled, parameters_on_meta
from megalite.checkpoint.convert.model_settings import Settings
from megalite.cli.checkpoints import convert as main
from megalite.frontends.huggingface.families import all_entries
from megalite.utils.errors import UserError
from megalite.utils.log import configure_logging
from tests.unit.checkpoint.convert.foreign_models import VOCABULARY, build, save


def exchanged_in_layer_1(config, model_type):
    """Our two norms of layer 1 stand for each other's tensors."""
    entries = {entry.ours: entry for entry in all_entries(config, model_type)}
    for ending in (".weight", ".bias"):
        one, other = (f"layers.1.{norm}_norm{ending}" for norm in ("attention", "mlp"))
        if one in entries:
            entries[one], entries[other] = (
                replace(entries[one], theirs=entries[other].theirs),
                replace(entries[other], theirs=entries[one].theirs),
            )
    return [*entries.values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gpt2", "bloom", "llama", "bert"])
def test_both_directions_agree(kind, dtype, tmp_path, capsys):
    configure_logging(rank=0)
    save(build(kind, dtype=dtype, layers=2), tmp_path / "hf")
    Conversion(tmp_path / "hf", tmp_path / "ours").run()
    Conversion(tmp_path / "ours", tmp_path / "back").run()
    Conversion(tmp_path / "back", tmp_path / "again", target="hf").run()
    assert capsys.readouterr().out.count("the models before and after agree") == 3


@pytest.mark.parametrize("kind", ["gpt2", "bloom", "llama", "bert"])
def test_a_wrong_mapping_from_hugging_face_is_found(kind, tmp_path, monkeypatch):
    save(build(kind), tmp_path / "hf")
    monkeypatch.setattr(hf_folder, "all_entries", exchanged_in_layer_1)
    with pytest.raises(UserError, match="the first difference is in the output of layer 1,"):
        Conversion(tmp_path / "hf", tmp_path / "ours").run()
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    Conversion(tmp_path / "hf", tmp_path / "ours", check=False).run()
    assert (tmp_path / "ours" / "iter_0000000").is_dir()


@pytest.mark.parametrize("kind", ["gpt2", "bloom", "llama", "bert"])
def test_a_wrong_mapping_to_hugging_face_is_found(kind, tmp_path, monkeypatch):
    save(build(kind), tmp_path / "hf")
    Conversion(tmp_path / "hf", tmp_path / "ours", check=False).run()
    monkeypatch.setattr(formats, "all_entries", exchanged_in_layer_1)
    with pytest.raises(UserError, match="the first difference is in the output of layer 1,"):
        Conversion(tmp_path / "ours", tmp_path / "back").run()
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("flags", [(), ("--window-size", "5,0")])
def test_a_window_is_compared(flags, tmp_path):
    """Both models agree on a window shorter than the sample; a flag's other window is found."""
    source = build("llama", layers=1)
    theirs = MistralForCausalLM(
        MistralConfig(**{**source.config.to_dict(), "model_type": "mistral"}, sliding_window=9)
    )
    theirs.load_state_dict(source.state_dict())
    save(theirs, tmp_path / "hf")
    conversion = Conversion(tmp_path / "hf", tmp_path / "ours", settings=Settings(flags))
    if not flags:
        conversion.run()
        return
    with pytest.raises(UserError, match=r"layer 0, .* or the flags --window-size 5,0"):
        conversion.run()


def test_a_setting_that_changes_the_model_is_named(tmp_path):
    save(build("llama", layers=1), tmp_path / "hf")
    settings = Settings(("--rotary-base", "500"))
    with pytest.raises(UserError, match=r"layer 0, .* or the flags --rotary-base 500;"):
        Conversion(tmp_path / "hf", tmp_path / "ours", settings=settings).run()


@pytest.mark.parametrize("flag", [[], ["--no-check"]])
def test_the_command_line_skips_the_check(flag, tmp_path, capsys):
    save(build("gpt2", layers=1), tmp_path / "hf")
    main(["--load", str(tmp_path / "hf"), "--save", str(tmp_path / "ours"), *flag])
    assert ("check: the models before and after agree" in capsys.readouterr().out) == (not flag)


def test_without_transformers_the_check_is_skipped(tmp_path, monkeypatch, capsys):
    configure_logging(rank=0)
    save(build("gpt2", layers=1), tmp_path / "hf")
    monkeypatch.setattr(convert_module.importlib.util, "find_spec", lambda name: None)
    Conversion(tmp_path / "hf", tmp_path / "ours").run()
    captured = capsys.readouterr()
    assert "check: skipped, because it needs transformers: pip install transformers" in (
        captured.out + captured.err
    )


def test_transformers_loads_the_written_folder(tmp_path, monkeypatch):
    """Our own reader compares as many rows of the vocabulary as both models have."""
    save(build("llama", layers=1), tmp_path / "hf")
    written = formats.hf_config_of
    monkeypatch.setattr(
        formats, "hf_config_of", lambda *values: {**written(*values), "vocab_size": VOCABULARY - 4}
    )
    with pytest.raises(UserError, match=r"transformers \S+ cannot load .*; --no-check converts") as raised:
        Conversion(tmp_path / "hf", tmp_path / "back", target="hf").run()
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "back").exists()


def test_what_transformers_cannot_run_is_one_line(tmp_path):
    folder = save(build("llama", layers=1), tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "pad_token_id": "none"}))
    with pytest.raises(UserError, match=r"cannot run .*; --no-check converts") as raised:
        Conversion(folder, tmp_path / "ours").run()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ([1.0, 2.0], None),
        ([1.0, 2.0 + 1e-5], None),
        ([1.0, 2.1], "of the logits, up to 1.00e-01 .* final norm"),
        ([1.0, float("nan")], "first difference is in the output of the logits"),
    ],
)
def test_the_tolerance(second, message):
    def outputs(row):
        yield "the logits", torch.tensor([row])

    if message is None:
        check_same(outputs([1.0, 2.0]), outputs(second), 1, "")
        return
    with pytest.raises(UserError, match=message):
        check_same(outputs([1.0, 2.0]), outputs(second), 1, "")


def test_nan_in_both_is_not_compared(capsys):
    configure_logging(rank=0)

    def outputs():
        yield "layer 0", torch.tensor([[float("nan")]])

    check_same(outputs(), outputs(), 1, "")
    captured = capsys.readouterr()
    assert "both models have NaN or infinity in the output of layer 0" in captured.out + captured.err


def test_parameters_have_memory_only_within_the_block():
    with parameters_on_meta():
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    with filled(model, model[0].parameters(), lambda parameter: torch.ones(parameter.shape)):
        assert torch.equal(model[0](torch.ones(1, 2)), torch.full((1, 2), 3.0))
        assert model[1].weight.is_meta
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not torch.nn.Linear(1, 1).weight.is_meta
