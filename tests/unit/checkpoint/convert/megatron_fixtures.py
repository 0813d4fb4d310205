"""Checkpoints as Megatron-LM and Megatron-DeepSpeed write them, made of transformers' weights.

By their documented layouts and element by element, with none of the converter's own tables: query, key and
value rows per head, [n, 3, d], from version 2 on; a row-parallel weight cut by columns; [gate, up] stacked on
each rank; layers counted from 0 on each stage; the word table padded.
"""

from __future__ import annotations

import argparse

import torch
from safetensors.torch import save_file

PADDED = 320


def linear(weights, name, kind):
    """A weight as [out, in], whatever the architecture."""
    tensor = weights[name]
    return (
        tensor.t()
        if kind == "gpt2" and tensor.dim() == 2 and ".wpe" not in name and ".wte" not in name
        else tensor
    )


def pad(table):
    return torch.cat((table, torch.full((PADDED - table.shape[0], table.shape[1]), 7.0, dtype=table.dtype)))


def rows(tensor, tp, rank):
    return tensor.chunk(tp, dim=0)[rank].clone()


def columns(tensor, tp, rank):
    return tensor.chunk(tp, dim=1)[rank].clone()


def by_head(tensor, heads, version):
    """Rows [n, 3, d] of one rank in the order of a version."""
    parts = tensor.unflatten(0, (heads, 3, -1))
    if version == 0:
        return torch.cat([parts[:, i].flatten(0, 1) for i in range(3)])
    if version == 1:
        return torch.stack([parts[:, i] for i in range(3)], dim=2).flatten(0, 2)
    return tensor


def gpt2_layer(weights, layer, heads):
    """One layer's full tensors by Megatron's old names."""
    prefix = f"transformer.h.{layer}."
    full = {}
    for kind in ("weight", "bias"):
        fused = linear(weights, f"{prefix}attn.c_attn.{kind}", "gpt2")  # [3, n, d]
        q, k, v = fused.chunk(3)
        per_head = [part.chunk(heads)[head] for head in range(heads) for part in (q, k, v)]
        full[f"self_attention.query_key_value.{kind}"] = torch.cat(per_head)
        full[f"self_attention.dense.{kind}"] = linear(weights, f"{prefix}attn.c_proj.{kind}", "gpt2")
        full[f"mlp.dense_h_to_4h.{kind}"] = linear(weights, f"{prefix}mlp.c_fc.{kind}", "gpt2")
        full[f"mlp.dense_4h_to_h.{kind}"] = linear(weights, f"{prefix}mlp.c_proj.{kind}", "gpt2")
        full[f"input_layernorm.{kind}"] = weights[f"{prefix}ln_1.{kind}"]
        full[f"post_attention_layernorm.{kind}"] = weights[f"{prefix}ln_2.{kind}"]
    return full


