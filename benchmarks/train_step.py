#!/usr/bin/env python
"""Tokens per second of one rank of megalite, as a ratio to the same model in plain PyTorch.

python benchmarks/train_step.py --hidden 512 --layers 6 --threads 1

Plain PyTorch is what a careful user writes without megalite: nn.Linear, nn.LayerNorm, F.cross_entropy,
scaled_dot_product_attention, fused AdamW, clip_grad_norm_. Each trains on random tokens in its own process,
turn by turn, so that a busy neighbour slows both; the ratio is of the medians. In bf16 plain PyTorch computes
under autocast, with weights in fp32.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection

import torch
from plain_gpt import PlainGPT, mean_loss
from torch import Tensor, nn

from megalite.config import Config, DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from megalite.topology import Launch, Topology
from megalite.train.prepare import build_data
from megalite.train.telemetry.timers import Timers
from megalite.train.trainer import Trainer

Batch = tuple[Tensor, Tensor]
"""Tokens and labels, ``[b, s]`` each."""


def plain_step(model: ModelConfig, batches: list[Batch]) -> Callable[[], float]:
    """A training step in plain PyTorch; it returns the loss."""
    network = PlainGPT(model)
    if model.params_dtype == "bf16":
        network.forward = torch.autocast("cpu", torch.bfloat16)(network.forward)  # type: ignore[method-assign]
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for tokens, labels in batches:
            loss = mean_loss(network(tokens), labels) / len(batches)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        return total

    return step


def megalite_step(config: Config, topology: Topology) -> Callable[[], float]:
    """A training step in megalite; it returns the loss."""
    timers = Timers()
    trainer = Trainer(config, topology, build_data(config, topology, timers), timers)
    return lambda: trainer.step().loss


def config_of(model: ModelConfig, args: argparse.Namespace) -> Config:
    """What plain PyTorch does, as a config."""
    return Config(
        model=model,
        parallel=ParallelConfig(num_threads=args.threads),
        optimizer=OptimizerConfig(lr=1e-4, lr_decay_style="constant"),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(
            micro_batch_size=args.micro_batch_size,
            global_batch_size=args.micro_batch_size * args.microbatches,
            train_iters=100_000,
            eval_iters=0,
        ),
    )


def serve(connection: Connection, kind: str, model: ModelConfig, args: argparse.Namespace) -> None:
    """Runs one step of `kind` for each word that comes, and answers with its seconds."""
    torch.set_num_threads(args.threads)
    with ExitStack() as stack:
        if kind == "megalite":
            config = config_of(model, args)
            topology = stack.enter_context(Topology.start(config.parallel, Launch(0, 1, 0, 1)))
            step = megalite_step(config, topology)
        else:
            step = plain_step(model, random_batches(model, args.micro_batch_size, args.microbatches))
        while connection.recv():
            start = time.perf_counter()
            step()
            connection.send(time.perf_counter() - start)


def measure(model: ModelConfig, args: argparse.Namespace) -> dict[str, float]:
    """Median seconds of a step of each kind, run turn by turn after three rounds of warm-up."""
    context = multiprocessing.get_context("spawn")
    ends: dict[str, Connection] = {}
    for kind in ("megalite", "plain"):
        ends[kind], other = context.Pipe()
        context.Process(target=serve, args=(other, kind, model, args), daemon=True).start()
    seconds: dict[str, list[float]] = {kind: [] for kind in ends}
    for round_number in range(-3, args.rounds):
        for kind, end in ends.items():
            end.send(True)
            taken = end.recv()
            if round_number >= 0:
                seconds[kind].append(taken)
    for end in ends.values():
        end.send(False)
    return {kind: statistics.median(taken) for kind, taken in seconds.items()}


def random_batches(model: ModelConfig, micro_batch_size: int, num_microbatches: int) -> list[Batch]:
    """Batches of random tokens."""
    generator = torch.Generator().manual_seed(0)
    assert model.vocab_size is not None
    shape = (micro_batch_size, model.seq_length + 1)
    texts = [torch.randint(0, model.vocab_size, shape, generator=generator) for _ in range(num_microbatches)]
    return [(text[:, :-1].contiguous(), text[:, 1:].contiguous()) for text in texts]


def main() -> None:
    """Prints a row for dropout 0 and one for dropout 0.1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--params-dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args.threads} thread(s), {vars(args)}, load {os.getloadavg()[0]:.1f}")
    print(f"{'dropout':>8} {'megalite tok/s':>15} {'plain tok/s':>12} {'ratio':>6}")
    for dropout in (0.0, 0.1):
        model = ModelConfig(
            num_layers=args.layers,
            hidden_size=args.hidden,
            num_attention_heads=max(1, args.hidden // 64),
            seq_length=args.seq_length,
            vocab_size=args.vocab_size,
            hidden_dropout=dropout,
            attention_dropout=dropout,
            params_dtype=args.params_dtype,
        )
        seconds = measure(model, args)
        num_tokens = args.micro_batch_size * args.microbatches * args.seq_length
        ours, plain = (num_tokens / seconds[kind] for kind in ("megalite", "plain"))
        print(f"{dropout:8.1f} {ours:15.0f} {plain:12.0f} {ours / plain:6.2f}", flush=True)


if __name__ == "__main__":
    main()
