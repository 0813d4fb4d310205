"""Report which links NCCL uses: NVLink, PCIe or host memory within a node, RDMA or TCP between nodes.

scripts/check_gpu.sh --links                                       on one machine
srun --nodes 4 --ntasks-per-node 1 scripts/check_gpu.sh --links    on the nodes of a Slurm job
scripts/check_gpu.sh --links --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500    on each of two hosts

Each rank runs an all-reduce and sends a message with NCCL_DEBUG=INFO; rank 0 parses what all of them logged.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

LOG_SETTINGS = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,GRAPH,NET"}
"""What NCCL must log for `parse_log`."""

_LINE = re.compile(r"(\S+):(\d+):\d+ \[\d+\] NCCL (?:INFO|WARN) +(.*)")
_CHANNEL = re.compile(r"(?:Channel|Ring) \d+.* : \d+\[\w+\] -> \d+\[\w+\].* via (.+)")
_RING = re.compile(r"Pattern 4,.* type (\w+)/")
_NVLS = re.compile(r"[1-9]\d* nvls channels")
_NVLINK_PATHS = frozenset({"NVL", "NVB", "C2C"})
"""Paths between GPUs in NCCL's topology that PCIe has no part in; NVB goes through another GPU."""
_NOT_RDMA = frozenset({"TCP", "NVLink"})
_CAUSES = (
    ("P2P", r"NCCL_P2P_DISABLE set by environment to 1", "unset NCCL_P2P_DISABLE"),
    ("TCP", r"NCCL_IB_DISABLE set by environment to 1", "unset NCCL_IB_DISABLE"),
    (
        "TCP",
        r"open libibverbs\.so(\.1|\[\.1\])",
        "libibverbs is missing: install libibverbs1 and ibverbs-providers in the image",
    ),
    (
        "TCP",
        r"NET/IB : No device found",
        "no InfiniBand device: compare ibv_devinfo in the container and outside; a container needs "
        "/dev/infiniband and ulimit -l unlimited",
    ),
    (
        "GDR",
        r"GPU Direct RDMA Disabled",
        "GPUDirect RDMA is off: run modprobe nvidia-peermem on the nodes (lsmod shows it)",
    ),
)
"""For each problem: a line of the log that explains it, and what to do."""
_USUAL_CAUSES = {
    "P2P": "the GPUs of a node have no peer access: see nvidia-smi topo -p2p r",
    "PCIe": "PCIe connects GPUs of a node: see nvidia-smi topo -m, and nvidia-smi nvlink -s for NVLink",
    "TCP": "NCCL uses TCP: see ibv_devinfo (PORT_ACTIVE) and NCCL_IB_HCA if the nodes have InfiniBand",
    "GDR": "no GPUDirect RDMA: see nvidia-smi topo -m (a NIC near each GPU) and NCCL_NET_GDR_LEVEL",
}
"""What to look at if no line of the log explains a problem."""


@dataclass(frozen=True)
class Links:
    """Describes the channels of a log of NCCL.

    Attributes:
        num_nodes: hosts in the log.
        in_node: NVLink, PCIe or host memory.
        between_nodes: InfiniBand, RoCE, TCP, NVLink or the name of a network plugin.
        has_nvls: NVSwitches sum (NVLink SHARP).
        has_gpu_direct: all channels between nodes read and write the GPUs' memory.
        advice: what to look at, for each problem.
    """

    num_nodes: int
    in_node: frozenset[str]
    between_nodes: frozenset[str]
    has_nvls: bool
    has_gpu_direct: bool
    advice: tuple[str, ...]

    @property
    def summary(self) -> str:
        """Return the links in a line."""
        parts = []
        if self.in_node:
            nvls = " with NVLS" if self.has_nvls else ""
            parts.append(f"{_joined(self.in_node)}{nvls} in a node")
        if self.between_nodes:
            direct = "with" if self.has_gpu_direct else "without"
            rdma = f" {direct} GPUDirect RDMA" if self.between_nodes - _NOT_RDMA else ""
            parts.append(f"{_joined(self.between_nodes)}{rdma} between nodes")
        nodes = f"{self.num_nodes} node{'' if self.num_nodes == 1 else 's'}"
        return f"NCCL on {nodes}: {', '.join(parts) or 'no channels'}"


def _joined(names: frozenset[str]) -> str:
    return " and ".join(sorted(names))


