"""The GPT models of megatron-core, trained as Megatron-LM's ``pretrain_gpt.py`` trains them.

What megatron-core leaves to its user follows ``gpt_builders.py``, ``pretrain_gpt.py`` and
``megatron/training/training.py`` of the same version: the construction of the model's chunks, the loss, the
loop over microbatches, what is logged. The layers are those of the local specs, because Transformer Engine
needs a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_utils import track_moe_metrics
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megalite.config import Config
from megalite.config.model.model_config import padded_vocab_size
from megalite.observe.judge.adapters.megatron.on_cpu import on_cpu
from megalite.observe.judge.adapters.megatron.settings import (
    filled,
    from_megalite,
    layout_values,
    model_values,
    optimizer_values,
    piece_of,
    whole_name,
)
from megalite.observe.judge.program import Piece, Program, ProgramFault, positions_in
from megalite.observe.verify.layouts import Layout
from megalite.utils.errors import UserError

__all__ = ["LAYOUTS", "PACKAGE", "VERSIONS", "build", "from_megalite"]

PACKAGE = "megatron-core"
VERSIONS = ("0.16.1",)
LAYOUTS = (
    *("tp2", "tp2+sp", "pp2", "pp2v2", "dp2", "dp2+zero1", "tp1+full", "tp2pp2", "pp2dp2"),
    "tp2dp2+sp+zero1",
)


@dataclasses.dataclass(frozen=True)
class _Choices:
    """Options that are in none of Megatron's configs.

    Attributes:
        parallel_output: GPTModel's logits stay cut over tensor-parallel ranks.
        label_smoothing: argument of ``vocab_parallel_cross_entropy``.
        padding_from: tokens from this one on are padding: they have no loss, and the router's auxiliary
            losses do not count them. Their number differs between ranks.
    """

    parallel_output: bool = True
    label_smoothing: float = 0.0
    padding_from: int | None = None


def _chunk(config: Config, theirs: TransformerConfig, choices: _Choices, stage: int) -> GPTModel:
    """Return a chunk of the model, as ``gpt_builders.py`` of Megatron-LM builds it.

    Args:
        stage: number of the chunk on this rank.
    """
    model = config.model
    stages = {"vp_stage": stage if theirs.virtual_pipeline_model_parallel_size else None}
    if theirs.experimental_attention_variant is not None:
        spec = get_transformer_block_with_experimental_attention_variant_spec(theirs, **stages)
    else:
        spec = get_gpt_decoder_block_spec(theirs, False, normalization=theirs.normalization, **stages)
    of_mtp = None
    if theirs.mtp_num_layers is not None:
        layers = get_gpt_decoder_layer_specs(theirs, False, normalization=theirs.normalization)
        of_mtp = get_gpt_mtp_block_spec(theirs, layers[-1], False, **stages)
    return GPTModel(
        theirs,
        spec,
        vocab_size=padded_vocab_size(model, 1),
        max_sequence_length=model.num_positions,
        parallel_output=choices.parallel_output,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **stages),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **stages),
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        mtp_block_spec=of_mtp,
        **stages,
    )


def _schedule(optimizer: Any, config: Config) -> OptimizerParamScheduler:
    """Return the schedule of the learning rate, in iterations."""
    ours = config.optimizer
    length = ours.lr_decay_iters or config.training.train_iters
    return OptimizerParamScheduler(
        optimizer,
        init_lr=ours.lr_warmup_init,
        max_lr=ours.lr,
        min_lr=ours.min_lr,
        lr_warmup_steps=ours.lr_warmup_iters,
        lr_decay_steps=length or 1 + ours.lr_warmup_iters,
        lr_decay_style="constant" if length is None else ours.lr_decay_style,
        start_wd=ours.weight_decay,
        end_wd=ours.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )


def _loss(weights: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the sum of the loss and the number of tokens, as ``loss_func`` of ``pretrain_gpt.py`` does."""
    weights = weights.view(-1)
    loss = torch.sum(output.float().view(-1) * weights)
    count = weights.sum().clone().detach().to(torch.int)
    return loss, count, {"loss": torch.cat([loss.clone().detach().view(1), count.view(1)])}


