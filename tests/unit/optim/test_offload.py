"""AdamW on offloaded states: the bits of the update without, for many ranges and each kind of state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megalite.config import OptimizerConfig, ParallelConfig
from megalite.optim import offload
from megalite.optim.optimizer import Optimizer
from megalite.utils.errors import UserError
from megalite.utils.hardware import host_memory

CONFIG = OptimizerConfig(lr=0.1, clip_grad=0.5)
SHAPES = {"a": (300, 7), "b": (50,), "c": (9000,)}


def _optimizer(make_parameter, topology, dtype: torch.dtype, **changes) -> Optimizer:
    parameters = {
        name: make_parameter(*shape, dtype=dtype, decay=len(shape) > 1) for name, shape in SHAPES.items()
    }
    parallel = replace(ParallelConfig(), ddp_bucket_size=100)
    return Optimizer(parameters.items(), None, replace(CONFIG, **changes), parallel, topology, dtype)


def _trained(optimizer: Optimizer, num_steps: int = 4, is_allowed: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(num_steps):
        optimizer.begin(1)
        for buffer in optimizer.buffers:
            for entry in buffer.bucket.entries:
                numbers = torch.randn(entry.parameter.shape, generator=generator)
                entry.parameter.grad = numbers.to(entry.parameter.dtype)
                buffer.accumulate(entry)
        norm = optimizer.finish_gradients()
        optimizer.step(0.1, 0.01, norm, torch.tensor(is_allowed))
    optimizer.finish_weights()
    found = {name: shard.tensor.clone() for name, shard in optimizer.weights().items()}
    for name, tensor in optimizer.state().items():
        found[f"state.{name}"] = (tensor if isinstance(tensor, torch.Tensor) else tensor.tensor).clone()
    squares = {f"squares.{shard.name}": shard.gradient.square().sum() for shard in optimizer.counted_shards()}
    return found | squares | {"norm": torch.tensor(optimizer.params_norm())}


@pytest.fixture(autouse=True)
def short_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "RANGE_SIZE", 1024)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("place", ["memory", "file"])
@pytest.mark.parametrize("fraction", [1.0, 0.3])
def test_an_offloaded_update_is_bitwise_the_update(
    make_parameter, topology, dtype: torch.dtype, place: str, fraction: float, tmp_path: Path
) -> None:
    expected = _trained(_optimizer(make_parameter, topology, dtype))
    where = (
        {"optimizer_cpu_offload": True} if place == "memory" else {"optimizer_nvme_offload": str(tmp_path)}
    )
    optimizer = _optimizer(make_parameter, topology, dtype, optimizer_offload_fraction=fraction, **where)
    assert optimizer.offload is not None
    assert optimizer.offload.count == (3 if fraction == 1.0 else 1)
    assert len(optimizer.offload.storage.ranges) > 8
    found = _trained(optimizer)
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)


def test_a_forbidden_update_changes_nothing(make_parameter, topology) -> None:
    before = _trained(_optimizer(make_parameter, topology, torch.bfloat16), 2)
    optimizer = _optimizer(make_parameter, topology, torch.bfloat16, optimizer_cpu_offload=True)
    _trained(optimizer, 2)
    after = _trained(optimizer, 1, is_allowed=False)
    names = [name for name in before if not name.startswith("squares")]
    assert all(after[name].equal(before[name]) for name in names)


def test_too_little_host_memory_is_one_line(make_parameter, topology, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(offload, "free_bytes", lambda: 10_000)
    with pytest.raises(
        UserError, match=r"--optimizer-cpu-offload needs 0.00 GB of host memory for 1 rank on"
    ):
        _optimizer(make_parameter, topology, torch.bfloat16, optimizer_cpu_offload=True)
    with pytest.raises(UserError, match="pass fewer ranks on this machine, or a smaller --optimizer-offload"):
        _optimizer(make_parameter, topology, torch.bfloat16, optimizer_nvme_offload=str(tmp_path))
    monkeypatch.setattr(offload, "free_bytes", lambda: None)  # the system does not say
    _optimizer(make_parameter, topology, torch.bfloat16, optimizer_cpu_offload=True)


def test_gradients_are_kept_on_the_host_only_if_it_has_the_memory(
    make_parameter, topology, monkeypatch
) -> None:
    expected = _trained(_optimizer(make_parameter, topology, torch.bfloat16))
    numel = 2112 + 64 + 9024
    for free, keeps in ((16 * numel + 3 * 1024 * 2, True), (16 * numel + 3 * 1024 * 2 - 1, False)):
        monkeypatch.setattr(offload, "free_bytes", lambda free=free: free)
        optimizer = _optimizer(make_parameter, topology, torch.bfloat16, optimizer_cpu_offload=True)
        assert optimizer.offload is not None and (optimizer.offload.gradients is not None) is keeps
        assert optimizer.offload.bytes.host <= free
        found = _trained(optimizer)
        assert all(found[name].equal(expected[name]) for name in expected)


def test_the_bytes_are_those_of_the_tensors(make_parameter, topology, tmp_path: Path) -> None:
    numel = 2112 + 64 + 9024  # in multiples of 64
    in_memory = _optimizer(make_parameter, topology, torch.bfloat16, optimizer_cpu_offload=True).offload
    in_file = _optimizer(
        make_parameter, topology, torch.bfloat16, optimizer_nvme_offload=str(tmp_path)
    ).offload
    fp32 = _optimizer(make_parameter, topology, torch.float32, optimizer_cpu_offload=True).offload
    staged = 3 * 1024 * 2
    assert in_memory.bytes == (16 * numel + staged, 0, 4 * numel, 2 * numel, 0, 0)
    assert in_file.bytes[2:] == (4 * numel, 2 * numel, 12 * numel, 12 * numel)
    assert in_file.bytes.file == in_file.storage.num_bytes
    assert fp32.bytes[2:4] == (8 * numel, 4 * numel)  # weights go down, and come back


def test_free_memory_is_the_least_of_machine_and_control_group(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    assert host_memory.free_bytes(tmp_path) is None
    (tmp_path / "proc/meminfo").write_text("MemTotal: 900 kB\nMemAvailable:    700 kB\n")
    assert host_memory.free_bytes(tmp_path) == 700 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("5000\n")
    (group / "memory.stat").write_text("anon 3\ninactive_file 1000\n")
    (group / "memory.max").write_text("max\n")
    assert host_memory.free_bytes(tmp_path) == 700 * 1024
    (group / "memory.max").write_text("9000\n")
    assert host_memory.free_bytes(tmp_path) == 5000
    # of a job's own group, as in Slurm, whose limit only an outer group has
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_text("4:cpu:/other\n0::/job_7/step_0\n")
    group = tmp_path / "sys/fs/cgroup/job_7"
    (group / "step_0").mkdir(parents=True)
    for name, text in (
        ("memory.max", "3000"),
        ("memory.current", "2000"),
        ("memory.stat", "inactive_file 1"),
    ):
        (group / name).write_text(text)
    assert host_memory.free_bytes(tmp_path) == 1001
