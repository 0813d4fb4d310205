"""What megatron-core takes for granted of a GPU, in terms of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import torch_norm
from megatron.core.transformer.moe import grouped_gemm_util
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megalite.utils.errors import UserError

_ALL_REDUCE = dist.all_reduce


class _CpuTensors(TorchFunctionMode):
    """Mode in which calls for a GPU use the CPU, and a tensor has the type name that optimizers expect."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.record_stream:
            return None
        result = func(*args, **kwargs)
        if func is Tensor.type and len(args) == 1:  # "torch.DoubleTensor" where fp32 is widened
            return result.replace("torch.", "torch.cuda.").replace("Double", "Float")
        return result


class _Stream:
    """CUDA stream or event in whose place the CPU computes in order."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class _Norm(nn.Module):
    """LayerNorm or RMSNorm, marked as the norms of Transformer Engine and Apex are."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps, self.has_one = eps, config.layernorm_zero_centered_gamma
        start = torch.zeros if self.has_one else torch.ones
        self.weight = nn.Parameter(start(hidden_size, dtype=config.params_dtype))
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, rows: Tensor) -> Tensor:
        weight = self.weight + 1 if self.has_one else self.weight
        if self.bias is None:
            return F.rms_norm(rows, weight.shape, weight, self.eps)
        return F.layer_norm(rows, weight.shape, weight, self.bias, self.eps)


def _new_norm(
    _: type, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **__: object
) -> nn.Module:
    return _Norm(config, hidden_size, eps)


def _grouped_gemm(rows: Tensor, weights: Tensor, sizes: Tensor, trans_b: bool) -> Tensor:
    parts = zip(rows.split(sizes.tolist()), weights, strict=True)
    return torch.cat([part @ (weight.T if trans_b else weight) for part, weight in parts])


def _all_reduce(
    tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    if op != dist.ReduceOp.AVG:
        return _ALL_REDUCE(tensor, op, group, async_op)
    if async_op:
        raise UserError("average_in_collective needs NCCL, because gloo does not average: remove it")
    _ALL_REDUCE(tensor, dist.ReduceOp.SUM, group)
    tensor.div_(dist.get_world_size(group))


@contextmanager
def on_cpu() -> Iterator[None]:
    """Replace what megatron-core takes for granted of a GPU: this is all that differs from a run on GPUs.

    - Devices, streams, synchronization and the random states of CUDA become those of the CPU.
    - gloo averages by a sum.
    - Functions for torch.compile run as they are written.
    - Kernels of other packages become PyTorch's formulas: the norms of Apex and Transformer Engine, with the
      mark that they give their weights for sequence parallelism, and the grouped GEMM.
    """
    cuda: dict[str, Any] = {
        "current_device": lambda: "cpu",
        "stream": lambda _: nullcontext(),
        "get_rng_state": torch.get_rng_state,
        "manual_seed": torch.manual_seed,
        **dict.fromkeys(("Stream", "Event", "current_stream", "default_stream"), _Stream),
        **dict.fromkeys(("synchronize", "empty_cache"), lambda: None),
    }
    random: dict[str, Any] = {
        "_get_cuda_rng_state": lambda *_, **__: torch.get_rng_state(),
        "_set_cuda_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
    }
    gemm = SimpleNamespace(gmm=_grouped_gemm)
    with ExitStack() as stack:
        for replaced in (
            patch.multiple(torch.cuda, **cuda),
            patch.multiple(megatron_random, **random),
            patch.multiple(grouped_gemm_util, grouped_gemm=gemm, ops=gemm),
            patch.object(dist, "all_reduce", _all_reduce),
            patch.object(torch_norm.WrappedTorchNorm, "__new__", _new_norm),
            torch.compiler.set_stance("force_eager"),
            _CpuTensors(),
        ):
            stack.enter_context(replaced)
        yield
