"""Layers as torch.compile has them: one graph for all, and the numbers of the code as written."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

from megalite.config import ModelConfig, RecomputeConfig, TrainingConfig
from megalite.distributed.topology import Topology
from megalite.errors import UserError
from megalite.kernels.library import compile_problem
from megalite.microbatch import Microbatch
from megalite.model.attention_core import UnfusedCore
from megalite.model.compiled import check_compiler, compile_layers
from megalite.model.flex_attention import FlexCore
from megalite.model.gpt_stage import GPTStage
from megalite.train.telemetry.metrics import CompileTime, compile_time
from tests.stages import build_stage

MODEL = ModelConfig(
    num_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    seq_length=16,
    vocab_size=64,
    params_dtype="fp64",
    hidden_dropout=0.1,
    attention_dropout=0.1,
)
CASES = {
    "dropout": (MODEL, RecomputeConfig()),
    "llama": (
        replace(
            MODEL,
            position_embedding_type="rope",
            activation="swiglu",
            normalization="RMSNorm",
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        ),
        RecomputeConfig(),
    ),
    "full": (MODEL, RecomputeConfig(recompute_granularity="full")),
    "parts": (
        replace(MODEL, position_embedding_type="alibi"),
        RecomputeConfig(
            recompute_granularity="selective", recompute_modules=("core_attn", "mlp_act", "layernorm")
        ),
    ),
    "mlp": (MODEL, RecomputeConfig(recompute_granularity="selective", recompute_modules=("mlp",))),
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    compile_problem.cache_clear()
    yield
    torch.compiler.reset()
    counters.clear()
    compile_problem.cache_clear()


def _losses(stage: GPTStage, **documents: Tensor) -> tuple[list[float], dict[str, Tensor | None]]:
    """Of two microbatches in training, and of one in evaluation; the gradients of the former."""
    ids = torch.randint(MODEL.vocab_size or 0, (2, 17), generator=torch.Generator().manual_seed(0))
    batch = ids[:, :-1], ids[:, 1:]
    losses = []
    for first in (0, 2**40):
        loss = stage(Microbatch(*batch, torch.tensor([first, first + 7]), **documents), None)
        loss.backward()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(stage.eval()(Microbatch(*batch, torch.tensor([0, 1]), **documents), None).item())
    return losses, {name: parameter.grad for name, parameter in stage.named_parameters()}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] if case in ("full", "mlp") else []) for case in CASES],
)
def test_one_graph_serves_all_layers(case: str, one_rank: Topology) -> None:
    model, recompute = CASES[case]
    stages = [build_stage(model, one_rank, range(3), seed=1, recompute=recompute) for _ in range(2)]
    compile_layers(stages[1], "aot_eager")
    (losses, grads), (compiled_losses, compiled_grads) = map(_losses, stages)
    assert compiled_losses == pytest.approx(losses, rel=1e-13)
    # Another sample meets another mask, and an evaluation none.
    assert len({*losses}) == (3 if model.hidden_dropout else 1)
    for name, grad in grads.items():
        torch.testing.assert_close(compiled_grads[name], grad, rtol=1e-11, atol=1e-12, msg=name)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2  # for training and for evaluation


def test_packed_documents(one_rank: Topology) -> None:
    places = torch.arange(16).expand(2, 16)
    documents = {"position_ids": places % 5, "document_ids": places // 5, "loss_mask": places % 5 != 4}
    stages = [build_stage(CASES["llama"][0], one_rank, range(2), seed=1) for _ in range(2)]
    compile_layers(stages[1], "aot_eager")
    (losses, grads), (compiled_losses, compiled_grads) = (_losses(stage, **documents) for stage in stages)
    assert compiled_losses == pytest.approx(losses, rel=1e-13)
    torch.testing.assert_close(compiled_grads, grads, rtol=1e-11, atol=1e-12)
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("position", ["alibi", "rope"])
def test_flex_attention_stays_a_graph_of_its_own(position: str, one_rank: Topology) -> None:
    """Forward alone: on a CPU it has no backward."""
    model = replace(
        MODEL,
        hidden_size=64,
        seq_length=128,
        position_embedding_type=position,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype="fp32",
    )
    ids = torch.randint(64, (2, 129), generator=torch.Generator().manual_seed(0))
    losses = []
    for core in (UnfusedCore, FlexCore):
        stage = build_stage(model, one_rank, range(2), seed=1, attention=core)
        if core is FlexCore:
            compile_layers(stage)
        with torch.no_grad():
            losses.append(stage(Microbatch(ids[:, :-1], ids[:, 1:], torch.tensor([0, 1])), None).item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_no_compiler_is_a_line_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # nothing is there yet
    missing = {"cpp.cxx": (None, str(tmp_path / "no-compiler")), "fx_graph_cache": False}
    with inductor.patch(missing), pytest.raises(UserError, match=r"install a C\+\+ compiler") as caught:
        check_compiler(torch.device("cpu"))
    assert "\n" not in str(caught.value)
    assert "no-compiler" in str(caught.value)


def test_the_compilers_time_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    seconds = iter([10.0, 12.5, 20.0, 21.0])
    watch = CompileTime(lambda: next(seconds))
    for _ in range(2):
        watch.begin()
        watch.end()
    with caplog.at_level(logging.INFO):
        assert watch.take() == 3.5
        assert watch.take() == 0.0
    assert [record.getMessage() for record in caplog.records] == [
        "compiling the layers: 3.5 s, not counted in the iteration time"
    ]


def test_torch_compile_is_watched_in_its_block_alone() -> None:
    def compiled() -> None:
        torch.compile(lambda x: x.sin() + 1.0, backend="eager", dynamic=False)(torch.ones(next(sizes)))

    sizes = count(2)  # each is a graph of its own

    with compile_time(TrainingConfig(compile=True)) as watch:
        compiled()
        assert watch.take() > 0.0
    compiled()
    assert watch.take() == 0.0
    with compile_time(TrainingConfig()) as idle:
        compiled()
    assert idle.take() == 0.0
