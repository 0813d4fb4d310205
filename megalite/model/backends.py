"""Attention backends by the names of --attention-backend, what each can serve, and which one auto takes.

A backend says what stands in its way in words, so that a refusal names it and what can serve instead. What
PyTorch's own kernels can do on a GPU depends on its model, the versions of CUDA and cuDNN and the head size:
PyTorch is asked, and no table of ours grows old.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend

from megalite.config import ModelConfig
from megalite.errors import UserError
from megalite.model.attention_core import AttentionCore, SdpaCore
from megalite.model.flex import FlexCore
from megalite.model.unfused import UnfusedCore
from megalite.parallel.shard import Placement

_FLASH, _CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
_EFFICIENT = SDPBackend.EFFICIENT_ATTENTION
_LONG_WITH_BIAS = 1024  # tokens from which any dtype with a bias is faster written out
_MIN_FLEX_HEAD, _MIN_FLEX_CAPABILITY = 16, (8, 0)


@dataclass(frozen=True)
class Case:
    """What a run asks of attention.

    Attributes:
        has_documents: samples are packed, and attention keeps within their documents.
    """

    config: ModelConfig
    place: Placement
    has_documents: bool = False

    @property
    def device(self) -> str:
        """The device's type."""
        return self.place.device.type

    @property
    def has_bias(self) -> bool:
        """Whether scores are more than scaled and causal."""
        return self.config.position_embedding_type == "alibi" or self.has_documents


class Backend(NamedTuple):
    """One way to compute attention.

    Attributes:
        build: makes it for a stage.
        refusal: what stands in its way, in words; empty where nothing does.
    """

    build: Callable[[ModelConfig, Placement], AttentionCore]
    refusal: Callable[[Case], str]


def _sdpa(*kernels: SDPBackend) -> Backend:
    """PyTorch's scaled_dot_product_attention on one of some kernels."""

    def build(config: ModelConfig, place: Placement) -> AttentionCore:
        return SdpaCore(config, place, *kernels)

    return Backend(build, partial(_sdpa_refusal, kernels))


def _sdpa_refusal(kernels: tuple[SDPBackend, ...], case: Case) -> str:
    if case.config.attention_dropout > 0.0:
        return _DROPOUT
    if case.device == "cpu":
        return "" if _FLASH in kernels else "it runs on CUDA GPUs alone"
    if case.device != "cuda" or not torch.cuda.is_available():  # a plan, on tensors without memory
        return ""
    if any(_PROBES[kernel](_parameters(case), False) for kernel in kernels):
        return ""
    bias = ", ALiBi or packed documents" if case.has_bias else ""
    return (
        f"PyTorch {torch.__version__} has no such kernel on {torch.cuda.get_device_name(case.place.device)} "
        f"for head size {case.config.head_dim} in {case.config.params_dtype}{bias}"
    )


_PROBES = {
    _FLASH: torch.backends.cuda.can_use_flash_attention,
    _CUDNN: torch.backends.cuda.can_use_cudnn_attention,
    _EFFICIENT: torch.backends.cuda.can_use_efficient_attention,
}
_DROPOUT = "it cannot drop weights by counter, the same in any layout, and --attention-dropout is above 0"


def _parameters(case: Case) -> torch.backends.cuda.SDPAParams:
    """One sample's attention as SDPA gets it, in tensors that have next to no memory."""
    config, place = case.config, case.place
    heads = config.num_attention_heads // place.tp.size
    groups = max(1, config.num_kv_heads // place.tp.size)
    s, d = config.seq_length, config.head_dim
    one = torch.empty(1, 1, 1, d, dtype=place.dtype, device=place.device, requires_grad=True)
    q, k = one.expand(1, heads, s, d), one.expand(1, groups, s, d)
    mask = torch.empty(1, 1, 1, s, dtype=place.dtype, device=place.device).expand(1, heads, s, s)
    bias = mask if case.has_bias else None
    return torch.backends.cuda.SDPAParams(q, k, k, bias, 0.0, not case.has_bias, heads != groups)


def _flex_refusal(case: Case) -> str:
    if case.config.attention_dropout > 0.0:
        return _DROPOUT
    if case.device == "cpu":
        return "FlexAttention has no backward on a CPU"
    if case.place.dtype == torch.float64:
        return "FlexAttention has no fp64"
    if case.config.head_dim < _MIN_FLEX_HEAD:
        return f"FlexAttention takes no head size below {_MIN_FLEX_HEAD}, and this is {case.config.head_dim}"
    if case.device == "cuda" and torch.cuda.is_available():
        if importlib.util.find_spec("triton") is None:
            return "FlexAttention needs Triton, which is not installed"
        if torch.cuda.get_device_capability(case.place.device) < _MIN_FLEX_CAPABILITY:
            return "FlexAttention needs a GPU of compute capability 8.0 or later"
    return ""


def _serves_all(case: Case) -> str:
    return ""


BACKENDS: Mapping[str, Backend] = {
    "flash": _sdpa(_FLASH),
    "cudnn": _sdpa(_CUDNN),
    "efficient": _sdpa(_EFFICIENT),
    "fused": _sdpa(_FLASH, _CUDNN, _EFFICIENT),
    "flex": Backend(FlexCore, _flex_refusal),
    "unfused": Backend(UnfusedCore, _serves_all),
}
"""Every backend by name."""
_ALIASES = {"local": "unfused"}
"""Megatron-core's names for what has another here."""


def preference(case: Case) -> tuple[str, ...]:
    """Backends in the order in which auto tries them; the last serves everything.

    On a CPU as benchmarks/attention.py measured (docs/attention.md). On a GPU PyTorch chooses among its
    kernels at each call; FlexAttention is not among them until it is measured. Tensors without memory (device
    meta) stand for a GPU's.
    """
    if case.device == "cpu":
        is_long = case.config.seq_length >= _LONG_WITH_BIAS
        is_faster = case.place.dtype == torch.bfloat16 or (case.has_bias and is_long)
        return ("unfused",) if is_faster else ("flash", "unfused")
    return ("fused", "unfused")


def choose(case: Case) -> tuple[str, str]:
    """The backend's name, and a line that says why.

    Raises:
        UserError: the one that was asked for cannot serve.
    """
    asked = case.config.attention_backend
    if asked != "auto":
        name = _ALIASES.get(asked, asked)
        if refusal := BACKENDS[name].refusal(case):
            able = ", ".join(other for other, backend in BACKENDS.items() if not backend.refusal(case))
            raise UserError(
                f"--attention-backend {asked} cannot serve this run: {refusal}; give auto, or {able}"
            )
        return name, f"{name}, as asked for" + (f" by the name {asked}" if asked != name else "")
    refusals = []
    for name in preference(case):
        refusal = BACKENDS[name].refusal(case)
        if not refusal:
            break
        refusals.append(f"not {name}: {refusal}")
    return name, f"{name}, chosen for {case.device} in {case.config.params_dtype}" + "".join(
        f"; {refusal}" for refusal in refusals
    )


def build_core(config: ModelConfig, place: Placement, *, has_documents: bool = False) -> AttentionCore:
    """Makes the attention product of a stage.

    Raises:
        UserError: --attention-backend names one that cannot serve.
    """
    name, line = choose(Case(config, place, has_documents))
    core = BACKENDS[name].build(config, place)
    core.choice = line
    return core
