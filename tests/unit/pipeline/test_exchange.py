"""How messages are started: on GPUs all of a batch at once, as NCCL has no tags; elsewhere one by one."""

from __future__ import annotations

import pytest
import torch

from megalite.config import ParallelConfig
from megalite.distributed.topology import Topology
from megalite.pipeline import point_to_point
from megalite.pipeline.point_to_point import PointToPoint


@pytest.mark.parametrize(("device", "launch"), [("cuda:0", "_launch_together"), ("cpu", "_launch_each")])
def test_a_batch_is_started_as_the_device_s_backend_wants(device: str, launch: str) -> None:
    parallel = ParallelConfig(pipeline_model_parallel_size=2)
    with Topology.fake(parallel, 2, 0) as topology:
        found = PointToPoint(topology.pp, (4, 1, 8), torch.float32, torch.device(device))
    assert found._launch is getattr(point_to_point, launch)
