"""Layers as torch.compile has them: one graph for all, and the numbers of the code as written."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from megalite import LossTerm, SequentialStage, WithTerms
from megalite.attention.choice import build_core
from megalite.config import ModelConfig, ParallelConfig, RecomputeConfig, TrainingConfig
from megalite.data.microbatch import Microbatch
from megalite.distributed.topology import Topology
from megalite.kernels.library import compile_problem, tag_compile_caches
from megalite.kernels.norm import NormFunctions, after_sum, rms_norm, rms_norm_with_residual
from megalite.model.activation_offload import ActivationOffload
from megalite.model.compiled import check_compiler, compile_layers
from megalite.model.stage import Stage
from megalite.tensor_parallel import linear
from megalite.tensor_parallel.gemm import MainGrad
from megalite.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalite.tensor_parallel.parameter_spec import LayerContext
from megalite.train.telemetry.metrics import CompileTime, compile_time
from megalite.utils.errors import UserError
from megalite.utils.wrapping import wrap_point, wrapped_names
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
EXPERTS = replace(
    MODEL,
    activation="swiglu",
    normalization="RMSNorm",
    add_bias_linear=False,
    num_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=16,
    moe_shared_expert_intermediate_size=24,
    moe_expert_capacity_factor=1.5,
    moe_router_load_balancing_type="none",
)
MLP_AND_NORMS = RecomputeConfig(
    recompute_granularity="selective", recompute_modules=("mlp", "layernorm", "core_attn")
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
    "gemma": (
        replace(
            MODEL,
            position_embedding_type="rope",
            activation="geglu",
            normalization="RMSNorm",
            norm_position="sandwich",
            zero_centered_norms=True,
            add_bias_linear=False,
            attn_logit_softcapping=1.5,
            softmax_type="learnable",
        ),
        RecomputeConfig(),
    ),
    "shared keys": (
        replace(
            MODEL,
            num_layers=3,
            position_embedding_type="rope",
            window_size=(5, 0),
            window_attn_skip_freq=(2,),
            full_attention_kv_channels=16,
            keys_as_values="full_attention",
            num_kv_shared_layers=1,
            value_layernorm=True,
            layer_output_scale=True,
        ),
        RecomputeConfig(),
    ),
    "full": (MODEL, RecomputeConfig(recompute_granularity="full")),
    "parts": (
        replace(MODEL, position_embedding_type="alibi", attention_output_gate=True),
        RecomputeConfig(
            recompute_granularity="selective", recompute_modules=("core_attn", "mlp_act", "layernorm")
        ),
    ),
    "mlp": (MODEL, RecomputeConfig(recompute_granularity="selective", recompute_modules=("mlp",))),
    "latents": (
        replace(
            MODEL,
            multi_latent_attention=True,
            position_embedding_type="rope",
            add_bias_linear=False,
            q_lora_rank=24,
            qk_layernorm=True,
        ),
        RecomputeConfig(recompute_granularity="selective", recompute_modules=("mla_up_proj", "layernorm")),
    ),
}


SLOW = ("llama", "full", "mlp", "shared keys", "latents")  # "gemma" has all that "llama" has


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    compile_problem.cache_clear()
    yield
    torch.compiler.reset()
    counters.clear()
    compile_problem.cache_clear()


def test_cached_graphs_are_of_the_same_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    num_hits = []
    with torch.compiler.config.patch(cache_key_tag=""):
        for tag in ("megalite-1", "megalite-1", "megalite-2"):
            monkeypatch.setattr("megalite.kernels.library._code_tag", lambda tag=tag: tag)
            tag_compile_caches()
            torch.compiler.reset()
            torch.compile(lambda x: x.sin() + 1.0)(torch.zeros(8))
            num_hits.append(counters["inductor"]["fxgraph_cache_hit"])
    assert num_hits == [0, 1, 1]


class Results(NamedTuple):
    """What a stage computes.

    Attributes:
        losses: of two microbatches in training, and of one in evaluation.
        grads: of all weights, or the buffers that they are added to.
        hooked: parameters whose hooks ran in backward.
    """

    losses: list[float]
    grads: dict[str, Tensor | None]
    hooked: Counter[str]


def _results(stage: Stage, **documents: Tensor) -> Results:
    """Train on two microbatches that are in flight together, evaluate, and train on another one."""
    ids = torch.randint(MODEL.vocab_size or 0, (2, 17), generator=torch.Generator().manual_seed(0))
    hooked: Counter[str] = Counter()
    for name, parameter in stage.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: hooked.update((name,)))
    main_grads = _main_grads(stage) if stage.context.fuses_weight_gradients else {}

    def loss_of(first: int) -> Tensor:
        numbers = torch.tensor([first, first + 7])
        loss: Tensor = stage(Microbatch(ids[:, :-1], ids[:, 1:], numbers, **documents), None)
        return loss

    _set(stage, main_grads)
    losses = [loss_of(0), loss_of(2**40)]
    for loss in losses:
        loss.backward()
    _set(stage, dict.fromkeys(main_grads))  # as the optimizer does between iterations
    stage.eval()
    with torch.no_grad():
        losses.append(loss_of(0))
    stage.train()
    _set(stage, main_grads)
    loss_of(1).backward()
    grads = {name: parameter.grad for name, parameter in stage.named_parameters()}
    for name, main_grad in main_grads.items():
        assert grads[name] is None or name.startswith("embedding")  # a tied weight has both
        assert main_grad.fixed_buffer is not None
        grads[f"{name}.main_grad"] = main_grad.fixed_buffer[0].nan_to_num()  # a weight that no graph uses
    return Results([loss.item() for loss in losses], grads, hooked)


def _main_grads(stage: Stage) -> dict[str, MainGrad]:
    """Of all matrices, in one tensor as the optimizer's are, which the first gradients overwrite."""
    matrices = {name: p for name, p in stage.named_parameters() if p.dim() > 1}
    sizes = [p.numel() for p in matrices.values()]
    flat = next(iter(matrices.values())).new_full((sum(sizes),), torch.nan, requires_grad=False)
    return {
        name: _main_grad(piece.view(matrices[name].shape))
        for name, piece in zip(matrices, flat.split(sizes), strict=True)
    }


