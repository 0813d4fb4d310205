#!/usr/bin/env python
"""Tokens per second of one rank of megalite, as a ratio to the same model in plain PyTorch.

python benchmarks/train_step.py --hidden 512 --layers 6 --threads 1

Plain PyTorch is what a careful user writes without megalite: nn.Linear, nn.LayerNorm, F.cross_entropy,
scaled_dot_product_attention, fused AdamW, clip_grad_norm_. Each trains on the same batches in its own
process, turn by turn, so that a busy neighbour slows both; the ratio is of the medians.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import ModelConfig, OptimizerConfig, ParallelConfig
from megalite.data.batch import Microbatch
from megalite.model.stage import GPTStage
from megalite.optim.learning_rate import LearningRate
from megalite.optim.optimizer import Optimizer
from megalite.topology import Launch, Topology
from megalite.train.step import TrainStep, build_pipeline
from megalite.train.timers import Timers


class PlainLayer(nn.Module):
    """A pre-norm transformer layer of torch's own modules, ``[b, s, h]``."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        h = model.hidden_size
        self.num_heads = model.num_attention_heads
        self.dropout = model.hidden_dropout
        self.attention_dropout = model.attention_dropout
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.projection = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, model.ffn_size), nn.Linear(model.ffn_size, h)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attention_dropout, is_causal=True)
        x = x + F.dropout(self.projection(y.transpose(1, 2).flatten(2)), self.dropout)
        y = self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + F.dropout(y, self.dropout)


class PlainGPT(nn.Module):
    """GPT-2 in torch's own modules; gives the mean loss."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.dropout = model.hidden_dropout
        self.word = nn.Embedding(model.padded_vocab_size(1), model.hidden_size)
        self.position = nn.Embedding(model.num_positions, model.hidden_size)
        self.layers = nn.Sequential(*(PlainLayer(model) for _ in range(model.num_layers)))
        self.norm = nn.LayerNorm(model.hidden_size)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """``[b, s]`` twice -> a scalar."""
        x = F.dropout(self.word(tokens) + self.position.weight[: tokens.shape[1]], self.dropout)
        logits = F.linear(self.norm(self.layers(x)), self.word.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def plain_step(model: ModelConfig, batches: list[Microbatch]) -> Callable[[], float]:
    """A training step in plain PyTorch; it returns the loss."""
    network = PlainGPT(model)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            loss = network(batch.tokens, batch.labels) / len(batches)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        return total

    return step


def megalite_step(model: ModelConfig, batches: list[Microbatch], topology: Topology) -> Callable[[], float]:
    """A training step in megalite; it returns the loss."""
    stage = GPTStage(model, topology, range(model.num_layers), seed=1)
    config = OptimizerConfig(lr=1e-4, lr_decay_style="constant")
    optimizer = Optimizer(
        stage.named_parameters(), stage.tied_weight, config, topology, bucket_size=40_000_000
    )
    micro_batch_size = batches[0].tokens.shape[0]
    step = TrainStep(
        build_pipeline(stage, topology, "1f1b", micro_batch_size, micro_batch_size * len(batches)),
        optimizer,
        LearningRate(config, train_iters=1000),
        lambda consumed, index: batches[index],
        len(batches),
        topology,
        Timers(),
    )
    return lambda: step(1, 0).loss


def serve(connection: Connection, kind: str, model: ModelConfig, args: argparse.Namespace) -> None:
    """Runs one step of `kind` for each word that comes, and answers with its seconds."""
    torch.set_num_threads(args.threads)
    batches = random_batches(model, args.micro_batch_size, args.microbatches)
    with ExitStack() as stack:
        if kind == "megalite":
            parallel = ParallelConfig(num_threads=args.threads)
            topology = stack.enter_context(Topology.start(parallel, Launch(0, 1, 0, 1)))
            step = megalite_step(model, batches, topology)
        else:
            step = plain_step(model, batches)
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


def random_batches(model: ModelConfig, micro_batch_size: int, num_microbatches: int) -> list[Microbatch]:
    """Batches of random tokens."""
    generator = torch.Generator().manual_seed(0)
    assert model.vocab_size is not None
    shape = (micro_batch_size, model.seq_length + 1)
    texts = [torch.randint(0, model.vocab_size, shape, generator=generator) for _ in range(num_microbatches)]
    numbers = torch.arange(micro_batch_size)
    return [Microbatch(text[:, :-1].contiguous(), text[:, 1:].contiguous(), numbers) for text in texts]


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
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args.threads} thread(s), {vars(args)}")
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
        )
        seconds = measure(model, args)
        num_tokens = args.micro_batch_size * args.microbatches * args.seq_length
        ours, plain = (num_tokens / seconds[kind] for kind in ("megalite", "plain"))
        print(f"{dropout:8.1f} {ours:15.0f} {plain:12.0f} {ours / plain:6.2f}", flush=True)


if __name__ == "__main__":
    main()
