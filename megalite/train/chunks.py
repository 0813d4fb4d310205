"""The parts of the model that one rank holds: a chunk for each of its pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from torch import nn

from megalite.config import Config
from megalite.config.stages import layers_per_stage, num_chunks
from megalite.model.backends import build_core
from megalite.model.compiled import check_compiler, compile_layers
from megalite.model.stage import GPTStage
from megalite.parallel.fp8 import check_device
from megalite.parallel.weight_gradient_store import WeightGradientStore
from megalite.pipeline.partition import layers_of_stages
from megalite.pipeline.schedule import SCHEDULES
from megalite.topology import Topology


def build_chunks(
    config: Config,
    topology: Topology,
    store: WeightGradientStore | None = None,
    *,
    fuses_weight_gradients: bool = False,
) -> list[GPTStage]:
    """Makes this rank's chunks with their initial weights, in the order in which a microbatch meets them.

    Where the weights are to be shared out there are none yet: the optimizer makes them.

    Args:
        config: of the run.
        topology: of the run.
        store: takes the linear layers' weight gradients if the schedule computes them later.
        fuses_weight_gradients: linear layers add weight gradients to `weight.main_grad`.
    """
    stages = SCHEDULES[config.parallel.schedule].stage_map(topology.pp.size, num_chunks(config))
    layers = layers_of_stages(config.model.num_layers, layers_per_stage(config))
    chunks: list[GPTStage] = []
    if config.training.fp8_format is not None and topology.device.type != "meta":
        with topology.agreed():
            check_device(topology.device, config.training.fp8_format)
    for stage in stages.stages_of(topology.pp.rank):
        holds_first = bool(chunks) and chunks[0].is_first
        chunk = GPTStage(
            config.model,
            topology,
            layers[stage],
            config.training.seed,
            is_first=stage == 0,
            is_last=stage == stages.num_stages - 1,
            word=chunks[0].get_submodule("embedding.word") if holds_first else None,
            weight_gradient_store=store,
            fuses_weight_gradients=fuses_weight_gradients,
            sequence_parallel=config.parallel.sequence_parallel,
            recompute=config.recompute,
            has_weights=config.parallel.zero_stage_among(topology.dp.size) < 3,
            attention=partial(build_core, has_documents=config.data.reset_attention_mask),
            fp8_format=config.training.fp8_format,
        )
        chunks.append(chunk)
    if config.training.compile and topology.device.type != "meta":
        with topology.agreed():
            check_compiler(topology.device)
        for chunk in chunks:
            compile_layers(chunk)
    return chunks


def named_parameters(chunks: Sequence[GPTStage]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a rank's chunks by their global names, each once."""
    seen: set[nn.Parameter] = set()
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if parameter not in seen:
                seen.add(parameter)
                yield name, parameter
