"""A trained model goes to transformers, and comes back to be trained on."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from megalite.checkpoint.full_tensors import FullReader
from megalite.checkpoint.manifest import read_manifest
from tests.end_to_end.conftest import status_of
from tests.programs import run_program
from tests.unit.checkpoint.convert.foreign_models import build, save
from tests.unit.checkpoint.convert.test_convert import change, make_tokenizer
from tests.unit.checkpoint.convert.test_convert import convert as converted


def convert(*flags):
    return run_program("tools/convert_checkpoint.py", *flags)


@pytest.mark.slow
def test_to_transformers_and_back(pretrain, tmp_path):
    layout = ("--tp", "2", "--bf16", "--zero-stage", "1")
    done = pretrain(*layout, "--train-iters", "2", "--save", str(tmp_path / "run"), ranks=4)
    assert done.returncode == 0, done.stderr

    done = convert("--load", tmp_path / "run", "--save", tmp_path / "hf", "--params-dtype", "fp32")
    assert done.returncode == 0, done.stderr
    reader = FullReader(read_manifest(tmp_path / "run" / "iter_0000002"))
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    main = reader.tensor("optimizer.embedding.word.weight.main")
    assert torch.equal(weights["transformer.wte.weight"], main)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.config.eos_token_id == 256
    assert torch.isfinite(model(torch.arange(8)[None]).logits).all()

    done = convert("--load", tmp_path / "hf", "--save", tmp_path / "ours")
    assert done.returncode == 0, done.stderr
    done = pretrain("--load", str(tmp_path / "ours"), "--finetune", "--train-iters", "1")
    assert done.returncode == 0, done.stderr
    assert "iter_0000000" in done.stdout
    done = pretrain("--load", str(tmp_path / "ours"), "--train-iters", "1")
    assert done.returncode == 1
    assert "no optimizer state" in done.stderr

    done = convert("--load", tmp_path / "hf", "--save", tmp_path / "ours")
    assert done.returncode == 1
    assert (
        done.stderr
        == f"error: --save {tmp_path / 'ours'} exists and is not empty: pass a new folder, "
        + ("or delete it first\n")
    )


@pytest.mark.parametrize(("ends", "expected"), [([2, 0], [2, 0]), (2, [0, 2]), (None, 0)])
def test_a_run_keeps_the_tokens_and_the_context_of_its_source(ends, expected, tmp_path):
    """Documents end with token 0 of the tokenizer, which also ends the texts of the model."""
    folder = save(build("llama"), tmp_path / "hf")
    make_tokenizer(folder)
    change(folder, bos_token_id=1, eos_token_id=ends, pad_token_id=2)
    generation = {"eos_token_id": ends, "do_sample": True, "temperature": 0.5}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    converted(folder, tmp_path / "ours")
    load = ("--load", str(tmp_path / "ours"), "--finetune", "--use-checkpoint-args", "--mock-data")
    tokenizer = ("--tokenizer-name-or-path", str(tmp_path / "ours" / "tokenizer"))
    length = ("--seq-length", "16", "--global-batch-size", "1", "--train-iters", "1", "--lr", "0")
    assert status_of(*load, *tokenizer, *length, "--save", str(tmp_path / "run")) == 0
    back = converted(tmp_path / "run", tmp_path / "back")
    config, generation = AutoConfig.from_pretrained(back), GenerationConfig.from_pretrained(back)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, expected, 2)
    assert (generation.eos_token_id, generation.temperature) == (expected, 0.5)
    assert config.max_position_embeddings == 40
