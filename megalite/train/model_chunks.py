"""Build the model chunks of a rank, one for each of its pipeline stages, and their optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from megalite.checkpoint.tensor_files import DTYPE_CODES
from megalite.config import Config
from megalite.config.config import hides_expert_messages, layers_of_stages, layers_per_stage, stage_map
from megalite.distributed.collectives import OverlapSlots
from megalite.distributed.topology import Topology
from megalite.kernels.weight_gradient import has_widening_gemm
from megalite.model.activation_offload import ActivationOffload, apply_offload
from megalite.model.attention import Attention
from megalite.model.bert_stage import STAGES
from megalite.model.compiled import check_compiler, compile_layers
from megalite.model.experts import Router
from megalite.model.recompute import apply_recompute
from megalite.model.stage import DTYPES, Stage, StageProvider, is_own_model
from megalite.optim.gradient_buckets import main_dtype
from megalite.optim.optimizer import Optimizer
from megalite.optim.post_step_hooks import ExpertBalance, MeasuredHeads, PostStepHook, QKClip
from megalite.optim.weight_gathering import ChunkModules
from megalite.pipeline.schedules import SCHEDULES
from megalite.tensor_parallel.block_scaling import BlockGemm, name_gemms
from megalite.tensor_parallel.delayed_scaling import DelayedGemm, ScaleHistory
from megalite.tensor_parallel.fp8 import (
    BackwardSamples,
    Fp8Settings,
    Fp8Weights,
    TensorwiseGemm,
    check_device,
    gather_in_8_bits,
)
from megalite.tensor_parallel.gemm import WeightGradientStore
from megalite.tensor_parallel.gemm_collectives import choose_overlap
from megalite.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalite.tensor_parallel.parameter_spec import (
    LayerContext,
    ParameterShard,
    buffer_spec,
    forget_initial_values,
)
from megalite.tensor_parallel.vocab_parallel import TiedWeight
from megalite.train.global_batch import hidden_shape
from megalite.train.own_model import OutputCheck, check_stage
from megalite.utils.errors import UserError


@dataclass(frozen=True)
class ChunkResources:
    """Objects that a rank's chunks share with its pipeline, optimizer and train step.

    Attributes:
        store: collects the linear layers' weight gradients if the schedule computes them later.
        fuses_weight_gradients: linear layers add weight gradients to `weight.main_grad`.
        fp8_weights: holds weights in 8 bits during an iteration; None to hold none.
        offload: holds the activations that the config offloads; None without offload.
        overlap_slots: lets another action run while rows of experts are in flight, or None.
        backward_samples: key the random rounding of gradients in 4 bits.
    """

    store: WeightGradientStore | None = None
    fuses_weight_gradients: bool = False
    fp8_weights: Fp8Weights | None = None
    offload: ActivationOffload | None = None
    overlap_slots: OverlapSlots | None = None
    backward_samples: BackwardSamples = field(default_factory=BackwardSamples)

    @staticmethod
    def of(config: Config, topology: Topology) -> ChunkResources:
        """Create what a run needs."""
        is_sharded = config.parallel.zero_stage_among(topology.replicas.shard.size) == 3
        is_offloaded = config.recompute.cpu_offload_activations > 0
        # Tensors without values have no messages.
        overlaps = hides_expert_messages(config) and topology.device.type != "meta"
        return ChunkResources(
            WeightGradientStore() if SCHEDULES[config.parallel.schedule].splits_backward else None,
            weight_gradient_fusion(config, topology).is_on,
            # ZeRO 3 does not keep full weights.
            Fp8Weights() if not is_sharded or config.training.fp8_param_gather else None,
            ActivationOffload(topology.device) if is_offloaded else None,
            OverlapSlots(topology.device) if overlaps else None,
        )


def build_chunks(
    config: Config,
    topology: Topology,
    resources: ChunkResources | None = None,
    build_stage: StageProvider | None = None,
) -> list[Stage]:
    """Build this rank's chunks with their initial weights, in the order in which a microbatch passes them.

    With ZeRO stage 3 they have no weights yet: the optimizer creates them.

    Args:
        resources: such as `ChunkResources.of` creates; by default none.
        build_stage: builds a stage of your own model; by default a stage of the config's architecture.

    Raises:
        UserError: a model of your own does not follow `StageProvider`.
    """
    training, has_device = config.training, topology.device.type != "meta"
    if training.fp8_format is not None and has_device:
        with topology.agreed():
            check_device(topology.device, training)
    resources = resources or ChunkResources()
    context = _layer_context(config, topology, resources)
    stages = stage_map(config)
    layers = layers_of_stages(config.model.num_layers, layers_per_stage(config))
    is_own = is_own_model(build_stage)
    build_stage = build_stage or STAGES[config.model.architecture]
    chunks: list[Stage] = []
    for stage in stages.stages_of(topology.pp.rank):
        shared = chunks[0].shared_modules() if chunks and chunks[0].is_first else {}
        chunk = build_stage(
            config.model,
            context,
            layers[stage],
            is_first=stage == 0,
            is_last=stage == stages.num_stages - 1,
            **shared,
        )
        if is_own:
            check_stage(chunk, build_stage)
            saved_buffers([chunk], topology)
            chunk.register_forward_hook(OutputCheck(hidden_shape(config, config.model.seq_length), chunk))
        if training.fp8_recipe == "nvfp4":
            name_gemms(chunk, topology)
        apply_recompute(chunk, config.recompute)
        if resources.offload is not None:
            apply_offload(chunk, config.recompute.cpu_offload_activations, resources.offload)
        chunks.append(chunk)
    if training.compile and has_device:
        with topology.agreed():
            check_compiler(topology.device)
            for chunk in chunks:
                compile_layers(chunk)
    gathers_in_8_bits = config.gathers_in_8_bits(topology.replicas.shard.size)
    if gathers_in_8_bits and resources.fp8_weights is not None:
        _gather_in_8_bits(chunks)
    return chunks


def _gather_in_8_bits(chunks: Sequence[Stage]) -> None:
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            gemm = module.context.gemm
            if isinstance(gemm, TensorwiseGemm | DelayedGemm | BlockGemm):
                gather_in_8_bits(module.weight, gemm)


def _layer_context(config: Config, topology: Topology, resources: ChunkResources) -> LayerContext:
    return LayerContext(
        topology,
        DTYPES[config.model.params_dtype],
        seed=config.training.seed,
        sequence_parallel=config.parallel.sequence_parallel,
        has_documents=config.masks_documents,
        weight_gradient_store=resources.store,
        fuses_weight_gradients=resources.fuses_weight_gradients,
        has_memory=config.parallel.zero_stage_among(topology.replicas.shard.size) < 3,
        fp8=_fp8_settings(config, resources),
        overlap=choose_overlap(
            config.parallel,
            topology,
            config.microbatch_tokens,
            DTYPES[config.model.params_dtype],
            config.training.fp8_options,
        ),
        cp_comm_type=config.parallel.cp_comm_type,
        moe_imbalance=config.parallel.planned_imbalance,
        moe_token_dispatcher_type=config.parallel.moe_token_dispatcher_type,
        overlap_slots=resources.overlap_slots,
    )


def _fp8_settings(config: Config, resources: ChunkResources) -> Fp8Settings | None:
    training, num_layers = config.training, config.model.num_layers
    if training.fp8_format is None:
        return None
    return Fp8Settings(
        training.fp8_format,
        training.fp8_recipe,
        frozenset(i for i in range(num_layers) if not training.is_layer_in_fp8(i, num_layers)),
        training.fp8_wgrad,
        resources.fp8_weights or Fp8Weights(),
        training.emulate,
        resources.backward_samples,
        training.fp8_amax_history_len,
        training.fp8_margin,
    )


def named_parameters(chunks: Sequence[Stage]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a rank's chunks by their global names, each once."""
    seen: set[nn.Parameter] = set()
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if parameter not in seen:
                seen.add(parameter)
                yield name, parameter


