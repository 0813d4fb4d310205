"""How messages are started: each direction by its group; on GPUs a batch at once, elsewhere one by one."""

from __future__ import annotations

import pytest
import torch

from megalite.config import ParallelConfig
from megalite.distributed.topology import Topology
from megalite.pipeline import executor
from megalite.pipeline.executor import PointToPoint
from megalite.pipeline.messages import Batch, StageMessage
from megalite.pipeline.schedules import Action, ActionKind


@pytest.mark.parametrize(("device", "launch"), [("cuda:0", "_launch_together"), ("cpu", "_launch_each")])
def test_a_batch_is_started_as_the_device_s_backend_wants(device: str, launch: str) -> None:
    parallel = ParallelConfig(pipeline_model_parallel_size=2)
    with Topology.fake(parallel.mesh, 2, 0) as topology:
        found = PointToPoint(topology.pp, torch.float32, torch.device(device))
    assert found._launch is getattr(executor, launch)


@pytest.mark.parametrize("kind", ActionKind)
def test_gradients_have_a_group_of_their_own(kind: ActionKind, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = []

    def launch(group, receives, send):
        groups.append(group)
        return [], None

    monkeypatch.setattr(executor, "_launch_each", launch)
    with Topology.fake(ParallelConfig(pipeline_model_parallel_size=2).mesh, 2, 0, device="cpu") as topology:
        exchange = PointToPoint(topology.pp, torch.float32, topology.device)
        exchange.start(Batch(StageMessage(0, 1, Action(kind, 0))), torch.zeros(1), (1,))
        is_forward = kind is ActionKind.FORWARD
        assert groups == [topology.pp.group if is_forward else topology.pp.backward_group]
