"""What a Hugging Face folder may hold of multi-token prediction."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file

from megalite.config.presets import PRESETS
from megalite.frontends.huggingface.families import FAMILIES, all_entries, config_of, family_of, to_hf
from megalite.tensor_parallel.parameter_spec import spec_of
from megalite.utils.errors import UserError
from tests.stages import build_stage
from tests.unit.checkpoint.convert.foreign_models import VOCABULARY, same_bits, tensors_of
from tests.unit.checkpoint.convert.test_convert import change, convert, save_stage
from tests.unit.model.test_against_transformers import CONFIGS

MODEL = dataclasses.replace(
    PRESETS["llama-tiny"], num_layers=2, vocab_size=VOCABULARY, hidden_dropout=0.0, mtp_num_layers=2
)


@pytest.fixture
def folder(tmp_path, one_rank):
    """A Llama with two modules of multi-token prediction, converted from a checkpoint."""
    stage = build_stage(MODEL, one_rank, range(2), seed=3)
    for parameter in stage.parameters():
        parameter.data.add_(torch.randn(parameter.shape) * 0.1)
    folder = convert(save_stage(stage, tmp_path / "ours"), tmp_path / "hf")
    used = {name: each.data[: spec_of(each).used_shape[0]] for name, each in stage.named_parameters()}
    expected, found = to_hf(used, MODEL), tensors_of(folder)
    assert found.keys() == expected.keys()
    assert all(same_bits(found[name], each) for name, each in expected.items())
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 2
    return folder


def write(folder, tensors):
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_multi_token_prediction_comes_back(folder, tmp_path):
    tensors = tensors_of(folder)
    assert "model.layers.3.mlp.gate_proj.weight" in tensors and "model.layers.2.eh_proj.weight" in tensors
    copies = {
        f"model.layers.{number}.{name}.weight": tensors[shared].clone()
        for number in (2, 3)
        for name, shared in (
            ("embed_tokens", "model.embed_tokens.weight"),
            ("shared_head.head", "lm_head.weight"),
        )
    }
    convert(write(folder, tensors | copies), tmp_path / "again")  # as DeepSeek-V3's files have them
    returned = tensors_of(convert(tmp_path / "again", tmp_path / "back"))
    assert returned.keys() == tensors.keys()
    assert all(same_bits(returned[name], each) for name, each in tensors.items())


def test_a_folder_without_its_weights_is_read_without_it(folder, tmp_path, caplog):
    tensors = {
        name: each
        for name, each in tensors_of(folder).items()
        if ".layers.2." not in name and ".layers.3." not in name
    }
    convert(write(folder, tensors), tmp_path / "again")
    said = [each.message for each in caplog.records if "num_nextn_predict_layers 2" in each.message]
    assert len(said) == 1 and f"{folder} lacks the weights of multi-token prediction" in said[0]
    returned = convert(tmp_path / "again", tmp_path / "back")
    assert tensors_of(returned).keys() == tensors.keys()
    assert "num_nextn_predict_layers" not in json.loads((returned / "config.json").read_text())


def test_weights_that_the_config_does_not_name_are_refused(folder, tmp_path):
    change(folder, num_nextn_predict_layers=1)
    with pytest.raises(
        UserError, match=r"has tensors that a llama of this config does not have: model\.layers\.3\."
    ):
        convert(folder, tmp_path / "again")


@pytest.mark.parametrize(
    "kind", [name for name, family in FAMILIES.items() if family.mtp and name == family.model_type]
)
def test_a_family_reads_what_it_writes(kind, one_rank):
    settings = CONFIGS[kind.removesuffix("_text")](lambda values: values[-1]).to_dict()
    config = config_of(settings | {"num_nextn_predict_layers": 1})
    assert config.mtp_num_layers == 1
    of_source = dataclasses.replace(config, max_position_embeddings=config.seq_length)
    assert config_of(family_of(config).settings(of_source)) == config
    stage = build_stage(config, one_rank, range(config.num_layers), has_weights=False)
    assert sorted(entry.ours for entry in all_entries(config)) == sorted(stage.state_dict())
    theirs = [name for entry in all_entries(config) for name in entry.theirs]
    assert len({*theirs}) == len(theirs)
