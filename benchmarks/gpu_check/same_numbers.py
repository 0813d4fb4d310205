"""Stage 2: the same numbers on CPU and GPU in fp64, operator by operator and in whole training steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.gpu_check.ceilings import one_rank
from benchmarks.gpu_check.results import Result, at_most, passed
from benchmarks.gpu_check.runner import CheckContext
from megalite import kernels
from megalite.attention.choice import build_core
from megalite.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RecomputeConfig,
    TrainingConfig,
)
from megalite.config.presets import PRESETS
from megalite.distributed.axis import Axis
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.kernels import Drop
from megalite.observe.verify.compare_runs import compare
from megalite.observe.verify.record_run import RunRecord, record_rank
from megalite.tensor_parallel.parameter_spec import LayerContext
from megalite.tensor_parallel.vocab_parallel import vocab_parallel_cross_entropy
from megalite.train.trainer import start_trainer

LIMIT = 1e-11
"""Limit of a relative difference in fp64: only the order of sums differs."""
GRADIENT_LIMIT = 1e-9
"""Limit for gradients, norms and weights of a training run, as in the layout table."""
KEY = kernels.site_key(1, "check")
ONE_RANK = Axis("tp", 1, 0, (0,), None)  # type: ignore[arg-type]
Outputs = Tensor | tuple[Tensor, ...]


def operators(context: CheckContext) -> Iterator[Result]:
    """Compare outputs and gradients of each operator, with odd shapes."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    s, b, h = 37, 3, 130
    x, residual, bias, weight = random(s, b, h), random(s, b, h), random(h), random(h)
    angles = random(s, 1, 1, 16).repeat(1, 1, 1, 2)
    numbers = torch.arange(b)
    targets = torch.randint(0, 1000, (s * b,), generator=generator)
    cases: dict[str, tuple[Callable[..., Outputs], list[Tensor]]] = {
        "bias_gelu": (kernels.bias_gelu, [x, bias]),
        "bias_swiglu": (lambda x: kernels.bias_swiglu(x, None), [x]),
        "bias_dropout_add": (
            lambda x, bias, r: kernels.bias_dropout_add(x, bias, r, 0.1, KEY, numbers.to(x.device)),
            [x, bias, residual],
        ),
        "dropout": (lambda x: kernels.dropout(x, 0.1, KEY, numbers.to(x.device)), [x]),
        "rms_norm": (lambda x, w: kernels.rms_norm_on(x.device.type).alone(x, w, 1e-5), [x, weight]),
        "rms_norm, residual": (
            lambda x, w: kernels.rms_norm_on(x.device.type).with_residual(x, w, 1e-5),
            [x, weight],
        ),
        "layer_norm": (
            lambda x, w, bias: kernels.layer_norm_on(x.device.type).alone(x, w, bias, 1e-5),
            [x, weight, bias],
        ),
        "layer_norm, residual": (
            lambda x, w, bias: kernels.layer_norm_on(x.device.type).with_residual(x, w, bias, 1e-5),
            [x, weight, bias],
        ),
        "bias_dropout_add_norm": (
            lambda x, bias, r, w, shift: kernels.layer_norm_on(x.device.type).norm_of_sum(
                kernels.ResidualSum(x, bias, r, 0.1, KEY, numbers.to(x.device)), w, shift, 1e-5
            ),
            [x, bias, residual, weight, random(h)],
        ),
        "rotate": (
            lambda x: kernels.rotate(x, angles.cos().to(x.device), angles.sin().to(x.device)),
            [random(s, b, 4, 32)],
        ),
        "cross-entropy": (
            lambda x: vocab_parallel_cross_entropy(x, targets.to(x.device), 1000, ONE_RANK),
            [random(s * b, 1000)],
        ),
    }
    for name, (function, inputs) in cases.items():
        there, here = (_computed(function, inputs, device) for device in (context.device, "cpu"))
        yield at_most(f"operator {name}", difference(there, here), LIMIT)


def _computed(function: Callable[..., Outputs], inputs: Sequence[Tensor], device: str) -> list[Tensor]:
    """Return outputs and gradients, for gradients of the outputs that differ from element to element."""
    leaves = [each.to(device, copy=True).requires_grad_() for each in inputs]
    outputs = function(*(leaf.clone() for leaf in leaves))  # some operators use up their input
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    grads = [torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape).to(device) for y in outputs]
    gradients = torch.autograd.grad(outputs, leaves, grads)
    return [each.detach().cpu() for each in (*outputs, *gradients)]


