"""The time of collectives and point-to-point messages, by NCCL's own model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import comb

from megalite.config.parallel import CpCommType
from megalite.distributed.axes import EXPERTS
from megalite.observe.unit_record import AttentionCall, PhaseRecord
from megalite.plan.planned_run import Cluster, PlannedRun


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
        one_adapter: a ring over nodes uses one network adapter of a node, however many ranks the node has.
    """

    cluster: Cluster
    size: int
    stride: int
    one_adapter: bool = False

    @property
    def is_inside_node(self) -> bool:
        """Return whether all ranks are on one node."""
        return self.size * self.stride <= self.cluster.gpus_per_node

    @property
    def ranks_per_node(self) -> int:
        """Return how many of the group's ranks are on one node."""
        if self.is_inside_node:
            return self.size
        return max(1, self.cluster.gpus_per_node // self.stride)

    @property
    def num_nodes(self) -> int:
        """Return how many nodes the group spans."""
        return -(-self.size // self.ranks_per_node)

    @property
    def bytes_per_second(self) -> float:
        """Return the bandwidth of each rank, while all groups of the same kind communicate.

        A ring over nodes enters and leaves each node once. All of its ranks on a node share that traffic,
        each over its own part of the network.
        """
        cluster = self.cluster
        inside = cluster.node_gbps * 1e9 * cluster.gpu.link_share
        if self.is_inside_node:
            return inside
        adapters = 1 if self.one_adapter else self.ranks_per_node
        return min(inside, cluster.network_gbps * 1e9 * cluster.gpu.link_share * adapters)

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
        is_near = self.stride < self.cluster.gpus_per_node
        gbps = self.cluster.node_gbps if is_near else self.cluster.network_gbps
        hop = simple.node_hop if is_near else simple.network_hop
        return simple.start + hop + num_bytes / (gbps * 1e9 * self.cluster.gpu.link_share)


def ep_seconds(run: PlannedRun, phase: PhaseRecord) -> float:
    """Return the seconds of the messages between the ranks that hold the experts of a group of tokens.

    The busiest rank's messages count, for which the others wait.
    """
    if not run.config.parallel.has_expert_axes:
        return 0.0
    sizes = run.sizes_in(EXPERTS)
    group = Group(run.cluster, sizes["ep"] * sizes["etp"], 1)
    exchange = group.all_to_all_seconds
    if run.program.sends_tokens_once and sizes["etp"] == 1:
        exchange = partial(dispatch_seconds, run, group)
    calls = (each.call for each in phase.collectives if each.call.is_over_experts)
    return sum(
        (exchange if call.kind == "all-to-all" else group.gather_seconds)(call.num_bytes) for call in calls
    )


def dispatch_seconds(run: PlannedRun, group: Group, num_bytes: float) -> float:
    """Return the seconds in which tokens reach their experts' ranks, or outputs come back, as with DeepEP.

    An all-to-all sends a token once for each of its experts. DeepEP sends it once to each node that has some
    of them, to the GPU with the sender's number, which passes it on once to each rank of the node that has
    some (DeepSeek-AI 2024, DeepSeek-V3, section 3.2.2). The outputs are added up on the same way back.

    Args:
        group: the ranks that hold the experts.
        num_bytes: size of the rows, one for each expert of a token.
    """
    if group.size == 1 or num_bytes == 0:
        return 0.0
    token_bytes = num_bytes / run.config.model.moe_router_topk
    nodes, near = group.num_nodes, group.ranks_per_node
    outside = token_bytes * num_holders(run, nodes) * (nodes - 1) / nodes
    inside = token_bytes * num_holders(run, group.size) * (near - 1) / near
    return group.exchange_seconds(inside, outside)


def num_holders(run: PlannedRun, num_parts: int) -> float:
    """Return how many of equal parts of the experts have some of a token's, in the mean."""
    model = run.config.model
    assert model.num_experts is not None
    topk, num_experts = model.moe_router_topk, model.num_experts
    if run.program.consecutive_experts:
        return max(1.0, topk * num_parts / num_experts)
    others = num_experts - num_experts // num_parts
    return num_parts * (1 - comb(others, topk) / comb(num_experts, topk))


def recurrent_cp_seconds(run: PlannedRun, phase: PhaseRecord) -> float:
    """Return the seconds in which recurrent layers exchange tokens for heads, and heads for tokens.

    Other programs than megalite are assumed to hide it.
    """
    if not run.program.is_own:
        return 0.0
    group = Group(run.cluster, run.cp, run.tp)
    calls = (each.call for each in phase.collectives)
    return sum(
        group.all_to_all_seconds(call.num_bytes)
        for call in calls
        if call.kind == "all-to-all" and call.axis == "cp"
    )


def cp_seconds(run: PlannedRun, call: AttentionCall, attention_seconds: float) -> float:
    """Return the seconds that a call of attention waits for context-parallel communication.

    Other programs than megalite are assumed to hide it, as ring attention does.

    Args:
        attention_seconds: seconds of the computation.
    """
    if call.cp_comm_type is None or not run.program.is_own:
        return 0.0
    return CP_SECONDS[call.cp_comm_type](run, call, attention_seconds)


def _gather_seconds(run: PlannedRun, call: AttentionCall, _: float) -> float:
    """Gather keys and values before a forward, and reduce-scatter their gradients after a backward."""
    group = Group(run.cluster, run.cp, run.tp)
    return group.gather_seconds(_key_elements(call) * call.keys * run.element_bytes)


def _exchange_seconds(run: PlannedRun, call: AttentionCall, _: float) -> float:
    """Exchange queries, keys and values for the part of the heads that the call has, and the output back."""
    heads, _ring = _levels(run, call)
    group = Group(run.cluster, heads, run.tp)
    element = run.element_bytes
    entering = (call.heads * call.size + _key_elements(call)) * call.queries * element
    leaving = call.heads * call.value_size * call.queries * element
    return group.all_to_all_seconds(entering) + group.all_to_all_seconds(leaving)


def _ring_seconds(run: PlannedRun, call: AttentionCall, attention_seconds: float) -> float:
    """Pass keys and values around the ring under the computation."""
    heads, ring = _levels(run, call)
    group = Group(run.cluster, ring, heads * run.tp)
    return exposed_ring_seconds(group, call, _key_elements(call) * run.element_bytes, attention_seconds)


def ring_slices(call: AttentionCall, num_ranks: int) -> float:
    """Return how many slices of keys and values a rank sends, in the mean over the ranks.

    There are two slices for each rank. In causal attention, all ranks need the first slice of a rank, and
    half of them the last one. A window reaches into few slices before a query's own.
    """
    if not call.is_causal:
        return 2.0 * (num_ranks - 1)
    slices = 1.5 * (num_ranks - 1)
    if call.window is None:
        return slices
    length = call.keys / (2 * num_ranks)
    return min(slices, 2.0 * -(-call.window // length) * (num_ranks - 1) / num_ranks)


def exposed_ring_seconds(
    group: Group, call: AttentionCall, bytes_per_token: float, attention_seconds: float
) -> float:
    """Return the seconds that a call of attention waits for messages.

    Backward sends keys and values again, and as many gradients back. Messages run under the computation with
    keys that have arrived; the first computation is with a rank's own keys.

    Args:
        bytes_per_token: bytes of a token's keys and values.
        attention_seconds: seconds of the computation.
    """
    of_slice = bytes_per_token * call.keys / (2 * group.size)
    num_bytes = ring_slices(call, group.size) * of_slice * (2 if call.is_backward else 1)
    # An all-gather of n bytes sends n (size - 1) / size.
    seconds = group.gather_seconds(num_bytes * group.size / (group.size - 1))
    return max(0.0, seconds - attention_seconds)


def _levels_seconds(run: PlannedRun, call: AttentionCall, attention_seconds: float) -> float:
    """Exchange heads between neighbours, and pass keys and values around the ring of their groups."""
    return _exchange_seconds(run, call, 0.0) + _ring_seconds(run, call, attention_seconds)


def _levels(run: PlannedRun, call: AttentionCall) -> tuple[int, int]:
    """Return how many ranks exchange heads for the call, and how many form a ring."""
    assert call.cp_comm_type is not None
    return run.config.parallel.cp_levels(call.cp_comm_type)


def _key_elements(call: AttentionCall) -> int:
    """Return the elements of a token's keys and values."""
    return call.kv_heads * (call.size + call.value_size)


CP_SECONDS: Mapping[CpCommType, Callable[[PlannedRun, AttentionCall, float], float]] = {
    "all_gather": _gather_seconds,
    "a2a": _exchange_seconds,
    "p2p": _ring_seconds,
    "a2a+p2p": _levels_seconds,
}
"""Seconds of the communication of a call of attention, by --cp-comm-type. A search tries these."""