def layer_depth(name: str) -> float:
    """Return the number of the layer of a module or parameter; -1 in the embedding, infinity in the head."""
    parts = name.split(".")
    if parts[0] == "layers" and len(parts) > 1:
        return int(parts[1])
    return -1 if parts[0] == "embedding" else math.inf


def saved_buffers(chunks: Sequence[Stage], topology: Topology) -> dict[str, ParameterShard]:
    """Return the buffers of a rank's chunks that checkpoints hold, by their global names, as views.

    These are all buffers that are not registered with ``persistent=False``. Every rank of
    `ParameterAxes.replicas` must have the same values.

    Raises:
        UserError: a buffer has another shape than when it was built, or cannot be stored.
    """
    found: dict[str, ParameterShard] = {}
    for chunk in chunks:
        persistent = chunk.state_dict(keep_vars=True).keys()
        for name, buffer in chunk.named_buffers():
            if name not in persistent:
                continue
            spec, shape = chunk.buffer_specs.get(name) or buffer_spec(buffer), tuple(buffer.shape)
            if shape != (built := spec.box(topology).shape):
                raise UserError(f"buffer {name} has shape {list(shape)}, not {list(built)}: keep its shape")
            if buffer.dtype not in DTYPE_CODES or not buffer.is_contiguous():
                fault = "is not contiguous" if buffer.dtype in DTYPE_CODES else f"is {buffer.dtype}"
                raise UserError(
                    f"buffer {name} {fault}, and cannot be saved: register a contiguous tensor of a common "
                    "dtype, or pass persistent=False if it is a constant"
                )
            found[name] = ParameterShard.whole(buffer, spec, is_buffer=True)
    return found


