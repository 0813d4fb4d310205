"""Attention backends by name (--attention-backend), the runs that each supports, and auto's choice.

A backend returns a text that says why it does not support a run; the error message contains it and the
alternatives. Whether PyTorch's kernels support a run depends on the GPU, the versions of CUDA and cuDNN and
the head size. We query PyTorch instead of keeping a table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megalite.attention.core import LayerCore, StageCore
from megalite.attention.kernels import BlockKernel, FlexKernel, Kernel, SdpaKernel, TritonKernel
from megalite.attention.plain import PlainKernel
from megalite.config import AttentionSpec, ModelConfig
from megalite.config.model.attention import KERNEL_FEATURES
from megalite.config.option import flag_of
from megalite.config.parallel import CpCommType
from megalite.kernels.flash_attention import MAX_HEAD_DIM
from megalite.kernels.library import compile_problem
from megalite.tensor_parallel.parameter_spec import LayerContext
from megalite.utils.errors import UserError
from megalite.utils.torch_private import selected_attention

_FLASH, _CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
_EFFICIENT = SDPBackend.EFFICIENT_ATTENTION
_LONG_WITH_BIAS = 1024  # tokens from which the unfused core is faster in any dtype, if there is a bias
_CUDNN_FIRST = ((9, 0), (10, 0), (10, 3))  # compute capabilities
_MIN_FLEX_HEAD, _MAX_FLEX_HEAD = 16, 256
_MIN_CAPABILITY = (8, 0)  # of attention kernels in Triton, FlexAttention's and ours


@dataclass(frozen=True)
class Case:
    """Requirements of a run on attention.

    Attributes:
        layers: numbers of these layers; None for all.
    """

    config: ModelConfig
    context: LayerContext
    layers: tuple[int, ...] | None = None

    @property
    def device(self) -> str:
        """Return the device's type."""
        return self.context.device.type

    @property
    def has_bias(self) -> bool:
        """Return whether the scores have a bias besides the causal mask, in some layers."""
        config = self.config
        layers = range(config.num_layers) if self.layers is None else self.layers
        attention = (config.layer_spec(number).attention for number in layers)
        has_window = any(spec is not None and spec.window is not None for spec in attention)
        has_distances = config.position_embedding_type == "alibi"
        return has_window or has_distances or self.context.has_documents or not config.is_causal

    @property
    def widest(self) -> AttentionSpec:
        """Return the attention of a layer with the largest heads."""
        return max(self.config.head_specs, key=lambda spec: spec.head_dim)

    @property
    def has_blocks(self) -> bool:
        """Return whether attention is computed in blocks, since a rank has slices of the queries."""
        return self.context.ring is not None or self.context.gathers_keys


class Backend(NamedTuple):
    """Functions of one way to compute attention.

    Attributes:
        refusal: returns why it does not support a run, besides `KERNEL_FEATURES`; empty if it does.
        kernels: kernels of scaled_dot_product_attention that it may use; empty if it does not call it.
    """

    build: Callable[[ModelConfig, LayerContext], Kernel]
    refusal: Callable[[Case], str]
    kernels: tuple[SDPBackend, ...] = ()


def _sdpa(*kernels: SDPBackend) -> Backend:
    def build(config: ModelConfig, context: LayerContext) -> Kernel:
        return SdpaKernel(config, context, *by_speed(kernels, context.device))

    return Backend(build, partial(_sdpa_refusal, kernels), kernels)


def by_speed(kernels: tuple[SDPBackend, ...], device: torch.device) -> list[SDPBackend]:
    """Order kernels by expected speed: PyTorch takes the first that supports a call.

    cuDNN is the fastest on Hopper and Blackwell data center GPUs, because it uses their own instructions
    (Shah et al. 2024, arXiv 2407.08608, figures 5 and 6); FlashAttention 2 is the fastest on other GPUs.
    """
    is_cuda = device.type == "cuda" and torch.cuda.is_available()
    prefers_cudnn = is_cuda and torch.cuda.get_device_capability(device) in _CUDNN_FIRST
    return sorted(kernels, key=lambda kernel: prefers_cudnn and kernel != _CUDNN)


def _sdpa_refusal(kernels: tuple[SDPBackend, ...], case: Case) -> str:
    if case.has_blocks and (reason := _blocks_refusal(kernels, case)):
        return reason
    if case.device == "cpu":
        if case.widest.value_dim != case.widest.head_dim:
            return f"on a CPU it needs {_EQUAL_SIZES}"
        return "" if _FLASH in kernels else "it runs only on CUDA GPUs"
    if case.device != "cuda" or not torch.cuda.is_available():  # a plan or dry run, on meta tensors
        return ""
    if any(_PROBES[kernel](_parameters(case), False) for kernel in kernels):
        return ""
    gpu = torch.cuda.get_device_name(case.context.device)
    bias = ", ALiBi, a window or packed documents" if case.has_bias else ""
    return (
        f"PyTorch {torch.__version__} has no such kernel on {gpu} "
        f"for {_head_sizes(case.widest)} in {case.config.params_dtype}{bias}"
    )


