"""The GPUs of a run and how far they are from each other."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.plan.gpu import Gpu


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal GPUs; ranks fill one node after the other.

    Attributes:
        node_gbps: gigabytes a second of a GPU to the others in its node, one way.
        network_gbps: of a GPU to other nodes, one way, while all GPUs of its node send.
    """

    gpu: Gpu
    world_size: int
    gpus_per_node: int
    node_gbps: float
    network_gbps: float

    @property
    def num_nodes(self) -> int:
        """Nodes, the last of which may be used in part."""
        return -(-self.world_size // self.gpus_per_node)