def parse_log(text: str) -> Links:
    """Return the links that NCCL reports; the text may hold the lines of several processes, in any order."""
    processes: dict[tuple[str, str], list[str]] = {}
    for line in text.splitlines():
        if found := _LINE.search(line):
            processes.setdefault((found[1], found[2]), []).append(found[3])
    messages = [message for lines in processes.values() for message in lines]
    is_roce = any("NET/IB" in message and "/RoCE" in message for message in messages)
    in_node, between_nodes, directs = set(), set(), set()
    for lines in processes.values():
        rings = {ring[1] for message in lines if (ring := _RING.search(message))}
        for message in lines:
            channel = _CHANNEL.search(message)
            if channel is None:
                continue
            kind, _, rest = channel[1].partition("/")
            if kind == "NET":
                between_nodes.add(_network(rest, is_roce))
                directs.add("/GDRDMA" in rest)
            elif kind == "P2P":
                in_node.add("NVLink" if not rings or rings <= _NVLINK_PATHS else "PCIe")
                if rest.startswith("MNNVL"):  # the NVLink domain spans nodes
                    between_nodes.add("NVLink")
            else:  # SHM, "direct shared memory"
                in_node.add("host memory")
    has_nvls = any(_NVLS.search(message) for message in messages)
    num_nodes = len({host for host, _ in processes})
    has_gpu_direct = directs == {True}
    problems = [
        *(["P2P"] if "host memory" in in_node else []),
        *(["PCIe"] if "PCIe" in in_node else []),
        *(["TCP"] if "TCP" in between_nodes else []),
        *(["GDR"] if between_nodes - _NOT_RDMA and not has_gpu_direct else []),
    ]
    advice = tuple(each for problem in problems for each in _advice(problem, messages))
    return Links(num_nodes, frozenset(in_node), frozenset(between_nodes), has_nvls, has_gpu_direct, advice)


def _network(name: str, is_roce: bool) -> str:
    """Return the kind of network: what follows "NET/" is IB/0/GDRDMA, Socket/0, or has a plugin's name."""
    name = re.split(r"/\d", name)[0]
    if name.startswith("IB"):
        return "RoCE" if is_roce else "InfiniBand"
    return "TCP" if name == "Socket" else name


def _advice(problem: str, messages: Sequence[str]) -> Iterator[str]:
    """Yield what the log says about a problem; its usual cause if the log says nothing."""
    found = [
        what
        for cause, pattern, what in _CAUSES
        if cause == problem and any(re.search(pattern, message) for message in messages)
    ]
    yield from found or [_USUAL_CAUSES[problem]]


def launch_command(arguments: Sequence[str], environment: Mapping[str, str], device: str) -> list[str]:
    """Return the command that starts the ranks of this node: torchrun's, with its arguments.

    In a step of a Slurm job of several nodes, the ranks meet on the step's first node.
    """
    ranks = ["--nproc-per-node", "2" if device == "cpu" else "gpu"]
    if int(environment.get("SLURM_STEP_NUM_NODES", "1")) > 1:
        first = first_node(environment["SLURM_STEP_NODELIST"])
        port = 20000 + int(environment["SLURM_JOB_ID"]) % 10000
        ranks += ["--nnodes", environment["SLURM_STEP_NUM_NODES"]]
        ranks += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{port}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *ranks, *arguments]
    return [*torchrun, "-m", "benchmarks.gpu_check.links", device]


def first_node(nodes: str) -> str:
    """Return the first name of a list of Slurm's, as in gpu[03-05,9],n1; containers have no scontrol."""
    found = re.match(r"([^\[,]*)(?:\[(\d+)[^]]*\]([^,]*))?", nodes)
    assert found is not None
    return "".join(part or "" for part in found.groups())


def check_links(arguments: Sequence[str], device: str) -> int:
    """Run the check on this node, or in this process if it is a rank already; return the exit status."""
    if "LOCAL_RANK" in os.environ:
        main(device)
        return 0
    return subprocess.run(launch_command(arguments, os.environ, device), check=False).returncode


def main(device: str) -> None:
    """Connect the ranks, and print the links and the advice on rank 0."""
    with tempfile.NamedTemporaryFile("r", prefix="nccl-", errors="replace") as log:
        os.environ.update(LOG_SETTINGS, NCCL_DEBUG_FILE=log.name)  # before NCCL reads them, at its first call
        text = _connect_and_log(device, log)
    if text is None:
        return
    if device == "cpu":
        print("gloo on CPUs has no links to report: this was a rehearsal")
        return
    links = parse_log(text)
    print("\n".join([links.summary, *(f"  {each}" for each in links.advice)]))


def _connect_and_log(device: str, log: tempfile._TemporaryFileWrapper[str]) -> str | None:
    """Run collectives, and messages to the next rank, over all ranks; return their logs on rank 0."""
    import torch
    import torch.distributed as dist

    from megalite.config import ParallelConfig
    from megalite.distributed.rendezvous import Launch
    from megalite.distributed.topology import Topology

    backend = "gloo" if device == "cpu" else "auto"
    with Topology.start(
        ParallelConfig(distributed_backend=backend).mesh, Launch.from_environment()
    ) as topology:
        rank, n = topology.rank, topology.world_size
        x = torch.ones(1 << 22, device=topology.device)
        dist.all_reduce(x)  # NCCL may sum in the switches, over no channel from GPU to GPU
        if n > 1:
            received = torch.empty_like(x)
            messages = [
                dist.P2POp(dist.isend, x, (rank + 1) % n),
                dist.P2POp(dist.irecv, received, (rank - 1) % n),
            ]
            for message in dist.batch_isend_irecv(messages):
                message.wait()
        if topology.device.type == "cuda":
            torch.cuda.synchronize(topology.device)
        logs: list[str] = [""] * n
        dist.all_gather_object(logs, log.read())
    return "\n".join(logs) if rank == 0 else None


if __name__ == "__main__":
    main(sys.argv[1])
