"""Test which kernels count as GEMMs, attention and memory-bound, on a CPU and in a profile of a GPU."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from megalite.attention.plain import PlainKernel
from megalite.config import Config, LoggingConfig, ModelConfig, ParallelConfig, TrainingConfig
from megalite.distributed.axis import EventStack
from megalite.distributed.topology import Topology
from megalite.kernels import CausalSoftmax, Drop, VisibleKeys
from megalite.observe.operator_log import _ATTENTION, _GEMMS, kernel_kind, kind_by_name
from megalite.tensor_parallel.parameter_spec import LayerContext
from megalite.train.telemetry.time_recorder import KernelProfile, OperatorTimer, kernel_seconds, kernel_timer
from megalite.utils.torch_private import EagerMode


class _SlowOperator(EagerMode):
    """Makes one operator take 50 ms, by a clock that moves by a microsecond when it is read."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self.calls = 0
        self._now = 0.0

    def perf_counter(self) -> float:
        self._now += 1e-6
        return self._now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket.__name__ == self._name:
            self.calls += 1
            self._now += 0.05
        return func(*args, **(kwargs or {}))


def _block() -> None:
    """Run a linear layer, a norm, fused and unfused attention, forward and backward."""
    x = torch.randn(2, 8, 16, requires_grad=True)
    y = F.layer_norm(F.linear(x, torch.randn(16, 16, requires_grad=True)), (16,))
    q = y.view(2, 8, 4, 4).transpose(1, 2)
    fused = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    softmax = CausalSoftmax(8, 0.5, None, VisibleKeys(), Drop(0.0, 0, torch.zeros(2, dtype=torch.int64)))
    with Topology.fake(ParallelConfig().mesh, 1, 0, device="cpu") as topology:
        kernel = PlainKernel(ModelConfig(), LayerContext(topology, torch.float32))
    unfused = kernel.attend(fused, fused, fused, softmax)
    unfused.sum().backward()


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("mm", "GEMMs"),
        ("_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("causal_softmax_", "attention"),
        ("bmm", "attention"),
        ("native_layer_norm_backward", "memory-bound kernels"),
    ],
)
def test_a_slow_operator_is_in_its_kind(operator: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = _SlowOperator(operator)
    monkeypatch.setattr(time, "perf_counter", slow.perf_counter)
    with slow, OperatorTimer() as timer:
        _block()
    assert slow.calls > 0
    seconds = timer.seconds()
    assert max(seconds, key=lambda name: seconds[name]) == kind
    assert seconds[kind] >= 0.05 * slow.calls  # type: ignore[index]
    assert timer.overhead > 0.0


def test_the_planners_operators_are_of_their_kinds() -> None:
    def kinds(operators: Any) -> set[str]:
        return {kind_by_name(str(operator).replace(".", "::")) for operator in operators}

    assert kinds(_GEMMS) == {"GEMMs"}
    assert kinds(_ATTENTION) == {"attention"}
    assert kernel_kind(torch.ops.aten._scaled_mm.default) == "GEMMs"
    assert kernel_kind(torch.ops.aten.add_.Tensor) == "memory-bound kernels"
    assert kernel_kind(torch.ops.aten.t.default) is None
    assert kernel_kind(torch.ops.c10d.allreduce_.default) is None


class _Event(NamedTuple):
    """An event of kineto."""

    on: DeviceType
    named: str
    nanoseconds: int
    own: int
    linked: int = 0
    is_annotation: bool = False

    def device_type(self) -> DeviceType:
        return self.on

    def name(self) -> str:
        return self.named

    def duration_ns(self) -> int:
        return self.nanoseconds

    def correlation_id(self) -> int:
        return self.own

    def linked_correlation_id(self) -> int:
        return self.linked

    def is_user_annotation(self) -> bool:
        return self.is_annotation


def test_kernels_of_a_gpu_are_of_the_kind_of_their_operator() -> None:
    host, gpu = DeviceType.CPU, DeviceType.CUDA
    events = [
        _Event(gpu, "sm90_xmma_gemm", 100, 7, linked=1),  # kernels may come before their operators
        _Event(host, "aten::mm", 900, 1),
        _Event(host, "cudaLaunchKernel", 500, 2, linked=1),  # its number is that of another operator
        _Event(host, "aten::_scaled_dot_product_cudnn_attention", 900, 2),
        _Event(gpu, "cudnn_generated_fort_native_sdpa", 20, 8, linked=2),
        _Event(host, "aten::native_layer_norm", 900, 3),
        _Event(gpu, "layer_norm_kernel", 3, 9, linked=3),
        _Event(gpu, "triton_poi_fused_add_0", 4, 10, linked=0),
        _Event(gpu, "ncclDevKernel_AllReduce", 5000, 11, linked=3),
        _Event(gpu, "Memcpy DtoH (Device -> Pinned)", 5000, 12, linked=3),
        _Event(gpu, "Optimizer.step", 5000, 13, is_annotation=True),
    ]
    assert kernel_seconds(events) == pytest.approx(
        {"GEMMs": 100e-9, "attention": 20e-9, "memory-bound kernels": 7e-9}
    )


@pytest.mark.parametrize(
    ("device", "config", "kind"),
    [
        ("cpu", Config(), OperatorTimer),
        ("cpu", Config(training=TrainingConfig(compile=True)), type(None)),
        ("cuda", Config(), KernelProfile),
        ("cuda", Config(training=TrainingConfig(compile=True)), KernelProfile),
        ("cuda", Config(logging=LoggingConfig(profile=True)), type(None)),
        ("cuda", Config(logging=LoggingConfig(profile_execution=True)), type(None)),
    ],
)
def test_the_timer_of_a_device(device: str, config: Config, kind: type) -> None:
    topology = SimpleNamespace(device=torch.device(device), events=EventStack())
    assert type(kernel_timer(config, cast("Topology", topology))) is kind