def _blocks_refusal(kernels: tuple[SDPBackend, ...], case: Case) -> str:
    need = f"in blocks, as --cp-comm-type {case.context.layer_cp_comm_type} needs"
    if kernels != (_FLASH,):
        return f"it does not compute attention {need}"
    if case.has_bias:
        return f"{need}, it has no ALiBi, windows or documents"
    sizes = {size for spec in case.config.head_specs for size in (spec.head_dim, spec.value_dim)}
    if case.device != "cpu" and (any(size % 8 for size in sizes) or len(sizes) > 1):
        return f"{need}, its heads have a multiple of 8 elements, all the same"
    return ""


def _head_sizes(spec: AttentionSpec) -> str:
    if spec.value_dim == spec.head_dim:
        return f"head size {spec.head_dim}"
    return f"heads of {spec.head_dim} elements with values of {spec.value_dim}"


_PROBES = {
    _FLASH: torch.backends.cuda.can_use_flash_attention,
    _CUDNN: torch.backends.cuda.can_use_cudnn_attention,
    _EFFICIENT: torch.backends.cuda.can_use_efficient_attention,
}
_KERNEL_NAMES = {_FLASH: "FlashAttention 2", _CUDNN: "cuDNN", _EFFICIENT: "memory-efficient attention"}
_EQUAL_SIZES = "values of the size of keys, which --v-head-dim sets"


