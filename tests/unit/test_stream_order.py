"""The order of memory accesses over CUDA streams in all code that uses them; see `tests.stream_checker`."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.checkpoint.relayout import _send_and_receive
from megalite.checkpoint.saver import HostCopy
from megalite.checkpoint.tensor_files import FilePiece
from megalite.config import ModelConfig, OptimizerConfig, ParallelConfig, RecomputeConfig
from megalite.data.microbatch import Microbatch
from megalite.distributed.collectives import (
    all_gather_from,
    copy_to_tensor_parallel,
    gather_from_sequence_parallel,
    gather_from_tensor_parallel,
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
    scatter_to_sequence_parallel,
    scatter_to_tensor_parallel,
)
from megalite.distributed.topology import Topology
from megalite.model import activation_offload
from megalite.model.activation_offload import ActivationOffload
from megalite.model.expert_dispatch import _Finish, _Start, dispatcher_for
from megalite.model.recompute_region import recompute
from megalite.optim import offload
from megalite.optim.flat_buffers import ReduceHandle
from megalite.optim.gradient_buckets import GradReducer
from megalite.optim.offload import OptimizerOffload
from megalite.optim.optimizer import Optimizer
from megalite.optim.staging import Staging
from megalite.optim.weight_gathering import ChunkModules, ShardedWeights, WeightGatherer
from megalite.pipeline.executor import PointToPoint
from megalite.pipeline.schedules import SCHEDULES, ScheduleName
from megalite.plan.calibrate import _host_link_rate
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_parameter
from megalite.tensor_parallel.vocab_parallel import TiedWeight, sum_tied_embedding_grads
from megalite.train.gemm_epilogues import seconds_in_turns
from megalite.train.telemetry.timers import clock_for
from megalite.utils.hardware.host_memory import AsyncValues, HostBuffers
from tests.ranks.pipeline.test_executor import SHAPE, build, load
from tests.stages import build_stage
from tests.stream_checker import StreamChecker, StreamOrderError

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megalite"
WIDTH = 16
NUM_BLOCKS = 5


@contextmanager
def world(parallel: ParallelConfig, size: int, rank: int = 0) -> Iterator[Topology]:
    """A rank of a world whose other ranks do not exist; its device is the checker's."""
    with Topology.fake(parallel.mesh, size, rank, device="cpu") as topology:
        yield replace(topology, device=StreamChecker.device)


class Chain(nn.Module):
    """Blocks of layers. At ZeRO 3 the first and the last one stand for the embedding and the head."""

    def __init__(self, context: LayerContext, block: int, has_bias: bool, is_recomputed: bool) -> None:
        super().__init__()
        self.is_recomputed = is_recomputed
        self.blocks = nn.ModuleList(
            nn.Sequential(*(Layer(context, has_bias) for _ in range(block))) for _ in range(NUM_BLOCKS)
        )

    def forward(self, x: Tensor) -> Tensor:
        first, *layers, last = self.blocks
        x = first(x)
        for layer in layers:
            x = recompute(layer, x) if self.is_recomputed else layer(x)
        return last(x).float().square().mean()


class Layer(nn.Module):
    def __init__(self, context: LayerContext, has_bias: bool) -> None:
        super().__init__()
        self.weight = new_parameter(ParameterSpec((WIDTH, WIDTH), std=0.1), context)
        self.bias = new_parameter(ParameterSpec((WIDTH,), decay=False), context) if has_bias else None
        for parameter in self.parameters() if context.has_memory else ():
            parameter.data.normal_()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.weight, self.bias)) + x


