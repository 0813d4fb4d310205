"""Configure torchtitan 0.3, whose trainer and models are built from nested configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import flex_attention
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part as stage_names
from torchtitan.models import deepseek_v3, llama3, qwen3
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, RMSNorm, attention
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.trainer import Trainer

from megalite.config import Config
from megalite.observe.judge.adapters.titan import Settings, hf_settings, require
from megalite.observe.verify.layouts import Layout
from megalite.utils.errors import UserError

__all__ = ["batches_of", "from_hf", "model_of", "new_job", "new_trainer", "stage_names"]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, scale: float | None, **options: Any
) -> tuple[Tensor, None]:
    """Return what the compiled flex attention returns, which has no gradient on CPU, by plain products."""
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    seen = flex_attention.create_mask(block_mask.mask_mod, len(q), 1, q.shape[2], k.shape[2], q.device)
    scores = (q @ k.mT) * (scale or q.shape[-1] ** -0.5)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v, None


def _grouped_mm(module: nn.Module, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
    """Return the products of each expert's rows, in any precision; the rows past the last offset are zero."""
    *rows, rest = A.tensor_split(offs.tolist())
    products = [each @ weight for each, weight in zip(rows, B_t, strict=True)]
    return torch.cat([*products, rest.new_zeros(len(rest), B_t.shape[-1])])


def _all_to_all(outputs: list[Tensor], inputs: list[Tensor], group: Any = None) -> None:
    """Exchange chunks of any sizes as one tensor; gloo's exchange of lists wants equal ones."""
    received, sent = ([each.numel() for each in chunks] for chunks in (outputs, inputs))
    output, joined = outputs[0].new_empty(sum(received)), torch.cat([each.flatten() for each in inputs])
    dist.all_to_all_single(output, joined, received, sent, group=group)
    for each, values in zip(outputs, output.split(received), strict=True):
        each.copy_(values.view_as(each))


dist.all_to_all = _all_to_all  # type: ignore[assignment]
attention.FlexAttention.compiled_flex_attn = staticmethod(_attend)
GroupedExperts._grouped_mm = _grouped_mm


def _sizes(hf: Settings) -> dict[str, Any]:
    """Return the arguments of all functions that build layers."""
    return {
        "n_layers": hf["num_hidden_layers"],
        "dim": hf["hidden_size"],
        "n_heads": hf["num_attention_heads"],
        "attn_backend": "flex",
    }


def _llama3(hf: Settings) -> tuple[str, list[Any]]:
    head_dim = hf["hidden_size"] // hf["num_attention_heads"]
    require(hf, head_dim=head_dim)
    scaling = {"rope_type": "llama3", "factor": 1.0, **(hf.get("rope_scaling") or {})}
    require(scaling, rope_type="llama3")
    rope = ComplexRoPE.Config(
        dim=head_dim,
        max_seq_len=hf["max_position_embeddings"],
        theta=hf["rope_theta"],
        scaling="llama",
        **{
            "scaling_factor" if name == "factor" else name: value
            for name, value in scaling.items()
            if name != "rope_type"
        },
    )
    layers = llama3._build_llama3_layers(
        **_sizes(hf), n_kv_heads=hf["num_key_value_heads"], hidden_dim=hf["intermediate_size"], rope=rope
    )
    return "1B" if hf["tie_word_embeddings"] else "debugmodel", layers


def _qwen3_sizes(hf: Settings) -> dict[str, Any]:
    require(hf, rope_scaling=None)
    rope = CosSinRoPE.Config(
        dim=hf["head_dim"], max_seq_len=hf["max_position_embeddings"], theta=hf["rope_theta"]
    )
    return _sizes(hf) | {"n_kv_heads": hf["num_key_value_heads"], "head_dim": hf["head_dim"], "rope": rope}


def _qwen3(hf: Settings) -> tuple[str, list[Any]]:
    layers = qwen3._build_qwen3_layers(**_qwen3_sizes(hf), hidden_dim=hf["intermediate_size"])
    return "0.6B" if hf["tie_word_embeddings"] else "8B", layers


def _qwen3_moe(hf: Settings) -> tuple[str, list[Any]]:
    require(hf, tie_word_embeddings=False)
    layers = qwen3._build_qwen3_moe_layers(
        **_qwen3_sizes(hf),
        moe_hidden_dim=hf["moe_intermediate_size"],
        num_experts=hf["num_experts"],
        top_k=hf["num_experts_per_tok"],
        moe_comm_backend="standard",
    )
    for layer in layers:
        layer.moe.router.route_norm = hf["norm_topk_prob"]
    return "30B-A3B", layers