def _tensors(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return queries, keys, values and bias of one sample, as expanded tensors that need little memory."""
    spec, context = case.widest, case.context
    heads = spec.num_heads // context.attention_heads.count
    groups = max(1, spec.num_kv_heads // context.attention_heads.count)
    s, d = case.config.seq_length, spec.head_dim
    one = torch.empty(1, 1, 1, d, dtype=context.dtype, device=context.device, requires_grad=True)
    q, k = one.expand(1, heads, s, d), one.expand(1, groups, s, d)
    v = (
        k
        if spec.value_dim == d
        else one.new_empty(spec.value_dim, requires_grad=True).expand(1, groups, s, -1)
    )
    mask = torch.empty(1, 1, 1, s, dtype=context.dtype, device=context.device).expand(1, heads, s, s)
    return q, k, v, mask if case.has_bias else None


def _parameters(case: Case) -> torch.backends.cuda.SDPAParams:
    q, k, v, bias = _tensors(case)
    return torch.backends.cuda.SDPAParams(q, k, v, bias, 0.0, bias is None, q.shape[1] != k.shape[1])


def kernel_of(kernels: tuple[SDPBackend, ...], case: Case) -> str:
    """Return the kernel that PyTorch selects on a GPU for this run's shapes, and cuDNN's version."""
    q, k, v, bias = _tensors(case)
    with sdpa_kernel(by_speed(kernels, case.context.device), set_priority=True):
        selected = SDPBackend(
            selected_attention(q, k, v, bias, 0.0, bias is None, enable_gqa=q.shape[1] != k.shape[1])
        )
    version = torch.backends.cudnn.version()
    installed = f"cuDNN {cudnn_version(version)}" if version else "no cuDNN"
    return f"{_KERNEL_NAMES.get(selected, selected.name)} ({installed})"


def cudnn_version(number: int) -> str:
    """Return cuDNN's version as its release notes write it: 91900 is 9.19.0, 8907 is 8.9.7."""
    major, rest = divmod(number, 10000 if number >= 90000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _flex_refusal(case: Case) -> str:
    if case.has_blocks:
        return "FlexAttention needs the queries of all positions, which --cp-comm-type a2a gives it"
    if case.device == "cpu":
        return "FlexAttention has no backward on a CPU"
    if case.context.dtype == torch.float64:
        return "FlexAttention has no fp64"
    smallest = min(spec.head_dim for spec in case.config.head_specs)
    if smallest < _MIN_FLEX_HEAD:
        return f"FlexAttention needs a head size of at least {_MIN_FLEX_HEAD}, not {smallest}"
    if case.widest.head_dim > _MAX_FLEX_HEAD:  # blocks do not fit into shared memory
        return f"FlexAttention needs a head size of at most {_MAX_FLEX_HEAD}, not {case.widest.head_dim}"
    return _machine_refusal(case)


def _triton_refusal(case: Case) -> str:
    if case.device == "cpu":
        return "it runs only on CUDA GPUs"
    if case.context.dtype == torch.float64:
        return "the Triton kernel has no fp64"
    size = max(case.widest.head_dim, case.widest.value_dim)
    if size > MAX_HEAD_DIM:
        return f"the Triton kernel needs a head size of at most {MAX_HEAD_DIM}, not {size}"
    return _machine_refusal(case)


def _machine_refusal(case: Case) -> str:
    if case.device != "cuda" or not torch.cuda.is_available():  # a plan or dry run, on meta tensors
        return ""
    if problem := compile_problem("cuda"):
        return f"Triton cannot compile kernels here: {problem}"
    if torch.cuda.get_device_capability(case.context.device) < _MIN_CAPABILITY:
        return "its kernels need a GPU of compute capability 8.0 or later"
    return ""


BACKENDS: Mapping[str, Backend] = {
    "flash": _sdpa(_FLASH),
    "cudnn": _sdpa(_CUDNN),
    "efficient": _sdpa(_EFFICIENT),
    "fused": _sdpa(_FLASH, _CUDNN, _EFFICIENT),
    "flex": Backend(FlexKernel, _flex_refusal),
    "triton": Backend(TritonKernel, _triton_refusal),
    "unfused": Backend(PlainKernel, lambda case: ""),
}
"""All backends by name."""
_ALIASES = {"local": "unfused"}
"""Names of backends in Megatron-core that differ from ours."""


def preference(case: Case) -> tuple[str, ...]:
    """Return the backends in the order in which auto tries them; the last one supports every run.

    The order on a CPU was measured with benchmarks/attention.py (docs/attention.md). On a GPU PyTorch uses
    the first of its kernels, in the order of `by_speed`, that supports the call. For ALiBi and documents
    these kernels need a bias in memory; our Triton kernel does not. FlexAttention is not included until it
    is measured. Device meta is treated as a GPU.
    """
    if case.context.ring is not None or (case.context.gathers_keys and case.device != "cpu"):
        return "flash", "triton", "unfused"
    if case.device == "cpu":
        is_long = case.config.seq_length >= _LONG_WITH_BIAS
        is_faster = case.context.dtype == torch.bfloat16 or (case.has_bias and is_long)
        return ("unfused",) if is_faster else ("flash", "unfused")
    return ("triton", "fused", "unfused") if case.has_bias else ("fused", "triton", "unfused")


def refusal_of(name: str, case: Case) -> str:
    """Return why a backend does not support a run; empty if it does."""
    for setting, backends, lack, _, is_merged in KERNEL_FEATURES:
        is_needed = setting.is_met(getattr(case.config, setting.field))
        if is_needed and name not in backends and not (is_merged and case.has_blocks):
            return f"it {lack} ({flag_of(setting.field)})"
    return BACKENDS[name].refusal(case)


def choose(case: Case) -> tuple[str, str]:
    """Return the backend's name, and a log line with the reason for the choice.

    Raises:
        UserError: the requested backend does not support the run.
    """
    requested = case.config.attention_backend
    if requested != "auto":
        name = _ALIASES.get(requested, requested)
        if refusal := refusal_of(name, case):
            able = ", ".join(other for other in BACKENDS if not refusal_of(other, case))
            raise UserError(
                f"--attention-backend {requested} does not support this run: {refusal}; use auto, or {able}"
            )
        return name, f"{name}, as requested" + (f" by the name {requested}" if requested != name else "")
    refusals = []
    for name in preference(case):
        refusal = refusal_of(name, case)
        if not refusal:
            break
        refusals.append(f"not {name}: {refusal}")
    return name, f"{name}, chosen for {case.device} in {case.config.params_dtype}" + "".join(
        f"; {refusal}" for refusal in refusals
    )


def fastest_kernel(config: ModelConfig, context: LayerContext) -> BlockKernel:
    """Return the kernel of a ring that auto chooses."""
    name, _ = choose(Case(replace(config, attention_backend="auto"), context))
    kernel = BACKENDS[name].build(config, context)
    assert isinstance(kernel, BlockKernel)
    return kernel


def build_core(config: ModelConfig, context: LayerContext, backend: str | None = None) -> StageCore:
    """Build the attention core of a stage, whose layers may each have their own --cp-comm-type.

    Args:
        backend: name of the backend, which is not checked; None for that of the config.

    Raises:
        UserError: the backend of --attention-backend does not support the run.
    """
    with_attention = [n for n, spec in enumerate(config.layer_specs) if spec.attention is not None] or [0]
    layers: dict[CpCommType, list[int]] = {}
    for number in with_attention:
        comm_type = context.for_layer(number if context.cp.size > 1 else 0).layer_cp_comm_type
        layers.setdefault(comm_type, []).append(number)
    cores = {
        comm_type: _layer_core(config, context.for_layer(numbers[0]), tuple(numbers), backend)
        for comm_type, numbers in layers.items()
    }
    return StageCore(config, context, cores)


def _layer_core(
    config: ModelConfig, context: LayerContext, layers: tuple[int, ...], backend: str | None
) -> LayerCore:
    """Build attention of layers with one communication type of context parallelism."""
    assert context.topology.positions.is_zigzag or not context.gathers_keys, (
        "gathered keys need zigzag slices"
    )
    if backend is not None:
        return LayerCore(config, context, BACKENDS[backend].build(config, context))
    case = Case(config, context, layers)
    name, line = choose(case)
    kernels = BACKENDS[name].kernels
    if kernels and context.device.type == "cuda" and torch.cuda.is_available():
        line += f"; its kernel is {kernel_of(kernels, case)}"
    return LayerCore(config, context, BACKENDS[name].build(config, context), line)
