"""The rows of the roofline against the model's own counts and operators, and the figures in the docs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.roofline import (
    LAYER_OPERATORS,
    SMALL_COPIES,
    Program,
    gpu_of_device,
    host_seconds,
    main,
    mfu,
    predicted_mfu,
    rows,
    step_seconds,
)
from benchmarks.roofline_published import compared_runs, shares
from docs.make.roofline_figures import step_and_mfu, with_figures
from megalite.config import Config, DataConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from megalite.config.model.model_config import flops_per_token
from megalite.config.presets import PRESETS
from megalite.data.microbatch import Microbatch
from megalite.distributed.topology import Topology
from megalite.plan.kernel_time import FUSED_BACKWARD, fused_attention_seconds
from megalite.train.model_chunks import ChunkResources, build_chunks, build_optimizer
from megalite.utils.errors import UserError
from megalite.utils.hardware.gpus import GPUS

MODEL, H200 = PRESETS["gpt-1.3b"], GPUS["h200"]
DOCS = Path(__file__).parents[3] / "docs"


def test_gemms_and_attention_are_those_of_the_model() -> None:
    """Attention's backward computes the scores again, which model FLOPs do not count."""
    table = rows(MODEL, 16, H200)
    flops = sum(row.count * row.flops for row in table if row.kind == "gemm")
    forward = sum(row.count * row.flops for row in table if row.name == "attention forward")
    backward = sum(row.count * row.flops for row in table if row.name == "attention backward")
    assert backward == pytest.approx(FUSED_BACKWARD * forward)
    counted = flops + 3 * forward
    assert counted == pytest.approx(flops_per_token(MODEL, 1) * 16 * MODEL.seq_length)


@pytest.mark.parametrize("gpu", ["h200", "h100-80", "a100-80", "b200"])
@pytest.mark.parametrize("change", [{}, *({name: True} for name in Program._fields[:5])])
def test_no_kernel_is_expected_to_be_faster_than_its_floor(gpu: str, change: dict[str, bool]) -> None:
    for row in rows(MODEL, 16, GPUS[gpu], program=Program(**change)):  # type: ignore[arg-type]
        assert 0 <= row.floor <= row.expected, row
        assert row.expected > 0


def test_the_step_is_the_sum_of_its_kinds() -> None:
    table = rows(MODEL, 1, H200, program=Program(operator_seconds=1.0))
    kinds = [step_seconds(table, kind) for kind in ("gemm", "attention", "memory", "host")]
    assert min(kinds) > 0
    assert sum(kinds) == pytest.approx(step_seconds(table))


def test_a_slow_host_decides() -> None:
    fast, slow = (Program(operator_seconds=seconds) for seconds in (1e-6, 30e-6))
    kernels = step_seconds(rows(MODEL, 1, H200, program=fast))
    assert host_seconds(MODEL, fast) < kernels < host_seconds(MODEL, slow)
    assert step_seconds(rows(MODEL, 1, H200, program=slow)) == pytest.approx(host_seconds(MODEL, slow))
    graph = slow._replace(cuda_graphs=True)
    assert step_seconds(rows(MODEL, 1, H200, program=graph)) < kernels


class CountedOperators(TorchDispatchMode):
    """Counts the operators that PyTorch dispatches, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[function.name()] += 1
        return function(*args, **(kwargs or {}))


def operators_of(num_layers: int) -> Counter[str]:
    """Return the operators of a step on meta tensors, as a Hopper GPU runs them."""

    def cudnn(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
        found: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)[0]
        return found

    is_there: dict[str, Callable[..., Any]] = {
        "megalite.tensor_parallel.linear.has_linear_gelu": lambda *_: True,
        "megalite.kernels.weight_gradient.has_bias_gradient_gemm": lambda *_: True,
        "megalite.kernels.norm.is_compiled": lambda *_: True,
        "megalite.kernels.norm.is_eager": lambda *_: False,
        "torch.nn.functional.scaled_dot_product_attention": cudnn,
    }
    parallel, model = ParallelConfig(), replace(MODEL, num_layers=num_layers, params_dtype="bf16")
    config = Config(
        model=model,
        parallel=parallel,
        optimizer=OptimizerConfig(lr=1e-3),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(micro_batch_size=1, global_batch_size=1, train_iters=1, eval_iters=0),
    )
    with Topology.fake(parallel.mesh, 1, 0) as topology, ExitStack() as patches:
        for name, function in is_there.items():
            patches.enter_context(patch(name, function))
        chunks = build_chunks(config, topology, ChunkResources(fuses_weight_gradients=True))
        optimizer = build_optimizer(chunks, config, topology, fuses_weight_gradients=True)
        ids = torch.zeros(1, model.seq_length, dtype=torch.int64, device="meta")
        optimizer.begin(1)
        with CountedOperators() as counted:
            chunks[0](Microbatch(ids, ids, ids[:, 0]), None).backward()
            optimizer.step(1e-3, 0.1, optimizer.finish_gradients())
    return counted.counts


VIEWS = {
    *("t", "view", "detach", "split_with_sizes", "permute", "_unsafe_view"),
    *("slice", "split", "unbind", "transpose", "expand", "new_empty"),
}
"""Operators that launch nothing."""
COPIES = ("aten::copy_", "aten::_to_copy")


def test_the_rows_are_the_operators_of_a_layer() -> None:
    """Of a step on meta tensors; views launch nothing, and GEMMs move GELU's input."""
    found = operators_of(4) - operators_of(3)  # each layer has a bucket, as in the whole model
    launching = {name: n for name, n in found.items() if name.split("::")[1].split(".")[0] not in VIEWS}
    copies = sum(launching.pop(name, 0) for name in COPIES)
    layers = [row for row in rows(MODEL, 1, H200) if row.count == MODEL.num_layers and row.kernels > 0]
    assert sum(launching.values()) == len([row for row in layers if "small" not in row.name]), launching
    assert copies == SMALL_COPIES
    assert found.total() == LAYER_OPERATORS


