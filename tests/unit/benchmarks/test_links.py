"""NCCL's log is read: which links it chose, and what to look at when they are slow."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from benchmarks.gpu_check.links import first_node, launch_command, parse_log

RING = "Pattern 4, crossNic 0, nChannels 8, bw 40.000000/20.000000, type {}, sameChannels 1"
IB = "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>"
ROCE = "NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>"
P2P = "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"


def log(host: str, messages: Iterable[str], pid: int = 7) -> str:
    return "".join(f"{host}:{pid}:{pid + 1} [0] NCCL INFO {message}\n" for message in messages)


def on_two_nodes(*messages: str) -> str:
    """The log of two nodes with NVLink, and further lines."""
    return "".join(log(host, [RING.format("NVL/PIX"), P2P, *messages]) for host in ("n1", "n2"))


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([RING.format("NVL/PIX"), P2P], "NVLink"),
        (
            [RING.format("NVL/PIX"), P2P, "24 coll channels, 16 nvls channels, 32 p2p channels"],
            "NVLink with NVLS",
        ),
        ([RING.format("NVL/PIX"), P2P, "24 coll channels, 0 nvls channels, 32 p2p channels"], "NVLink"),
        (["Pattern 5, nChannels 2, bw 9/9, type NVL/PIX", RING.format("SYS/PIX"), P2P], "PCIe"),
        (["Pattern 1, nChannels 2, bw 9/9, type SYS/PIX", RING.format("NVL/PIX"), P2P], "NVLink"),
        ([RING.format("PHB/PIX"), "Channel 01 : 0[4000] -> 1[5000] via P2P/direct pointer/read"], "PCIe"),
        ([RING.format("SYS/SYS"), "Channel 00 : 0[0] -> 1[1] via SHM/direct/direct"], "host memory"),
        (["Ring 00 : 2[0] -> 3[0] via direct shared memory"], "host memory"),
    ],
)
def test_links_in_a_node(messages: list[str], expected: str) -> None:
    found = parse_log(log("n1", messages))
    assert found.summary == f"NCCL on 1 node: {expected} in a node"
    assert (found.advice == ()) is expected.startswith("NVLink")


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([IB, "Channel 00/0 : 8[0] -> 0[0] [receive] via NET/IB/0/GDRDMA"], "InfiniBand with GPUDirect RDMA"),
        (
            [ROCE, "Channel 00/0 : 8[0] -> 0[0] [send] via NET/IB/1(3)/GDRDMA(PCI)/Shared"],
            "RoCE with GPUDirect RDMA",
        ),
        (["Channel 00/0 : 8[0] -> 0[0] [send] via NET/IBext_v8/3/GDRDMA"], "InfiniBand with GPUDirect RDMA"),
        (
            ["Channel 02/0 : 8[0] -> 0[0] [send] via NET/AWS Libfabric/0/GDRDMA"],
            "AWS Libfabric with GPUDirect RDMA",
        ),
        (["Channel 02/0 : 8[0] -> 0[0] via P2P/MNNVL"], "NVLink"),
    ],
)
def test_fast_links_between_nodes(messages: list[str], expected: str) -> None:
    found = parse_log(on_two_nodes(*messages))
    assert found.summary == f"NCCL on 2 nodes: NVLink in a node, {expected} between nodes"
    assert found.advice == ()


@pytest.mark.parametrize(
    ("cause", "advice"),
    [
        ("NCCL_IB_DISABLE set by environment to 1.", "unset NCCL_IB_DISABLE"),
        ("Count not open libibverbs.so.1", "install libibverbs1"),
        ("NET/IB : No device found.", "/dev/infiniband"),
        ("NCCL_IB_DISABLE set by environment to 0.", "ibv_devinfo (PORT_ACTIVE)"),
    ],
)
def test_tcp_between_nodes_has_a_cause(cause: str, advice: str) -> None:
    other = "NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'"
    found = parse_log(on_two_nodes(cause, other, "Channel 03/0 : 15[7] -> 6[6] [send] via NET/Socket/3"))
    assert found.summary == "NCCL on 2 nodes: NVLink in a node, TCP between nodes"
    assert len(found.advice) == 1
    assert advice in found.advice[0]


def test_one_channel_without_gpu_direct_is_reported() -> None:
    channels = [f"Channel 0{i}/0 : 8[0] -> 0[0] [send] via NET/IB/{i}" for i in range(2)]
    found = parse_log(on_two_nodes(IB, f"{channels[0]}/GDRDMA", channels[1]))
    assert "InfiniBand without GPUDirect RDMA between nodes" in found.summary
    assert "NCCL_NET_GDR_LEVEL" in found.advice[0]
    disabled = "NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'"
    assert "nvidia-peermem" in parse_log(on_two_nodes(IB, *channels, disabled)).advice[0]


def test_the_rings_of_a_process_say_what_its_channels_are() -> None:
    """One node of two has no NVLink."""
    text = log("n1", [RING.format("NVL/PIX"), P2P]) + log("n2", [RING.format("PXB/PIX"), P2P])
    assert parse_log(text).summary == "NCCL on 2 nodes: NVLink and PCIe in a node"


def test_text_without_channels() -> None:
    assert parse_log("hello\n").summary == "NCCL on 0 nodes: no channels"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n3", "n3"), ("n3,n7", "n3"), ("gpu[03-05,9],n1", "gpu03"), ("r1-[7,9]-ib", "r1-7-ib")],
)
def test_the_first_node_of_a_step(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_ranks_are_started_by_torchrun() -> None:
    alone = launch_command(["--nnodes", "2"], {}, "cuda")
    assert alone[1:] == [
        *("-m", "torch.distributed.run", "--nproc-per-node", "gpu", "--nnodes", "2"),
        *("-m", "benchmarks.gpu_check.links", "cuda"),
    ]
    slurm = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[3-4]", "SLURM_JOB_ID": "1234567"}
    command = launch_command([], slurm, "cuda")
    assert command[command.index("--nnodes") + 1] == "2"
    assert command[command.index("--rdzv-endpoint") + 1] == "n3:24567"


def test_rehearsal_runs_the_collectives() -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", "--rehearse", "--links", "--standalone"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "gloo on CPUs has no links to report: this was a rehearsal\n"
