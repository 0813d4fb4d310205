"""A cluster, and the time of collectives and messages between its ranks, by NCCL's own model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from megalite.utils.hardware.gpus import Gpu


@dataclass(frozen=True)
class Cluster:
    """Cluster of equal nodes with equal GPUs. Ranks fill one node after the other.

    Attributes:
        node_gbps: gigabytes per second from a GPU to others in its node, one way.
        network_gbps: gigabytes per second from a GPU to other nodes, one way, while all GPUs of its node
            send.
    """

    gpu: Gpu
    world_size: int
    gpus_per_node: int
    node_gbps: float
    network_gbps: float

    @property
    def ranks_per_node(self) -> int:
        """Return the number of ranks on a node, of which a small run leaves some GPUs free."""
        return min(self.world_size, self.gpus_per_node)

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes. The last node may be used only in part."""
        return -(-self.world_size // self.gpus_per_node)

    @cached_property
    def ranks_per_domain(self) -> int:
        """Return how many consecutive ranks NVLink connects: those of a node, or of a rack.

        Every rack holds as many nodes of the run, or all but the last one if racks would be half empty.
        """
        most, num_nodes = max(1, self.gpu.nvlink_gpus // self.gpus_per_node), self.num_nodes
        nodes = max(number for number in range(1, most + 1) if num_nodes % number == 0)
        if 2 * nodes <= most:
            nodes = math.ceil(num_nodes / math.ceil(num_nodes / most))
        return self.gpus_per_node * nodes

    def ring_bandwidth(self, ranks_per_node: int) -> float:
        """Return the bytes per second of a ring over nodes that has this many ranks on each.

        It enters and leaves each node once. Its ranks share that traffic, each over its own part of the
        network.
        """
        return self.network_gbps * 1e9 * self.gpu.link_share * ranks_per_node


@dataclass(frozen=True)
class Protocol:
    """One of NCCL's protocols. All latencies are in seconds.

    Source: baseLatencies and hwLatencies of NCCL 2.2x, src/graph/tuning.cc.

    Attributes:
        bandwidth: share of the link's bandwidth.
        start: latency of starting a collective.
        node_hop: latency of a ring's step between two GPUs of a node.
        network_hop: latency of a ring's step to another node.
        tree_node_hop, tree_network_hop: the same latencies for a tree.
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
CONTENTION = 0.25
"""Seconds of computation that a second of overlapped communication costs, since they share the GPU."""
TREE_BANDWIDTH = 0.92
"""Bandwidth of a tree, as a share of a ring's."""


@dataclass(frozen=True)
class Group:
    """Equally spaced ranks that communicate with each other.

    Attributes:
        size: number of ranks.
        stride: distance from one rank to the next.
    """

    cluster: Cluster
    size: int
    stride: int

    @property
    def is_inside_node(self) -> bool:
        """Return whether all ranks of each such group are on one node, or in one rack with NVLink."""
        cluster, span = self.cluster, self.size * self.stride
        domain = cluster.ranks_per_domain
        is_rack = cluster.gpus_per_node < domain < cluster.world_size
        return span <= domain and not (is_rack and domain % span)

    @property
    def ranks_per_node(self) -> int:
        """Return how many of the group's ranks are on one node or rack."""
        if self.is_inside_node:
            return self.size
        near = max(1, self.cluster.ranks_per_domain // self.stride)
        return near if near < self.size else math.gcd(near, self.size)  # some groups straddle two racks

    @property
    def num_nodes(self) -> int:
        """Return how many nodes the group spans."""
        return -(-self.size // self.ranks_per_node)

    @property
    def bytes_per_second(self) -> float:
        """Return the bandwidth of each rank, while all groups of the same kind communicate."""
        cluster = self.cluster
        inside = cluster.node_gbps * 1e9 * cluster.gpu.link_share
        if self.is_inside_node:
            return inside
        return min(inside, cluster.ring_bandwidth(self.ranks_per_node))

    def gather_seconds(self, num_bytes: float, num_calls: float = 1) -> float:
        """Return the seconds of an all-gather to, or a reduce-scatter of, `num_bytes` on each rank.

        Both are rings of size - 1 steps.

        Args:
            num_calls: number of collectives that the bytes are split into.
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

    def all_to_all_seconds(self, num_bytes: float) -> float:
        """Return the seconds of an all-to-all in which each rank sends `num_bytes` in equal parts.

        NCCL sends a message to each rank. A rank does not send its own part.
        """
        if self.size == 1 or num_bytes == 0:
            return 0.0
        part, near = num_bytes / self.size, self.ranks_per_node
        return self.exchange_seconds((near - 1) * part, (self.size - near) * part)

    def exchange_seconds(self, inside: float, outside: float) -> float:
        """Return the seconds in which each rank sends so many bytes inside its node, and over the network.

        Both happen at the same time. Each rank has its own part of the network.
        """
        cluster, simple = self.cluster, PROTOCOLS[-1]
        rate = cluster.gpu.link_share * 1e9
        hop = simple.node_hop if self.is_inside_node else simple.network_hop
        longest = max(inside / (rate * cluster.node_gbps), outside / (rate * cluster.network_gbps))
        return simple.start + hop + longest

    def _ring_seconds(self, protocol: Protocol, num_bytes: float, num_calls: float, turns: int = 1) -> float:
        network_hops = 0 if self.is_inside_node else self.num_nodes - 1
        node_hops = self.size - 1 - network_hops
        hops = node_hops * protocol.node_hop + network_hops * protocol.network_hop
        sent = turns * num_bytes * (self.size - 1) / self.size
        latency = protocol.start + turns * hops
        return num_calls * latency + sent / (self.bytes_per_second * protocol.bandwidth)

    def _tree_seconds(self, protocol: Protocol, num_bytes: float, num_calls: float) -> float:
        hops = (self.ranks_per_node - 1) * protocol.tree_node_hop
        hops += math.floor(math.log2(self.num_nodes)) * protocol.tree_network_hop
        rate = self.bytes_per_second * protocol.bandwidth * TREE_BANDWIDTH
        # NCCL has two trees. Each of two nodes is a leaf of one tree and the root of the other, so it sends
        # half of the bytes up and half down; with more nodes, a node sends to two others.
        sent = num_bytes * (1 if self.num_nodes == 2 else 2)
        return num_calls * (protocol.start + 2 * hops) + sent / rate

    def message_seconds(self, num_bytes: float) -> float:
        """Return the seconds of a message to the group's next rank, with the protocol Simple."""
        if self.size == 1:
            return 0.0
        simple = PROTOCOLS[-1]
        is_near = self.stride < self.cluster.ranks_per_domain
        gbps = self.cluster.node_gbps if is_near else self.cluster.network_gbps
        hop = simple.node_hop if is_near else simple.network_hop
        return simple.start + hop + num_bytes / (gbps * 1e9 * self.cluster.gpu.link_share)
