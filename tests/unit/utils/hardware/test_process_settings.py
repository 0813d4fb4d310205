"""What is set before CUDA starts: by the layout, and never against the user."""

from __future__ import annotations

import os

import pytest
import torch

from megalite.config import ParallelConfig
from megalite.distributed.axes import MeshOptions
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.utils.hardware import process_settings

VARIABLES = (
    *("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    *("NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_MAX_CTAS", "NCCL_NVLS_ENABLE", "NCCL_BUFFSIZE"),
)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the variables is set, and none stays."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is taken back
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def found() -> dict[str, str]:
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


@pytest.mark.parametrize(
    ("tp", "zero_stage", "one_connection"), [(1, 0, False), (2, 0, True), (8, 2, True), (2, 3, False)]
)
def test_by_layout(tp: int, zero_stage: int, one_connection: bool) -> None:
    settings = process_settings.settings_for(MeshOptions(zero_stage=zero_stage), tp)
    process_settings.prepare_environment(settings)
    expected = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert found() == expected | ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if one_connection else {})
    told = process_settings.describe(settings)
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True (freed memory" in told
    assert ("CUDA_DEVICE_MAX_CONNECTIONS=1 (tensor-parallel" in told) is one_connection
    assert "set by the user" not in told


def test_symmetric_memory_needs_several_connections() -> None:
    process_settings.prepare_environment(
        process_settings.settings_for(MeshOptions(requests_symmetric_memory=True), 8)
    )
    assert found() == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def test_ranks_that_share_a_gpu_are_allowed_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MAX_CTAS", "4")
    settings = process_settings.settings_for(MeshOptions(ranks_share_gpus=True), 1)
    process_settings.prepare_environment(settings)
    assert (os.environ["NCCL_MULTI_RANK_GPU_ENABLE"], os.environ["NCCL_MAX_CTAS"]) == ("1", "4")
    assert "NCCL_MAX_CTAS=4 (set by the user)" in process_settings.describe(settings)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_the_user_has_set_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {name: "max_split_size_mb:512", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    settings = process_settings.settings_for(MeshOptions(), 8)
    process_settings.prepare_environment(settings)
    assert found() == given
    expected = (
        f"{name}=max_split_size_mb:512 (set by the user), CUDA_DEVICE_MAX_CONNECTIONS=32 (set by the user)"
    )
    assert process_settings.describe(settings) == expected


def test_without_cuda_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    process_settings.prepare_environment(process_settings.settings_for(MeshOptions(), 8))
    assert found() == {}


@pytest.mark.parametrize(("backend", "is_set"), [("auto", True), ("gloo", False)])
def test_a_run_sets_it_before_it_looks_for_a_gpu(
    backend: str, is_set: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen.append(found()) or False)
    with Topology.start(ParallelConfig(distributed_backend=backend).mesh, Launch(0, 1, 0, 1)):
        pass
    expected = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if is_set else {}
    assert found() == expected
    assert all(each == expected for each in seen)
    assert seen or not is_set
