"""NCCL of one rank: the options of groups, and the records of its collectives."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megalite.config import ParallelConfig
from megalite.distributed.axis import group_options
from megalite.distributed.local_ranks import run_ranks
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.tensor_parallel.gemm_collectives import choose_overlap, trial_problem
from megalite.train.callbacks.hang_report import recorder_of, write_records

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _trial(topology: Topology, parallel: ParallelConfig) -> tuple[str, str]:
    overlap = choose_overlap(parallel, topology, 8192, torch.bfloat16)
    return overlap.description, trial_problem(topology.tp, topology.device, torch.float32)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs that access each other's memory")
def test_two_gpus_multiply_in_symmetric_memory() -> None:
    if not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("the GPUs do not access each other's memory")
    parallel = ParallelConfig(
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        tp_comm_overlap_method="symmetric_memory",
        distributed_backend="nccl",
    )
    for description, problem in run_ranks(_trial, parallel.mesh, 2, parallel):
        assert description.startswith("overlap with their GEMMs in torch's symmetric memory")
        assert problem == ""


def test_torch_has_the_options_of_replicas() -> None:
    options = group_options("cuda", 2, "dp")
    assert options is not None
    assert options["dp"].is_high_priority_stream


def test_a_file_has_the_last_collectives_of_nccl(tmp_path: Path) -> None:
    with Topology.start(ParallelConfig().mesh, Launch(0, 1, 0, 1)) as topology:
        dist.all_reduce(torch.ones(4, device=topology.device))
        torch.cuda.synchronize()
        recorder = recorder_of("cuda")
        assert recorder is not None
        write_records(tmp_path / "flight_recorder_00000", recorder)
    records = pickle.loads((tmp_path / "flight_recorder_00000").read_bytes())
    assert records["entries"][-1]["profiling_name"] == "nccl:all_reduce"
