"""Small models of transformers, and folders of them as its own programs write them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForPreTraining,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

VOCABULARY = 300


def build(kind, *, tied=None, dtype=torch.float32, layers=3):
    """A model whose every element matters."""
    torch.manual_seed(1)
    size = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        tied = {} if tied is None else {"tie_word_embeddings": tied}
        model = GPT2LMHeadModel(
            GPT2Config(n_layer=layers, n_embd=24, n_head=4, n_positions=40, **size, **none, **tied)
        )
    elif kind == "bloom":
        model = BloomForCausalLM(BloomConfig(n_layer=layers, hidden_size=32, n_head=4, **size))
    elif kind == "bert":
        small = {"num_hidden_layers": layers, "hidden_size": 24, "num_attention_heads": 4}
        model = BertForPreTraining(
            BertConfig(intermediate_size=48, max_position_embeddings=40, vocab_size=VOCABULARY, **small)
        )
    else:
        config = LlamaConfig(
            num_hidden_layers=layers,
            hidden_size=32,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=40,
            tie_word_embeddings=bool(tied),
            **size,
        )
        model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        shift = 1.0 if parameter.dim() == 1 and name.endswith(".weight") else 0.0
        parameter.data.copy_(torch.randn(parameter.shape) * 0.2 + shift)
    return model.to(dtype).eval()


def save(model, folder: Path, form="safetensors", shards=1):
    """Writes a folder; the weights also as pytorch_model.bin, and over several files."""
    model.save_pretrained(folder, max_shard_size="20KB" if shards > 1 else "1GB")
    if form == "bin":
        weights = {name: tensor.clone() for name, tensor in tensors_of(folder).items()}
        for file in folder.glob("model*"):
            file.unlink()
        names = sorted(weights)
        parts = [names[start::shards] for start in range(shards)]
        files = [f"pytorch_model-{i + 1:05d}-of-{shards:05d}.bin" for i in range(shards)]
        files = files if shards > 1 else ["pytorch_model.bin"]
        for file, part in zip(files, parts, strict=True):
            torch.save({name: weights[name] for name in part}, folder / file)
        if shards > 1:
            pairs = zip(files, parts, strict=True)
            index = {"weight_map": {name: file for file, part in pairs for name in part}}
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


def tensors_of(folder: Path):
    """Every tensor of a folder's safetensors files."""
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def logits_of(folder_or_model, ids):
    model = folder_or_model
    if isinstance(model, Path):
        model = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits.float()


def same_bits(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bits(one), _bits(other))


def _bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)