def difference(there: Sequence[Tensor], here: Sequence[Tensor]) -> float:
    """Return the largest difference, each relative to the tensor's largest magnitude; NaN if there is any."""
    each = [((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in zip(there, here, strict=True)]
    return torch.stack(each).max().item()


def masks(context: CheckContext) -> Iterator[Result]:
    """Compare dropout masks and initial weights, which must be equal to the bit, in each precision."""
    numbers = torch.tensor([5, 2**40, 0])
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        ones = torch.ones(129, 3, 1031, dtype=dtype)
        there, here = (
            kernels.dropout(ones.to(device), 0.1, KEY, numbers.to(device)).cpu()
            for device in (context.device, "cpu")
        )
        dropped = (here == 0).double().mean().item()
        yield passed(f"dropout mask, {_name(dtype)}", torch.equal(there, here), f"{dropped:.4f} zeros", "0.1")
        there, here = (
            kernels.fill_normal_(torch.empty(4097, 31, dtype=dtype, device=device), KEY, std=0.02).cpu()
            for device in (context.device, "cpu")
        )
        yield passed(f"initial weights, {_name(dtype)}", torch.equal(there, here), "equal", "equal")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


ATTENTION: dict[str, dict[str, object]] = {
    "causal": {},
    "dropout 0.1": {"attention_dropout": 0.1},
    "ALiBi, dropout 0.1": {"position_embedding_type": "alibi", "attention_dropout": 0.1},
    "grouped queries": {"num_query_groups": 2},
    "documents, dropout 0.1": {"attention_dropout": 0.1},
    "documents, both sides, dropout 0.1": {"architecture": "bert", "attention_dropout": 0.1},
}


def attention(context: CheckContext) -> Iterator[Result]:
    """Compare unfused attention, with the same dropout of weights."""
    s, b = 67, 2
    generator = torch.Generator().manual_seed(1)
    ids = (torch.arange(s) * 5 // s).expand(b, s)
    for name, changes in ATTENTION.items():
        config = ModelConfig(
            num_layers=1, hidden_size=128, num_attention_heads=4, seq_length=s, vocab_size=64,
            **{"attention_dropout": 0.0, **changes},  # type: ignore[arg-type]
        )  # fmt: skip
        inputs = [
            torch.randn(b, heads, s, config.head_dim, generator=generator, dtype=torch.float64)
            for heads in (config.num_attention_heads, config.num_kv_heads, config.num_kv_heads)
        ]
        found = []
        for device in (context.device, "cpu"):
            with one_rank(replace(context, device=device)) as topology:
                core = build_core(config, LayerContext(topology, torch.float64), "unfused")
                layer = core.for_layer(0, core.config.head_specs[0])
                numbers = torch.arange(b, device=topology.device)
                drop = Drop(config.attention_dropout, KEY, numbers)
                document_ids = ids.to(topology.device) if name.startswith("documents") else None
                (visible,) = core.visible_keys((b, s), document_ids, [None]).values()
                found.append(
                    _computed(lambda q, k, v, c=layer, x=visible, d=drop: c(q, k, v, x, d), inputs, device)
                )
        yield at_most(f"attention, {name}", difference(*found), LIMIT)


def _config(model: str, **changes: object) -> Config:
    shape = PRESETS[model]
    dropout = 0.1 if model == "gpt-tiny" else 0.0
    config = Config(
        model=replace(
            shape, vocab_size=512, params_dtype="fp64", hidden_dropout=dropout, attention_dropout=dropout
        ),
        optimizer=OptimizerConfig(lr=3e-3, lr_decay_style="constant"),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(micro_batch_size=2, global_batch_size=4, train_iters=10, eval_iters=0),
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def _changed(**changes: object) -> Config:
    """Return a Llama-like config with changes of the model."""
    config = _config("llama-tiny")
    return replace(config, model=replace(config.model, **changes))  # type: ignore[arg-type]


RUNS: dict[str, Callable[[], Config]] = {
    "gpt, dropout 0.1": lambda: _config("gpt-tiny"),
    "bloom": lambda: _config("bloom-tiny"),
    "llama": lambda: _config("llama-tiny"),
    "full recomputation": lambda: _config(
        "gpt-tiny", recompute=RecomputeConfig(recompute_granularity="full")
    ),
    "selective recomputation": lambda: _config(
        "gpt-tiny", recompute=RecomputeConfig(recompute_granularity="selective")
    ),
    "loss in 4 chunks": lambda: _config("gpt-tiny", recompute=RecomputeConfig(cross_entropy_chunks=4)),
    "packed documents": lambda: _config(
        "llama-tiny", data=DataConfig(mock_data=True, reset_attention_mask=True, reset_position_ids=True)
    ),
    "bert": lambda: _config("bert-tiny"),
    "experts": lambda: _changed(
        num_experts=6, moe_router_topk=2, moe_ffn_hidden_size=48, moe_z_loss_coeff=0.01
    ),
    "sinks, gates, windows": lambda: _changed(
        softmax_type="learnable", attention_output_gate=True, window_size=(20, 0), window_attn_skip_freq=(2,)
    ),
    "caps, norms before and after": lambda: _changed(
        attn_logit_softcapping=20.0, final_logit_softcapping=10.0, norm_position="sandwich", qk_layernorm=True
    ),
    "latents, shared expert, bias": lambda: _changed(
        multi_latent_attention=True,
        kv_lora_rank=24,
        qk_head_dim=12,
        qk_pos_emb_head_dim=8,
        v_head_dim=10,
        num_query_groups=None,
        num_experts=8,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_ffn_hidden_size=24,
        moe_shared_expert_intermediate_size=24,
    ),
    "Gated DeltaNet, later tokens": lambda: _changed(
        recurrent_mixer="gated_delta_net",
        linear_attention_freq=(3,),
        linear_key_head_dim=6,
        linear_value_head_dim=8,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        mtp_num_layers=1,
    ),
    "Mamba-2": lambda: _config("nemotron-h-tiny"),
    "gradients not fused": lambda: _config(
        "gpt-tiny", parallel=ParallelConfig(gradient_accumulation_fusion=False)
    ),
    "ZeRO stage 1": lambda: _config("llama-tiny", parallel=ParallelConfig(zero_stage=1)),
}
NUM_ITERATIONS = 5


def train_steps(context: CheckContext) -> Iterator[Result]:
    """Train some iterations on both and compare losses, gradients and weights."""
    for name, config_of in RUNS.items():
        there, here = (_recorded(config_of(), context, device) for device in (context.device, "cpu"))
        found = compare(there, here)
        yield at_most(f"train, {name}: loss", found.loss, LIMIT)
        ((parameter, gradient),) = found.worst(found.gradients)
        yield at_most(f"train, {name}: gradient", gradient, GRADIENT_LIMIT, detail=parameter)
        ((parameter, weight),) = found.worst(found.weights)
        yield at_most(f"train, {name}: weight", weight, GRADIENT_LIMIT, detail=parameter)


def _recorded(config: Config, context: CheckContext, device: str) -> RunRecord:
    backend = "gloo" if device == "cpu" else "auto"
    config = replace(config, parallel=replace(config.parallel, distributed_backend=backend))
    with Topology.start(config.parallel.mesh, Launch(0, 1, 0, 1)) as topology:
        assert topology.device.type == device
        return record_rank(topology, config, NUM_ITERATIONS)


def auto_attention(context: CheckContext) -> Iterator[Result]:
    """Train in bf16 with fused and with unfused attention: losses differ by rounding alone."""
    losses = {}
    for backend in ("auto", "unfused"):
        config = _config("gpt-tiny")
        model = replace(
            config.model, params_dtype="bf16", hidden_dropout=0.0, attention_dropout=0.0,
            attention_backend=backend, hidden_size=256,
        )  # fmt: skip
        with one_rank(context) as topology, start_trainer(replace(config, model=model), topology) as trainer:
            losses[backend] = [trainer.step().loss for _ in range(NUM_ITERATIONS)]
            print(trainer.chunks[0].core.choice)
    worst = max(abs(a - b) / b for a, b in zip(losses["auto"], losses["unfused"], strict=True))
    yield at_most("bf16 losses, auto against unfused attention", worst, 1e-2)


def gelu_in_gemms(context: CheckContext) -> Iterator[Result]:
    """Train in bf16 with GELU in GEMMs and in kernels of its own: losses differ by rounding alone."""
    losses = []
    for in_gemms in (True, False):
        config = _config("gpt-tiny")
        model = replace(config.model, params_dtype="bf16", hidden_dropout=0.0, attention_dropout=0.0)
        with one_rank(context) as topology, start_trainer(replace(config, model=model), topology) as trainer:
            for layer in trainer.chunks[0].layers.values():
                layer.mlp.up.fuses_gelu = in_gemms
            losses.append([trainer.step().loss for _ in range(NUM_ITERATIONS)])
    worst = max(abs(a - b) / b for a, b in zip(*losses, strict=True))
    yield at_most("bf16 losses, GELU in GEMMs against its own kernels", worst, 1e-2)
