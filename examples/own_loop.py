r"""Write the training loop yourself, over a trainer that has the model, the optimizer and the data.

torchrun --nproc-per-node 4 examples/own_loop.py --tp 2 --pp 2 --preset gpt-tiny --mock-data \
    --vocab-size 512 --train-iters 20 --lr 1e-3 --global-batch-size 8 --micro-batch-size 2 --save checkpoints
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import megalite


def main(arguments: Sequence[str]) -> None:
    """Train, evaluate at the end and save a checkpoint that any layout loads, if there is a --save folder."""
    launch = megalite.Launch.from_environment()
    config, _ = megalite.parse(arguments)
    megalite.check_config(config, launch.world_size)
    with (
        megalite.Topology.start(config.parallel.mesh, launch) as topology,
        megalite.hold_folder(config.checkpoint.save, topology) as lease,  # no other run saves there
        megalite.start_trainer(config, topology, lease=lease) as trainer,
    ):
        for _ in range(config.num_iterations(topology.dp.size)):
            result = trainer.step()
            if topology.rank == 0:
                print(f"iteration {result.plan.iteration}: loss {result.loss:.4f}")
        assert trainer.datasets.valid is not None
        losses = trainer.evaluate(trainer.datasets.valid, first_sample=0)
        if topology.rank == 0:
            print(f"validation loss {losses['lm_loss']:.4f}")
        if config.checkpoint.save is not None:
            trainer.save(is_last=True)


if __name__ == "__main__":
    megalite.run_rank(main, sys.argv[1:])  # prints a mistake of the user as one line
