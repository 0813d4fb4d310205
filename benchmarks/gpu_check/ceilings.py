"""Stage 1: the device's rates in a copy, in GEMMs and in attention, for the rows of the roofline."""

from __future__ import annotations

import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import DeviceType

from benchmarks.clock import Clock
from benchmarks.gpu_check.results import Result, at_most, duration, failed, info, passed, rate, skipped
from benchmarks.gpu_check.runner import CheckContext
from benchmarks.gpu_check.watch import watched
from benchmarks.roofline import COPY_SHARE, gemms, gpu_of_device, rows
from megalite import kernels
from megalite.attention.choice import BACKENDS, Case, build_core, kernel_of, refusal_of
from megalite.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
)
from megalite.config.presets import PRESETS
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.kernels import Drop, add_weight_and_bias_gradient_, add_weight_gradient_
from megalite.kernels.weight_gradient import has_bias_gradient_gemm, has_widening_gemm
from megalite.plan.kernel_time import fused_attention_seconds
from megalite.tensor_parallel.parameter_spec import LayerContext
from megalite.train.trainer import start_trainer
from megalite.utils.hardware.gpus import Gpu

TINY = replace(
    PRESETS["gpt2-124m"], num_layers=2, hidden_size=64, num_attention_heads=2, seq_length=64, vocab_size=128,
    pad_vocab_size_to=None,
)  # fmt: skip
SUSTAINED_SECONDS = 20.0


def model_of(context: CheckContext) -> tuple[ModelConfig, int]:
    """Return the model whose shapes are measured, without dropout, and its micro-batch size."""
    model = replace(PRESETS["gpt-1.3b"], hidden_dropout=0.0, attention_dropout=0.0, params_dtype="bf16")
    if context.is_small:
        return replace(TINY, hidden_dropout=0.0, attention_dropout=0.0, params_dtype="bf16"), 2
    is_large = context.device == "cuda" and torch.cuda.get_device_properties(0).total_memory > 100e9
    return model, 16 if is_large else 8


def data_sheet(context: CheckContext) -> Gpu | None:
    """Return the data sheet of the first GPU; None if it is not known, or there is none."""
    found = gpu_of_device(torch.cuda.get_device_name(0)) if context.device == "cuda" else None
    return found[1] if found else None


@contextmanager
def one_rank(context: CheckContext) -> Iterator[Topology]:
    """Start a process group of this process, on the check's device."""
    backend = "gloo" if context.device == "cpu" else "auto"
    with Topology.start(ParallelConfig(distributed_backend=backend).mesh, Launch(0, 1, 0, 1)) as topology:
        yield topology


def seconds_of(function: Callable[[], object], device: str, rounds: int = 15, num_warmup: int = 3) -> float:
    """Return the median seconds of a call, after some that do not count."""
    clock = Clock(torch.device(device))
    taken = []
    for number in range(-num_warmup, rounds):
        clock.start()
        start = clock.mark()
        function()
        seconds = clock.seconds(start, clock.mark())
        if number >= 0:
            taken.append(seconds)
    return statistics.median(taken)


def copy(context: CheckContext) -> Iterator[Result]:
    """Measure a copy that no cache holds, bytes read plus bytes written."""
    gpu, size = data_sheet(context), 2**16 if context.is_small else 2**32
    source = torch.empty(size, dtype=torch.uint8, device=context.device).random_()
    target = torch.empty_like(source)
    seconds = seconds_of(lambda: target.copy_(source), context.device)
    expected = gpu.memory_gbps * COPY_SHARE / 1e3 if gpu else None
    yield rate("copy", 2 * size / seconds / 1e12, expected, "TB/s", 0.95)