def _smoothed(
    weights: Tensor, labels: Tensor, smoothing: float, logits: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the same with smoothed labels, which only a loss of the user's own has."""
    losses = tensor_parallel.vocab_parallel_cross_entropy(
        logits.transpose(0, 1).float(), labels.transpose(0, 1).contiguous(), smoothing
    )
    return _loss(weights, losses.transpose(0, 1).contiguous())


class MegatronProgram(Program):
    """GPT model of megatron-core in its DistributedDataParallel, with its optimizer and schedules."""

    @on_cpu()
    def __init__(self, layout: Layout, config: Config, options: Mapping[str, str]) -> None:
        values = model_values(config) | optimizer_values(config) | layout_values(layout)
        kinds = (TransformerConfig, DistributedDataParallelConfig, OptimizerConfig, _Choices)
        known = {field.name for each in kinds for field in dataclasses.fields(each)}
        if unknown := sorted(options.keys() - known):
            raise UserError(f"--set {unknown[0]}: megatron-core's configs have no such field")
        self._config, self._ddp, of_optimizer, self._choices = (
            filled(each, values, options) for each in kinds
        )
        has_cut_experts = config.model.has_experts and layout.size("tp") > 1
        if has_cut_experts and not self._config.sequence_parallel:
            raise UserError(f"layout {layout}: experts of megatron-core need +sp beside tp")
        parallel_state.initialize_model_parallel(
            self._config.tensor_model_parallel_size,
            self._config.pipeline_model_parallel_size,
            self._config.virtual_pipeline_model_parallel_size,
            expert_model_parallel_size=self._config.expert_model_parallel_size,
            expert_tensor_parallel_size=self._config.expert_tensor_parallel_size,
            num_distributed_optimizer_instances=self._ddp.num_distributed_optimizer_instances,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(config.training.seed, force_reset_rng=True)
        torch.manual_seed(config.training.seed)
        self._micro_batch = layout.mbs or config.training.micro_batch_size
        self._chunks = [
            self._wrapped(_chunk(config, self._config, self._choices, stage), stage)
            for stage in range(layout.v or 1)
        ]
        self._models: list[GPTModel] = [chunk.module for chunk in self._chunks]
        self._optimizer = get_megatron_optimizer(of_optimizer, self._chunks)
        self._schedule = _schedule(self._optimizer, config)
        self._config.grad_scale_func = self._optimizer.scale_loss
        self._config.finalize_model_grads_func = finalize_model_grads
        if self._ddp.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self._chunks]
            self._config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def _wrapped(self, chunk: GPTModel, stage: int) -> DistributedDataParallel:
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        return DistributedDataParallel(self._config, self._ddp, chunk, disable_bucketing=stage > 0)

    def _named(self) -> Iterator[tuple[str, Any]]:
        """Yield this rank's parameters, to which Megatron adds attributes such as ``main_grad``."""
        for model in self._models:
            is_unused = model.share_embeddings_and_output_weights and hasattr(model, "embedding")
            for name, parameter in model.named_parameters():
                if is_unused and name == "output_layer.weight":
                    continue  # on the last stage with an embedding for MTP, which is tied in its place
                yield whole_name(model, name), parameter

    @on_cpu()
    def weights(self) -> Mapping[str, Piece]:
        if self._ddp.overlap_param_gather:
            for chunk in self._chunks:
                chunk.start_param_sync(force_sync=True)
        pieces = {name: piece_of(name, parameter.detach(), self._config) for name, parameter in self._named()}
        for model in self._models:
            for name, buffer in model.named_buffers():
                if name.endswith("router.expert_bias"):
                    pieces[whole_name(model, name)] = Piece.whole(buffer)
        return pieces

    @on_cpu()
    def load(self, full: Mapping[str, Tensor]) -> None:
        super().load(full)
        self._optimizer.reload_model_params()

    @on_cpu()
    def backward(self, samples: Tensor) -> Mapping[str, float]:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        own = self._own(samples)
        reported = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=[iter(own) for _ in self._chunks] if len(self._chunks) > 1 else iter(own),
            model=self._chunks if len(self._chunks) > 1 else self._chunks[0],
            num_microbatches=len(own),
            seq_length=samples.shape[1] - 1,
            micro_batch_size=self._micro_batch,
            decoder_seq_length=samples.shape[1] - 1,
            forward_only=False,
        )
        return self._losses(reported, len(own))

    def _own(self, samples: Tensor) -> list[Tensor]:
        """Return this rank's microbatches, as ``MegatronPretrainingSampler`` distributes the samples."""
        size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        if len(samples) % (self._micro_batch * size):
            raise UserError(f"{len(samples)} samples are no multiple of {self._micro_batch} x dp {size}")
        return list(samples.view(-1, size, self._micro_batch, samples.shape[1])[:, rank])

    def _forward(self, data: Iterator[Tensor], model: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        """Compute the loss of each token, as ``forward_step`` of ``pretrain_gpt.py`` does."""
        microbatch = next(data)
        tokens, labels = microbatch[:, :-1].contiguous(), microbatch[:, 1:].contiguous()
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1]).tril() < 0.5
        weights = torch.ones(tokens.shape, dtype=torch.float32)
        first = self._choices.padding_from
        padding = torch.zeros_like(tokens, dtype=torch.bool) if first is None else tokens >= first
        weights[padding] = 0.0
        others = {"padding_mask": padding} if self._config.num_moe_experts and padding.any() else {}
        if self._choices.label_smoothing:
            logits = model(tokens, positions, mask, **others)
            return logits, partial(_smoothed, weights, labels, self._choices.label_smoothing)
        output = model(tokens, positions, mask, labels=labels, loss_mask=weights, **others)
        return output, partial(_loss, weights)

    def _losses(self, reported: list[dict[str, Tensor]], num_microbatches: int) -> dict[str, float]:
        """Return what ``train_step`` and ``training_log`` of Megatron-LM report."""
        totals: dict[str, Tensor] = {}
        config = self._config
        if config.num_moe_experts is not None:
            kinds = config.moe_router_load_balancing_type
            names = {
                "aux_loss": "load_balancing_loss",
                "seq_aux_loss": "seq_load_balancing_loss",
                "global_aux_loss": "global_load_balancing_loss",
            }
            tracked = [name for kind, name in names.items() if kind == kinds or kind in list(kinds)]
            tracked += ["z_loss"] * (config.moe_z_loss_coeff is not None)
            track_moe_metrics(
                1 / num_microbatches,
                iteration=0,
                total_loss_dict=totals,
                force_initialize=True,
                track_names=tracked,
                num_layers=config.num_layers,
                moe_layer_freq=config.moe_layer_freq,
                mtp_num_layers=config.mtp_num_layers,
            )
        if config.mtp_num_layers is not None:
            MTPLossLoggingHelper.track_mtp_metrics(1 / num_microbatches, 0, None, total_loss_dict=totals)
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return {}
        loss = torch.stack([each["loss"] for each in reported]).sum(0)
        dist.all_reduce(loss, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        return {"loss": float(loss[0] / loss[1])} | {name: float(value) for name, value in totals.items()}

    @on_cpu()
    def gradients(self) -> Mapping[str, Piece]:
        return dict(self._gradients())

    def _gradients(self) -> Iterator[tuple[str, Piece]]:
        optimizers = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        for name, parameter in self._named():
            piece = piece_of(name, parameter.main_grad, self._config)
            if not self._ddp.use_distributed_optimizer:
                yield name, piece
            for optimizer in optimizers:
                # A distributed optimizer knows the parameters of which this rank updates a part.
                if place := getattr(optimizer, "model_param_gbuf_map", {}).get(parameter):
                    buffer, dtype, bucket = place
                    own = optimizer.gbuf_ranges[buffer][dtype][bucket]["param_map"][parameter]["param"]
                    where = positions_in(piece.shape) if piece.positions is None else piece.positions
                    grad, part = piece.tensor.reshape(-1), slice(own.start, own.end)
                    yield name, Piece(grad[part], piece.shape, where.reshape(-1)[part])

    @on_cpu()
    def update(self) -> Mapping[str, float]:
        rate = next(group["lr"] for group in self._optimizer.param_groups if group["default_config"])
        succeeded, norm, _ = self._optimizer.step()
        if not succeeded:
            raise ProgramFault("megatron-core skipped an update: a gradient is not finite")
        self._schedule.step(increment=1)
        return {"gradient norm": float(norm), "learning rate": float(rate)}

    def modules(self) -> Mapping[str, nn.Module]:
        return {
            whole_name(model, name): module
            for model in self._models
            for name, module in model.named_modules()
            if name
        }

    @on_cpu()
    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        if self._ddp.overlap_param_gather:
            for chunk in self._chunks:
                chunk.start_param_sync(force_sync=True)
        dist_checkpointing.save(self._state(is_loading=False), str(folder))

    @on_cpu()
    def resume(self, folder: Path) -> None:
        saved = dist_checkpointing.load_common_state_dict(str(folder))["args"]
        if saved["use_distributed_optimizer"] or self._ddp.use_distributed_optimizer:
            raise UserError("without Apex and Transformer Engine, megatron-core resumes no run with +zero1")
        state = dist_checkpointing.load(self._state(is_loading=True), str(folder))
        for key, model in zip(self._keys, self._models, strict=True):
            model.load_state_dict(state[key])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["opt_param_scheduler"])

    @property
    def _keys(self) -> list[str]:
        return (
            ["model"] if len(self._models) == 1 else [f"model{number}" for number in range(len(self._models))]
        )

    def _state(self, is_loading: bool) -> dict[str, Any]:
        """Return what ``generate_state_dict`` of Megatron-LM saves.

        Its optimizer is as ``--dist-ckpt-optim-fully-reshardable`` saves it, to be loaded in any layout.
        """
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        args = {"use_distributed_optimizer": self._ddp.use_distributed_optimizer}
        state: dict[str, Any] = {"checkpoint_version": 3.0, "args": args}
        for key, model in zip(self._keys, self._models, strict=True):
            state[key] = model.sharded_state_dict(metadata=metadata)
        state["optimizer"] = self._optimizer.sharded_state_dict(state, is_loading, metadata=metadata)
        state["opt_param_scheduler"] = self._schedule.state_dict()
        return state

    def close(self) -> None:
        parallel_state.destroy_model_parallel()


def build(layout: Layout, config: Config, options: Mapping[str, str]) -> Program:
    """Return the program of this rank.

    Args:
        options: fields of Megatron's configs of the model, DistributedDataParallel and the optimizer, and
            those of `_Choices`.
    """
    try:
        return MegatronProgram(layout, config, options)
    except (AssertionError, ImportError, NotImplementedError, ValueError) as error:
        raise UserError(f"megatron-core cannot be run in the layout {layout}: {error}") from error
