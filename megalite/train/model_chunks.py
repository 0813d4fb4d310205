"""Build the parts of the model that one rank holds: one chunk for each of its pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from megalite.config import Config
from megalite.config.stage_layers import layers_of_stages, layers_per_stage, stage_map
from megalite.distributed.topology import Topology
from megalite.model.activation_offload import ActivationOffload, apply_offload
from megalite.model.architectures import STAGES
from megalite.model.compiled import check_compiler, compile_layers
from megalite.model.recompute import apply_recompute
from megalite.model.stage import DTYPES, Stage, StageProvider
from megalite.tensor_parallel.fp8 import check_device
from megalite.tensor_parallel.parameter_spec import LayerContext
from megalite.tensor_parallel.weight_gradient_store import WeightGradientStore
from megalite.train.own_model import OutputCheck, check_stage, is_own


def hidden_shape(config: Config, tp: int) -> tuple[int, int, int]:
    """Return the shape of a microbatch's hidden states between two stages, on each of `tp` ranks."""
    num_positions = config.model.seq_length // (tp if config.parallel.sequence_parallel else 1)
    return num_positions, config.training.micro_batch_size, config.model.hidden_size


def build_chunks(
    config: Config,
    topology: Topology,
    store: WeightGradientStore | None = None,
    *,
    fuses_weight_gradients: bool = False,
    offload: ActivationOffload | None = None,
    build_stage: StageProvider | None = None,
) -> list[Stage]:
    """Build this rank's chunks with their initial weights, in the order in which a microbatch passes them.

    With ZeRO stage 3 they have no weights yet: the optimizer creates them.

    Args:
        store: collects the linear layers' weight gradients if the schedule computes them later.
        fuses_weight_gradients: linear layers add weight gradients to `weight.main_grad`.
        offload: holds the activations that the config offloads; None without offload.
        build_stage: builds a stage of your own model; by default a stage of the config's architecture.

    Raises:
        UserError: a model of your own does not follow `StageProvider`.
    """
    training, has_device = config.training, topology.device.type != "meta"
    if training.fp8_format is not None and has_device:
        with topology.agreed():
            check_device(topology.device, training.fp8_format)
    context = _layer_context(config, topology, store, fuses_weight_gradients)
    stages = stage_map(config)
    layers = layers_of_stages(config.model.num_layers, layers_per_stage(config))
    is_own_model = is_own(build_stage)
    if build_stage is None:
        build_stage = STAGES[config.model.architecture]
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
        if is_own_model:
            check_stage(chunk, build_stage)
            chunk.register_forward_hook(
                OutputCheck(config.model, hidden_shape(config, topology.tp.size), chunk)
            )
        apply_recompute(chunk, config.recompute)
        if offload is not None:
            apply_offload(chunk, config.recompute.cpu_offload_activations, offload)
        chunks.append(chunk)
    if training.compile and has_device:
        with topology.agreed():
            check_compiler(topology.device)
        for chunk in chunks:
            compile_layers(chunk)
    return chunks


def _layer_context(
    config: Config, topology: Topology, store: WeightGradientStore | None, fuses_weight_gradients: bool
) -> LayerContext:
    return LayerContext(
        topology,
        DTYPES[config.model.params_dtype],
        seed=config.training.seed,
        sequence_parallel=config.parallel.sequence_parallel,
        has_documents=config.data.reset_attention_mask or not config.model.is_causal,
        weight_gradient_store=store,
        fuses_weight_gradients=fuses_weight_gradients,
        has_weights=config.parallel.zero_stage_among(topology.dp.shard.size) < 3,
        fp8_format=config.training.fp8_format,
    )


def named_parameters(chunks: Sequence[Stage]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a rank's chunks by their global names, each once."""
    seen: set[nn.Parameter] = set()
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if parameter not in seen:
                seen.add(parameter)
                yield name, parameter
