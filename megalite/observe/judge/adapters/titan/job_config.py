"""Configure torchtitan 0.2, whose trainer takes a JobConfig and the name of a registered model.

Attention is torch's flash attention of GPUs on CPU, by plain products. Torch's context parallelism and
DTensors know this operator, and not the one that attention calls on CPU. So they can be judged there, in any
precision.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.config import JobConfig
from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part as stage_names
from torchtitan.models.attention import ScaledDotProductAttentionWrapper
from torchtitan.models.moe import kernels as permutation_kernels
from torchtitan.protocols import train_spec
from torchtitan.train import Trainer

from megalite.config import Config
from megalite.observe.judge.adapters.titan import Settings, hf_settings, require
from megalite.observe.verify.layouts import Layout
from megalite.utils import torch_private
from megalite.utils.errors import UserError


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    """Return what `scaled_dot_product_attention` returns, ``[b, heads, s, d]``; keys may have fewer heads."""
    _register_kernels()
    return torch_private.flash_attention(q, k, v, 0.0, is_causal, scale=scale)[0]


@functools.cache
def _register_kernels() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")  # the kernels live as long as this object
    for operator, kernel in (
        (torch_private.flash_attention, _forward),
        (torch_private.flash_attention_backward, _backward),
    ):
        library.impl(str(operator).removeprefix("aten."), kernel, "CPU")
    return library


def _probabilities(
    q: Tensor, k: Tensor, is_causal: bool, scale: float, lse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the probabilities and their scores' logsumexp, which is computed if it is None."""
    scores = q @ k.mT * scale
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(-1) if lse is None else lse
    return (scores - lse.unsqueeze(-1)).exp(), lse


def _repeated(q: Tensor, *others: Tensor) -> list[Tensor]:
    """Return keys and values with as many heads as queries have."""
    return [each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in others]


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | int, ...]:
    keys, values = _repeated(q, k, v)
    probabilities, lse = _probabilities(q, keys, is_causal, scale or q.shape[-1] ** -0.5, None)
    none = torch.zeros((), dtype=torch.int64)  # where a GPU's kernel returns its random numbers' state
    out = (probabilities @ values).transpose(1, 2).contiguous().transpose(1, 2)  # as the GPU's is
    return out, lse, none, none, q.shape[2], k.shape[2], none, none, none


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values; `out` and `lse` may be of more keys than `k`."""
    scale = scale or q.shape[-1] ** -0.5
    keys, values = _repeated(q, k, v)
    probabilities = _probabilities(q, keys, is_causal, scale, lse)[0]
    grad_scores = probabilities * (grad @ values.mT - (grad * out).sum(-1, keepdim=True)) * scale
    grad_k, grad_v = (
        each.unflatten(1, (k.shape[1], -1)).sum(2) for each in (grad_scores.mT @ q, probabilities.mT @ grad)
    )
    return grad_scores @ keys, grad_k, grad_v


__all__ = ["batches_of", "from_hf", "model_of", "new_job", "new_trainer", "stage_names"]


def _histc(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return torch.histc, which counts integers on GPUs only, of numbers of any dtype."""
    return _FLOAT_HISTC(values.double(), *args, **kwargs).to(values.dtype)


_FLOAT_HISTC = torch.histc
torch.histc = _histc  # type: ignore[assignment]


def _attend(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = True, **options: Any
) -> Tensor:
    return flash_attention(q, k, v, is_causal=is_causal, **options)


permutation_kernels.fill_indices_wrapper = permutation_kernels.fill_indices_cpu
ScaledDotProductAttentionWrapper.forward = _attend  # a GPU's operator, because the CPU's knows no DTensors

_NUMBERS = itertools.count()

_COMMON = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
}
"""transformers' settings by the arguments of all of torchtitan's models."""
_EXPERTS = {"score_before_experts": False, "use_grouped_mm": False}  # grouped_mm computes in bf16