@contextmanager
def unchanged_buffers(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Give all buffers their values back after this block, which runs forward outside of training."""
    owners = [owner for chunk in chunks for owner in chunk.modules()]
    before = [
        (owner, name, buffer, buffer.clone())
        for owner in owners
        for name, buffer in owner.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, name, buffer, values in before:
                setattr(owner, name, buffer.copy_(values))


class Fusion(NamedTuple):
    """Fusion of weight-gradient GEMMs with the accumulation of their results.

    Attributes:
        is_on: the GEMMs add to `weight.main_grad` themselves.
        description: how gradients are accumulated, and why, for the log.
    """

    is_on: bool
    description: str


def weight_gradient_fusion(config: Config, topology: Topology) -> Fusion:
    """Return the fastest choice that the run's config and device allow.

    Fusion is not faster if the device has no GEMM that adds to the wider dtype of `main_grad`. Then autograd
    accumulates; it first sums the gradients of a weight that is used twice.
    """
    dtype = DTYPES[config.model.params_dtype]
    if not config.parallel.gradient_accumulation_fusion:
        return Fusion(False, "accumulated by autograd (--no-gradient-accumulation-fusion)")
    zero_stage = config.parallel.zero_stage_among(topology.replicas.shard.size)
    if dtype != main_dtype(dtype) and not has_widening_gemm(dtype, main_dtype(dtype), topology.device):
        inputs, total = (str(each).removeprefix("torch.") for each in (dtype, main_dtype(dtype)))
        return Fusion(
            False,
            f"accumulated by autograd ({topology.device.type} has no GEMM of {inputs} that adds to {total})",
        )
    if config.training.compile and topology.tp.size == 1 and (zero_stage > 1 or config.recompute.modules):
        reason = f"--zero-stage {zero_stage}, whose buffers do not stay in place"
        if config.recompute.modules:
            reason = "--recompute-granularity selective"
        return Fusion(
            True,
            f"accumulated by the GEMM of the logits, and by autograd in the layers (--compile with {reason})",
        )
    return Fusion(True, "accumulated by the weight-gradient GEMMs (fused)")


def build_optimizer(
    chunks: Sequence[Stage],
    config: Config,
    topology: Topology,
    *,
    fuses_weight_gradients: bool = False,
    keeps_weights: bool = False,
) -> Optimizer:
    """Build the optimizer of the chunks' weights. The fp32 main weights start unrounded.

    Args:
        fuses_weight_gradients: the chunks' linear layers add weight gradients to `weight.main_grad`.
        keeps_weights: with ZeRO stage 3, gather each weight once an iteration.
    """
    optimizer = Optimizer(
        named_parameters(chunks),
        _tied_weight(chunks, topology),
        config.optimizer,
        config.parallel,
        topology,
        DTYPES[config.model.params_dtype],
        [ChunkModules(chunk, list(chunk.layers.values()), list(chunk.units())) for chunk in chunks],
        fuses_weight_gradients,
        # A graph that recomputes a part of itself cannot add to a buffer that other microbatches change:
        # PyTorch compares the buffer's version with the version in forward.
        graphs_add=config.training.compile and not config.recompute.modules,
        keeps_weights=keeps_weights,
        seed=config.training.seed,
    )
    optimizer.post_step_hooks = _post_step_hooks(config, topology, chunks, optimizer)
    optimizer.initialize_main(config.training.seed)
    for _, parameter in named_parameters(chunks):
        forget_initial_values(parameter)
    return optimizer


def _post_step_hooks(
    config: Config, topology: Topology, chunks: Sequence[Stage], optimizer: Optimizer
) -> list[PostStepHook]:
    found: list[PostStepHook] = []
    model = config.model
    if model.qk_clip:
        found.append(QKClip(model, topology, _measured_heads(chunks), optimizer.updated))
    modules = list(dict.fromkeys(module for chunk in chunks for module in chunk.modules()))
    routers = [module for module in modules if isinstance(module, Router) and module.is_adjusted]
    if routers:
        found.append(ExpertBalance(topology, routers, model.moe_router_bias_update_rate))
    kinds = ColumnParallelLinear, RowParallelLinear
    linear = [module for module in modules if isinstance(module, kinds)]
    delayed: dict[nn.Module, DelayedGemm] = {
        module: gemm for module in linear if isinstance(gemm := module.context.gemm, DelayedGemm)
    }
    if delayed:
        uses_newest = config.training.fp8_amax_compute_algo == "most_recent"
        found.append(ScaleHistory(topology, delayed, uses_newest=uses_newest))
    return found


def _measured_heads(chunks: Sequence[Stage]) -> list[MeasuredHeads]:
    return [
        MeasuredHeads(module.qkv.weight, module.qkv.bias, module.core.largest)
        for chunk in chunks
        for module in chunk.modules()
        if isinstance(module, Attention) and module.core.largest is not None
    ]


def _tied_weight(chunks: Sequence[Stage], topology: Topology) -> TiedWeight | None:
    """Return the word embedding if two pipeline stages use it, on one rank or as copies on two ranks."""
    weight = next((chunk.tied_weight for chunk in chunks if chunk.tied_weight is not None), None)
    if weight is None or topology.pp.size == 1:
        return None
    has_both = any(chunk.is_first for chunk in chunks) and any(chunk.is_last for chunk in chunks)
    num_gradients = sum(chunk.num_tied_gradients for chunk in chunks)
    return TiedWeight(weight, has_other_copy=not has_both, num_gradients=num_gradients)
