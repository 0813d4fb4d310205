#!/usr/bin/env python
"""Do the activations of a wide model stay as large as the base model's, with muP and without it?

python benchmarks/coordinate_check.py
python benchmarks/coordinate_check.py --learning-rates --data-path runs/bytes_text_document

Both train a small GPT at several widths with the same hyperparameters. The first command prints the mean
absolute values of activations after a few steps on random tokens (Yang et al. 2021, arXiv 2203.03466,
section D.1). The second prints losses for several learning rates, on a corpus of bytes: with muP, the best
rate is the same at every width.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from megalite.config import Config, DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.train.trainer import start_trainer
from megalite.utils.commands import run_main
from megalite.utils.log import log

WIDTHS = (64, 128, 256, 512)
NUM_STEPS = 4
RATE = 1e-2
RATES = tuple(2.0**-power for power in range(11, 3, -1))
NUM_TRAINED_STEPS = 60
HEAD_DIM = 16
PARTS = {"attention": "layers.1.attention", "mlp": "layers.1.mlp", "logits": "output.bound"}
"""Names of the columns, and the modules whose outputs are measured. The logits are those of `output.bound`,
which is the identity."""


def config_of(width: int, base_width: int | None, optimizer: OptimizerConfig, num_steps: int) -> Config:
    """Return a GPT with more heads at larger widths.

    Args:
        base_width: base width of muP; None to train without muP.
    """
    return Config(
        model=ModelConfig(
            num_layers=2,
            hidden_size=width,
            num_attention_heads=width // HEAD_DIM,
            mup_base_width=base_width,
            vocab_size=257,
            seq_length=32,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        ),
        optimizer=replace(optimizer, lr_decay_style="constant"),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(micro_batch_size=8, global_batch_size=8, train_iters=num_steps, eval_iters=0),
    )


def activation_sizes(topology: Topology, config: Config, num_steps: int) -> dict[str, float]:
    """Train, and return the mean absolute value of each part's output in the forward after the last step."""
    sizes = dict[str, float]()

    def measure(name: str, output: Tensor) -> None:
        sizes[name] = output.detach().abs().mean().item()

    with start_trainer(config, topology) as trainer:
        (stage,) = trainer.chunks
        for name, module in PARTS.items():
            stage.get_submodule(module).register_forward_hook(
                lambda _module, _inputs, output, name=name: measure(
                    name, output if isinstance(output, Tensor) else output.x
                )
            )
        for _ in range(num_steps + 1):
            trainer.step()
    return sizes


def final_loss(topology: Topology, config: Config, num_steps: int) -> float:
    """Train, and return the mean loss of the last ten steps."""
    with start_trainer(config, topology) as trainer:
        losses = [trainer.step().loss for _ in range(num_steps)]
    return sum(losses[-10:]) / 10


def sizes_by_width(
    topology: Topology, widths: Sequence[int], optimizer: OptimizerConfig, uses_mup: bool
) -> dict[int, dict[str, float]]:
    """Return the sizes of activations at each width; the first one is the base width."""
    sizes = {}
    for width in widths:
        config = config_of(width, widths[0] if uses_mup else None, optimizer, NUM_STEPS + 1)
        sizes[width] = activation_sizes(topology, config, NUM_STEPS)
    return sizes


def losses_by_width(
    topology: Topology, optimizer: OptimizerConfig, data: DataConfig, uses_mup: bool
) -> dict[int, list[float]]:
    """Return the losses of `RATES` at each width."""
    losses = dict[int, list[float]]()
    for width in WIDTHS:
        config = config_of(width, WIDTHS[0] if uses_mup else None, optimizer, NUM_TRAINED_STEPS)
        configs = [replace(config, optimizer=replace(config.optimizer, lr=rate), data=data) for rate in RATES]
        losses[width] = [final_loss(topology, each, NUM_TRAINED_STEPS) for each in configs]
    return losses


def print_sizes(sizes: dict[int, dict[str, float]]) -> None:
    """Print a line for each width."""
    print(f"{'width':>12}" + "".join(f"{name:>12}" for name in PARTS))
    for width, by_part in sizes.items():
        print(f"{width:>12}" + "".join(f"{by_part[name]:>12.4f}" for name in PARTS))


def print_losses(losses: dict[int, list[float]]) -> None:
    """Print a line for each width; a star marks its smallest loss."""
    print(f"{'width':>8}" + "".join(f"{rate:>10.5f}" for rate in RATES))
    for width, by_rate in losses.items():
        cells = (f"{loss:.3f}{'*' if loss == min(by_rate) else ' '}" for loss in by_rate)
        print(f"{width:>8}" + "".join(f"{cell:>10}" for cell in cells))


def main(arguments: Sequence[str]) -> None:
    """Print a table with muP, and one without it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--optimizer", choices=("adam", "muon"), default="adam")
    parser.add_argument("--learning-rates", action="store_true", help="print losses by learning rate")
    parser.add_argument("--data-path", help="preprocessed bytes, for --learning-rates")
    args = parser.parse_args(arguments)
    if args.learning_rates != (args.data_path is not None):
        parser.error("--learning-rates needs --data-path, and only it reads data")
    data = DataConfig(data_path=(args.data_path,), tokenizer_type="byte")
    log.setLevel(logging.ERROR)
    optimizer = OptimizerConfig(optimizer=args.optimizer, muon_scale_mode="unit_rms_norm", lr=RATE)
    with Topology.start(ParallelConfig(num_threads=1).mesh, Launch(0, 1, 0, 1)) as topology:
        for uses_mup in (True, False):
            print(f"with --mup-base-width {WIDTHS[0]}" if uses_mup else "without muP")
            if args.learning_rates:
                print_losses(losses_by_width(topology, optimizer, data, uses_mup))
            else:
                print_sizes(sizes_by_width(topology, WIDTHS, optimizer, uses_mup))


if __name__ == "__main__":
    run_main(main, sys.argv[1:])
