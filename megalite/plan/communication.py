"""Time of collectives and messages.

The cost of a collective is NCCL's own model (src/graph/tuning.cc): a start, a latency for each step of the
ring or the tree, and the bytes over the bandwidth. NCCL has three protocols, which trade bandwidth for
latency, and takes the one that its model says is fastest; so does this module.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megalite.plan.cluster import Cluster


@dataclass(frozen=True)
class Protocol:
    """One of NCCL's protocols. All latencies are in seconds.

    Source: baseLatencies and hwLatencies of NCCL 2.2x, src/graph/tuning.cc.

    Attributes:
        bandwidth: share of the link's rate.
        start: of a collective.
        node_hop: of a step of a ring between two GPUs of a node.
        network_hop: of a step of a ring to another node.
        tree_node_hop, tree_network_hop: the same of a tree.
    """

    bandwidth: float
    start: float
    node_hop: float
    network_hop: float
    tree_node_hop: float
    tree_network_hop: float


PROTOCOLS = (
    Protocol(0.50, 6.6e-6, 1.0e-6, 2.7e-6, 0.6e-6, 5.0e-6),  # LL
    Protocol(0.92, 14.0e-6, 1.9e-6, 4.0e-6, 1.25e-6, 8.5e-6),  # LL128
    Protocol(1.00, 8.4e-6, 3.4e-6, 14.0e-6, 4.0e-6, 14.0e-6),  # Simple
)
TREE_BANDWIDTH = 0.92
"""Share of a ring's bandwidth that a tree has."""


@dataclass(frozen=True)
class Group:
    """Ranks that talk to each other, at equal distances.

    Attributes:
        size: ranks.
        stride: from one of them to the next.
        one_adapter: a ring over nodes runs over one adapter of a node, however many ranks it has there.
    """

    cluster: Cluster
    size: int
    stride: int
    one_adapter: bool = False

    @property
    def is_inside_node(self) -> bool:
        """Whether no message leaves a node."""
        return self.size * self.stride <= self.cluster.gpus_per_node

    @property
    def ranks_per_node(self) -> int:
        """Return how many of the group's ranks a node holds."""
        if self.is_inside_node:
            return self.size
        return max(1, self.cluster.gpus_per_node // self.stride)

    @property
    def num_nodes(self) -> int:
        """Return how many nodes the group spans."""
        return -(-self.size // self.ranks_per_node)

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
        adapters = 1 if self.one_adapter else self.ranks_per_node
        return min(inside, cluster.network_gbps * 1e9 * cluster.gpu.link_share * adapters)

    def gather_seconds(self, num_bytes: float, num_calls: float = 1) -> float:
        """Return the seconds of an all-gather to, or a reduce-scatter of, `num_bytes` on each rank.

        Each is a ring of size - 1 steps.

        Args:
            num_calls: collectives that the bytes are cut into.
        """
        if self.size == 1 or num_bytes == 0:
            return 0.0
        return min(self._ring_seconds(protocol, num_bytes, num_calls) for protocol in PROTOCOLS)

    def reduce_seconds(self, num_bytes: float, num_calls: float = 1) -> float:
        """Return the seconds of an all-reduce: a reduce-scatter and an all-gather, or a tree up and down."""
        if self.size == 1 or num_bytes == 0:
            return 0.0
        return min(
            min(
                self._ring_seconds(protocol, num_bytes, num_calls, turns=2),
                self._tree_seconds(protocol, num_bytes, num_calls),
            )
            for protocol in PROTOCOLS
        )

    def _ring_seconds(self, protocol: Protocol, num_bytes: float, num_calls: float, turns: int = 1) -> float:
        network_hops = 0 if self.is_inside_node else self.num_nodes - 1
        node_hops = self.size - 1 - network_hops
        hops = node_hops * protocol.node_hop + network_hops * protocol.network_hop
        passed = turns * num_bytes * (self.size - 1) / self.size
        latency = protocol.start + turns * hops
        return num_calls * latency + passed / (self.bytes_per_second * protocol.bandwidth)

    def _tree_seconds(self, protocol: Protocol, num_bytes: float, num_calls: float) -> float:
        hops = (self.ranks_per_node - 1) * protocol.tree_node_hop
        hops += math.floor(math.log2(self.num_nodes)) * protocol.tree_network_hop
        rate = self.bytes_per_second * protocol.bandwidth * TREE_BANDWIDTH
        # NCCL has two trees. Of two nodes each is a leaf of one tree and the root of the other, so that it
        # sends half of the bytes up and half down; of more nodes, one sends to two others.
        passed = num_bytes * (1 if self.num_nodes == 2 else 2)
        return num_calls * (protocol.start + 2 * hops) + passed / rate

    def message_seconds(self, num_bytes: float) -> float:
        """Return the seconds of a message to the next rank of the group, by the protocol Simple."""
        if self.size == 1:
            return 0.0
        simple = PROTOCOLS[-1]
        is_near = self.stride < self.cluster.gpus_per_node
        gbps = self.cluster.node_gbps if is_near else self.cluster.network_gbps
        hop = simple.node_hop if is_near else simple.network_hop
        return simple.start + hop + num_bytes / (gbps * 1e9 * self.cluster.gpu.link_share)
