#!/usr/bin/env python3
"""Kernels and bytes of a transformer layer that torch.compile compiles for an H200, without a GPU.

    python benchmarks/compiled_layer.py                # needs no GPU and no Triton
    python benchmarks/compiled_layer.py --decompose    # norms, GELU and SwiGLU as PyTorch's operators

The layer is traced with tensors that have no data, in bf16, without dropout, with fused weight gradients.
Then inductor schedules its graphs as for an H200: which operators it fuses is exact. Bytes count each
kernel's inputs and outputs once, in units of X, a tensor [tokens, hidden size] in bf16. An input counts fully
even if a kernel only reads a part of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map

from megalite.attention.choice import build_core
from megalite.attention.positions import PositionInfo
from megalite.config import ModelConfig, ParallelConfig
from megalite.config.presets import PRESETS
from megalite.distributed.topology import Topology
from megalite.kernels import VisibleKeys, activations, norm, rotary
from megalite.model.layer import TransformerLayer
from megalite.tensor_parallel.gemm import MainGrad
from megalite.tensor_parallel.parameter_spec import LayerContext
from megalite.utils.commands import run_main
from megalite.utils.hardware.gpus import GPUS

BATCH = 16
MEMORY_SHARE = 0.9  # of the data sheet's bandwidth: 4.3 TB/s, what a copy reaches
GPU = torch.device("cuda", 0)
H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block_optin=227 << 10,
    L2_cache_size=50 << 20,
    gcnArchName="",
)
REFERENCES: dict[str, Callable[..., Any]] = {
    "bias_gelu": activations.gelu_reference,
    "bias_gelu_backward": activations.gelu_backward_reference,
    "bias_swiglu": activations.swiglu_reference,
    "bias_swiglu_backward": activations.swiglu_backward_reference,
    "layer_norm_backward": norm.layer_backward_reference,
    "rms_norm_backward": norm.rms_backward_reference,
}
"""Operators that remain calls in a graph, in PyTorch's operators."""
GEMMS = ("extern_kernels.", "add_weight_gradient_")


class Kernel(NamedTuple):
    """Describes a call of a scheduled graph: a fused kernel, or an operator.

    Attributes:
        is_memory_bound: neither a GEMM nor attention.
    """

    is_backward: bool
    name: str
    num_bytes: int
    is_memory_bound: bool


