"""Replacements on a CPU for the parts of CUDA that megatron-core uses without a check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import torch_norm
from megatron.core.transformer.moe import grouped_gemm_util, moe_utils, token_dispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megalite.utils.errors import UserError

_ALL_REDUCE, _ALL_GATHER = dist.all_reduce, dist.all_gather


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
        if func in (Tensor.float, Tensor.double) and result is args[0]:
            return result.clone()  # a copy, as of 16 bits: the code that follows changes it in place
        if func is Tensor.type and len(args) == 1:  # "torch.DoubleTensor" where fp32 is widened
            return result.replace("torch.", "torch.cuda.").replace("Double", "Float")
        return result


class _Stream:
    """CUDA stream or event in whose place the CPU computes in order."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., _Stream]:
        return lambda *_, **__: self


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


class _NormedLinear(ColumnParallelLinear):
    """Norm and column-parallel linear layer, which Transformer Engine has in one module."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any
    ) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.norm = _Norm(config, input_size, config.layernorm_epsilon)

    def forward(self, rows: Tensor, *options: Any, **named: Any) -> Any:
        return super().forward(self.norm(rows), *options, **named)


class _Backend(LocalSpecProvider):
    """Modules of Transformer Engine for the specs that accept no others."""

    def column_parallel_layer_norm_linear(self) -> type:
        return _NormedLinear


def _new_norm(
    _: type, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **__: object
) -> nn.Module:
    return _Norm(config, hidden_size, eps)


def _grouped_gemm(rows: Tensor, weights: Tensor, sizes: Tensor, trans_b: bool) -> Tensor:
    parts = zip(rows.split(sizes.tolist()), weights, strict=True)
    return torch.cat([part @ (weight.T if trans_b else weight) for part, weight in parts])


def _l2norm(rows: Tensor) -> Tensor:
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + 1e-6)


def _counts(counts: Any, as_numpy: bool = False, **_: object) -> Any:
    return counts.numpy() if as_numpy and isinstance(counts, Tensor) else counts


def _all_reduce(
    tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    if op != dist.ReduceOp.AVG:
        return _ALL_REDUCE(tensor, op, group, async_op)
    if async_op:
        raise UserError("average_in_collective needs NCCL, because gloo does not average: remove it")
    _ALL_REDUCE(tensor, dist.ReduceOp.SUM, group)
    tensor.div_(dist.get_world_size(group))


def _all_gather(outputs: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
    if len({output.shape for output in outputs}) == 1:
        return _ALL_GATHER(outputs, tensor, group, async_op)
    for rank, output in enumerate(outputs):
        if rank == dist.get_rank(group):
            output.copy_(tensor)
        dist.broadcast(output, group=group, group_src=rank)


def _reduce_scatter(
    output: Tensor, inputs: list[Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None
) -> None:
    for rank, part in enumerate(inputs):
        total = part.clone()
        _ALL_REDUCE(total, op, group)
        if rank == dist.get_rank(group):
            output.copy_(total)


@contextmanager
def on_cpu() -> Iterator[None]:
    """Replace what megatron-core takes for granted of a GPU: this is all that differs from a run on GPUs.

    - Devices, streams, synchronization and the random states of CUDA become those of the CPU.
    - gloo averages by a sum, gathers and scatters parts of different lengths one by one, and gets the counts
      of an all-to-all as numbers, as from a GPU.
    - Functions for torch.compile run as they are written.
    - Kernels of other packages become PyTorch's formulas: the norms of Apex and Transformer Engine, with the
      mark for sequence parallelism that these give their weights; the grouped GEMM; the norm of keys of the
      gated delta net, whose deterministic mode runs. The router does without one of Transformer Engine's,
      whose name 0.16.1 does not define if that is missing.
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
            patch.object(moe_utils, "te_general_gemm", None, create=True),
            patch.multiple(gated_delta_net, HAVE_FLA=True, l2norm=_l2norm, create=True),
            patch.multiple(variants, TESpecProvider=_Backend, create=True),
            patch.multiple(gpt_layer_specs, TESpecProvider=_Backend, create=True),
            patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _counts),
            patch.multiple(
                dist, all_reduce=_all_reduce, all_gather=_all_gather, reduce_scatter=_reduce_scatter
            ),
            patch.object(torch_norm.WrappedTorchNorm, "__new__", _new_norm),
            torch.compiler.set_stance("force_eager"),
            _CpuTensors(),
        ):
            stack.enter_context(replaced)
        yield