def train(
    *,
    stage: int = 1,
    shard: int | None = None,
    overlap: bool = True,
    message: str | None = None,
    bucket_size: int = WIDTH * WIDTH,
    is_tied: bool = False,
    dp: int = 4,
    pp: int = 1,
    block: int = 1,
    has_bias: bool = True,
    is_recomputed: bool = False,
    keeps_weights: bool = False,
    num_microbatches: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    num_iterations: int = 3,
    **config: Any,
) -> None:
    """Run iterations on the first stage. A thread writes a copy of weights and state during every other one.

    The others follow a forward pass that ends early: at ZeRO 3 it has started to gather the next weights.
    """
    parallel = ParallelConfig(
        data_parallel_size=dp,
        pipeline_model_parallel_size=pp,
        data_parallel_shard_degree=shard,
        zero_stage=stage,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        grad_communication_dtype=message,
        ddp_bucket_size=bucket_size,
    )
    settings = OptimizerConfig(lr=0.1, clip_grad=0.5, **config)
    with world(parallel, dp * pp) as topology, ThreadPoolExecutor(1) as writer:
        device, context = topology.device, LayerContext(topology, dtype, has_memory=stage < 3)
        net = Chain(context, block, has_bias, is_recomputed)
        units = [(block, list(block.parameters())) for block in net.blocks]
        first = net.blocks[0][0].weight
        tied = TiedWeight(first, pp > 1, num_gradients=1 if pp > 1 else 2) if is_tied else None
        optimizer = Optimizer(
            net.named_parameters(),
            tied,
            settings,
            parallel,
            topology,
            dtype,
            [ChunkModules(net, net.blocks[1:-1], units)],
            keeps_weights=keeps_weights,
        )
        optimizer.initialize_main(seed=1)
        copy, save = HostCopy(device), None
        for iteration in range(num_iterations):
            optimizer.begin(num_microbatches)
            losses = deque[Tensor]()
            for _ in range(num_microbatches):
                losses.append(net(torch.randn(4, WIDTH, dtype=dtype, device=device)))
                if len(losses) == pp:  # as in 1F1B
                    losses.popleft().backward()
            for loss in losses:
                loss.backward()
            norm = optimizer.finish_gradients()
            scalars = AsyncValues(norm.unsqueeze(0))
            if save is not None:
                copy.protect()
            optimizer.step(0.1, 0.01, norm, torch.ones((), dtype=torch.bool, device=device))
            scalars.read()
            if save is not None:
                save.result()
                save = None
            if iteration % 2 == 0:
                optimizer.finish_weights()
                save = writer.submit(write, copy, copy.take(pieces_of(optimizer)))
            else:
                net.blocks[0](torch.zeros(4, WIDTH, dtype=dtype, device=device))


def pieces_of(optimizer: Optimizer) -> dict[str, FilePiece]:
    tensors = {**optimizer.weights(), **optimizer.state()}
    shards = {name: each if isinstance(each, Tensor) else each.tensor for name, each in tensors.items()}
    return {name: FilePiece(each, None) for name, each in shards.items()}


def write(copy: HostCopy, pieces: Mapping[str, FilePiece]) -> float:
    copy.fill()
    return sum(float(piece.tensor.float().sum()) for piece in pieces.values())


def train_in_file(stage: int) -> None:
    with TemporaryDirectory() as folder:
        train(stage=stage, bucket_size=WIDTH, optimizer_nvme_offload=folder)


def run_pipeline(schedule: ScheduleName, num_ranks: int) -> None:
    """Run each rank's actions and messages; a rank receives zeros."""
    parallel = ParallelConfig(pipeline_model_parallel_size=num_ranks)
    for rank in range(num_ranks):
        with world(parallel, num_ranks, rank) as topology:
            chunks, pipeline = build(topology, schedule)
            for chunk in chunks:
                chunk.to(topology.device)
            for number in (1, 3, 4):
                pipeline.train_step(number, lambda index: load(index).to(topology.device), SHAPE)
                pipeline.evaluate(number, lambda index: load(index).to(topology.device), SHAPE)


def offload_activations() -> None:
    model = ModelConfig(
        num_layers=3,
        hidden_size=64,
        num_attention_heads=4,
        seq_length=64,
        vocab_size=100,
        params_dtype="fp32",
    )
    with world(ParallelConfig(), 1) as topology:
        device = topology.device
        offload = ActivationOffload(device)
        stage = build_stage(
            model, topology, range(3), recompute=RecomputeConfig(cpu_offload_activations=2), offload=offload
        )
        for _ in range(2):
            losses = [stage(tokens(model, device), None).sum() for _ in range(2)]
            for loss in reversed(losses):
                loss.backward()
        assert offload.buffers.copied_up == offload.buffers.copied_down > 0