@contextmanager
def _scheduled_for_h200(kernels: list[Kernel]) -> Iterator[Callable[..., Any]]:
    """Yield a backend of torch.compile that schedules graphs for an H200 and adds their kernels to a list."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config, scheduler
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.graph import GraphLowering

    def schedule(graph: Any) -> Any:
        graph._update_scheduler()
        kernels.extend(_kernels_of(graph))
        outputs = next(node for node in graph.orig_gm.graph.nodes if node.op == "output").args[0]
        values = [None if each is None else each.meta["val"] for each in outputs]

        def call(_: list[Any]) -> list[Any]:
            return [
                None if x is None else torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)
                for x in values
            ]

        return SimpleNamespace(__file__="", key="", path="", call=call, runner=None)

    def on_gpu(x: Any) -> Any:
        if isinstance(x, FakeTensor) and x.dim() > 0:  # scalars are keys of dropout, on the host
            x.fake_device = GPU
        return x

    def compile_on_gpu(graph: Any, inputs: Sequence[Any], **options: Any) -> Any:
        for node in graph.graph.nodes:
            tree_map(on_gpu, node.meta.get("val"))
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": GPU}
        tree_map(on_gpu, list(inputs))
        return compile_fx_inner(graph, inputs, **options)

    properties = staticmethod(lambda device=None: H200)
    with ExitStack() as stack:
        for target, name, value in (
            (GraphLowering, "_compile_to_module", schedule),
            (scheduler, "has_triton", lambda: True),
            (torch.cuda, "get_device_properties", lambda device=None: H200),
            (torch.cuda, "get_device_capability", lambda device=None: (H200.major, H200.minor)),
            (torch.cuda, "current_device", lambda: 0),
            (CudaInterface, "get_device_properties", properties),
            (CudaInterface, "is_bf16_supported", staticmethod(lambda including_emulation=True: True)),
            (CudaInterface.Worker, "get_device_properties", properties),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(config.patch(fx_graph_cache=False, compile_threads=1))
        yield lambda graph, inputs: compile_fx(graph, inputs, inner_compile=compile_on_gpu)


def _functions(alone: Callable[..., Any], with_residual: Callable[..., Any]) -> norm.NormFunctions:
    return norm.NormFunctions(alone, with_residual, norm.after_sum(with_residual))


def _main_grad(buffer: Tensor) -> MainGrad:
    return MainGrad(lambda: (buffer.detach(), False), lambda: None, buffer)


def _kernels_of(graph: Any) -> Iterator[Kernel]:
    for node in graph.scheduler.nodes:
        num_bytes = node.get_read_write_buffers_sizes()
        if num_bytes == 0:  # an output of an operator with several
            continue
        called = getattr(node.node, "python_kernel_name", None)
        origins = {str(origin.target) for part in node.get_nodes() for origin in part.node.get_origins()}
        name = called or " ".join(sorted(each.split(".")[-2] for each in origins if each.count(".") > 1))
        is_product = called is not None and any(each in called for each in (*GEMMS, "attention"))
        yield Kernel(graph.is_backward, name, num_bytes, not is_product)


def layer_kernels(model: ModelConfig) -> list[Kernel]:
    """Return what forward and backward of one layer of a model call, for `BATCH` samples."""
    kernels: list[Kernel] = []
    as_on_a_gpu = {
        "norm.layer_norm_on": lambda _: _functions(norm.layer_norm, norm.layer_norm_with_residual),
        "norm.rms_norm_on": lambda _: _functions(norm.rms_norm, norm.rms_norm_with_residual),
        "positions.rotate": lambda x, *angles: rotary.reference(x, *angles, False),
    }
    with ExitStack() as stack:
        for name, function in as_on_a_gpu.items():
            stack.enter_context(mock.patch(f"megalite.model.{name}", function))
        topology = stack.enter_context(Topology.fake(ParallelConfig().mesh, 1, 0, device="cpu"))
        backend = stack.enter_context(_scheduled_for_h200(kernels))
        stack.enter_context(FakeTensorMode())
        context = LayerContext(topology, torch.bfloat16, fuses_weight_gradients=True)
        layer = TransformerLayer(model, context, build_core(model, context, "triton"), 0)
        layer.attention.core.prepare(model.seq_length)  # type: ignore[attr-defined]
        for weight in layer.parameters():
            buffer = torch.empty(weight.shape)
            weight.main_grad = _main_grad(buffer)  # type: ignore[attr-defined]
        shape = model.seq_length, BATCH, model.hidden_size
        x = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
        samples = torch.empty(BATCH, dtype=torch.int64)
        compiled = torch.compile(layer.forward, backend=backend, dynamic=False)
        y: Tensor = compiled(x, samples, PositionInfo({None: VisibleKeys()}))
        y.sum().backward()
    return kernels


def main(arguments: Sequence[str]) -> None:
    """Print the kernels, and the time of those that are bound by memory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="gpt-1.3b", choices=list(PRESETS))
    parser.add_argument("--decompose", action="store_true", help="give the compiler PyTorch's operators")
    args = parser.parse_args(arguments)
    model = PRESETS[args.preset]
    if args.decompose:
        from torch._inductor.decomposition import register_decomposition

        for name, reference in REFERENCES.items():
            register_decomposition([getattr(torch.ops.megalite, name).default])(reference)
    kernels = layer_kernels(model)
    unit = 2 * BATCH * model.seq_length * model.hidden_size
    for is_backward in (False, True):
        print("backward" if is_backward else "forward")
        for kernel in kernels:
            if kernel.is_backward == is_backward:
                mark = "memory" if kernel.is_memory_bound else ""
                print(f"  {kernel.num_bytes / unit:6.2f} X  {mark:6}  {kernel.name[:84]}")
    moved = sum(kernel.num_bytes for kernel in kernels if kernel.is_memory_bound)
    seconds = moved / (GPUS["h200"].memory_gbps * 1e9 * MEMORY_SHARE)
    print(
        f"{args.preset}, {BATCH} samples: {len(kernels)} kernels a layer; the memory-bound ones move "
        f"{moved / unit:.1f} X = {moved / 1e9:.2f} GB, {seconds * 1e3:.2f} ms a layer and "
        f"{model.num_layers * seconds * 1e3:.1f} ms a microbatch"
    )


if __name__ == "__main__":
    run_main(main, sys.argv[1:])