def _deepseek_v3(hf: Settings) -> tuple[str, list[Any]]:
    require(hf, tie_word_embeddings=False, rope_scaling=None, num_key_value_heads=hf["num_attention_heads"])
    require(hf, rms_norm_eps=1e-6)  # of its latents, whose norms here have the epsilon of the others
    has_groups = hf["n_group"] > 1
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    layers = deepseek_v3._build_dsv3_layers(
        **_sizes(hf),
        **{name: hf[name] for name in sizes},
        q_lora_rank=hf["q_lora_rank"] or 0,
        n_dense_layers=hf["first_k_dense_replace"],
        mscale=1.0,
        dense_hidden_dim=hf["intermediate_size"],
        moe_hidden_dim=hf["moe_intermediate_size"],
        num_experts=hf["n_routed_experts"],
        num_shared_experts=hf["n_shared_experts"],
        router_top_k=hf["num_experts_per_tok"],
        router_score_func="sigmoid",
        router_num_expert_groups=hf["n_group"] if has_groups else None,
        router_num_limited_groups=hf["topk_group"] if has_groups else None,
        router_route_scale=hf["routed_scaling_factor"],
        router_route_norm=True,
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        rope=ComplexRoPE.Config(
            dim=hf["qk_rope_head_dim"], max_seq_len=hf["max_position_embeddings"], theta=hf["rope_theta"]
        ),
    )
    for layer in layers:
        if layer.moe and not hf["n_shared_experts"]:
            layer.moe.shared_experts = None
    return "debugmodel", layers


_MODELS: dict[str, tuple[ModuleType, Callable[[Settings], tuple[str, list[Any]]]]] = {
    "llama": (llama3, _llama3),
    "qwen3": (qwen3, _qwen3),
    "qwen3_moe": (qwen3, _qwen3_moe),
    "deepseek_v3": (deepseek_v3, _deepseek_v3),
}
"""torchtitan's package of a model, and its flavor and layers from transformers' settings."""


def model_of(config: Config) -> tuple[Any, Any]:
    """Return torchtitan's specification of a model, and the model's configuration in it."""
    model_type, hf = hf_settings(config, _MODELS)
    package, layers_of = _MODELS[model_type]
    flavor, layers = layers_of(hf)
    spec = package.model_registry(flavor)
    model = spec.model
    model.layers, model.dim, model.vocab_size = layers, hf["hidden_size"], hf["vocab_size"]
    model.tok_embeddings.num_embeddings = model.lm_head.out_features = model.vocab_size
    model.tok_embeddings.embedding_dim = model.lm_head.in_features = model.norm.normalized_shape = model.dim
    for _, norm, _, _ in model.traverse(RMSNorm.Config):
        norm.eps = hf["rms_norm_eps"]
    rate = config.model.moe_router_bias_update_rate if config.model.moe_router_enable_expert_bias else None
    for layer in layers:
        if layer.moe:
            layer.moe.load_balance_coeff = rate or None
    return spec, model


def new_job(layout: Layout, config: Config) -> Any:
    """Return a configuration with what other versions name otherwise: recomputation, optimizer, loss."""
    if layout.sizes.get("etp", 1) > 1:
        raise UserError(f"torchtitan does not cut experts over tp: remove etp from layout {layout}")
    optimizer, modes = config.optimizer, {"full": FullAC.Config(), "selective": SelectiveAC.Config()}
    job = Trainer.Config(
        loss=ChunkedLossWrapper.Config(
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=config.model.vocab_size)
        ),
        optimizer=default_adamw(
            optimizer.lr,
            betas=(optimizer.adam_beta1, optimizer.adam_beta2),
            eps=optimizer.adam_eps,
            weight_decay=optimizer.weight_decay,
        ),
        activation_checkpoint=next((modes[each] for each in layout.switches if each in modes), None),
    )
    job.training.disable_cuda_graphs = True
    return job


def new_trainer(job: Any, spec: Any, model: Any, log: Any, no_data: Any) -> Any:
    """Return the trainer of a job and of a model's specification, with this log and dataloader."""
    if job.compile.enable:
        raise UserError("--set compile.enable=true: this adapter runs torchtitan eagerly, leave it out")
    torch.compiler.set_stance("force_eager")  # the masks of flex attention are compiled
    flex_attention._DEFAULT_SPARSE_BLOCK_SIZE = 1  # cp cuts masks into blocks, of 128 positions on a GPU
    job.model_spec = spec
    job.tokenizer, job.dataloader, job.metrics = (
        SimpleNamespace(build=lambda part=part, **_: part) for part in (None, no_data, log)
    )
    return Trainer(job)


def batches_of(job: Any, samples: Tensor) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Return the inputs and the labels of a rank's samples as its dataloader would."""
    has_stages = job.parallelism.pipeline_parallel_degree > 1
    size = job.parallelism.pipeline_parallel_microbatch_size if has_stages else job.training.local_batch_size
    positions = torch.arange(samples.shape[1] - 1)
    return [
        ({"input": each[:, :-1], "positions": positions.repeat(len(each), 1)}, each[:, 1:])
        for each in samples.split(size)
    ]


def from_hf(spec: Any, model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by torchtitan's names, given those of the hub; its modules join some of them."""
    with torch.device("meta"):
        built = model.build()
    converted = spec.state_dict_adapter(model, None).from_hf(dict(tensors))
    built.load_state_dict(converted, strict=False, assign=True)  # gradients have none of buffers
    if getattr(model, "enable_weight_tying", False):
        built.tok_embeddings.weight = built.lm_head.weight  # two tensors after assigning
    named = (*built.named_parameters(), *built.named_buffers())
    return {name: each.detach() for name, each in named if not each.is_meta}