def reuse_host_buffer() -> None:
    """Copy to a buffer whose copy to the device may still run; drop a tensor while it is copied."""
    buffers = HostBuffers(StreamChecker.device)
    first, second = (torch.ones(100, device=StreamChecker.device).view(torch.uint8) for _ in range(2))
    buffer = buffers.copy_to_host(first)
    buffers.wait(buffers.mark_copied())
    back = buffers.copy_to_device(buffer)
    again = buffers.copy_to_host(second)
    del back  # no stream has waited for its copy
    buffers.keep_for_copies(second)
    del second
    buffers.give_back(again)
    buffers.wait(buffers.mark_copied())
    torch.cuda.current_stream().synchronize()


def tokens(model: ModelConfig, device: torch.device) -> Microbatch:
    ids = torch.randint(model.vocab_size, (2, model.seq_length + 1))
    return Microbatch.of(ids, torch.arange(2)).pin_memory().to(device)


def exchange_tied_gradient() -> None:
    with world(ParallelConfig(pipeline_model_parallel_size=2), 2) as topology:
        gradient = torch.ones(8, device=topology.device)
        sum_tied_embedding_grads(gradient, topology.pp)
        gradient.zero_()


def run_collectives() -> None:
    with world(ParallelConfig(tensor_model_parallel_size=2), 2) as topology:
        x = torch.randn(4, 2, 8, device=topology.device, requires_grad=True)
        for there, back in (
            (scatter_to_sequence_parallel, gather_from_sequence_parallel),
            (reduce_scatter_to_sequence_parallel, gather_from_sequence_parallel),
            (copy_to_tensor_parallel, reduce_from_tensor_parallel),
            (scatter_to_tensor_parallel, gather_from_tensor_parallel),
            (scatter_to_tensor_parallel, all_gather_from),
        ):
            back(there(x * 2, topology.tp) * 2, topology.tp).sum().backward()


def move_tokens(dispatcher: str) -> None:
    """Compute something else from the tokens while they are on their way to experts on two ranks."""
    with world(ParallelConfig(expert_model_parallel_size=2), 2) as topology:
        x = torch.randn(6, 2, 8, device=topology.device, requires_grad=True)
        weights = torch.ones(6, 2, 1, device=topology.device, requires_grad=True)
        experts = torch.zeros(6, 2, 1, dtype=torch.int64, device=topology.device)
        tokens = x * 2
        context = LayerContext(topology, torch.float32, moe_token_dispatcher_type=dispatcher)
        wait = dispatcher_for(4, context).start(tokens, weights, experts)
        other = tokens.square() * 3
        rows, of_rows, _, combine = wait()
        (other + combine(rows * of_rows.unsqueeze(1))).sum().backward()


def time_parts() -> None:
    clock = clock_for(StreamChecker.device)
    assert clock.seconds(clock.now(), clock.now()) >= 0.0


def time_gemms() -> None:
    x = torch.ones(4, device=StreamChecker.device)
    assert seconds_in_turns([lambda: x.add_(1.0), lambda: x.mul_(2.0)]) == [1e-3, 1e-3]


def move_to_another_layout() -> None:
    held = [torch.arange(4.0), torch.arange(3)]
    with world(ParallelConfig(), 2) as topology:
        wanted = [torch.zeros_like(part, device=StreamChecker.device) for part in held]
        assert _send_and_receive(held, 1, wanted, 1, topology) == 40
        assert all(part.add(1).shape == part.shape for part in wanted)


def measure_host_link() -> None:
    assert _host_link_rate(StreamChecker.device, 1.0, True) > 0.0