PAGE = (DOCS / "performance.md").read_text(encoding="utf-8")


def test_figures_are_those_that_the_page_records() -> None:
    assert with_figures(PAGE) == PAGE, "run python -m docs.make, and read what it changes"
    changed = re.sub(r"\d\.\d% \|$", "0.0% |", PAGE, flags=re.MULTILINE).replace("lf_a100_7b_8 ", "lf_a100 ")
    assert len(set(PAGE.splitlines()) - set(changed.splitlines())) >= 25
    assert with_figures(changed) == PAGE


def test_the_decision_about_graphs_has_the_figures() -> None:
    page = (DOCS / "decisions/cuda_graphs.md").read_text(encoding="utf-8")
    for preset, sizes in (("gpt2-124m", (1, 4, 16)), ("gpt-1.3b", (1, 16))):
        for size in sizes:
            flags = f"--preset {preset} --micro-batch-size {size}"
            (eager, _), (graph, _) = (step_and_mfu(f"{flags}{more}") for more in ("", " --cuda-graphs"))
            assert re.search(rf"\| {size} \| {eager}[^|]*\| {graph} \|", page), (flags, eager, graph)


def test_published_runs_stay_below_the_roofline() -> None:
    """And near it on A100s."""
    for run in compared_runs():
        published, expected = shares(run)
        assert (0.8 if run.planned_run.cluster.gpu.tflops == 312 else 0.6) < published / expected < 1, (
            run.name
        )


def test_one_update_serves_several_microbatches() -> None:
    assert predicted_mfu(MODEL, 16, H200) == mfu(MODEL, 16, H200, step_seconds(rows(MODEL, 16, H200)))
    assert predicted_mfu(MODEL, 16, H200, 8) > predicted_mfu(MODEL, 16, H200)


@pytest.mark.parametrize("flags", ["--fp8 --gpu a100-80", "--compile --dropout"])
def test_changes_that_have_no_figures_are_refused(flags: str) -> None:
    with pytest.raises(UserError, match=flags.split()[0]):
        main(flags.split())


def test_triton_attention_costs_flash_attention_2_plus_a_second_set_of_scores_and_dropout() -> None:
    scores = 16 * MODEL.num_attention_heads * MODEL.seq_length**2 / 2
    forward, backward = fused_attention_seconds(H200, "flash", scores, 2048, 128)
    plain, dropped = (
        fused_attention_seconds(H200, "triton", scores, 2048, 128, dropout=dropout)
        for dropout in (False, True)
    )
    assert plain == pytest.approx((forward, 1.4 * backward))
    as_recorded = [round(seconds * 1e3, 2) for seconds in (*plain, *dropped)]
    assert as_recorded == [1.05, 3.68, 1.48, 4.71]
    rows_of_page = (
        f"| without dropout | {as_recorded[0]} | {as_recorded[1]} |",
        f"| with dropout | {as_recorded[2]}",
    )
    assert all(row in PAGE for row in rows_of_page)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-80"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("Tesla T4", None),
    ],
)
def test_a_gpu_is_known_by_its_name(name: str, key: str | None) -> None:
    found = gpu_of_device(name)
    assert (found and found[0]) == key
