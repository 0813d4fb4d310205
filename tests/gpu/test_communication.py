"""NCCL of one rank: the options of groups, and the records of its collectives."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megalite.config import ParallelConfig
from megalite.distributed.mesh import group_options
from megalite.distributed.topology import Launch, Topology
from megalite.train.health.flight_recorder import recorder_of, write_records

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_torch_has_the_options_of_replicas() -> None:
    options = group_options("cuda", 2, "dp")
    assert options is not None
    assert options["dp"].is_high_priority_stream


def test_a_file_has_the_last_collectives_of_nccl(tmp_path: Path) -> None:
    with Topology.start(ParallelConfig(), Launch(0, 1, 0, 1)) as topology:
        dist.all_reduce(torch.ones(4, device=topology.device))
        torch.cuda.synchronize()
        recorder = recorder_of("cuda")
        assert recorder is not None
        write_records(tmp_path / "flight_recorder_00000", recorder)
    records = pickle.loads((tmp_path / "flight_recorder_00000").read_bytes())
    assert records["entries"][-1]["profiling_name"] == "nccl:all_reduce"