OFFLOADED = {"optimizer_cpu_offload": True}
SCENARIOS: dict[str, Callable[[], object]] = {
    **{f"zero {stage}": partial(train, stage=stage) for stage in (0, 1, 2)},
    **{f"zero {stage}, no overlap": partial(train, stage=stage, overlap=False) for stage in (0, 1, 2)},
    **{f"zero {stage}, groups": partial(train, stage=stage, shard=2, message="bf16") for stage in (1, 2)},
    **{f"offload, zero {stage}": partial(train, stage=stage, **OFFLOADED) for stage in (0, 1, 2)},
    **{
        f"one bucket and a tied weight, {name}": partial(
            train, stage=2, bucket_size=10**6, has_bias=False, is_tied=True, **options
        )
        for name, options in {"groups": {"shard": 2}, "offload": OFFLOADED}.items()
    },
    "offload, fp32, a part": partial(
        train, dtype=torch.float32, optimizer_offload_fraction=0.5, shard=2, **OFFLOADED
    ),
    "offload, a file": partial(train_in_file, 1),
    "offload, one rank": partial(train, stage=0, dp=1, **OFFLOADED),
    "zero 3": partial(train, stage=3, num_microbatches=3),
    **{
        f"zero 3, {name}": partial(train, stage=3, **options)
        for name, options in {
            "blocks of layers": {"block": 3, "message": "bf16"},
            "fp32": {"dtype": torch.float32},
            "kept weights": {"keeps_weights": True},
            "pipeline": {"pp": 2, "is_tied": True, "num_microbatches": 4},
            "groups": {"shard": 2, "message": "bf16"},
            "offload": OFFLOADED,
            "offload in groups": {"shard": 2, "optimizer_offload_fraction": 0.5, **OFFLOADED},
            "recomputation": {"is_recomputed": True, "block": 2},
            "recomputation of kept weights": {"is_recomputed": True, "keeps_weights": True},
        }.items()
    },
    **{f"pipeline, {schedule}": partial(run_pipeline, schedule, 2) for schedule in SCHEDULES},
    "activations": offload_activations,
    "host buffers": reuse_host_buffer,
    "tied embedding": exchange_tied_gradient,
    "tensor parallelism": run_collectives,
    "rows of experts": partial(move_tokens, "alltoall"),
    "gathered tokens of experts": partial(move_tokens, "allgather"),
    "times of GEMMs": time_gemms,
    "timers": time_parts,
    "host link": measure_host_link,
    "relayout": move_to_another_layout,
}
COVERED = {
    "megalite/checkpoint/relayout.py": ("relayout",),
    "megalite/checkpoint/saver.py": ("zero 1",),
    "megalite/distributed/collectives.py": ("rows of experts",),
    "megalite/utils/hardware/host_memory.py": ("activations", "zero 1"),
    "megalite/data/microbatch.py": ("activations",),
    "megalite/optim/flat_buffers.py": ("zero 1, groups", "zero 3"),
    "megalite/optim/gradient_buckets.py": ("zero 1, groups",),
    "megalite/optim/offload.py": ("offload, zero 1",),
    "megalite/optim/weight_gathering.py": ("zero 3",),
    "megalite/optim/staging.py": ("offload, zero 1",),
    "megalite/pipeline/executor.py": ("pipeline, 1f1b",),
    "megalite/plan/calibrate.py": ("host link",),
    "megalite/tensor_parallel/vocab_parallel.py": ("tied embedding",),
    "megalite/tensor_parallel/parameter_spec.py": ("zero 3",),
    "megalite/train/gemm_epilogues.py": ("times of GEMMs",),
    "megalite/train/telemetry/timers.py": ("timers",),
}
"""Scenarios that run the streams, events, collectives or copies of each file."""

USES = re.compile(
    r"torch\.cuda\.(Stream|Event|stream|current_stream)\(|record_stream|wait_(stream|event)\("
    r"|non_blocking=True|async_op=True|batch_isend_irecv|\.resize_\("
)


@pytest.fixture(autouse=True)
def small_and_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(offload, "RANGE_SIZE", 100)
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 1 << 10)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_access_is_ordered(name: str) -> None:
    with StreamChecker() as checker:
        SCENARIOS[name]()
    print(checker.report())
    assert {file for file, scenarios in COVERED.items() if name in scenarios} <= checker.files