def _main_grad(buffer: Tensor) -> MainGrad:
    is_written = torch.tensor(False)

    def claim() -> tuple[Tensor, bool]:
        is_stale = not is_written.item()
        is_written.fill_(True)
        return buffer, is_stale

    return MainGrad(claim, lambda: None, (buffer, is_written))


def _set(stage: Stage, main_grads: Mapping[str, MainGrad | None]) -> None:
    for name, main_grad in main_grads.items():
        stage.get_parameter(name).main_grad = main_grad  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else []) for case in CASES],
)
@pytest.mark.parametrize("fuses", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_one_graph_serves_all_layers(case: str, fuses: bool, one_rank: Topology) -> None:
    model, recompute = CASES[case]
    stages = [
        build_stage(model, one_rank, range(3), seed=1, recompute=recompute, fuses_weight_gradients=fuses)
        for _ in range(2)
    ]
    compile_layers(stages[1], "aot_eager")
    expected, compiled = map(_results, stages)
    assert compiled.losses == pytest.approx(expected.losses, rel=1e-13)
    # Another sample meets another mask, and an evaluation none.
    assert len({*expected.losses}) == (3 if model.hidden_dropout else 1)
    for name, grad in expected.grads.items():
        torch.testing.assert_close(compiled.grads[name], grad, rtol=1e-11, atol=1e-12, msg=name)
    assert compiled.hooked == expected.hooked
    assert not counters["graph_break"]
    num_kinds = len({*model.layer_specs[:3]})
    assert counters["stats"]["unique_graphs"] == 2 * num_kinds  # for training and for evaluation


@pytest.mark.parametrize(
    "recompute",
    [RecomputeConfig(), pytest.param(MLP_AND_NORMS, marks=pytest.mark.slow)],
    ids=["", "recomputed"],
)
def test_experts_run_between_graphs(recompute: RecomputeConfig, one_rank: Topology) -> None:
    """A layer is a graph before its experts and another after them; the shared expert is one too."""
    stages = [build_stage(EXPERTS, one_rank, range(2), seed=1, recompute=recompute) for _ in range(2)]
    compile_layers(stages[1], "aot_eager")
    expected, compiled = map(_results, stages)
    assert compiled.losses == pytest.approx(expected.losses, rel=1e-13)
    for name, grad in expected.grads.items():
        torch.testing.assert_close(compiled.grads[name], grad, rtol=1e-11, atol=1e-12, msg=name)
    assert compiled.hooked == expected.hooked
    assert counters["stats"]["unique_graphs"] == 2 * 3  # for training and for evaluation


@pytest.mark.parametrize("case", [pytest.param("dropout", marks=pytest.mark.slow), "parts"])
def test_what_graphs_save_is_offloaded(
    case: str, one_rank: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalite.model.activation_offload.MIN_BYTES", 1)
    model, recompute = CASES[case]
    offload = ActivationOffload(one_rank.device)
    kinds = [(None, recompute), (offload, replace(recompute, cpu_offload_activations=2))]
    stages = [
        build_stage(
            model, one_rank, range(3), seed=1, recompute=each, offload=to, fuses_weight_gradients=True
        )
        for to, each in kinds
    ]
    for stage in stages:
        compile_layers(stage, "aot_eager")
    expected, offloaded = map(_results, stages)
    torch.testing.assert_close(offloaded.grads, expected.grads, rtol=0, atol=0)
    assert offloaded.losses == expected.losses
    assert offload.buffers.num_bytes > 0


def test_no_gemm_of_a_graph_computes_gelu(one_rank: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "has_linear_gelu", lambda *_: pytest.fail("asked for GEMMs with GELU"))
    stage = build_stage(MODEL, one_rank, range(1), seed=1)
    compile_layers(stage, "aot_eager")
    assert stage(Microbatch(*torch.zeros(2, 1, 16, dtype=torch.int64), torch.zeros(1).long()), None) > 0


class Residual(nn.Module):
    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(32, 64, context)
        self.down = RowParallelLinear(64, 32, context)

    @wrap_point
    def forward(self, x: Tensor, microbatch: Microbatch) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Undeclared(Residual):
    def forward(self, x: Tensor, microbatch: Microbatch) -> Tensor:
        return super().forward(x, microbatch)


class OwnModel(SequentialStage):
    layer: type[Residual] = Residual

    def build_layer(self, number: int) -> nn.Module:
        return self.layer(self.context)


def _own_stage(topology: Topology, layer: type[Residual] = Residual) -> OwnModel:
    model = type("OwnModel", (OwnModel,), {"layer": layer})
    stage: OwnModel = model(MODEL, LayerContext(topology, torch.float64, seed=1), range(2))
    return stage


def test_layers_of_an_own_model(one_rank: Topology) -> None:
    """Their hooks stay outside of the graph."""
    stages, hooked = [_own_stage(one_rank) for _ in range(2)], []
    compile_layers(stages[1], "aot_eager")
    for layer in stages[1].layers.values():
        layer.register_forward_pre_hook(lambda module, _: hooked.append(torch.compiler.is_compiling()))
    expected, compiled = map(_results, stages)
    assert compiled.losses == pytest.approx(expected.losses, rel=1e-13)
    torch.testing.assert_close(compiled.grads, expected.grads, rtol=1e-11, atol=1e-12)
    assert hooked == [False] * 2 * 4
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2


class Routed(Residual):
    @wrap_point
    def forward(self, x: Tensor, microbatch: Microbatch) -> WithTerms:  # type: ignore[override]
        x = super().forward(x, microbatch)
        return WithTerms(x, {"router_loss": LossTerm(x.square().sum(), per="sample", scale=0.1)})


class RoutedModel(OwnModel):
    layer = Routed
    loss_names = ("lm_loss", "router_loss")


@pytest.mark.parametrize(("is_first", "is_last"), [(True, True), (False, False)])
def test_terms_of_layers(is_first: bool, is_last: bool, one_rank: Topology) -> None:
    """On a middle stage too, which has no other loss."""
    ids = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(0))
    microbatch = Microbatch(ids[:, :-1], ids[:, 1:], torch.arange(2))
    context = LayerContext(one_rank, torch.float64, seed=1)
    found = []
    for compiles in (False, True):
        stage = RoutedModel(MODEL, context, range(1, 3), is_first=is_first, is_last=is_last)
        if compiles:
            compile_layers(stage, "aot_eager")
        hidden = None
        if not is_first:
            hidden = torch.randn(16, 2, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            hidden.requires_grad_()
        output = stage(microbatch, hidden)
        torch.autograd.backward([tensor.sum() for tensor in output.tensors()])
        gradients = {name: parameter.grad for name, parameter in stage.named_parameters()}
        found.append((output, gradients, None if hidden is None else hidden.grad))
    (expected, *gradients), (compiled, *compiled_gradients) = found
    assert compiled.terms.keys() == ({"lm_loss", "router_loss"} if is_last else {"router_loss"})
    for name, term in expected.terms.items():
        assert compiled.terms[name][1:] == term[1:]
        torch.testing.assert_close(compiled.terms[name].total, term.total, rtol=1e-13, atol=0)
    torch.testing.assert_close(compiled_gradients, gradients, rtol=1e-11, atol=1e-12)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("build", [_own_stage, partial(build_stage, MODEL, layers=range(2))])
def test_no_forward_is_replaced(build: Callable[..., Any]) -> None:
    with Topology.fake(ParallelConfig(tensor_model_parallel_size=2).mesh, 2, 0) as topology:
        stage = build(topology=topology)
        compile_layers(stage, "aot_eager")
    assert not [name for name, module in stage.named_modules() if "forward" in vars(module)]
    wrapped = {name for name, module in stage.named_modules() if "forward" in wrapped_names(module)}
    assert {"layers.0", "layers.1"} <= wrapped
    assert wrapped == {
        name
        for name, module in stage.named_modules()
        if name in ("layers.0", "layers.1") or isinstance(module, ColumnParallelLinear | RowParallelLinear)
    }


def test_a_layer_must_declare_its_forward(one_rank: Topology) -> None:
    with pytest.raises(UserError, match=r"Undeclared\.forward must be wrapped.*@megalite\.wrap_point"):
        compile_layers(_own_stage(one_rank, Undeclared))


def test_packed_documents(one_rank: Topology) -> None:
    places = torch.arange(16).expand(2, 16)
    documents = {"position_ids": places % 5, "document_ids": places // 5, "loss_mask": places % 5 != 4}
    stages = [build_stage(CASES["llama"][0], one_rank, range(2), seed=1) for _ in range(2)]
    compile_layers(stages[1], "aot_eager")
    expected, compiled = (_results(stage, **documents) for stage in stages)
    assert compiled.losses == pytest.approx(expected.losses, rel=1e-13)
    torch.testing.assert_close(compiled.grads, expected.grads, rtol=1e-11, atol=1e-12)
    assert not counters["graph_break"]


class Recorder:
    """Count what the graphs of forward and backward call of megalite, after inductor's decompositions."""

    def __init__(self) -> None:
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()
        self.backend = aot_autograd(
            fw_compiler=partial(self._record, self.forward),
            bw_compiler=partial(self._record, self.backward),
            decompositions=select_decomp_table(),
        )

    def _record(self, counts: Counter[str], graph: GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            # An operator that changes its input is the first argument of a functional call.
            target = node.args[0] if "auto_functionalized" in str(node.target) else node.target
            if str(target).startswith("megalite."):
                counts[str(target).removeprefix("megalite.").removesuffix(".default")] += 1
        return make_boxed_func(graph)


def test_calls_of_the_graph_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On meta tensors, which the operators treat as a GPU's."""
    norm = NormFunctions(rms_norm, rms_norm_with_residual, after_sum(rms_norm_with_residual))
    monkeypatch.setattr("megalite.model.norm.rms_norm_on", lambda _: norm)
    with Topology.fake(ParallelConfig().mesh, 1, 0, device="meta") as topology:
        model = CASES["llama"][0]
        stage = build_stage(
            model,
            topology,
            range(2),
            attention=partial(build_core, backend="unfused"),
            fuses_weight_gradients=True,
        )
        _set(stage, _main_grads(stage))
        recorder = Recorder()
        compile_layers(stage, recorder.backend)
        ids = torch.zeros((2, 17), dtype=torch.int64, device="meta")
        stage(Microbatch(ids[:, :-1], ids[:, 1:], ids[:, 0]), None).backward()
    # Norm, rotation and residual are PyTorch's operators.
    assert recorder.forward == {"attention": 1, "bias_swiglu": 1}
    assert recorder.backward == {
        "add_weight_gradient_": 4,
        "attention_backward": 1,
        "bias_swiglu_backward": 1,
        "rms_norm_backward": 2,
    }


class Totals(TorchDispatchMode):
    """Collect the addresses to which weight gradients are added."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[int] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.megalite.add_weight_gradient_.default:
            self.addresses.append(args[0].data_ptr())
        return function(*args, **(kwargs or {}))


def test_inductor_adds_weight_gradients_in_place(one_rank: Topology) -> None:
    context = LayerContext(one_rank, torch.float32, fuses_weight_gradients=True)
    linear = ColumnParallelLinear(16, (2, 8), context, bias=True, std=0.1)
    for parameter in linear.parameters():
        torch.nn.init.normal_(parameter)
    total = torch.zeros_like(linear.weight)
    linear.weight.main_grad = _main_grad(total)  # type: ignore[attr-defined]
    run = torch.compile(linear.forward, dynamic=False)
    x, totals = torch.randn(4, 3, 16), Totals()
    for _ in range(2):
        y = run(x)
        with totals:
            y.sum().backward()
    assert totals.addresses == [total.data_ptr()] * 2
    torch.testing.assert_close(total, 2 * x.sum((0, 1)).expand_as(total))


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
    for backend in ("unfused", "flex"):
        stage = build_stage(model, one_rank, range(2), seed=1, attention=partial(build_core, backend=backend))
        if backend == "flex":
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
