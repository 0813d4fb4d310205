"""Write a job for Slurm or Kubernetes that trains in a planned layout and restarts until the run is done.

megalite launch --nodes 16 --gpu a100-80 --time 20:00:00 --preset gpt3-175b --tp 8 --pp 16 ...
megalite launch --nodes 4 --gpu h100 --time 1-00:00:00 --config run.yaml --search
megalite launch --nodes 4 --gpu h100 --kubernetes REGISTRY/megalite --volume runs:/runs --save /runs/a ...

It takes all flags of megalite train, and the flags of megalite plan that describe the cluster (--gpu-set,
--node-gbps, --network-gbps, --train-tokens, --price-per-gpu-hour, --padded-vocab-size, --search). It prints
the plan, refuses a layout that does not fit in memory, and warns about likely problems.
"""

from __future__ import annotations

from collections.abc import Sequence

from megalite.plan.launch.write_job import write_job


def main(arguments: Sequence[str]) -> None:
    """Write the job and print the plan."""
    assert __doc__
    print("\n".join(write_job(arguments, __doc__)))