def test_all_code_that_uses_streams_is_covered() -> None:
    """A new file needs a scenario, unless it only synchronizes the device or replaces CUDA by the CPU."""
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    del sources["megalite/observe/judge/adapters/megatron/on_cpu.py"]
    assert {file for file, source in sources.items() if USES.search(source)} == COVERED.keys()


def without(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, text: str, replacement: str) -> None:
    """Replace a part of the source of a function, which must occur once in it."""
    function = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(text) == 1, source
    changed: dict[str, Any] = {}
    lines = "\n" * (function.__code__.co_firstlineno - 2) + "from __future__ import annotations\n"
    code = compile(lines + source.replace(text, replacement), function.__code__.co_filename, "exec")
    exec(code, function.__globals__, changed)
    monkeypatch.setattr(owner, name, changed[function.__name__])


RACES = {
    "the gradients of rows are read before they arrive": (
        *(_Start, "backward", "ctx.messages.wait(), None", "grad, None"),
        *("rows of experts", "are read by .* without waiting until they are written by all-to-all"),
    ),
    "rows are read before they arrive": (
        *(_Finish, "forward", "messages.wait()", "messages.pending.tensor"),
        *("rows of experts", "are read by .* without waiting until they are written by all-to-all"),
    ),
    "a temporary is freed while it is saved": (
        *(HostCopy, "_copy_on", "tensor.record_stream(stream)", "pass"),
        *(
            "zero 3",
            r"freed at .*return to the default stream.*read by copy_\(non_blocking\) on stream 1",
        ),
    ),
    "weights are saved before they are computed": (
        *(HostCopy, "_copy_on", "stream.wait_stream(torch.cuda.current_stream(self._device))", "pass"),
        *("zero 3", "device memory .* read by copy_.*saver.py"),
    ),
    "weights are updated while they are saved": (
        *(HostCopy, "protect", "torch.cuda.current_stream(self._device).wait_event(self._done)", "pass"),
        *("zero 1", "are written by .*adamw.* without waiting until they are read by copy_.*saver.py"),
    ),
    "a file is written before the copy has ended": (
        *(HostCopy, "fill", "self._done.synchronize()", "pass"),
        *(
            "zero 1",
            "pinned memory .* are read by .*on host thread ThreadPool.*written by copy_.*saver.py",
        ),
    ),
    "a scalar is read before it has arrived": (
        *(AsyncValues, "read", "self._arrived.synchronize()", "pass"),
        *("zero 1", "pinned memory .* read by .* on host thread .*host_memory.py.*written by copy_"),
    ),
    "gradients are read before they are reduced": (
        *(ReduceHandle, "_complete", "self._pending.wait()", "pass"),
        *("zero 0", "without waiting until they are written by all-reduce on the communication stream"),
    ),
    "gradients are added while they are reduced": (
        *(GradReducer, "finish", "self._wait(0)", "pass"),
        *("zero 1", "without waiting until they are .* by reduce-scatter"),
    ),
    "weights are used before they are gathered": (
        *(WeightGatherer, "_wait", "pending.wait()", "pass"),
        *("zero 1", "without waiting until they are written by all-gather"),
    ),
    "hidden states are read before they have arrived": (
        PointToPoint,
        "received",
        'self._wait(work, f"{message.direction}-recv", reader, message.sender)',
        "pass",
        *("pipeline, 1f1b", "without waiting until they are written by receive"),
    ),
    "hidden states are overwritten before they are sent": (
        PointToPoint,
        "start",
        "self._pending[batch.direction].append((sent, batch.send, send[0]))",
        "send[0].zero_()",
        *("pipeline, 1f1b", "are written by zero_ .* without waiting until they are read by .*send"),
    ),
    "a slot is overwritten before it is copied up": (
        *(Staging, "down", "self._down.wait_event(before)", "pass"),
        *("offload, zero 1", "pinned memory .* without waiting until they are read by copy_.*staging.py"),
    ),
    "the host updates a gradient that has not arrived": (
        *(Staging, "arrived", "event.synchronize()", "pass"),
        *("offload, a file", "are written by megalite::adamw_ on host thread optimizer-update"),
    ),
    "forward reads weights before they are copied up": (
        *(OptimizerOffload, "wait", "torch.cuda.current_stream().wait_event(event)", "pass"),
        *("offload, zero 0", "without waiting until they are written by copy_.*staging.py"),
    ),
    "weights are used before they are gathered at ZeRO 3": (
        *(ShardedWeights, "_finish", "pending.wait()", "pass"),
        *("zero 3", "are read by .* on the default stream .*without waiting until they are written by all-g"),
    ),
    "a recomputed layer does not wait for its weights": (
        *(ShardedWeights, "_before_forward", "self._finish(bucket)", "pass"),
        *("zero 3, recomputation", "without waiting until they are written by all-gather"),
    ),
    "backward does not wait for its weights": (
        *(ShardedWeights, "_before_backward", "self._finish(bucket)", "pass"),
        *("zero 3", "without waiting until they are written by all-gather"),
    ),
    "weights are freed while they are gathered": (
        *(ShardedWeights, "_free", "self._finish(bucket)", "pass"),
        *("zero 3", "freed at .*weight_gathering.py.* still written by all-gather"),
    ),
    "a shard is gathered while it is rounded": (
        ShardedWeights,
        "_start",
        "own.copy_(bucket.main)",
        "with torch.cuda.stream(torch.cuda.Stream()): own.copy_(bucket.main)",
        *("zero 3", "are read by all-gather .* without waiting until they are written by copy_"),
    ),
    "weights are gathered while they are allocated for another stream": (
        ShardedWeights,
        "_start",
        "gathered.untyped_storage().resize_(gathered.nbytes)",
        "with torch.cuda.stream(torch.cuda.Stream()): gathered.untyped_storage().resize_(gathered.nbytes)",
        *("zero 3", "freed at .* return to stream .* but are still read by"),
    ),
    "weights are gathered before the host has updated them": (
        *(ShardedWeights, "_start", "self.wait_for_update(bucket)", "pass"),
        *(
            "zero 3, offload",
            # In the order in which the two threads come.
            "are read by copy_.* without waiting until they are written by copy_.*staging.py|"
            "are written by copy_.*staging.py.* without waiting until they are read by copy_.*gathering.py",
        ),
    ),
    "a message is freed before its sum is stored": (
        *(ReduceHandle, "_start_following", "self._first = self._store_result", "pass"),
        *("zero 3, groups", "freed at .*flat_buffers.py.* still read by"),
    ),
    "a gradient is copied to the host before it is complete": (
        *(ReduceHandle, "advance", "stream.wait_stream(torch.cuda.current_stream())", "pass"),
        *("offload, one rank", "are read by copy_.*staging.py.* without waiting until they are written by"),
    ),
    "an activation is freed while it is copied down": (
        *(HostBuffers, "wait", "torch.cuda.current_stream(self._device).wait_event(event)", "pass"),
        *("activations", "freed at .*activation_offload.py.*still read by copy_.*host_memory.py"),
    ),
    "an activation is copied back before it has been copied down": (
        *(
            HostBuffers,
            "copy_to_device",
            "self._up.wait_stream(torch.cuda.current_stream(self._device))",
            "pass",
        ),
        *("activations", "pinned memory .* read by copy_.*without waiting until they are written by copy_"),
    ),
    "a buffer is overwritten before it has been copied back": (
        *(HostBuffers, "copy_to_host", "self._down.wait_event(buffer.read)", "pass"),
        *("host buffers", "pinned memory .* written by copy_.*without waiting until they are read by copy_"),
    ),
}
"""Where an order is removed: the function, the text, what replaces it; a scenario, and the message."""


@pytest.mark.parametrize("race", RACES)
def test_a_race_is_found(race: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, text, replacement, scenario, message = RACES[race]
    without(monkeypatch, owner, name, text, replacement)
    with pytest.raises(StreamOrderError, match=message), StreamChecker():
        SCENARIOS[scenario]()
