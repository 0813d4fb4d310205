"""Models for timing steps, by name; GPT's shapes are from Brown et al. 2020, table 2.1."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from megalite.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
    check_config,
    to_yaml,
)
from megalite.config.model.model_config import padded_vocab_size
from megalite.config.presets import PRESETS
from megalite.frontends.command_line import parse


class NamedModel(NamedTuple):
    """A model, and the tensor-parallel ranks that it is cut over, of which one is timed."""

    model: ModelConfig
    tp: int = 1


def _gpt(layers: int, hidden: int, heads: int) -> NamedModel:
    base = PRESETS["gpt-1.3b"]
    return NamedModel(replace(base, num_layers=layers, hidden_size=hidden, num_attention_heads=heads))


_SMALL_LLAMA = replace(
    PRESETS["llama-tiny"],
    num_layers=6,
    hidden_size=512,
    num_attention_heads=8,
    num_query_groups=4,
    seq_length=512,
    vocab_size=32000,
)
MODELS: Mapping[str, NamedModel] = {
    "small": NamedModel(
        ModelConfig(num_layers=6, hidden_size=512, num_attention_heads=8, seq_length=512, vocab_size=32000)
    ),
    "small-llama": NamedModel(_SMALL_LLAMA),
    "small-experts": NamedModel(
        replace(
            _SMALL_LLAMA,
            num_experts=8,
            moe_router_topk=2,
            moe_ffn_hidden_size=704,
            moe_router_load_balancing_type="none",  # it would be a term of the loss for some peers only
        )
    ),
    "gpt-0.1b": _gpt(12, 768, 12),
    "gpt-1.3b": NamedModel(PRESETS["gpt-1.3b"]),
    "gpt-2.7b": _gpt(32, 2560, 32),
    "gpt-7b": _gpt(32, 4096, 32),
    "bloom-20b-slice": NamedModel(replace(PRESETS["bloom-176b"], num_layers=8, num_attention_heads=32), tp=8),
}
"""`small` and the models beginning with `small-` are no published models: they are a CPU's."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the model, its batch and its rank."""
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--layers", type=int, help="in place of the model's, as the next four")
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--heads", type=int, help="by default as many as keep the model's size of a head")
    parser.add_argument("--seq-length", type=int)
    parser.add_argument("--vocab-size", type=int)
    parser.add_argument(
        "--micro-batch-size",
        type=int,
        help="by default 1; of `small` 2; train_step.py takes the largest that fits a GPU",
    )
    parser.add_argument("--microbatches", type=int, default=1, help="of a step")
    parser.add_argument("--params-dtype", choices=("fp32", "bf16"), help="by default fp32 on a CPU")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="of a CPU")
    parser.add_argument("--flags", default="", help="further flags of megalite, in one word")


def named_model(args: argparse.Namespace, dropout: float) -> NamedModel:
    """Return the model of the flags, with a vocabulary that needs no padding."""
    model, tp = MODELS[args.model]
    hidden = args.hidden or model.hidden_size
    model = replace(
        model,
        num_layers=args.layers or model.num_layers,
        hidden_size=hidden,
        num_attention_heads=args.heads or max(1, hidden // model.head_dim),
        seq_length=args.seq_length or model.seq_length,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        params_dtype=args.params_dtype,
    )
    if args.vocab_size:
        model = replace(model, vocab_size=args.vocab_size, pad_vocab_size_to=None)
    return NamedModel(replace(model, vocab_size=padded_vocab_size(model, tp)), tp)


def config_of(named: NamedModel, args: argparse.Namespace, micro_batch_size: int) -> Config:
    """Return a run of the model on one rank, with the further flags of megalite.

    Raises:
        ConfigError: the shape or the flags do not fit each other.
    """
    config = Config(
        model=named.model,
        parallel=ParallelConfig(num_threads=args.threads, tensor_model_parallel_size=named.tp),
        optimizer=OptimizerConfig(lr=1e-4, lr_decay_style="constant"),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(
            micro_batch_size=micro_batch_size,
            global_batch_size=micro_batch_size * args.microbatches,
            train_iters=100_000,
            eval_iters=0,
        ),
    )
    if args.flags:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(to_yaml(config))
            file.flush()
            config, _ = parse(["--config", file.name, *args.flags.split()])
    check_config(config, named.tp)
    return config


def like(name: str, model: ModelConfig) -> NamedModel:
    """Return the model of that name in another's precision and with its dropout."""
    other, tp = MODELS[name]
    changed = replace(
        other,
        params_dtype=model.params_dtype,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
    )
    return NamedModel(changed, tp)