def bloom_layer(weights, layer):
    """transformers keeps Megatron's names and its order of rows."""
    prefix = f"transformer.h.{layer}."
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def cut(full, tp, rank, heads=None, version=3):
    """A tensor-parallel rank's part of a layer in the old names."""
    local = {}
    for name, tensor in full.items():
        if name.startswith("self_attention.query_key_value"):
            local[name] = by_head(rows(tensor, tp, rank), heads // tp, version)
        elif name.startswith("mlp.dense_h_to_4h"):
            local[name] = rows(tensor, tp, rank)
        elif name in ("self_attention.dense.weight", "mlp.dense_4h_to_h.weight"):
            local[name] = columns(tensor, tp, rank)
        else:
            local[name] = tensor.clone()
    return local


def arguments(**changes):
    base = {
        **{"num_layers": 3, "seq_length": 40, "max_position_embeddings": 40, "hidden_dropout": 0.0},
        **{"attention_dropout": 0.0, "bias_gelu_fusion": True, "make_vocab_size_divisible_by": 64},
        **{"padded_vocab_size": PADDED, "seed": 5, "global_batch_size": 8, "consumed_train_samples": 96},
    }
    return argparse.Namespace(**{**base, **changes})


def save_old(folder, weights, heads, tp, pp, version=3.0, extra=None):
    """Megatron-LM's files of a GPT-2: dicts in dicts, one a rank; layers 2 and 1 on two stages."""
    stages = {1: [[0, 1, 2]], 2: [[0, 1], [2]]}[pp]
    args = arguments(hidden_size=24, num_attention_heads=heads, ffn_hidden_size=96)
    for stage, layers in enumerate(stages):
        for rank in range(tp):
            encoder = {
                f"layers.{local}.{name}": tensor
                for local, layer in enumerate(layers)
                for name, tensor in cut(gpt2_layer(weights, layer, heads), tp, rank, heads, version).items()
            }
            language_model = {"encoder": encoder}
            table = {"weight": rows(pad(weights["transformer.wte.weight"]), tp, rank)}
            model = {"language_model": language_model}
            if stage == 0:
                positions = {"weight": weights["transformer.wpe.weight"].clone()}
                language_model["embedding"] = {"word_embeddings": table, "position_embeddings": positions}
            elif stage == pp - 1:
                model["word_embeddings_for_head"] = table
            if stage == pp - 1:
                for kind in ("weight", "bias"):
                    encoder[f"final_layernorm.{kind}"] = weights[f"transformer.ln_f.{kind}"].clone()
            state = {
                "args": args,
                "checkpoint_version": version,
                "iteration": 12,
                "model": model,
                **(extra or {}),
            }
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else "")
            path = folder / "iter_0000012" / name
            path.mkdir(parents=True)
            torch.save(state, path / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("12")
    return folder


def save_core(folder, weights, tp, inside, sinks=None, gates=None):
    """Megatron Core's flat names of a Llama with 4 heads in 2 groups, on an interleaved pipeline of two.

    `inside`: norms in the linear layer behind them, as with Transformer Engine. `sinks`, `gates`: those of
    each layer, ``[4]`` and ``[32, 32]``.
    """
    norms = ("self_attention.linear_qkv.layer_norm_", "mlp.linear_fc1.layer_norm_")
    if not inside:
        norms = ("input_layernorm.", "pre_mlp_layernorm.")
    args = arguments(
        **{"hidden_size": 32, "num_attention_heads": 4, "group_query_attention": True, "num_query_groups": 2},
        **{"ffn_hidden_size": 48, "position_embedding_type": "rope", "normalization": "RMSNorm"},
        **{"swiglu": True, "add_bias_linear": False, "untie_embeddings_and_output_weights": True},
        **{"norm_epsilon": 1e-6, "num_layers": 4, "rotary_base": 10000, "kv_channels": 8},
        softmax_type="vanilla" if sinks is None else "learnable",
        attention_output_gate=gates is not None,
    )
    for stage in range(2):
        for rank in range(tp):
            state = {"args": args, "checkpoint_version": 3.0, "iteration": 1}
            for chunk in range(2):
                layer = 2 * chunk + stage  # one layer a chunk
                state[f"model{chunk}"] = part = {}
                theirs = f"model.layers.{layer}."
                q, k, v = (weights[f"{theirs}self_attn.{name}_proj.weight"] for name in "qkv")
                parts = [q, k, v] if gates is None else [q, gates[layer], k, v]
                groups = zip(*(part.chunk(2) for part in parts), strict=True)
                qkv = torch.cat([torch.cat(group) for group in groups])
                gate, up = (
                    rows(weights[f"{theirs}mlp.{name}_proj.weight"], tp, rank) for name in ("gate", "up")
                )
                ours = "decoder.layers.0."
                part[f"{ours}self_attention.linear_qkv.weight"] = rows(qkv, tp, rank)
                part[f"{ours}self_attention.linear_qkv._extra_state"] = None
                if sinks is not None:
                    offsets = rows(sinks[layer], tp, rank)
                    part[f"{ours}self_attention.core_attention.softmax_offset"] = offsets
                output = weights[f"{theirs}self_attn.o_proj.weight"]
                part[f"{ours}self_attention.linear_proj.weight"] = columns(output, tp, rank)
                part[f"{ours}mlp.linear_fc1.weight"] = torch.cat((gate, up))
                down = weights[f"{theirs}mlp.down_proj.weight"]
                part[f"{ours}mlp.linear_fc2.weight"] = columns(down, tp, rank)
                part[f"{ours}{norms[0]}weight"] = weights[f"{theirs}input_layernorm.weight"].clone()
                part[f"{ours}{norms[1]}weight"] = weights[f"{theirs}post_attention_layernorm.weight"].clone()
                if (stage, chunk) == (0, 0):
                    table = pad(weights["model.embed_tokens.weight"])
                    part["embedding.word_embeddings.weight"] = rows(table, tp, rank)
                if (stage, chunk) == (1, 1):
                    part["decoder.final_layernorm.weight"] = weights["model.norm.weight"].clone()
                    part["output_layer.weight"] = rows(pad(weights["lm_head.weight"]), tp, rank)
            path = folder / f"mp_rank_{rank:02d}_{stage:03d}"
            path.mkdir(parents=True)
            torch.save(state, path / "model_optim_rng.pt")
    return folder


def save_deepspeed(folder, weights, tp, args=None, drift=0.0, form="pt"):
    """Megatron-DeepSpeed's files of a BLOOM: the embedding in layer 1, then layers, the last norm."""
    step = folder / "global_step40"
    step.mkdir(parents=True)
    for rank in range(tp):
        embedding = {
            "word_embeddings.weight": rows(pad(weights["transformer.word_embeddings.weight"]), tp, rank)
        }
        for kind in ("weight", "bias"):
            norm = weights[f"transformer.word_embeddings_layernorm.{kind}"]
            embedding[f"word_embeddings.norm.{kind}"] = norm.clone()
        layers = {1: embedding}
        for layer in range(3):
            layers[3 + layer] = cut(bloom_layer(weights, layer), tp, rank, heads=4)
            layers[3 + layer]["input_layernorm.weight"] += drift * (2 * rank - tp + 1)
        layers[7] = {kind: weights[f"transformer.ln_f.{kind}"].clone() for kind in ("weight", "bias")}
        for number, tensors in layers.items():
            path = step / f"layer_{number:02d}-model_{rank:02d}-model_states.{form}"
            if form == "pt":
                torch.save(tensors, path)
            else:
                save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        if args is not None:
            state = {"args": args, "iteration": 40, "module": None}
            torch.save(state, step / f"mp_rank_{rank:02d}_model_states.pt")
    (step / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"not read")
    (folder / "latest").write_text("global_step40")
    return folder
