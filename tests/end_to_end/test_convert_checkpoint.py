"""A trained model goes to transformers, and comes back to be trained on."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megalite.checkpoint.full_tensors import FullReader
from megalite.checkpoint.manifest import read_manifest
from tests.programs import run_program


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