def large_gemm(context: CheckContext) -> Iterator[Result]:
    """Multiply large matrices for 20 seconds: the rate once the GPU is warm, with clock and power."""
    gpu, size = data_sheet(context), 256 if context.is_small else 8192
    wanted = 0.2 if context.is_small else SUSTAINED_SECONDS
    repeats = (
        2 if context.is_small else 200
    )  # calls in a row: the clock waits between turns, and the GPU cools
    x, y, z = (torch.randn(size, size, device=context.device).bfloat16() for _ in range(3))
    rates: list[float] = []

    def multiply() -> None:
        for _ in range(repeats):
            torch.mm(x, y, out=z)

    with watched(context.device) as watch:
        multiply()
        start = time.monotonic()
        while time.monotonic() - start < wanted:
            seconds = seconds_of(multiply, context.device, rounds=1, num_warmup=0)
            rates.append(2 * size**3 * repeats / seconds / 1e12)
    expected = gpu.tflops * gpu.product_share if gpu else None
    yield info(f"GEMM {size}, first moments", rates[0], "TFLOP/s")
    last = statistics.median(rates[-max(1, len(rates) // 4) :])
    yield rate(f"GEMM {size}, sustained {wanted:.0f} s", last, expected, "TFLOP/s", 0.95, watch.summary())


def layer_gemms(context: CheckContext) -> Iterator[Result]:
    """Measure each product of the layers and the logits as training computes it: wgrad adds to fp32 sums."""
    model, micro_batch_size = model_of(context)
    gpu = data_sheet(context)
    expected = {row.name: row.expected for row in rows(model, micro_batch_size, gpu)} if gpu else {}
    kind = {"device": context.device, "dtype": torch.bfloat16}
    if context.device == "cuda":
        widens = has_widening_gemm(torch.bfloat16, torch.float32, torch.device("cuda", 0))
        yield passed("wgrad GEMM adds bf16 products to fp32 sums", widens, str(widens), "True")
    for gemm in gemms(model, micro_batch_size):
        name, form = gemm.name.rsplit(" ", 1)
        if form == "wgrad":
            has_bias = name == "qkv"  # as below
            grad, x = torch.randn(gemm.k, gemm.m, **kind), torch.randn(gemm.k, gemm.n, **kind)
            total = torch.zeros(gemm.m, gemm.n, device=context.device)
            if has_bias and context.device == "cuda":
                has_it = has_bias_gradient_gemm(total, grad, x)
                yield passed("bias' gradient in a GEMM", has_it, str(has_it), "True")
                alone = seconds_of(lambda a=total, b=grad, c=x: add_weight_gradient_(a, b, c), context.device)
                yield info(f"{name} wgrad without its bias", alone * 1e3, "ms", "the sum is not in the GEMM")
            add = add_weight_and_bias_gradient_ if has_bias else add_weight_gradient_
            seconds = seconds_of(lambda a=total, b=grad, c=x, f=add: f(a, b, c), context.device)
            plain = seconds_of(lambda b=grad, c=x: b.t() @ c, context.device)
            yield info(f"{name} wgrad in bf16", plain * 1e3, "ms", f"{gemm.flops / plain / 1e12:.0f} TFLOP/s")
        else:
            x = torch.randn(gemm.m, gemm.k, **kind)
            if form == "forward":
                weight = torch.randn(gemm.n, gemm.k, **kind)
                has_bias = name == "qkv"  # the others' biases are added by the next kernel
                bias = torch.randn(gemm.n, **kind) if has_bias else None
                seconds = seconds_of(lambda a=x, b=weight, c=bias: F.linear(a, b, c), context.device)
            else:
                weight = torch.randn(gemm.k, gemm.n, **kind)
                seconds = seconds_of(lambda a=x, b=weight: a @ b, context.device)
        limit = expected.get(gemm.name)
        reached = f"{gemm.flops / seconds / 1e12:.0f} TFLOP/s"
        yield duration(gemm.name, seconds * 1e3, limit and limit * 1e3, "ms", 0.9, reached)


def gelu_in_gemms(context: CheckContext) -> Iterator[Result]:
    """Compare GEMMs that compute GELU, forward and backward, with a GEMM and a kernel for each.

    A run measures both itself and takes the faster form.
    """
    model, micro_batch_size = model_of(context)
    tokens, h, ffn = micro_batch_size * model.seq_length, model.hidden_size, model.ffn_size
    kind = {"device": context.device, "dtype": torch.bfloat16}
    x, up, bias = torch.randn(tokens, h, **kind), torch.randn(ffn, h, **kind), torch.randn(ffn, **kind)
    down, before = torch.randn(h, ffn, **kind), torch.randn(tokens, ffn, **kind)
    if context.device == "cuda":
        has_it = kernels.has_linear_gelu(up, True)
        yield passed("GELU in GEMMs", has_it, str(has_it), "True")
    calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "forward": (
            lambda: kernels.linear_gelu(x, up, bias),
            lambda: kernels.bias_gelu(F.linear(x, up), bias),
        ),
        "backward": (
            lambda: kernels.gelu_linear_backward(x, down, before, True),
            lambda: torch.ops.megalite.bias_gelu_backward(x @ down, before, bias),
        ),
    }
    for name, (in_gemm, apart) in calls.items():
        seconds, seconds_apart = (seconds_of(function, context.device) for function in (in_gemm, apart))
        shown = f"{seconds * 1e3:.3f} instead of {seconds_apart * 1e3:.3f} ms"
        yield info(f"GELU {name}: times as fast in a GEMM", seconds_apart / seconds, detail=shown)


def heads_of(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values ``[b, n, s, d]`` with the strides that they have in a layer.

    Args:
        qkv: ``[s, b, n, 3, d]``, the output of the fused product.
    """
    q, k, v = (part.squeeze(3).permute(1, 2, 0, 3) for part in qkv.split(1, dim=3))
    return q, k, v


def compile_attention(context: CheckContext) -> Iterator[Result]:
    """Compile Triton's attention, which keeps its kernels on disk; `attention` reports what fails."""
    model, micro_batch_size = model_of(context)
    with one_rank(context) as topology:
        for dropout in (0.0, 0.1):
            case = Case(replace(model, attention_dropout=dropout), LayerContext(topology, torch.bfloat16))
            for result in _attention_backends(context, ("triton",), case, micro_batch_size):
                print(result.to_json())
    yield info("compile attention", "done")


def attention(context: CheckContext) -> Iterator[Result]:
    """Measure each attention backend on a layer's strides, and name the kernel that runs.

    Dropout of the attention weights runs in Triton alone, so Triton is measured with and without.
    """
    model, micro_batch_size = model_of(context)
    with one_rank(context) as topology:
        for dropout, names in (
            (0.0, ("fused", "cudnn", "flash", "efficient", "triton", "unfused")),
            (0.1, ("triton",)),
        ):
            layer = replace(model, attention_dropout=dropout)
            case = Case(layer, LayerContext(topology, torch.bfloat16))
            yield from _attention_backends(context, names, case, micro_batch_size)


def attention_of(name: str, case: Case, qkv: Tensor, drop: Drop) -> Callable[[], Tensor]:
    """Return a call of a backend, with the visible keys precomputed as in a stage.

    Args:
        qkv: ``[s, b, n, 3, d]``.
    """
    core = build_core(case.config, case.context, name)
    layer = core.for_layer(0, core.config.head_specs[0])
    s, b, *_ = qkv.shape
    (visible,) = core.visible_keys((b, s), None, [None]).values()
    return lambda: layer(*heads_of(qkv), visible, drop)


def _attention_backends(
    context: CheckContext, names: Sequence[str], case: Case, micro_batch_size: int
) -> Iterator[Result]:
    model, device = case.config, case.context.topology.device
    s, n, d = model.seq_length, model.num_attention_heads, model.head_dim
    qkv = torch.randn(s, micro_batch_size, n, 3, d, device=device, dtype=torch.bfloat16).requires_grad_()
    drop = Drop(model.attention_dropout, 1, torch.arange(micro_batch_size, device=device))
    with torch.no_grad():
        reference = attention_of("unfused", case, qkv, drop)()
    for name in names:
        title = f"attention {name}" + (f", dropout {drop.p}" if drop.p else "")
        if refusal := refusal_of(name, case):
            yield skipped(title, refusal)
            continue
        try:
            yield from _attention_backend(context, name, title, case, qkv, drop, reference)
        except Exception as error:  # the other backends are measured all the same
            traceback.print_exc()
            yield failed(title, f"{type(error).__name__}: {error}")


def _attention_backend(
    context: CheckContext, name: str, title: str, case: Case, qkv: Tensor, drop: Drop, reference: Tensor
) -> Iterator[Result]:
    """Compare one backend with the formula, and measure it.

    Args:
        qkv: ``[s, b, n, 3, d]``.
        reference: the formula's result, ``[b, n, s, d]``.
    """
    s, b, n, _, d = qkv.shape
    grad = torch.randn(s, b, n, d, device=qkv.device, dtype=qkv.dtype).permute(1, 2, 0, 3)
    forward = attention_of(name, case, qkv, drop)
    out = forward()
    error = ((out - reference).float().norm() / reference.float().norm()).item()
    yield at_most(f"{title}, against unfused", error, 0.02)
    taken = {
        "forward": seconds_of(forward, context.device),
        "backward": seconds_of(
            lambda: torch.autograd.grad(out, qkv, grad, retain_graph=True), context.device
        ),
    }
    gpu = data_sheet(context)
    expected = expected_attention(name, case.config, b, gpu) if gpu else {}
    ran = kernels_run(forward, context.device)
    for form, seconds in taken.items():
        limit = expected.get(form)
        yield duration(f"{title} {form}", seconds * 1e3, limit and limit * 1e3, "ms", 0.85, ran)
    if name == "fused" and context.device == "cuda":
        named, line = kernel_of(BACKENDS[name].kernels, case), "attention kernel in the start-up line"
        if ran:
            yield passed(line, _is_named(named, ran), named, named, ran)
        else:
            yield skipped(line, "the profiler saw no kernel")


def expected_attention(name: str, model: ModelConfig, micro_batch_size: int, gpu: Gpu) -> dict[str, float]:
    """Return the expected seconds of a backend's forward and backward; empty where nothing is known."""
    if name == "unfused":
        return {}
    table = {
        row.name: row.expected for row in rows(model, micro_batch_size, gpu, name in ("flash", "efficient"))
    }
    forward, backward = (table[f"attention {form}"] for form in ("forward", "backward"))
    if name == "triton":
        scores = micro_batch_size * model.num_attention_heads * model.seq_length**2 / 2
        forward, backward = fused_attention_seconds(
            gpu, "triton", scores, model.seq_length, model.head_dim, dropout=model.attention_dropout > 0.0
        )
    # Autograd writes the gradients of q, k and v into one tensor.
    return {"forward": forward, "backward": backward + table["gradients of q, k, v into one tensor"]}


def kernels_run(function: Callable[[], object], device: str) -> str:
    """Return the names of the kernels that a call starts, the longest running first."""
    if device != "cuda":
        return ""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    kernels = [event for event in profile.key_averages() if event.device_type == DeviceType.CUDA]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    return ", ".join(event.key[:60] for event in kernels[:2])


def _is_named(named: str, ran: str) -> bool:
    """Return whether the kernels that ran match the start-up line, by words in their names."""
    is_cudnn = "cudnn" in ran.lower()  # its kernels have "flash" in their names too
    if named.startswith("cuDNN"):
        return is_cudnn
    return not is_cudnn and ("flash" if named.startswith("FlashAttention") else "fmha") in ran.lower()


def no_synchronization(context: CheckContext) -> Iterator[Result]:
    """Run a training step in which PyTorch raises an error wherever the host waits for the GPU."""
    model = replace(TINY, params_dtype="bf16", hidden_dropout=0.0, attention_dropout=0.0)
    models = {
        "fused attention": model,
        "dropout 0.1": replace(model, hidden_dropout=0.1, attention_dropout=0.1),
        "experts": replace(model, add_bias_linear=False, num_experts=4),
    }
    for name, changed in models.items():
        config = Config(
            model=changed,
            parallel=ParallelConfig(distributed_backend="gloo" if context.device == "cpu" else "auto"),
            optimizer=OptimizerConfig(lr=1e-4, lr_decay_style="constant"),
            data=DataConfig(mock_data=True),
            training=TrainingConfig(micro_batch_size=2, global_batch_size=4, train_iters=100, eval_iters=0),
        )
        with one_rank(context) as topology, start_trainer(config, topology) as trainer:
            for _ in range(3):
                trainer.step()
            loss, problem = math.nan, ""
            try:
                if context.device == "cuda":
                    torch.cuda.set_sync_debug_mode("error")
                loss = trainer.step().loss
            except RuntimeError as error:  # caught here, so that the process group ends for the next case
                traceback.print_exc()
                problem = str(error)
            finally:
                if context.device == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
        yield passed(
            f"step without synchronization, {name}", loss == loss, f"loss {loss:.4f}", "a loss", problem
        )
