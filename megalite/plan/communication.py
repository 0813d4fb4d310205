"""Time of collectives and messages."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.plan.cluster import HOP_SECONDS, START_SECONDS, Cluster


@dataclass(frozen=True)
class Group:
    """Ranks that talk to each other, at equal distances.

    Attributes:
        size: ranks.
        stride: from one of them to the next.
    """

    cluster: Cluster
    size: int
    stride: int

    @property
    def is_inside_node(self) -> bool:
        """Whether no message leaves a node."""
        return self.size * self.stride <= self.cluster.gpus_per_node

    @property
    def bytes_per_second(self) -> float:
        """Of each rank, while all groups of the same kind talk.

        A ring over nodes enters and leaves each of them once: as many of its ranks as a node holds
        share the traffic, so that a rank's part of the network carries it that many times faster.
        """
        cluster = self.cluster
        inside = cluster.node_gbps * 1e9 * cluster.gpu.link_share
        if self.is_inside_node:
            return inside
        local = max(1, cluster.gpus_per_node // self.stride)
        return min(inside, cluster.network_gbps * 1e9 * cluster.gpu.link_share * local)

    def gather_seconds(self, num_bytes: float, num_calls: float = 1) -> float:
        """All-gather to, or reduce-scatter of, `num_bytes` on each rank, in so many calls."""
        if self.size == 1 or num_bytes == 0:
            return 0.0
        passed = num_bytes * (self.size - 1) / self.size
        latency = START_SECONDS + (self.size - 1) * HOP_SECONDS
        return num_calls * latency + passed / self.bytes_per_second

    def reduce_seconds(self, num_bytes: float, num_calls: float = 1) -> float:
        """All-reduce: a reduce-scatter and an all-gather; trees bound the latency of many ranks."""
        if self.size == 1 or num_bytes == 0:
            return 0.0
        passed = 2 * num_bytes * (self.size - 1) / self.size
        hops = 2 * min(self.size - 1, 8 + 4 * self.size.bit_length())
        return num_calls * (START_SECONDS + hops * HOP_SECONDS) + passed / self.bytes_per_second

    def message_seconds(self, num_bytes: float) -> float:
        """A message to the next one in the group."""
        return START_SECONDS + num_bytes / self._next_bytes_per_second if self.size > 1 else 0.0

    @property
    def _next_bytes_per_second(self) -> float:
        cluster = self.cluster
        gbps = cluster.node_gbps if self.stride < cluster.gpus_per_node else cluster.network_gbps
        return gbps * 1e9 * cluster.gpu.link_share