def _llama3(hf: Settings) -> dict[str, Any]:
    require(hf, tie_word_embeddings=False, head_dim=hf["hidden_size"] // hf["num_attention_heads"])
    scaling = {"rope_type": "llama3", "factor": 1.0, **(hf.get("rope_scaling") or {})}
    require(scaling, rope_type="llama3")
    return {
        "n_kv_heads": hf["num_key_value_heads"],
        "multiple_of": 1,
        "ffn_dim_multiplier": (hf["intermediate_size"] + 0.5)
        / int(8 * hf["hidden_size"] / 3),  # rounded down
        "rope_scaling_args": {
            "scaling_factor" if name == "factor" else name: value
            for name, value in scaling.items()
            if name != "rope_type"
        },
    }


def _qwen3(hf: Settings) -> dict[str, Any]:
    require(hf, rope_scaling=None)
    return {
        "n_kv_heads": hf["num_key_value_heads"],
        "head_dim": hf["head_dim"],
        "hidden_dim": hf["intermediate_size"],
        "enable_weight_tying": hf["tie_word_embeddings"],
    }


def _qwen3_moe(hf: Settings) -> dict[str, Any]:
    experts = {
        "num_experts": hf["num_experts"],
        "num_shared_experts": 0,
        "top_k": hf["num_experts_per_tok"],
        "score_func": "softmax",
        "route_norm": hf["norm_topk_prob"],
        "load_balance_coeff": None,
    }
    args = {"moe_enabled": True, "moe_inter_dim": hf["moe_intermediate_size"]}
    return _qwen3(hf) | args | {"moe_args": _EXPERTS | experts}


def _deepseek_v3(hf: Settings) -> dict[str, Any]:
    require(hf, tie_word_embeddings=False, rope_scaling=None, num_key_value_heads=hf["num_attention_heads"])
    require(hf, rms_norm_eps=1e-6)  # of its latents, whose norms here have the epsilon of the others
    has_groups = hf["n_group"] > 1
    experts = {
        "num_experts": hf["n_routed_experts"],
        "num_shared_experts": hf["n_shared_experts"],
        "top_k": hf["num_experts_per_tok"],
        "score_func": "sigmoid",
        "route_norm": True,
        "route_scale": hf["routed_scaling_factor"],
        "num_expert_groups": hf["n_group"] if has_groups else None,
        "num_limited_groups": hf["topk_group"] if has_groups else None,
    }
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {
        "inter_dim": hf["intermediate_size"],
        "moe_inter_dim": hf["moe_intermediate_size"],
        "n_dense_layers": hf["first_k_dense_replace"],
        "q_lora_rank": hf["q_lora_rank"] or 0,
        **{name: hf[name] for name in sizes},
        "moe_args": _EXPERTS | experts,
    }


_MODELS: dict[str, tuple[str, Callable[[Settings], dict[str, Any]]]] = {
    "llama": ("llama3", _llama3),
    "qwen3": ("qwen3", _qwen3),
    "qwen3_moe": ("qwen3", _qwen3_moe),
    "deepseek_v3": ("deepseek_v3", _deepseek_v3),
}
"""torchtitan's model, and its other arguments from transformers' settings, by transformers' name of it."""


def model_of(config: Config) -> tuple[str, Any]:
    """Return torchtitan's name of a model, and its arguments."""
    model_type, hf = hf_settings(config, _MODELS)
    name, others = _MODELS[model_type]
    args = type(next(iter(train_spec.get_train_spec(name).model_args.values())))()
    values = {argument: hf[setting] for argument, setting in _COMMON.items()} | others(hf)
    for field, value in values.items():
        if isinstance(value, dict):
            value = dataclasses.replace(getattr(args, field), **value)
        setattr(args, field, value)
    if config.model.moe_router_enable_expert_bias:
        args.moe_args.load_balance_coeff = config.model.moe_router_bias_update_rate or None
    return name, args


def new_job(layout: Layout, config: Config) -> Any:
    """Return a configuration with what other versions name otherwise: experts, recomputation, optimizer."""
    tp, ep, optimizer = layout.size("tp"), layout.size("ep"), config.optimizer
    if layout.shard == 1 < layout.size("dp") < layout.world_size:
        raise UserError(f"torchtitan's DDP is alone: remove shard1 from layout {layout}")
    job = JobConfig()
    job.parallelism.expert_tensor_parallel_degree = layout.sizes.get("etp", tp if ep > 1 else 1)
    modes = [each for each in layout.switches if each in ("full", "selective")]
    job.activation_checkpoint.mode = modes[0] if modes else "none"
    job.optimizer.lr, job.optimizer.eps = optimizer.lr, optimizer.adam_eps
    job.optimizer.beta1, job.optimizer.beta2 = optimizer.adam_beta1, optimizer.adam_beta2
    job.optimizer.weight_decay = optimizer.weight_decay
    return job


def new_trainer(job: Any, name: str, args: Any, log: Any, no_data: Any) -> Any:
    """Return the trainer of a job and of a model's arguments, with this log and dataloader."""
    spec = dataclasses.replace(
        train_spec.get_train_spec(name),
        model_args={"judged": args},
        build_tokenizer_fn=None,
        build_dataloader_fn=lambda **_: no_data,
        build_metrics_processor_fn=lambda *_: log,
        build_validator_fn=None,
    )
    job.model.name, job.model.flavor = f"judged {next(_NUMBERS)}", "judged"
    train_spec.register_train_spec(job.model.name, spec)
    return Trainer(job)


def batches_of(job: Any, samples: Tensor) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Return the inputs and the labels of a rank's samples as its dataloader would."""
    batches = samples.split(job.training.local_batch_size)
    return [({"input": each[:, :-1]}, each[:, 1:]) for each in batches]


def from_hf(name: str, args: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by torchtitan's names, given those of the hub."""
    adapter = train_spec.get_train_spec(name).state_dict_adapter
    assert adapter is not None
    converted: dict[str, Tensor] = adapter(args, None).from_hf(tensors)
    return converted
